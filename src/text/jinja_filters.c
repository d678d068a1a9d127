/* Filters on single values: numbers, defaults, attributes, escaping, JSON. Those on sequences and on text have files of their own. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/jinja_internal.h"

#define FILTER(name) static bool filter_##name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)

FILTER(abs)
{
  struct jv v = call->self;
  if (v.type == JV_FLOAT) return *out = jv_float(fabs(v.f)), true;
  if (v.type == JV_UNDEFINED || !jv_is_intlike(v))
    return jinja_fail(run, "TypeError", "bad operand type for abs(): '%s'", jinja_type_name(v));
  return jv_as_int(v) < 0 ? jinja_negate(run, v, true, out) : (*out = jv_int(jv_as_int(v)), true);
}

FILTER(attr)
{
  struct jv name;
  if (call->self.type == JV_UNDEFINED) return jinja_undefined_fail(run, call->self);
  if (!jinja_to_str(run, call->a[0], &name)) return false;
  if (call->self.type != JV_DICT) return jinja_getattr(run, call->self, name.s, out);
  struct jinja_dict none = {0}; /* attributes only, never items: ask an empty dict, then name the real one */
  struct jv empty = {.type = JV_DICT, .dict = &none};
  if (!jinja_getattr(run, empty, name.s, out)) return false;
  if (out->type != JV_METHOD) return true;
  struct jinja_method *method = jinja_alloc(run, 1, sizeof *method);
  if (!method) return false;
  *method = (struct jinja_method){.self = call->self, .fn = out->method->fn};
  out->method = method;
  return true;
}

FILTER(default)
{
  bool by_truth, truth;
  if (!jinja_truth(run, call->a[1], &by_truth) || !jinja_truth(run, call->self, &truth)) return false;
  bool keeps = call->self.type != JV_UNDEFINED && (!by_truth || truth);
  if (keeps) return *out = call->self, true;
  if (jv_given(call->a[0])) return *out = call->a[0], true;
  return jinja_str_view(run, "", 0, out);
}

/* Text trimmed and without underscores, ready for strtoll and strtod. False: too long or empty. */
static bool number_text(struct jinja_run *run, struct jv v, char *text, size_t size, bool *is_usable)
{
  struct jv trimmed;
  if (!jinja_strip(run, v, jv_none(), 3, &trimmed)) return false;
  size_t n = 0;
  *is_usable = trimmed.s->n_bytes > 0 && trimmed.s->n_bytes < size;
  for (size_t i = 0; *is_usable && i < trimmed.s->n_bytes; i++) {
    char c = trimmed.s->data[i];
    bool is_between = i > 0 && i + 1 < trimmed.s->n_bytes && trimmed.s->data[i - 1] != '_' && trimmed.s->data[i + 1] != '_';
    if (c == '_' && !is_between) *is_usable = false;
    if (c == '\0') *is_usable = false;
    if (c != '_') text[n++] = c;
  }
  text[n] = '\0';
  return true;
}

/* A decimal number as Python's float() reads it: no hex, no "nan(...)". */
static bool parse_float(const char *text, double *out)
{
  char *end;
  if (strpbrk(text, "xX(")) return false;
  *out = strtod(text, &end);
  return end != text && *end == '\0';
}

static bool parse_int(const char *text, int base, int64_t *out)
{
  char *end;
  const char *digits = text + (text[0] == '-' || text[0] == '+');
  if (digits[0] == '0' && base != 10) { /* the prefix that goes with the base */
    char letter = (char)(digits[1] | 0x20);
    if ((base == 16 && letter == 'x') || (base == 8 && letter == 'o') || (base == 2 && letter == 'b')) digits += 2;
  }
  if (!*digits || *digits == '-' || *digits == '+' || *digits == ' ') return false;
  unsigned long long value = strtoull(digits, &end, base);
  if (*end || (base == 16 && strpbrk(digits, "xX")) || value > INT64_MAX) return false;
  *out = text[0] == '-' ? -(int64_t)value : (int64_t)value;
  return true;
}

FILTER(int)
{
  struct jv v = call->self, fallback = jv_given(call->a[0]) ? call->a[0] : jv_int(0);
  char text[400];
  int64_t base, value;
  double number;
  bool is_usable;
  if (v.type == JV_UNDEFINED) return jinja_undefined_fail(run, v);
  if (!jinja_int_arg(run, call->a[1], 10, &base)) return false;
  *out = fallback;
  if (jv_is_intlike(v)) return *out = jv_int(jv_as_int(v)), true;
  if (v.type == JV_FLOAT) return *out = fabs(v.f) < 9.2e18 ? jv_int((int64_t)v.f) : fallback, true;
  if (v.type != JV_STR) return true;
  if (!number_text(run, v, text, sizeof text, &is_usable)) return false;
  if (!is_usable || base < 2 || base > 36) return true;
  if (parse_int(text, (int)base, &value)) *out = jv_int(value);
  else if (parse_float(text, &number) && fabs(number) < 9.2e18) *out = jv_int((int64_t)number);
  return true;
}

