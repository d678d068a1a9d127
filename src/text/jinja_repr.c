/* Printing values as Python does: str(), repr(), floats by their shortest exact digits, and HTML escaping for Markup. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

/* The shortest of up to 17 significant digits that reads back as the same double, laid out as Python's repr. */
size_t jinja_float_text(double f, char text[40])
{
  if (isnan(f)) return (size_t)snprintf(text, 40, "nan");
  if (isinf(f)) return (size_t)snprintf(text, 40, f < 0 ? "-inf" : "inf");
  char digits[40];
  for (int precision = 0; precision < 17; precision++) {
    snprintf(digits, sizeof digits, "%.*e", precision, f);
    if (strtod(digits, NULL) == f) break;
  }
  char *e = strchr(digits, 'e');
  int exponent = (int)strtol(e + 1, NULL, 10);
  *e = '\0';
  const char *sign = digits[0] == '-' ? "-" : "", *first = digits + (digits[0] == '-');
  char run[24];
  size_t n = 0;
  for (const char *c = first; *c; c++)
    if (*c != '.') run[n++] = *c;
  run[n] = '\0';
  if (exponent < -4 || exponent >= 16)
    return (size_t)snprintf(text, 40, "%s%c%s%se%c%02d", sign, run[0], n > 1 ? "." : "", run + 1, exponent < 0 ? '-' : '+', abs(exponent));
  if (exponent < 0) return (size_t)snprintf(text, 40, "%s0.%.*s%s", sign, -exponent - 1, "0000", run);
  int whole = exponent + 1, padding = whole > (int)n ? whole - (int)n : 0;
  if (padding > 0 || (size_t)whole == n) return (size_t)snprintf(text, 40, "%s%s%.*s.0", sign, run, padding, "0000000000000000");
  return (size_t)snprintf(text, 40, "%s%.*s.%s", sign, whole, run, run + whole);
}

/* ---- repr of strings ---- */

static bool emit_repr_char(struct jinja_run *run, struct jinja_out *out, uint32_t c, const char *bytes, size_t n_bytes, char quote)
{
  char text[16];
  if (c == (uint32_t)quote || c == '\\') snprintf(text, sizeof text, "\\%c", (char)c);
  else if (c == '\n') snprintf(text, sizeof text, "\\n");
  else if (c == '\r') snprintf(text, sizeof text, "\\r");
  else if (c == '\t') snprintf(text, sizeof text, "\\t");
  else if (jinja_is_printable(c)) return jinja_emit(run, out, bytes, n_bytes);
  else if (c < 0x100) snprintf(text, sizeof text, "\\x%02x", c);
  else if (c < 0x10000) snprintf(text, sizeof text, "\\u%04x", c);
  else snprintf(text, sizeof text, "\\U%08x", c);
  return jinja_emit_text(run, out, text);
}

static bool emit_repr_str(struct jinja_run *run, struct jinja_out *out, const struct jinja_str *s)
{
  bool has_single = s->n_bytes && memchr(s->data, '\'', s->n_bytes), has_double = s->n_bytes && memchr(s->data, '"', s->n_bytes);
  char quote = has_single && !has_double ? '"' : '\'';
  if (!jinja_charge(run, s->n_bytes / 8) || !jinja_emit(run, out, &quote, 1)) return false;
  size_t length;
  for (size_t i = 0; i < s->n_bytes; i += length) {
    uint32_t c = utf8_decode(s->data + i, s->n_bytes - i, &length);
    if (!emit_repr_char(run, out, c, s->data + i, length, quote)) return false;
  }
  return jinja_emit(run, out, &quote, 1);
}

/* ---- repr of containers ---- */

static bool emit_repr_seq(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  bool is_list = v.type == JV_LIST;
  if (!jinja_emit_text(run, out, is_list ? "[" : "(")) return false;
  for (size_t i = 0; i < v.seq->n; i++)
    if ((i && !jinja_emit_text(run, out, ", ")) || !jinja_emit_repr(run, out, v.seq->items[i])) return false;
  return jinja_emit_text(run, out, is_list ? "]" : v.seq->n == 1 ? ",)" : ")");
}

static bool emit_repr_dict(struct jinja_run *run, struct jinja_out *out, const struct jinja_dict *dict)
{
  if (!jinja_emit_text(run, out, "{")) return false;
  for (size_t i = 0; i < dict->n; i++) {
    if (i && !jinja_emit_text(run, out, ", ")) return false;
    if (!jinja_emit_repr(run, out, dict->pairs[i].key) || !jinja_emit_text(run, out, ": ")) return false;
    if (!jinja_emit_repr(run, out, dict->pairs[i].value)) return false;
  }
  return jinja_emit_text(run, out, "}");
}

static bool emit_repr_view(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  struct jinja_vec items = {0};
  struct jv list;
  if (!jinja_to_vec(run, v, &items) || !jinja_vec_list(run, &items, &list)) return false;
  return jinja_emit_text(run, out, jinja_type_name(v)) && jinja_emit_text(run, out, "(") && emit_repr_seq(run, out, list) &&
         jinja_emit_text(run, out, ")");
}

