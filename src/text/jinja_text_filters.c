/* Filters on text. Values that are no strings are printed first, as jinja2's soft_str does. */
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

#define FILTER(name) static bool filter_##name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)

static bool change_case(struct jinja_run *run, struct jv v, enum jinja_case how, struct jv *out)
{
  struct jv text;
  return jinja_to_str(run, v, &text) && jinja_change_case(run, text, how, out);
}

FILTER(upper) { return change_case(run, call->self, CASE_UPPER, out); }
FILTER(lower) { return change_case(run, call->self, CASE_LOWER, out); }
FILTER(capitalize) { return change_case(run, call->self, CASE_CAPITALIZE, out); }

/* jinja2's own title: a word begins after white space or one of - ( { [ <, unlike str.title. */
FILTER(title)
{
  struct jinja_out text = {0};
  struct jv v, piece;
  bool at_start = true;
  size_t length;
  if (!jinja_to_str(run, call->self, &v) || !jinja_charge(run, v.s->n_bytes / 4)) return false;
  for (size_t i = 0; i < v.s->n_bytes; i += length) {
    uint32_t c = utf8_decode(v.s->data + i, v.s->n_bytes - i, &length);
    bool is_break = jinja_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c));
    const struct jinja_str one = {.data = v.s->data + i, .n_bytes = length, .n_chars = 1};
    if (!jinja_change_case(run, jv_str(&one), at_start && !is_break ? CASE_UPPER : CASE_LOWER, &piece) ||
        !jinja_emit_str(run, &text, piece))
      return false;
    at_start = is_break;
  }
  return jinja_out_str(run, &text, out);
}

FILTER(trim)
{
  struct jv text;
  return jinja_to_str(run, call->self, &text) && jinja_strip(run, text, call->a[0], 3, out);
}

FILTER(replace)
{
  struct jv text, from, to;
  int64_t count;
  if (!jinja_to_str(run, call->self, &text) || !jinja_to_str(run, call->a[0], &from) || !jinja_to_str(run, call->a[1], &to)) return false;
  text.is_markup = false; /* autoescape is off, so plain text comes out */
  return jinja_int_arg(run, call->a[2], -1, &count) && jinja_replace(run, text, from, to, count, out);
}

FILTER(format)
{
  struct jv text, arg;
  if (!jinja_to_str(run, call->self, &text)) return false;
  if (call->n_pos && call->n_kw)
    return jinja_fail(run, "FilterArgumentError", "can't handle positional and keyword arguments at the same time");
  if (!call->n_kw) {
    if (!jinja_list_new(run, JV_TUPLE, call->pos, call->n_pos, true, &arg)) return false;
  } else {
    if (!jinja_dict_new(run, &arg)) return false;
    for (size_t i = 0; i < call->n_kw; i++)
      if (!jinja_dict_set(run, arg.dict, jv_str(call->kw[i].name), call->kw[i].value)) return false;
  }
  return jinja_percent(run, text, arg, out);
}

FILTER(indent)
{
  struct jinja_out text = {0}, spaces = {0};
  struct jinja_vec lines = {0};
  struct jv with_end, indention = call->a[0], v = call->self;
  bool has_first, has_blank;
  int64_t width;
  static const struct jinja_str newline = {.data = "\n", .n_bytes = 1, .n_chars = 1};
  if (!jinja_truth(run, call->a[1], &has_first) || !jinja_truth(run, call->a[2], &has_blank)) return false;
  if (indention.type != JV_STR) {
    if (!jinja_int_arg(run, indention, 4, &width)) return false;
    if (width > 1000) return jinja_limit(run, "indent of 1000");
    for (int64_t i = 0; i < width; i++)
      if (!jinja_emit(run, &spaces, " ", 1)) return false;
    if (!jinja_out_str(run, &spaces, &indention)) return false;
  }
  if (v.type != JV_STR) return jinja_binary(run, T_ADD, v, jv_str(&newline), out); /* raises what Python raises */
  if (!jinja_concat(run, v.s, &newline, &with_end) || !jinja_splitlines(run, with_end, false, &lines)) return false;
  for (size_t i = 0; i < lines.n; i++) {
    bool is_indented = i == 0 ? has_first : has_blank || lines.items[i].s->n_bytes > 0;
    if (i && !jinja_emit(run, &text, "\n", 1)) return false;
    if (is_indented && !jinja_emit_str(run, &text, indention)) return false;
    if (!jinja_emit_str(run, &text, lines.items[i])) return false;
  }
  if (!jinja_out_str(run, &text, out)) return false;
  out->is_markup = v.is_markup;
  return true;
}

FILTER(center)
{
  struct jv text, width = jv_given(call->a[0]) ? call->a[0] : jv_int(80);
  if (!jinja_to_str(run, call->self, &text)) return false;
  struct jinja_call inner = {.self = text, .pos = &width, .n_pos = 1};
  return jinja_invoke(run, jinja_find(jinja_str_methods, "center", 6), &inner, out);
}

FILTER(truncate)
{
  struct jv text, end = call->a[2], head;
  int64_t length, leeway;
  bool kills_words;
  if (!jinja_to_str(run, call->self, &text) || !jinja_int_arg(run, call->a[0], 255, &length) || !jinja_truth(run, call->a[1], &kills_words))
    return false;
  if (!jinja_int_arg(run, call->a[3], 5, &leeway) || (!jv_given(end) && !jinja_str_view(run, "...", 3, &end))) return false;
  if (end.type != JV_STR) return jinja_fail(run, "TypeError", "truncate's end must be a string");
  if (length < (int64_t)end.s->n_chars || leeway < 0)
    return jinja_fail(run, "AssertionError", "truncate needs length >= the end's and leeway >= 0");
  if ((int64_t)text.s->n_chars <= length || (int64_t)text.s->n_chars - length <= leeway) return *out = text, true;
  if (!jinja_substr(run, text.s, 0, (size_t)length - end.s->n_chars, &head)) return false;
  if (!kills_words) {
    const char *space = head.s->n_bytes ? memrchr(head.s->data, ' ', head.s->n_bytes) : NULL;
    if (space && !jinja_str_view(run, head.s->data, (size_t)(space - head.s->data), &head)) return false;
  }
  return jinja_concat(run, head.s, end.s, out);
}

