/* tojson: json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False), as transformers replaces jinja2's own. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

struct writer {
  struct jinja_run *run;
  struct jinja_out out;
  bool is_ascii, sorts_keys, is_indented;
  const char *indent, *item_separator, *key_separator;
  size_t indent_bytes, item_bytes, key_bytes;
};

static bool put(struct writer *w, const char *text, size_t n) { return jinja_emit(w->run, &w->out, text, n); }

static bool write_code_point(struct writer *w, uint32_t c)
{
  char text[16];
  int n;
  if (c < 0x10000) n = snprintf(text, sizeof text, "\\u%04x", c);
  else n = snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + ((c - 0x10000) & 0x3FF));
  return put(w, text, (size_t)n);
}

static bool write_str(struct writer *w, const struct jinja_str *s)
{
  size_t from = 0, length;
  if (!put(w, "\"", 1) || !jinja_charge(w->run, s->n_bytes / 16)) return false;
  for (size_t i = 0; i < s->n_bytes; i += length) {
    unsigned char c = (unsigned char)s->data[i];
    static const char short_names[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    length = 1;
    if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\') continue;
    if (c >= 0x7f && !(w->is_ascii && c >= 0x80)) continue;
    if (!put(w, s->data + from, i - from)) return false;
    const char *known = NULL;
    for (const char *at = short_names; *at && !known; at += 2)
      if ((unsigned char)*at == c) known = at + 1;
    uint32_t code = utf8_decode(s->data + i, s->n_bytes - i, &length);
    if (known ? !put(w, (char[]){'\\', *known}, 2) : !write_code_point(w, code)) return false;
    from = i + length;
  }
  return put(w, s->data + from, s->n_bytes - from) && put(w, "\"", 1);
}

static bool write_float(struct writer *w, double f)
{
  char text[40];
  if (isnan(f)) return put(w, "NaN", 3);
  if (isinf(f)) return f < 0 ? put(w, "-Infinity", 9) : put(w, "Infinity", 8);
  return put(w, text, jinja_float_text(f, text));
}

static bool write_newline(struct writer *w, int level)
{
  if (!w->is_indented) return true;
  if (!put(w, "\n", 1)) return false;
  for (int i = 0; i < level; i++)
    if (!jinja_charge(w->run, 1) || !put(w, w->indent, w->indent_bytes)) return false;
  return true;
}

static bool write_value(struct writer *w, struct jv v, int level);

static bool write_seq(struct writer *w, const struct jinja_seq *seq, int level)
{
  if (seq->n == 0) return put(w, "[]", 2);
  if (!put(w, "[", 1)) return false;
  for (size_t i = 0; i < seq->n; i++) {
    if (i && !put(w, w->item_separator, w->item_bytes)) return false;
    if (!write_newline(w, level + 1) || !write_value(w, seq->items[i], level + 1)) return false;
  }
  return write_newline(w, level) && put(w, "]", 1);
}

static bool write_key(struct writer *w, struct jv key)
{
  if (key.type == JV_STR) return write_str(w, key.s);
  if (!jv_is_number(key) && key.type != JV_NONE)
    return jinja_fail(w->run, "TypeError", "keys must be str, int, float, bool or None, not %s", jinja_type_name(key));
  return put(w, "\"", 1) && write_value(w, key, 0) && put(w, "\"", 1);
}

static bool write_dict(struct writer *w, const struct jinja_dict *dict, int level)
{
  if (dict->n == 0) return put(w, "{}", 2);
  struct jv *pairs = jinja_alloc(w->run, dict->n, 2 * sizeof *pairs), *keys = pairs + dict->n; /* items: indices, keys to sort by */
  if (!pairs || !put(w, "{", 1)) return false;
  for (size_t i = 0; i < dict->n; i++) {
    pairs[i] = jv_int((int64_t)i);
    keys[i] = dict->pairs[i].key;
  }
  if (w->sorts_keys && !jinja_sort(w->run, pairs, keys, dict->n, false)) return false;
  for (size_t i = 0; i < dict->n; i++) {
    const struct jinja_pair *pair = &dict->pairs[pairs[i].i];
    if (i && !put(w, w->item_separator, w->item_bytes)) return false;
    if (!write_newline(w, level + 1) || !write_key(w, pair->key) || !put(w, w->key_separator, w->key_bytes)) return false;
    if (!write_value(w, pair->value, level + 1)) return false;
  }
  return write_newline(w, level) && put(w, "}", 1);
}

static bool write_value(struct writer *w, struct jv v, int level)
{
  char text[32];
  if (!jinja_charge(w->run, 1) || !jinja_enter(w->run)) return false;
  bool ok;
  switch ((enum jinja_type)v.type) {
  case JV_NONE: ok = put(w, "null", 4); break;
  case JV_BOOL: ok = v.b ? put(w, "true", 4) : put(w, "false", 5); break;
  case JV_INT: ok = put(w, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)v.i)); break;
  case JV_FLOAT: ok = write_float(w, v.f); break;
  case JV_STR: ok = write_str(w, v.s); break;
  case JV_LIST: case JV_TUPLE: ok = write_seq(w, v.seq, level); break;
  case JV_DICT: ok = write_dict(w, v.dict, level); break;
  default: ok = jinja_fail(w->run, "TypeError", "Object of type %s is not JSON serializable", jinja_type_name(v)); break;
  }
  jinja_leave(w->run);
  return ok;
}

/* indent: a number of spaces, or the text itself. */
static bool set_indent(struct writer *w, struct jv indent)
{
  static const char spaces[] = "                                                                "; /* 64 */
  if (indent.type == JV_ABSENT || indent.type == JV_NONE) return true;
  w->is_indented = true;
  w->item_separator = ",";
  w->item_bytes = 1;
  if (indent.type == JV_STR) {
    w->indent = indent.s->data;
    w->indent_bytes = indent.s->n_bytes;
    return true;
  }
  int64_t n;
  if (!jinja_int_arg(w->run, indent, 0, &n)) return false;
  if (n > 64) return jinja_limit(w->run, "indent of 64");
  w->indent = spaces;
  w->indent_bytes = n < 0 ? 0 : (size_t)n;
  return true;
}

static bool set_separators(struct writer *w, struct jv pair)
{
  if (pair.type == JV_ABSENT || pair.type == JV_NONE) return true;
  if (!jv_is_seq(pair) || pair.seq->n != 2 || pair.seq->items[0].type != JV_STR || pair.seq->items[1].type != JV_STR)
    return jinja_fail(w->run, "TypeError", "separators must be a pair of strings");
  w->item_separator = pair.seq->items[0].s->data;
  w->item_bytes = pair.seq->items[0].s->n_bytes;
  w->key_separator = pair.seq->items[1].s->data;
  w->key_bytes = pair.seq->items[1].s->n_bytes;
  return true;
}

bool jinja_tojson(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  struct writer w = {.run = run, .item_separator = ", ", .key_separator = ": ", .item_bytes = 2, .key_bytes = 2, .indent = ""};
  if (!jinja_truth(run, call->a[0], &w.is_ascii) || !jinja_truth(run, call->a[3], &w.sorts_keys)) return false;
  if (!set_indent(&w, call->a[1]) || !set_separators(&w, call->a[2])) return false;
  return write_value(&w, call->self, 0) && jinja_out_str(run, &w.out, out);
}