static bool emit_repr_object(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  char text[96];
  switch ((enum jinja_type)v.type) {
  case JV_RANGE:
    snprintf(text, sizeof text, v.range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)", (long long)v.range->start,
             (long long)v.range->stop, (long long)v.range->step);
    break;
  case JV_MACRO:
    if (!v.macro->node->text) return jinja_emit_text(run, out, "<Macro anonymous>");
    return jinja_emit_text(run, out, "<Macro ") && emit_repr_str(run, out, v.macro->node->text) && jinja_emit_text(run, out, ">");
  case JV_METHOD:
    snprintf(text, sizeof text, "<built-in method %s of %s object>", v.method->fn->name, jinja_type_name(v.method->self));
    break;
  case JV_FUNCTION: snprintf(text, sizeof text, "<function %s>", v.function->name); break;
  default: snprintf(text, sizeof text, "<%s object>", jinja_type_name(v)); break;
  }
  return jinja_emit_text(run, out, text);
}

static bool emit_repr_nested(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  if (!jinja_enter(run)) return false;
  bool ok;
  switch ((enum jinja_type)v.type) {
  case JV_LIST: case JV_TUPLE: ok = emit_repr_seq(run, out, v); break;
  case JV_DICT: ok = emit_repr_dict(run, out, v.dict); break;
  case JV_NAMESPACE:
    ok = jinja_emit_text(run, out, "<Namespace ") && emit_repr_dict(run, out, v.dict) && jinja_emit_text(run, out, ">");
    break;
  default: ok = emit_repr_view(run, out, v); break;
  }
  jinja_leave(run);
  return ok;
}

bool jinja_emit_repr(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  char text[40];
  if (!jinja_charge(run, 1)) return false;
  switch ((enum jinja_type)v.type) {
  case JV_ABSENT: case JV_UNDEFINED: return jinja_emit_text(run, out, "Undefined");
  case JV_NONE: return jinja_emit_text(run, out, "None");
  case JV_BOOL: return jinja_emit_text(run, out, v.b ? "True" : "False");
  case JV_INT: return jinja_emit(run, out, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)v.i));
  case JV_FLOAT: return jinja_emit(run, out, text, jinja_float_text(v.f, text));
  case JV_STR:
    if (!v.is_markup) return emit_repr_str(run, out, v.s);
    return jinja_emit_text(run, out, "Markup(") && emit_repr_str(run, out, v.s) && jinja_emit_text(run, out, ")");
  case JV_LIST: case JV_TUPLE: case JV_DICT: case JV_NAMESPACE: case JV_VIEW: return emit_repr_nested(run, out, v);
  case JV_LOOP: {
    struct jv length;
    bool found;
    if (!jinja_loop_attr(run, v.loop, &(struct jinja_str){.data = "length", .n_bytes = 6, .n_chars = 6}, &length, &found)) return false;
    char loop[80];
    snprintf(loop, sizeof loop, "<LoopContext %lld/%lld>", (long long)v.loop->index0 + 1, (long long)length.i);
    return jinja_emit_text(run, out, loop);
  }
  default: return emit_repr_object(run, out, v);
  }
}

bool jinja_emit_str(struct jinja_run *run, struct jinja_out *out, struct jv v)
{
  if (v.type == JV_STR) return jinja_emit(run, out, v.s->data, v.s->n_bytes);
  if (v.type == JV_UNDEFINED || v.type == JV_ABSENT) return true;
  return jinja_emit_repr(run, out, v);
}

bool jinja_to_str(struct jinja_run *run, struct jv v, struct jv *out)
{
  if (v.type == JV_STR) return *out = v, true;
  struct jinja_out text = {0};
  return jinja_emit_str(run, &text, v) && jinja_out_str(run, &text, out);
}

/* ---- Escaping ---- */

bool jinja_emit_escaped(struct jinja_run *run, struct jinja_out *out, const char *text, size_t n_bytes)
{
  size_t from = 0;
  for (size_t i = 0; i < n_bytes; i++) {
    const char *entity = NULL;
    switch (text[i]) {
    case '&': entity = "&amp;"; break;
    case '<': entity = "&lt;"; break;
    case '>': entity = "&gt;"; break;
    case '"': entity = "&#34;"; break;
    case '\'': entity = "&#39;"; break;
    default: break;
    }
    if (!entity) continue;
    if (!jinja_emit(run, out, text + from, i - from) || !jinja_emit_text(run, out, entity)) return false;
    from = i + 1;
  }
  return jinja_emit(run, out, text + from, n_bytes - from);
}

bool jinja_escape(struct jinja_run *run, struct jv v, struct jv *out)
{
  if (v.type == JV_STR && v.is_markup) return *out = v, true;
  struct jinja_out text = {0};
  struct jv plain;
  if (!jinja_to_str(run, v, &plain) || !jinja_charge(run, plain.s->n_bytes / 8)) return false;
  if (!jinja_emit_escaped(run, &text, plain.s->data, plain.s->n_bytes) || !jinja_out_str(run, &text, out)) return false;
  out->is_markup = true;
  return true;
}
