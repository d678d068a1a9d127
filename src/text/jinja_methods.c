/* Methods of str. Positions count code points; optional start and end work as in Python. */
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

#define METHOD(name) static bool str_##name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)

static bool need_str(struct jinja_run *run, struct jv v)
{
  if (v.type == JV_STR) return true;
  if (v.type == JV_UNDEFINED) return jinja_undefined_fail(run, v);
  return jinja_fail(run, "TypeError", "expected str, got %s", jinja_type_name(v));
}

METHOD(upper) { return jinja_change_case(run, call->self, CASE_UPPER, out); }
METHOD(lower) { return jinja_change_case(run, call->self, CASE_LOWER, out); }
METHOD(title) { return jinja_change_case(run, call->self, CASE_TITLE, out); }
METHOD(capitalize) { return jinja_change_case(run, call->self, CASE_CAPITALIZE, out); }
METHOD(swapcase) { return jinja_change_case(run, call->self, CASE_SWAP, out); }

METHOD(strip) { return jinja_strip(run, call->self, call->a[0], 3, out); }
METHOD(lstrip) { return jinja_strip(run, call->self, call->a[0], 1, out); }
METHOD(rstrip) { return jinja_strip(run, call->self, call->a[0], 2, out); }

METHOD(replace)
{
  int64_t count;
  if (!need_str(run, call->a[0]) || !need_str(run, call->a[1]) || !jinja_int_arg(run, call->a[2], -1, &count)) return false;
  return jinja_replace(run, call->self, call->a[0], call->a[1], count, out);
}

METHOD(join) { return jinja_join(run, call->self, call->a[0], jv_absent(), true, out); }

/* ---- Searching ---- */

/* self[start:end] as bytes; *offset is the code point where it starts. False and *is_empty when start is past the end. */
static bool window(struct jinja_run *run, const struct jinja_call *call, int first, struct jinja_str *part, int64_t *offset, bool *is_out)
{
  const struct jinja_str *s = call->self.s;
  int64_t n = (int64_t)s->n_chars, start, end;
  if (!jinja_int_arg(run, call->a[first], 0, &start) || !jinja_int_arg(run, call->a[first + 1], n, &end)) return false;
  if (start < 0) start = start + n < 0 ? 0 : start + n;
  if (end < 0) end = end + n < 0 ? 0 : end + n;
  if (end > n) end = n;
  *is_out = start > end;
  if (*is_out) return true;
  size_t from = jinja_str_offset(s, (size_t)start), to = end == n ? s->n_bytes : jinja_str_offset(s, (size_t)end);
  *part = (struct jinja_str){.data = s->data + from, .n_bytes = to - from, .n_chars = (size_t)(end - start)};
  *offset = start;
  return jinja_charge(run, s->n_bytes / 32);
}

/* The last occurrence, or NULL. Each place where the first byte fits is paid for, so that repetitive texts cannot cost n * m unseen. */
static bool find_last(struct jinja_run *run, const char *data, size_t n, const struct jinja_str *needle, const char **hit)
{
  *hit = NULL;
  if (!jinja_charge(run, n / 16)) return false;
  for (size_t at = n >= needle->n_bytes ? n - needle->n_bytes + 1 : 0; at-- > 0;) {
    if (needle->n_bytes && data[at] != needle->data[0]) continue;
    if (!jinja_charge(run, 1 + needle->n_bytes / 32)) return false;
    if (memcmp(data + at, needle->data, needle->n_bytes) == 0) return *hit = data + at, true;
  }
  return true;
}

static bool find(struct jinja_run *run, const struct jinja_call *call, bool is_last, int64_t *at)
{
  struct jinja_str part;
  int64_t offset;
  bool is_out;
  *at = -1;
  if (!need_str(run, call->a[0]) || !window(run, call, 1, &part, &offset, &is_out)) return false;
  if (is_out) return true;
  const struct jinja_str *needle = call->a[0].s;
  const char *hit = part.data;
  if (is_last && !find_last(run, part.data, part.n_bytes, needle, &hit)) return false;
  if (!is_last && needle->n_bytes) hit = memmem(part.data, part.n_bytes, needle->data, needle->n_bytes);
  if (!hit) return true;
  *at = offset;
  for (const char *c = part.data; c < hit; c++) *at += ((unsigned char)*c & 0xC0) != 0x80;
  return true;
}

