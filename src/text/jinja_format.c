/* Formatting: `format % values` (jinja_percent) and str.format (jinja_format_method), for the conversions that texts need:
 * %s %r %a-less %d %i %u %x %X %o %c %e %f %g %% with flags, width and precision; {} {0} {name} {a.b} {a[0]} with !s !r and [[fill]align]
 * [sign][0][width][,][.precision][type]. Anything else is refused. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

enum { MAX_WIDTH = 10000, MAX_PRECISION = 200 };

struct spec {
  char fill[5];
  size_t fill_bytes;
  char align, sign, type; /* align: < > ^ =, 0 for the type's own */
  bool is_alternate, has_commas, has_precision;
  int64_t width, precision;
};

static bool bad_format(struct jinja_run *run, const char *what) { return jinja_fail(run, "ValueError", "%s", what); }

static bool fill(struct jinja_run *run, struct jinja_out *out, const struct spec *spec, int64_t n)
{
  if (!jinja_charge(run, n > 0 ? (size_t)n / 8 : 0)) return false;
  for (; n > 0; n--)
    if (!jinja_emit(run, out, spec->fill_bytes ? spec->fill : " ", spec->fill_bytes ? spec->fill_bytes : 1)) return false;
  return true;
}

/* Text padded to the width; n_head bytes (sign, 0x) stay in front of `=` padding. */
static bool emit_padded(struct jinja_run *run, struct jinja_out *out, const struct spec *spec, const char *text, size_t n_bytes,
                        size_t n_head, char default_align)
{
  int64_t n_chars = 0;
  for (size_t i = 0; i < n_bytes; i++) n_chars += ((unsigned char)text[i] & 0xC0) != 0x80;
  int64_t more = spec->width - n_chars;
  if (more < 0) more = 0;
  char align = spec->align ? spec->align : default_align;
  int64_t left = align == '>' ? more : align == '^' ? more / 2 : 0;
  if (align == '=')
    return jinja_emit(run, out, text, n_head) && fill(run, out, spec, more) && jinja_emit(run, out, text + n_head, n_bytes - n_head);
  return fill(run, out, spec, left) && jinja_emit(run, out, text, n_bytes) && fill(run, out, spec, more - left);
}

static size_t add_commas(char *text, size_t n_head, size_t n, size_t size)
{
  size_t digits = 0;
  while (n_head + digits < n && text[n_head + digits] >= '0' && text[n_head + digits] <= '9') digits++;
  for (size_t at = digits; at > 3;) {
    at -= 3;
    if (n + 1 >= size) return n;
    memmove(text + n_head + at + 1, text + n_head + at, n - n_head - at);
    text[n_head + at] = ',';
    n++;
  }
  return n;
}

static bool emit_int(struct jinja_run *run, struct jinja_out *out, const struct spec *spec, int64_t value)
{
  char text[160], digits[80];
  uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
  size_t n = 0;
  const char *prefix = "";
  switch (spec->type) {
  case 'x': snprintf(digits, sizeof digits, "%llx", (unsigned long long)magnitude); prefix = "0x"; break;
  case 'X': snprintf(digits, sizeof digits, "%llX", (unsigned long long)magnitude); prefix = "0X"; break;
  case 'o': snprintf(digits, sizeof digits, "%llo", (unsigned long long)magnitude); prefix = "0o"; break;
  case 'b': {
    size_t at = sizeof digits - 1;
    digits[at] = '\0';
    for (uint64_t rest = magnitude; at > 0; rest >>= 1) {
      digits[--at] = (char)('0' + (rest & 1));
      if (rest <= 1) break;
    }
    memmove(digits, digits + at, sizeof digits - at);
    prefix = "0b";
    break;
  }
  default: snprintf(digits, sizeof digits, "%llu", (unsigned long long)magnitude); break;
  }
  if (value < 0) text[n++] = '-';
  else if (spec->sign == '+' || spec->sign == ' ') text[n++] = spec->sign;
  if (spec->is_alternate) n += (size_t)snprintf(text + n, sizeof text - n, "%s", prefix);
  size_t n_head = n;
  n += (size_t)snprintf(text + n, sizeof text - n, "%s", digits);
  if (spec->has_commas) n = add_commas(text, n_head, n, sizeof text);
  return emit_padded(run, out, spec, text, n, n_head, '>');
}