FILTER(float)
{
  struct jv v = call->self;
  char text[400];
  double number;
  bool is_usable;
  if (v.type == JV_UNDEFINED) return jinja_undefined_fail(run, v);
  *out = jv_given(call->a[0]) ? call->a[0] : jv_float(0);
  if (jv_is_number(v)) return *out = jv_float(jv_as_float(v)), true;
  if (v.type != JV_STR) return true;
  if (!number_text(run, v, text, sizeof text, &is_usable)) return false;
  if (is_usable && parse_float(text, &number)) *out = jv_float(number);
  return true;
}

/* Round half to even on the exact decimal value, as Python's round(): printf rounds the exact binary value correctly. */
static double round_decimal(double v, int64_t digits)
{
  char text[400];
  if (!isfinite(v) || digits > 300) return v;
  if (digits >= 0) {
    snprintf(text, sizeof text, "%.*f", (int)digits, v);
    return strtod(text, NULL);
  }
  double scale = pow(10, (double)(digits < -308 ? 308 : -digits));
  return nearbyint(v / scale) * scale;
}

FILTER(round)
{
  int64_t precision;
  struct jv v = call->self;
  if (!jinja_int_arg(run, call->a[0], 0, &precision)) return false;
  if (v.type == JV_UNDEFINED || !jv_is_number(v))
    return jinja_fail(run, "TypeError", "type %s doesn't define __round__ method", jinja_type_name(v));
  bool is_common = !jv_given(call->a[1]) || jinja_str_is(call->a[1], "common");
  bool is_ceil = jinja_str_is(call->a[1], "ceil");
  if (!is_common && !is_ceil && !jinja_str_is(call->a[1], "floor"))
    return jinja_fail(run, "FilterArgumentError", "method must be common, ceil or floor");
  if (is_common && jv_is_intlike(v) && precision >= 0) return *out = jv_int(jv_as_int(v)), true; /* round(3, 0) stays an int */
  if (is_common) {
    double rounded = round_decimal(jv_as_float(v), precision);
    *out = jv_is_intlike(v) && fabs(rounded) < 9.2e18 ? jv_int((int64_t)rounded) : jv_float(rounded);
    return true;
  }
  double scale = pow(10, (double)precision);
  *out = jv_float((is_ceil ? ceil(jv_as_float(v) * scale) : floor(jv_as_float(v) * scale)) / scale);
  return true;
}

FILTER(string) { return jinja_to_str(run, call->self, out); }
FILTER(escape) { return jinja_escape(run, call->self, out); }

FILTER(forceescape)
{
  struct jv text;
  if (!jinja_to_str(run, call->self, &text)) return false;
  text.is_markup = false;
  return jinja_escape(run, text, out);
}

FILTER(safe)
{
  if (!jinja_to_str(run, call->self, out)) return false;
  out->is_markup = true;
  return true;
}

FILTER(length)
{
  int64_t n;
  if (!jinja_length(run, call->self, &n)) return false;
  *out = jv_int(n);
  return true;
}

FILTER(filesizeformat)
{
  static const char *const binary[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}, *const decimal[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  struct jinja_call as_float = {.self = call->self};
  struct jv number;
  bool is_binary;
  char text[64];
  if (!jinja_truth(run, call->a[0], &is_binary) || !filter_float(run, &as_float, &number)) return false;
  double base = is_binary ? 1024 : 1000, bytes = number.f, unit = base;
  if (bytes == 1) return jinja_str_view(run, "1 Byte", 6, out);
  if (bytes < base) return jinja_str_new(run, text, (size_t)snprintf(text, sizeof text, "%.0f Bytes", trunc(bytes)), out);
  int i = 0;
  for (unit = base * base; bytes >= unit && i < 5; i++) unit *= base;
  return jinja_str_new(run, text, (size_t)snprintf(text, sizeof text, "%.1f %s", base * bytes / unit, (is_binary ? binary : decimal)[i]),
                       out);
}

const struct jinja_builtin jinja_filters[] = {
    {"abs", "", 0, filter_abs},
    {"attr", "name", 1, filter_attr},
    {"default", "default_value boolean", 0, filter_default},
    {"d", "default_value boolean", 0, filter_default},
    {"int", "default base", 0, filter_int},
    {"float", "default", 0, filter_float},
    {"round", "precision method", 0, filter_round},
    {"string", "", 0, filter_string},
    {"escape", "", 0, filter_escape},
    {"e", "", 0, filter_escape},
    {"forceescape", "", 0, filter_forceescape},
    {"safe", "", 0, filter_safe},
    {"length", "", 0, filter_length},
    {"count", "", 0, filter_length},
    {"filesizeformat", "binary", 0, filter_filesizeformat},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, jinja_tojson},
    {0},
};