static bool find_method(struct jinja_run *run, const struct jinja_call *call, bool is_last, bool must_exist, struct jv *out)
{
  int64_t at;
  if (!find(run, call, is_last, &at)) return false;
  if (at < 0 && must_exist) return jinja_fail(run, "ValueError", "substring not found");
  *out = jv_int(at);
  return true;
}

METHOD(find) { return find_method(run, call, false, false, out); }
METHOD(rfind) { return find_method(run, call, true, false, out); }
METHOD(index) { return find_method(run, call, false, true, out); }
METHOD(rindex) { return find_method(run, call, true, true, out); }

METHOD(count)
{
  struct jinja_str part;
  int64_t offset, n = 0;
  bool is_out;
  if (!need_str(run, call->a[0]) || !window(run, call, 1, &part, &offset, &is_out)) return false;
  const struct jinja_str *needle = call->a[0].s;
  if (is_out) return *out = jv_int(0), true;
  if (needle->n_bytes == 0) return *out = jv_int((int64_t)part.n_chars + 1), true;
  for (size_t at = 0; at < part.n_bytes; n++) {
    const char *hit = memmem(part.data + at, part.n_bytes - at, needle->data, needle->n_bytes);
    if (!hit) break;
    at = (size_t)(hit - part.data) + needle->n_bytes;
  }
  *out = jv_int(n);
  return true;
}

static bool has_affix(const struct jinja_str *s, const struct jinja_str *affix, bool is_prefix)
{
  if (affix->n_bytes > s->n_bytes) return false;
  return memcmp(s->data + (is_prefix ? 0 : s->n_bytes - affix->n_bytes), affix->data, affix->n_bytes) == 0;
}

static bool affix_method(struct jinja_run *run, const struct jinja_call *call, bool is_prefix, struct jv *out)
{
  struct jinja_str part;
  int64_t offset;
  bool is_out, holds = false;
  struct jv wanted = call->a[0];
  const char *name = is_prefix ? "startswith" : "endswith";
  if (!window(run, call, 1, &part, &offset, &is_out)) return false;
  if (wanted.type == JV_UNDEFINED) return jinja_undefined_fail(run, wanted);
  if (wanted.type != JV_STR && wanted.type != JV_TUPLE)
    return jinja_fail(run, "TypeError", "%s first arg must be str or a tuple of str, not %s", name, jinja_type_name(wanted));
  size_t n = wanted.type == JV_STR ? 1 : wanted.seq->n;
  for (size_t i = 0; i < n && !is_out && !holds; i++) {
    struct jv affix = wanted.type == JV_STR ? wanted : wanted.seq->items[i];
    if (affix.type != JV_STR)
      return jinja_fail(run, "TypeError", "tuple for %s must only contain str, not %s", name, jinja_type_name(affix));
    holds = has_affix(&part, affix.s, is_prefix);
  }
  *out = jv_bool(holds);
  return true;
}

METHOD(startswith) { return affix_method(run, call, true, out); }
METHOD(endswith) { return affix_method(run, call, false, out); }

static bool remove_affix(struct jinja_run *run, const struct jinja_call *call, bool is_prefix, struct jv *out)
{
  if (!need_str(run, call->a[0])) return false;
  const struct jinja_str *s = call->self.s, *affix = call->a[0].s;
  if (!has_affix(s, affix, is_prefix)) return *out = call->self, true;
  if (!jinja_str_view(run, s->data + (is_prefix ? affix->n_bytes : 0), s->n_bytes - affix->n_bytes, out)) return false;
  out->is_markup = call->self.is_markup;
  return true;
}

METHOD(removeprefix) { return remove_affix(run, call, true, out); }
METHOD(removesuffix) { return remove_affix(run, call, false, out); }

/* ---- Splitting ---- */

static bool push_part(struct jinja_run *run, const struct jinja_call *call, struct jinja_vec *parts, const char *data, size_t n_bytes)
{
  struct jv part;
  if (!jinja_str_view(run, data, n_bytes, &part)) return false;
  part.is_markup = call->self.is_markup;
  return jinja_vec_push(run, parts, part);
}

static bool split_on(struct jinja_run *run, const struct jinja_call *call, const struct jinja_str *separator, int64_t most,
                     struct jinja_vec *parts)
{
  const struct jinja_str *s = call->self.s;
  size_t at = 0;
  while (most > 0) {
    const char *hit = at < s->n_bytes ? memmem(s->data + at, s->n_bytes - at, separator->data, separator->n_bytes) : NULL;
    if (!hit) break;
    if (!push_part(run, call, parts, s->data + at, (size_t)(hit - s->data) - at)) return false;
    at = (size_t)(hit - s->data) + separator->n_bytes;
    most--;
  }
  return push_part(run, call, parts, s->data + at, s->n_bytes - at);
}