static bool emit_float(struct jinja_run *run, struct jinja_out *out, const struct spec *spec, double value)
{
  char text[640], format[16];
  int precision = spec->has_precision ? (int)spec->precision : 6;
  double scaled = spec->type == '%' ? value * 100 : value;
  char type = spec->type == '%' ? 'f' : spec->type;
  size_t n = 0, n_head;
  if (!signbit(scaled) && (spec->sign == '+' || spec->sign == ' ')) text[n++] = spec->sign;
  snprintf(format, sizeof format, spec->is_alternate ? "%%#.*%c" : "%%.*%c", type);
  n += (size_t)snprintf(text + n, sizeof text - n - 2, format, precision, scaled);
  n_head = n > 0 && (text[0] < '0' || text[0] > '9') && text[0] != 'i' && text[0] != 'n';
  if (spec->has_commas) n = add_commas(text, n_head, n, sizeof text - 2);
  if (spec->type == '%') text[n++] = '%';
  return emit_padded(run, out, spec, text, n, n_head, '>');
}

/* Text cut to the precision and padded. */
static bool emit_text(struct jinja_run *run, struct jinja_out *out, const struct spec *spec, struct jv text, char default_align)
{
  if (spec->has_precision && !jinja_substr(run, text.s, 0, (size_t)spec->precision, &text)) return false;
  return emit_padded(run, out, spec, text.s->data, text.s->n_bytes, 0, default_align);
}

/* ---- % ---- */

struct percent { struct jv values; size_t next; bool is_tuple; };

static bool next_value(struct jinja_run *run, struct percent *args, struct jv *out)
{
  size_t n = args->is_tuple ? args->values.seq->n : 1;
  if (args->next >= n) return jinja_fail(run, "TypeError", "not enough arguments for format string");
  *out = args->is_tuple ? args->values.seq->items[args->next] : args->values;
  args->next++;
  return true;
}

/* A number or `*` in a format. */
static bool percent_number(struct jinja_run *run, const struct jinja_str *f, size_t *at, struct percent *args, int64_t most, int64_t *out)
{
  *out = 0;
  if (*at < f->n_bytes && f->data[*at] == '*') {
    struct jv value;
    ++*at;
    if (!next_value(run, args, &value) || !jinja_int_arg(run, value, 0, out)) return false;
  }
  while (*at < f->n_bytes && f->data[*at] >= '0' && f->data[*at] <= '9' && *out <= most) *out = *out * 10 + (f->data[(*at)++] - '0');
  return *out <= most && *out >= -most ? true : jinja_limit(run, "format width");
}

static bool percent_value(struct jinja_run *run, struct jinja_out *out, struct spec *spec, struct jv value)
{
  struct jinja_out text = {0};
  struct jv shown;
  char bytes[4];
  switch (spec->type) {
  case 's': return jinja_to_str(run, value, &shown) && emit_text(run, out, spec, shown, '>');
  case 'r':
  case 'a': return jinja_emit_repr(run, &text, value) && jinja_out_str(run, &text, &shown) && emit_text(run, out, spec, shown, '>');
  case 'c':
    if (value.type == JV_STR && value.s->n_chars == 1) return emit_text(run, out, spec, value, '>');
    if (!jv_is_intlike(value) || jv_as_int(value) < 0 || jv_as_int(value) > 0x10FFFF)
      return jinja_fail(run, "TypeError", "%%c requires int or char");
    return jinja_str_new(run, bytes, utf8_encode((uint32_t)jv_as_int(value), bytes), &shown) && emit_text(run, out, spec, shown, '>');
  case 'd': case 'i': case 'u': case 'x': case 'X': case 'o':
    if (value.type == JV_UNDEFINED) return jinja_undefined_fail(run, value);
    if (value.type == JV_FLOAT && strchr("diu", spec->type) && fabs(value.f) < 9.2e18) value = jv_int((int64_t)value.f);
    if (!jv_is_intlike(value))
      return jinja_fail(run, "TypeError", "%%%c format: a real number is required, not %s", spec->type, jinja_type_name(value));
    return emit_int(run, out, spec, jv_as_int(value));
  case 'e': case 'E': case 'f': case 'F': case 'g': case 'G':
    if (value.type == JV_UNDEFINED) return jinja_undefined_fail(run, value);
    if (!jv_is_number(value)) return jinja_fail(run, "TypeError", "must be real number, not %s", jinja_type_name(value));
    return emit_float(run, out, spec, jv_as_float(value));
  default: return bad_format(run, "unsupported format character");
  }
}