static bool is_word(uint32_t c) { return c == '_' || jinja_is_alpha(c) || jinja_is_digit(c); }

FILTER(wordcount)
{
  struct jv text;
  int64_t n = 0;
  bool in_word = false;
  size_t length;
  if (!jinja_to_str(run, call->self, &text) || !jinja_charge(run, text.s->n_bytes / 4)) return false;
  for (size_t i = 0; i < text.s->n_bytes; i += length) {
    bool is_in = is_word(utf8_decode(text.s->data + i, text.s->n_bytes - i, &length));
    n += is_in && !in_word;
    in_word = is_in;
  }
  *out = jv_int(n);
  return true;
}

static bool emit_quoted(struct jinja_run *run, struct jinja_out *out, struct jv v, bool is_query)
{
  struct jv text;
  static const char hex[] = "0123456789ABCDEF";
  if (!jinja_to_str(run, v, &text) || !jinja_charge(run, text.s->n_bytes / 4)) return false;
  for (size_t i = 0; i < text.s->n_bytes; i++) {
    unsigned char c = (unsigned char)text.s->data[i];
    bool is_plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c && strchr("_.-~", c)) || (c == '/' && !is_query);
    const char escaped[3] = {'%', hex[c >> 4], hex[c & 15]};
    if (is_plain               ? !jinja_emit(run, out, (const char *)&c, 1)
        : c == ' ' && is_query ? !jinja_emit(run, out, "+", 1)
                               : !jinja_emit(run, out, escaped, 3))
      return false;
  }
  return true;
}

FILTER(urlencode)
{
  struct jinja_out text = {0};
  struct jinja_vec pairs = {0};
  struct jv v = call->self;
  if (v.type == JV_STR || !jinja_is_iterable(v)) return emit_quoted(run, &text, v, false) && jinja_out_str(run, &text, out);
  if (v.type == JV_DICT && !jinja_invoke(run, jinja_find(jinja_dict_methods, "items", 5), &(struct jinja_call){.self = v}, &v))
    return false;
  if (!jinja_to_vec(run, v, &pairs)) return false;
  for (size_t i = 0; i < pairs.n; i++) {
    struct jinja_vec pair = {0};
    if (!jinja_to_vec(run, pairs.items[i], &pair)) return false;
    if (pair.n != 2) return jinja_fail(run, "ValueError", "urlencode needs pairs");
    if ((i && !jinja_emit(run, &text, "&", 1)) || !emit_quoted(run, &text, pair.items[0], true)) return false;
    if (!jinja_emit(run, &text, "=", 1) || !emit_quoted(run, &text, pair.items[1], true)) return false;
  }
  return jinja_out_str(run, &text, out);
}

static bool has_byte_of(const struct jinja_str *s, const char *set)
{
  for (size_t i = 0; i < s->n_bytes; i++)
    if (s->data[i] && strchr(set, s->data[i])) return true;
  return false;
}

/* ' key="value"' for each pair whose value is neither None nor undefined. */
FILTER(xmlattr)
{
  struct jinja_out text = {0};
  bool adds_space;
  if (call->self.type != JV_DICT) return jinja_fail(run, "TypeError", "xmlattr needs a mapping, not %s", jinja_type_name(call->self));
  if (!jinja_truth(run, jv_given(call->a[0]) ? call->a[0] : jv_bool(true), &adds_space)) return false;
  for (size_t i = 0; i < call->self.dict->n; i++) {
    struct jv key = call->self.dict->pairs[i].key, value = call->self.dict->pairs[i].value;
    if (value.type == JV_NONE || value.type == JV_UNDEFINED) continue;
    if (key.type != JV_STR || has_byte_of(key.s, " \t\n\r\f\v/>="))
      return jinja_fail(run, "ValueError", "invalid character in attribute name");
    if (!jinja_escape(run, key, &key) || !jinja_escape(run, value, &value)) return false;
    if ((adds_space || text.size) && !jinja_emit(run, &text, " ", 1)) return false;
    if (!jinja_emit_str(run, &text, key) || !jinja_emit(run, &text, "=\"", 2)) return false;
    if (!jinja_emit_str(run, &text, value) || !jinja_emit(run, &text, "\"", 1)) return false;
  }
  return jinja_out_str(run, &text, out);
}

const struct jinja_builtin jinja_text_filters[] = {
    {"upper", "", 0, filter_upper},
    {"lower", "", 0, filter_lower},
    {"capitalize", "", 0, filter_capitalize},
    {"title", "", 0, filter_title},
    {"trim", "chars", 0, filter_trim},
    {"replace", "old new count", 2, filter_replace},
    {"format", "*", 0, filter_format},
    {"indent", "width first blank", 0, filter_indent},
    {"center", "width", 0, filter_center},
    {"truncate", "length killwords end leeway", 0, filter_truncate},
    {"wordcount", "", 0, filter_wordcount},
    {"urlencode", "", 0, filter_urlencode},
    {"xmlattr", "autospace", 0, filter_xmlattr},
    {0},
};