static bool rsplit_on(struct jinja_run *run, const struct jinja_call *call, const struct jinja_str *separator, int64_t most,
                      struct jinja_vec *parts)
{
  const struct jinja_str *s = call->self.s;
  size_t end = s->n_bytes;
  while (most > 0) {
    const char *hit;
    if (!find_last(run, s->data, end, separator, &hit)) return false;
    if (!hit) break;
    size_t from = (size_t)(hit - s->data) + separator->n_bytes;
    if (!push_part(run, call, parts, s->data + from, end - from)) return false;
    end = (size_t)(hit - s->data);
    most--;
  }
  return push_part(run, call, parts, s->data, end);
}

static size_t space_at(const struct jinja_str *s, size_t at)
{
  size_t length;
  return jinja_is_space(utf8_decode(s->data + at, s->n_bytes - at, &length)) ? length : 0;
}

/* Runs of white space separate; none at the ends. */
static bool split_space(struct jinja_run *run, const struct jinja_call *call, int64_t most, struct jinja_vec *parts)
{
  const struct jinja_str *s = call->self.s;
  size_t at = 0, n;
  for (;;) {
    while (at < s->n_bytes && (n = space_at(s, at)) > 0) at += n;
    if (at >= s->n_bytes) return true;
    size_t from = at;
    if (most-- <= 0) return push_part(run, call, parts, s->data + from, s->n_bytes - from); /* white space after it stays */
    while (at < s->n_bytes && space_at(s, at) == 0) at++;
    if (!push_part(run, call, parts, s->data + from, at - from)) return false;
  }
}

static size_t char_start(const struct jinja_str *s, size_t end)
{
  size_t at = end - 1;
  while (at > 0 && ((unsigned char)s->data[at] & 0xC0) == 0x80) at--;
  return at;
}

static bool rsplit_space(struct jinja_run *run, const struct jinja_call *call, int64_t most, struct jinja_vec *parts)
{
  const struct jinja_str *s = call->self.s;
  size_t end = s->n_bytes;
  for (;;) {
    while (end > 0 && space_at(s, char_start(s, end))) end = char_start(s, end);
    if (end == 0) return true;
    size_t to = end;
    if (most-- <= 0) return push_part(run, call, parts, s->data, to);
    while (end > 0 && !space_at(s, char_start(s, end))) end = char_start(s, end);
    if (!push_part(run, call, parts, s->data + end, to - end)) return false;
  }
}

static bool split(struct jinja_run *run, const struct jinja_call *call, bool from_right, struct jv *out)
{
  struct jinja_vec parts = {0};
  int64_t most;
  bool on_space = call->a[0].type == JV_ABSENT || call->a[0].type == JV_NONE, ok;
  if ((!on_space && !need_str(run, call->a[0])) || !jinja_int_arg(run, call->a[1], -1, &most)) return false;
  if (!jinja_charge(run, call->self.s->n_bytes / 16)) return false;
  if (most < 0) most = INT64_MAX;
  if (!on_space && call->a[0].s->n_bytes == 0) return jinja_fail(run, "ValueError", "empty separator");
  if (on_space) ok = from_right ? rsplit_space(run, call, most, &parts) : split_space(run, call, most, &parts);
  else ok = from_right ? rsplit_on(run, call, call->a[0].s, most, &parts) : split_on(run, call, call->a[0].s, most, &parts);
  if (!ok) return false;
  for (size_t i = 0; from_right && i < parts.n / 2; i++) {
    struct jv swapped = parts.items[i];
    parts.items[i] = parts.items[parts.n - 1 - i];
    parts.items[parts.n - 1 - i] = swapped;
  }
  return jinja_vec_list(run, &parts, out);
}

METHOD(split) { return split(run, call, false, out); }
METHOD(rsplit) { return split(run, call, true, out); }

METHOD(splitlines)
{
  struct jinja_vec lines = {0};
  bool keeps_ends;
  if (!jinja_truth(run, call->a[0], &keeps_ends) || !jinja_splitlines(run, call->self, keeps_ends, &lines)) return false;
  return jinja_vec_list(run, &lines, out);
}