/* %(key)s: the value behind the key. */
static bool percent_key(struct jinja_run *run, const struct jinja_str *f, size_t *at, struct jv values, struct jv *out)
{
  const char *close = memchr(f->data + *at, ')', f->n_bytes - *at);
  if (!close) return bad_format(run, "incomplete format key");
  struct jv key;
  size_t n = (size_t)(close - f->data) - *at - 1;
  if (values.type != JV_DICT) return jinja_fail(run, "TypeError", "format requires a mapping");
  if (!jinja_str_view(run, f->data + *at + 1, n, &key) || !jinja_dict_find(run, values.dict, key, out)) return false;
  *at += n + 2;
  return jv_given(*out) || jinja_fail(run, "KeyError", "format key is missing");
}

static bool percent_directive(struct jinja_run *run, struct jinja_out *out, const struct jinja_str *f, size_t *at, struct percent *args,
                              bool is_markup)
{
  struct spec spec = {0};
  struct jv value = jv_absent();
  if (*at < f->n_bytes && f->data[*at] == '(' && !percent_key(run, f, at, args->values, &value)) return false;
  for (; *at < f->n_bytes && f->data[*at] && strchr("-+ 0#", f->data[*at]); ++*at) {
    char flag = f->data[*at];
    if (flag == '-') spec.align = '<';
    else if (flag == '+' || (flag == ' ' && !spec.sign)) spec.sign = flag;
    else if (flag == '#') spec.is_alternate = true;
    else if (flag == '0' && !spec.align) spec.align = '=';
  }
  if (!percent_number(run, f, at, args, MAX_WIDTH, &spec.width)) return false;
  if (spec.width < 0) {
    spec.align = '<';
    spec.width = -spec.width;
  }
  if (*at < f->n_bytes && f->data[*at] == '.') {
    ++*at;
    spec.has_precision = true;
    if (!percent_number(run, f, at, args, MAX_PRECISION, &spec.precision)) return false;
    if (spec.precision < 0) spec.precision = 0;
  }
  if (*at >= f->n_bytes) return bad_format(run, "incomplete format");
  spec.type = f->data[(*at)++];
  if (spec.type == '%') return jinja_emit(run, out, "%", 1);
  bool is_number = strchr("sra", spec.type) == NULL;
  if (spec.align == '=' && !is_number) spec.align = '>';
  if (spec.align == '=') memcpy(spec.fill, "0", 2), spec.fill_bytes = 1;
  if (!jv_given(value) && !next_value(run, args, &value)) return false;
  if (is_markup && !is_number && !jinja_escape(run, value, &value)) return false;
  return percent_value(run, out, &spec, value);
}

bool jinja_percent(struct jinja_run *run, struct jv format, struct jv arg, struct jv *out)
{
  const struct jinja_str *f = format.s;
  struct percent args = {.values = arg, .is_tuple = arg.type == JV_TUPLE};
  struct jinja_out text = {0};
  size_t from = 0;
  if (!jinja_charge(run, f->n_bytes / 16)) return false;
  for (size_t at = 0; at < f->n_bytes;) {
    if (f->data[at] != '%') {
      at++;
      continue;
    }
    if (!jinja_emit(run, &text, f->data + from, at - from)) return false;
    at++;
    if (!percent_directive(run, &text, f, &at, &args, format.is_markup)) return false;
    from = at;
  }
  size_t n_values = args.is_tuple ? arg.seq->n : arg.type == JV_DICT || arg.type == JV_LIST ? args.next : 1;
  if (args.next < n_values) return jinja_fail(run, "TypeError", "not all arguments converted during string formatting");
  if (!jinja_emit(run, &text, f->data + from, f->n_bytes - from) || !jinja_out_str(run, &text, out)) return false;
  out->is_markup = format.is_markup;
  return true;
}

