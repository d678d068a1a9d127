/* Operations on strings that methods and filters share: case, strip, replace, split lines, join. Markup stays Markup. */
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

static bool finish(struct jinja_run *run, struct jinja_out *text, bool is_markup, struct jv *out)
{
  if (!jinja_out_str(run, text, out)) return false;
  out->is_markup = is_markup;
  return true;
}

/* ---- Case ---- */

static bool is_cased(uint32_t c) { return jinja_upper(c) != c || jinja_lower(c) != c || jinja_upper_special(c); }

/* A capital sigma at the end of a word becomes the final form: before it a cased letter, after it none. */
static bool is_final_sigma(const struct jinja_str *s, size_t at, bool after_cased)
{
  size_t length;
  if (!after_cased) return false;
  at += 2;
  return at >= s->n_bytes || !is_cased(utf8_decode(s->data + at, s->n_bytes - at, &length));
}

static bool emit_upper(struct jinja_run *run, struct jinja_out *text, uint32_t c, bool is_title)
{
  char bytes[4];
  const char *special = jinja_upper_special(c);
  if (special && is_title && strlen(special) > 1) { /* only the first character stays large: "ss" of sharp s becomes "Ss" */
    size_t length;
    utf8_decode(special, strlen(special), &length);
    if (!jinja_emit(run, text, special, length)) return false;
    for (const char *at = special + length; *at; at += length) {
      uint32_t rest = jinja_lower(utf8_decode(at, strlen(at), &length));
      if (!jinja_emit(run, text, bytes, utf8_encode(rest, bytes))) return false;
    }
    return true;
  }
  if (special) return jinja_emit_text(run, text, special);
  return jinja_emit(run, text, bytes, utf8_encode(jinja_upper(c), bytes));
}

static bool emit_lower(struct jinja_run *run, struct jinja_out *text, const struct jinja_str *s, size_t at, uint32_t c, bool after_cased)
{
  char bytes[4];
  if (c == 0x130) return jinja_emit_text(run, text, "i\xCC\x87");
  uint32_t lower = c == 0x3A3 && is_final_sigma(s, at, after_cased) ? 0x3C2 : jinja_lower(c);
  return jinja_emit(run, text, bytes, utf8_encode(lower, bytes));
}

bool jinja_change_case(struct jinja_run *run, struct jv v, enum jinja_case how, struct jv *out)
{
  const struct jinja_str *s = v.s;
  struct jinja_out text = {0};
  bool after_cased = false;
  size_t length;
  if (!jinja_charge(run, s->n_bytes / 4)) return false;
  for (size_t i = 0; i < s->n_bytes; i += length) {
    uint32_t c = utf8_decode(s->data + i, s->n_bytes - i, &length);
    bool is_upper = how == CASE_UPPER || (how == CASE_TITLE && !after_cased) || (how == CASE_CAPITALIZE && i == 0) ||
                    (how == CASE_SWAP && jinja_lower(c) == c);
    if (is_upper ? !emit_upper(run, &text, c, how == CASE_TITLE || how == CASE_CAPITALIZE) : !emit_lower(run, &text, s, i, c, after_cased))
      return false;
    after_cased = is_cased(c);
  }
  return finish(run, &text, v.is_markup, out);
}

/* ---- Strip ---- */

static bool in_set(const struct jv chars, const char *bytes, size_t length, uint32_t c)
{
  if (chars.type != JV_STR) return jinja_is_space(c);
  for (size_t i = 0; i + length <= chars.s->n_bytes; i++) /* a whole character cannot match inside another one: UTF-8 synchronises itself */
    if (memcmp(chars.s->data + i, bytes, length) == 0) return true;
  return false;
}

bool jinja_strip(struct jinja_run *run, struct jv v, struct jv chars, int sides, struct jv *out)
{
  const struct jinja_str *s = v.s;
  size_t from = 0, to = s->n_bytes, length, set_cost = chars.type == JV_STR ? 1 + chars.s->n_bytes : 1;
  if (jv_given(chars) && chars.type != JV_NONE && chars.type != JV_STR)
    return jinja_fail(run, "TypeError", "strip arg must be None or str");
  while ((sides & 1) && from < to) {
    uint32_t c = utf8_decode(s->data + from, to - from, &length);
    if (!in_set(chars, s->data + from, length, c)) break;
    if (!jinja_charge(run, set_cost / 4)) return false;
    from += length;
  }
  while ((sides & 2) && to > from) {
    size_t at = to - 1;
    while (at > from && ((unsigned char)s->data[at] & 0xC0) == 0x80) at--;
    uint32_t c = utf8_decode(s->data + at, to - at, &length);
    if (!in_set(chars, s->data + at, to - at, c)) break;
    if (!jinja_charge(run, set_cost / 4)) return false;
    to = at;
  }
  bool is_markup = v.is_markup;
  if (!jinja_str_view(run, s->data + from, to - from, out)) return false;
  out->is_markup = is_markup;
  return jinja_charge(run, (from + s->n_bytes - to) / 16);
}