static bool partition(struct jinja_run *run, const struct jinja_call *call, bool is_last, struct jv *out)
{
  const struct jinja_str *s = call->self.s;
  struct jinja_vec parts = {0};
  if (!need_str(run, call->a[0]) || !jinja_charge(run, s->n_bytes / 8)) return false;
  const struct jinja_str *separator = call->a[0].s;
  if (separator->n_bytes == 0) return jinja_fail(run, "ValueError", "empty separator");
  const char *hit = memmem(s->data, s->n_bytes, separator->data, separator->n_bytes);
  if (is_last && !find_last(run, s->data, s->n_bytes, separator, &hit)) return false;
  size_t head = hit ? (size_t)(hit - s->data) : is_last ? 0 : s->n_bytes, middle = hit ? separator->n_bytes : 0;
  if (!push_part(run, call, &parts, s->data, head) || !push_part(run, call, &parts, s->data + head, middle)) return false;
  if (!push_part(run, call, &parts, s->data + head + middle, s->n_bytes - head - middle)) return false;
  return jinja_list_new(run, JV_TUPLE, parts.items, parts.n, false, out);
}

METHOD(partition) { return partition(run, call, false, out); }
METHOD(rpartition) { return partition(run, call, true, out); }

/* ---- Padding ---- */

static bool pad(struct jinja_run *run, const struct jinja_call *call, int64_t left_share, bool is_zfill, struct jv *out)
{
  const struct jinja_str *s = call->self.s;
  struct jinja_out text = {0};
  int64_t width;
  const char *fill = is_zfill ? "0" : " ";
  size_t n_fill = 1, sign = is_zfill && s->n_bytes && (s->data[0] == '-' || s->data[0] == '+');
  if (!jinja_int_arg(run, call->a[0], 0, &width)) return false;
  if (!is_zfill && jv_given(call->a[1])) {
    if (!need_str(run, call->a[1])) return false;
    if (call->a[1].s->n_chars != 1) return jinja_fail(run, "TypeError", "the fill character must be exactly one character long");
    fill = call->a[1].s->data;
    n_fill = call->a[1].s->n_bytes;
  }
  int64_t more = width - (int64_t)s->n_chars;
  if (more < 0) more = 0;
  if (more > JINJA_MAX_OUTPUT_BYTES) return jinja_limit(run, "output");
  int64_t left = left_share == 2 ? more / 2 + (more & width & 1) : left_share == 1 ? more : 0; /* str.center's own rounding */
  if (!jinja_charge(run, (size_t)more) || !jinja_emit(run, &text, s->data, sign)) return false;
  for (int64_t i = 0; i < left; i++)
    if (!jinja_emit(run, &text, fill, n_fill)) return false;
  if (!jinja_emit(run, &text, s->data + sign, s->n_bytes - sign)) return false;
  for (int64_t i = left; i < more; i++)
    if (!jinja_emit(run, &text, fill, n_fill)) return false;
  return jinja_out_str(run, &text, out);
}

METHOD(ljust) { return pad(run, call, 0, false, out); }
METHOD(rjust) { return pad(run, call, 1, false, out); }
METHOD(center) { return pad(run, call, 2, false, out); }
METHOD(zfill) { return pad(run, call, 1, true, out); }

METHOD(expandtabs)
{
  const struct jinja_str *s = call->self.s;
  struct jinja_out text = {0};
  int64_t size, column = 0;
  if (!jinja_int_arg(run, call->a[0], 8, &size)) return false;
  if (size > 1000) return jinja_limit(run, "tab size");
  for (size_t i = 0; i < s->n_bytes; i++) {
    char c = s->data[i];
    if (!jinja_charge(run, 1)) return false;
    if (c == '\t') {
      for (int64_t n = size > 0 ? size - column % size : 0; n > 0; n--, column++)
        if (!jinja_emit(run, &text, " ", 1)) return false;
      continue;
    }
    column = c == '\n' || c == '\r' ? 0 : column + (((unsigned char)c & 0xC0) != 0x80);
    if (!jinja_emit(run, &text, &c, 1)) return false;
  }
  return jinja_out_str(run, &text, out);
}

/* ---- Asking about characters ---- */

enum char_class { IS_ALPHA, IS_DIGIT, IS_ALNUM, IS_SPACE, IS_ASCII, IS_PRINTABLE };