/* ---- str.format ---- */

struct braces { const struct jinja_call *call; size_t next; bool is_numbered; };

static bool parse_number(struct jinja_run *run, const char *text, size_t n, size_t *at, int64_t most, int64_t *out)
{
  *out = 0;
  while (*at < n && text[*at] >= '0' && text[*at] <= '9' && *out <= most) *out = *out * 10 + (text[(*at)++] - '0');
  return *out <= most ? true : jinja_limit(run, "format width");
}

static bool parse_spec(struct jinja_run *run, const char *text, size_t n, struct spec *spec)
{
  size_t at = 0, length = 0;
  *spec = (struct spec){0};
  if (n > 0) utf8_decode(text, n, &length);
  if (n > length && length && strchr("<>^=", text[length])) {
    memcpy(spec->fill, text, length);
    spec->fill_bytes = length;
    spec->align = text[length];
    at = length + 1;
  } else if (n > 0 && text[0] && strchr("<>^=", text[0])) {
    spec->align = text[at++];
  }
  if (at < n && (text[at] == '+' || text[at] == '-' || text[at] == ' ')) spec->sign = text[at++];
  if (at < n && text[at] == '#') spec->is_alternate = true, at++;
  if (at < n && text[at] == '0') {
    if (!spec->align) spec->align = '=', spec->fill_bytes = 1, spec->fill[0] = '0';
    at++;
  }
  if (!parse_number(run, text, n, &at, MAX_WIDTH, &spec->width)) return false;
  if (at < n && text[at] == ',') spec->has_commas = true, at++;
  if (at < n && text[at] == '.') {
    at++;
    spec->has_precision = true;
    if (!parse_number(run, text, n, &at, MAX_PRECISION, &spec->precision)) return false;
  }
  if (at < n) spec->type = text[at++];
  return at == n || bad_format(run, "invalid format specifier");
}

static bool format_value(struct jinja_run *run, struct jinja_out *out, const char *spec_text, size_t n, struct jv value)
{
  struct spec spec;
  struct jv text;
  if (!parse_spec(run, spec_text, n, &spec)) return false;
  if (value.type == JV_STR || n == 0) {
    if (spec.type && spec.type != 's') return bad_format(run, "unknown format code for object of type 'str'");
    if (spec.align == '=' && value.type == JV_STR) return bad_format(run, "'=' alignment not allowed in string format specifier");
    return jinja_to_str(run, value, &text) && emit_text(run, out, &spec, text, '<');
  }
  if (!jv_is_number(value))
    return jinja_fail(run, "TypeError", "unsupported format string passed to %s.__format__", jinja_type_name(value));
  if (spec.type == 'c') return percent_value(run, out, &spec, value);
  if (spec.type && strchr("eEfFgG%", spec.type)) return emit_float(run, out, &spec, jv_as_float(value));
  if (jv_is_intlike(value) && (!spec.type || strchr("dxXobn", spec.type))) return emit_int(run, out, &spec, jv_as_int(value));
  if (value.type != JV_FLOAT || spec.type) return bad_format(run, "unknown format code");
  if (spec.has_precision) {
    spec.type = 'g';
    return emit_float(run, out, &spec, value.f);
  }
  return jinja_to_str(run, value, &text) && emit_padded(run, out, &spec, text.s->data, text.s->n_bytes, value.f < 0, '>');
}

static bool pick_argument(struct jinja_run *run, struct braces *state, const char *name, size_t n, struct jv *out)
{
  const struct jinja_call *call = state->call;
  size_t at = 0;
  int64_t index = 0;
  bool is_index = n == 0 || (name[0] >= '0' && name[0] <= '9');
  if (n > 0 && is_index && !parse_number(run, name, n, &at, 100000, &index)) return false;
  if (is_index && at == n) {
    if (n == 0) index = (int64_t)state->next++;
    if ((size_t)index >= call->n_pos)
      return jinja_fail(run, "IndexError", "Replacement index %lld out of range for positional args tuple", (long long)index);
    *out = call->pos[index];
    return true;
  }
  for (size_t i = 0; i < call->n_kw; i++)
    if (call->kw[i].name->n_bytes == n && memcmp(call->kw[i].name->data, name, n) == 0) return *out = call->kw[i].value, true;
  return jinja_fail(run, "KeyError", "format name is missing");
}