/* ---- Replace ---- */

bool jinja_replace(struct jinja_run *run, struct jv v, struct jv from, struct jv to, int64_t count, struct jv *out)
{
  const struct jinja_str *s = v.s, *old = from.s, *new = to.s;
  struct jinja_out text = {0};
  size_t at = 0;
  if (!jinja_charge(run, s->n_bytes / 32)) return false;
  if (count < 0) count = INT64_MAX;
  while (count > 0) {
    const char *hit = old->n_bytes == 0 ? s->data + at
                      : at < s->n_bytes ? memmem(s->data + at, s->n_bytes - at, old->data, old->n_bytes)
                                        : NULL;
    if (!hit) break;
    size_t where = (size_t)(hit - s->data);
    if (!jinja_charge(run, 1) || !jinja_emit(run, &text, s->data + at, where - at) || !jinja_emit(run, &text, new->data, new->n_bytes))
      return false;
    at = where + old->n_bytes;
    count--;
    if (old->n_bytes > 0) continue;
    if (at >= s->n_bytes) break; /* an empty pattern stands before every character and at the end */
    size_t length;
    utf8_decode(s->data + at, s->n_bytes - at, &length);
    if (!jinja_emit(run, &text, s->data + at, length)) return false;
    at += length;
  }
  if (at < s->n_bytes && !jinja_emit(run, &text, s->data + at, s->n_bytes - at)) return false;
  return finish(run, &text, v.is_markup, out);
}

/* ---- Lines ---- */

/* Bytes of the line end at a position, or 0: \n \r \r\n \v \f \x1c-\x1e U+0085 U+2028 U+2029. */
static size_t line_end(const struct jinja_str *s, size_t at)
{
  unsigned char c = (unsigned char)s->data[at];
  if (c == '\r') return 1 + (at + 1 < s->n_bytes && s->data[at + 1] == '\n');
  if ((c >= 0x0a && c <= 0x0c) || (c >= 0x1c && c <= 0x1e)) return 1;
  if (c < 0x80) return 0;
  size_t length;
  uint32_t code = utf8_decode(s->data + at, s->n_bytes - at, &length);
  return code == 0x85 || code == 0x2028 || code == 0x2029 ? length : 0;
}

bool jinja_splitlines(struct jinja_run *run, struct jv v, bool keeps_ends, struct jinja_vec *vec)
{
  const struct jinja_str *s = v.s;
  size_t from = 0;
  struct jv line;
  if (!jinja_charge(run, s->n_bytes / 16)) return false;
  for (size_t i = 0; i < s->n_bytes;) {
    size_t end = line_end(s, i);
    if (!end) {
      i++;
      continue;
    }
    if (!jinja_str_view(run, s->data + from, i - from + (keeps_ends ? end : 0), &line)) return false;
    line.is_markup = v.is_markup;
    if (!jinja_vec_push(run, vec, line)) return false;
    i += end;
    from = i;
  }
  if (from >= s->n_bytes) return true;
  if (!jinja_str_view(run, s->data + from, s->n_bytes - from, &line)) return false;
  line.is_markup = v.is_markup;
  return jinja_vec_push(run, vec, line);
}

/* ---- Join ---- */

/* strict: items must be strings (str.join); otherwise they are printed (the join filter). */
bool jinja_join(struct jinja_run *run, struct jv separator, struct jv items, struct jv path, bool strict, struct jv *out)
{
  struct jinja_out text = {0};
  struct jinja_iter iter;
  struct jv item;
  bool has, is_markup = strict && separator.is_markup;
  if (!jinja_iter_init(run, items, &iter)) return false;
  for (size_t i = 0;; i++) {
    if (!jinja_iter_next(run, &iter, &item, &has)) return false;
    if (!has) return finish(run, &text, is_markup, out);
    if (!jinja_getpath(run, item, path, jv_absent(), &item)) return false;
    if (strict && item.type != JV_STR)
      return jinja_fail(run, "TypeError", "sequence item %zu: expected str instance, %s found", i, jinja_type_name(item));
    if (is_markup && !jinja_escape(run, item, &item)) return false;
    if (i && !jinja_emit(run, &text, separator.s->data, separator.s->n_bytes)) return false;
    if (!jinja_emit_str(run, &text, item)) return false;
  }
}

/* What sort, unique, min and max compare: strings in lower case unless case counts. */
bool jinja_fold_key(struct jinja_run *run, struct jv v, bool is_case_sensitive, struct jv *out)
{
  if (v.type != JV_STR || is_case_sensitive) return *out = v, true;
  return jinja_change_case(run, v, CASE_LOWER, out);
}