static bool char_is(uint32_t c, enum char_class what)
{
  switch (what) {
  case IS_ALPHA: return jinja_is_alpha(c);
  case IS_DIGIT: return jinja_is_digit(c);
  case IS_ALNUM: return jinja_is_alpha(c) || jinja_is_digit(c);
  case IS_SPACE: return jinja_is_space(c);
  case IS_ASCII: return c < 0x80;
  default: return jinja_is_printable(c);
  }
}

static bool all_chars(struct jinja_run *run, const struct jinja_call *call, enum char_class what, struct jv *out)
{
  const struct jinja_str *s = call->self.s;
  bool holds = s->n_bytes > 0 || what == IS_ASCII || what == IS_PRINTABLE;
  size_t length;
  if (!jinja_charge(run, s->n_bytes / 4)) return false;
  for (size_t i = 0; holds && i < s->n_bytes; i += length) holds = char_is(utf8_decode(s->data + i, s->n_bytes - i, &length), what);
  *out = jv_bool(holds);
  return true;
}

METHOD(isalpha) { return all_chars(run, call, IS_ALPHA, out); }
METHOD(isdigit) { return all_chars(run, call, IS_DIGIT, out); }
METHOD(isalnum) { return all_chars(run, call, IS_ALNUM, out); }
METHOD(isspace) { return all_chars(run, call, IS_SPACE, out); }
METHOD(isascii) { return all_chars(run, call, IS_ASCII, out); }
METHOD(isprintable) { return all_chars(run, call, IS_PRINTABLE, out); }

METHOD(islower) { return jinja_invoke(run, jinja_find(jinja_tests, "lower", 5), &(struct jinja_call){.self = call->self}, out); }
METHOD(isupper) { return jinja_invoke(run, jinja_find(jinja_tests, "upper", 5), &(struct jinja_call){.self = call->self}, out); }

METHOD(istitle)
{
  struct jv title, lower;
  if (!jinja_change_case(run, call->self, CASE_TITLE, &title) || !jinja_change_case(run, call->self, CASE_LOWER, &lower)) return false;
  *out = jv_bool(jinja_str_compare(title.s, call->self.s) == 0 && jinja_str_compare(lower.s, call->self.s) != 0);
  return true;
}

const struct jinja_builtin jinja_str_methods[] = {
    {"capitalize", "", 0, str_capitalize},
    {"casefold", "", 0, str_lower},
    {"center", "width fillchar", 1, str_center},
    {"count", "sub start end", 1, str_count},
    {"endswith", "suffix start end", 1, str_endswith},
    {"expandtabs", "tabsize", 0, str_expandtabs},
    {"find", "sub start end", 1, str_find},
    {"format", "*", 0, jinja_format_method},
    {"index", "sub start end", 1, str_index},
    {"isalnum", "", 0, str_isalnum},
    {"isalpha", "", 0, str_isalpha},
    {"isascii", "", 0, str_isascii},
    {"isdecimal", "", 0, str_isdigit},
    {"isdigit", "", 0, str_isdigit},
    {"islower", "", 0, str_islower},
    {"isnumeric", "", 0, str_isdigit},
    {"isprintable", "", 0, str_isprintable},
    {"isspace", "", 0, str_isspace},
    {"istitle", "", 0, str_istitle},
    {"isupper", "", 0, str_isupper},
    {"join", "iterable", 1, str_join},
    {"ljust", "width fillchar", 1, str_ljust},
    {"lower", "", 0, str_lower},
    {"lstrip", "chars", 0, str_lstrip},
    {"partition", "sep", 1, str_partition},
    {"removeprefix", "prefix", 1, str_removeprefix},
    {"removesuffix", "suffix", 1, str_removesuffix},
    {"replace", "old new count", 2, str_replace},
    {"rfind", "sub start end", 1, str_rfind},
    {"rindex", "sub start end", 1, str_rindex},
    {"rjust", "width fillchar", 1, str_rjust},
    {"rpartition", "sep", 1, str_rpartition},
    {"rsplit", "sep maxsplit", 0, str_rsplit},
    {"rstrip", "chars", 0, str_rstrip},
    {"split", "sep maxsplit", 0, str_split},
    {"splitlines", "keepends", 0, str_splitlines},
    {"startswith", "prefix start end", 1, str_startswith},
    {"strip", "chars", 0, str_strip},
    {"swapcase", "", 0, str_swapcase},
    {"title", "", 0, str_title},
    {"upper", "", 0, str_upper},
    {"zfill", "width", 1, str_zfill},
    {0},
};