/* first.attr[key]... */
static bool resolve_field(struct jinja_run *run, struct braces *state, const char *name, size_t n, struct jv *out)
{
  size_t end = 0;
  while (end < n && name[end] != '.' && name[end] != '[') end++;
  if (!pick_argument(run, state, name, end, out)) return false;
  while (end < n) {
    bool is_item = name[end++] == '[';
    size_t from = end, index_at = 0;
    struct jv key;
    while (end < n && (is_item ? name[end] != ']' : name[end] != '.' && name[end] != '[')) end++;
    if (end == from) return bad_format(run, "empty attribute in format string");
    if (!jinja_str_view(run, name + from, end - from, &key)) return false;
    int64_t index;
    if (is_item) {
      if (!parse_number(run, name + from, end - from, &index_at, 1000000, &index)) return false;
      if (index_at == end - from) key = jv_int(index);
      end += end < n;
    }
    if (!(is_item ? jinja_getitem(run, *out, key, out) : jinja_getattr(run, *out, key.s, out))) return false;
  }
  return true;
}

static bool format_field(struct jinja_run *run, struct jinja_out *out, struct braces *state, const char *text, size_t n, bool is_markup)
{
  size_t name = 0, spec;
  struct jv value;
  if (memchr(text, '{', n)) return bad_format(run, "nested fields in a format specification are not supported");
  while (name < n && text[name] != '!' && text[name] != ':') name++;
  if (!resolve_field(run, state, text, name, &value)) return false;
  spec = name;
  if (spec < n && text[spec] == '!') {
    struct jinja_out shown = {0};
    char how = spec + 1 < n ? text[spec + 1] : 0;
    if (how != 's' && how != 'r') return bad_format(run, "unsupported conversion in a format string");
    if (!(how == 's' ? jinja_emit_str(run, &shown, value) : jinja_emit_repr(run, &shown, value)) || !jinja_out_str(run, &shown, &value))
      return false;
    spec += 2;
  }
  if (spec < n && text[spec] != ':') return bad_format(run, "expected ':' after conversion specifier");
  spec += spec < n;
  if (!is_markup) return format_value(run, out, text + spec, n - spec, value);
  struct jinja_out shown = {0};
  struct jv plain;
  bool is_safe = value.type == JV_STR && value.is_markup;
  if (!format_value(run, &shown, text + spec, n - spec, value) || !jinja_out_str(run, &shown, &plain)) return false;
  plain.is_markup = is_safe;
  return jinja_escape(run, plain, &plain) && jinja_emit_str(run, out, plain);
}

bool jinja_format_method(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  const struct jinja_str *f = call->self.s;
  struct braces state = {.call = call};
  struct jinja_out text = {0};
  if (!jinja_charge(run, f->n_bytes / 4)) return false;
  for (size_t at = 0; at < f->n_bytes;) {
    char c = f->data[at];
    bool is_double = (c == '{' || c == '}') && at + 1 < f->n_bytes && f->data[at + 1] == c;
    if (is_double || (c != '{' && c != '}')) {
      if (!jinja_emit(run, &text, &c, 1)) return false;
      at += is_double ? 2 : 1;
      continue;
    }
    if (c == '}') return bad_format(run, "Single '}' encountered in format string");
    const char *close = memchr(f->data + at, '}', f->n_bytes - at);
    if (!close) return bad_format(run, "expected '}' before end of string");
    size_t end = (size_t)(close - f->data);
    if (!format_field(run, &text, &state, f->data + at + 1, end - at - 1, call->self.is_markup)) return false;
    at = end + 1;
  }
  if (!jinja_out_str(run, &text, out)) return false;
  out->is_markup = call->self.is_markup;
  return true;
}
