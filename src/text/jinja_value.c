/* Values: strings, lists, undefined, truth, length, and the conversion from JSON. Dicts are in jinja_dict.c, printing in jinja_repr.c. */
#include <string.h>

#include "base/utf8.h"
#include "text/jinja_internal.h"

const char *jinja_type_name(struct jv v)
{
  static const char *const names[] = {
      [JV_ABSENT] = "absent", [JV_UNDEFINED] = "Undefined", [JV_NONE] = "NoneType", [JV_BOOL] = "bool", [JV_INT] = "int",
      [JV_FLOAT] = "float", [JV_STR] = "str", [JV_LIST] = "list", [JV_TUPLE] = "tuple", [JV_DICT] = "dict", [JV_NAMESPACE] = "Namespace",
      [JV_RANGE] = "range", [JV_VIEW] = "dict_items", [JV_GENERATOR] = "generator", [JV_MACRO] = "Macro", [JV_LOOP] = "LoopContext",
      [JV_METHOD] = "builtin_function_or_method", [JV_FUNCTION] = "function", [JV_CYCLER] = "Cycler", [JV_JOINER] = "Joiner",
      [JV_SLICE] = "slice",
  };
  if (v.type == JV_STR && v.is_markup) return "Markup";
  if (v.type == JV_VIEW) return v.view->kind == VIEW_KEYS ? "dict_keys" : v.view->kind == VIEW_VALUES ? "dict_values" : "dict_items";
  return names[v.type];
}

/* ---- Strings ---- */

static size_t count_chars(const char *text, size_t n_bytes)
{
  size_t n = 0;
  for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xC0) != 0x80;
  return n;
}

struct jinja_str *jinja_str_make(struct arena *arena, const char *text, size_t n_bytes, bool copies)
{
  struct jinja_str *s = arena_alloc(arena, sizeof *s);
  if (!s) return NULL;
  *s = (struct jinja_str){.data = text, .n_bytes = n_bytes, .n_chars = count_chars(text, n_bytes)};
  if (copies && !(s->data = arena_strndup(arena, text, n_bytes))) return NULL;
  return s;
}

bool jinja_str_view(struct jinja_run *run, const char *text, size_t n_bytes, struct jv *out)
{
  if (!jinja_charge(run, n_bytes / 64)) return false;
  struct jinja_str *s = jinja_alloc(run, 1, sizeof *s);
  if (!s) return false;
  *s = (struct jinja_str){.data = text, .n_bytes = n_bytes, .n_chars = count_chars(text, n_bytes)};
  *out = jv_str(s);
  return true;
}

bool jinja_str_new(struct jinja_run *run, const char *text, size_t n_bytes, struct jv *out)
{
  char *copy = jinja_alloc(run, n_bytes + 1, 1);
  if (!copy) return false;
  if (n_bytes) memcpy(copy, text, n_bytes);
  return jinja_str_view(run, copy, n_bytes, out);
}

bool jinja_str_is(struct jv v, const char *text)
{
  return v.type == JV_STR && v.s->n_bytes == strlen(text) && memcmp(v.s->data, text, v.s->n_bytes) == 0;
}

int jinja_str_compare(const struct jinja_str *a, const struct jinja_str *b)
{
  size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
  int order = n ? memcmp(a->data, b->data, n) : 0; /* byte order of UTF-8 is code point order */
  return order ? order : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

/* Templates build long texts by `x = x + more`. A concatenation leaves room behind its bytes; when its result is the left side of the next
 * one and nothing has been put behind it yet, the new bytes go there, so that n appends cost O(n) bytes, not O(n^2). */
struct jinja_grow { size_t used, capacity; };

bool jinja_concat(struct jinja_run *run, const struct jinja_str *a, const struct jinja_str *b, struct jv *out)
{
  size_t n = a->n_bytes + b->n_bytes;
  if (!jinja_charge(run, 1 + b->n_bytes / 32)) return false;
  struct jinja_str *s = jinja_alloc(run, 1, sizeof *s);
  if (!s) return false;
  if (b->n_bytes == 0 || a->n_bytes == 0) {
    *s = b->n_bytes == 0 ? *a : *b;
    *out = jv_str(s);
    return true;
  }
  struct jinja_grow *grow = a->grow;
  if (!grow || grow->used != a->n_bytes || grow->capacity - grow->used < b->n_bytes) {
    size_t capacity = n < 64 ? 64 : n + n / 2;
    if (!(grow = jinja_alloc(run, 1, sizeof *grow + capacity))) return false;
    memcpy((char *)(grow + 1), a->data, a->n_bytes);
    grow->capacity = capacity;
  }
  memcpy((char *)(grow + 1) + a->n_bytes, b->data, b->n_bytes);
  grow->used = n;
  *s = (struct jinja_str){.data = (char *)(grow + 1), .n_bytes = n, .n_chars = a->n_chars + b->n_chars, .grow = grow};
  *out = jv_str(s);
  return true;
}

/* Byte offset of the code point `count` after the one at byte `at`. Whole words that cannot hold the target are counted at once. */
static size_t skip_chars(const struct jinja_str *s, size_t at, size_t count)
{
  while (count >= 8 && at + 8 <= s->n_bytes) {
    uint64_t word;
    memcpy(&word, s->data + at, sizeof word);
    uint64_t continuations = (word >> 7) & (~word >> 6) & 0x0101010101010101u; /* bytes 10xxxxxx */
    count -= 8 - (size_t)__builtin_popcountll(continuations);
    at += 8;
  }
  while (at < s->n_bytes && ((unsigned char)s->data[at] & 0xC0) == 0x80) at++; /* the words may have ended inside a character */
  for (; count > 0 && at < s->n_bytes; count--)
    for (at++; at < s->n_bytes && ((unsigned char)s->data[at] & 0xC0) == 0x80;) at++;
  return at;
}

size_t jinja_str_offset(const struct jinja_str *s, size_t index) { return s->n_chars == s->n_bytes ? index : skip_chars(s, 0, index); }

bool jinja_substr(struct jinja_run *run, const struct jinja_str *s, size_t from, size_t to, struct jv *out)
{
  if (to > s->n_chars) to = s->n_chars;
  if (from > to) from = to;
  if (s->n_chars == s->n_bytes) return jinja_str_view(run, s->data + from, to - from, out);
  if (!jinja_charge(run, to / 16)) return false;
  size_t start = skip_chars(s, 0, from), end = skip_chars(s, start, to - from);
  return jinja_str_view(run, s->data + start, end - start, out);
}

/* ---- Sequences ---- */

bool jinja_list_new(struct jinja_run *run, enum jinja_type type, const struct jv *items, size_t n, bool copies, struct jv *out)
{
  struct jinja_seq *seq = jinja_alloc(run, 1, sizeof *seq);
  if (!seq) return false;
  seq->n = n;
  seq->items = items;
  if (copies && n) {
    struct jv *copy = jinja_alloc(run, n, sizeof *copy);
    if (!copy) return false;
    memcpy(copy, items, n * sizeof *copy);
    seq->items = copy;
  }
  *out = (struct jv){.type = (uint8_t)type, .seq = seq};
  return true;
}

bool jinja_vec_push(struct jinja_run *run, struct jinja_vec *vec, struct jv item)
{
  if (vec->n == vec->capacity) {
    size_t capacity = vec->capacity ? vec->capacity * 2 : 8;
    struct jv *items = jinja_alloc(run, capacity, sizeof *items);
    if (!items) return false;
    if (vec->n) memcpy(items, vec->items, vec->n * sizeof *items);
    vec->items = items;
    vec->capacity = capacity;
  }
  vec->items[vec->n++] = item;
  return jinja_charge(run, 1);
}

bool jinja_vec_list(struct jinja_run *run, struct jinja_vec *vec, struct jv *out)
{
  return jinja_list_new(run, JV_LIST, vec->items, vec->n, false, out);
}

/* ---- Undefined ---- */

bool jinja_undefined(struct jinja_run *run, enum jinja_undef_kind kind, struct jv obj, struct jv name, const char *hint, struct jv *out)
{
  struct jinja_undef *undef = jinja_alloc(run, 1, sizeof *undef);
  if (!undef) return false;
  const char *obj_type = obj.type == JV_NONE ? NULL : jinja_type_name(obj);
  *undef = (struct jinja_undef){.kind = kind, .obj_type = obj_type, .hint = hint, .name = name};
  *out = (struct jv){.type = JV_UNDEFINED, .undef = undef};
  return true;
}

bool jinja_undefined_fail(struct jinja_run *run, struct jv v)
{
  const struct jinja_undef *undef = v.undef;
  struct jinja_out name = {0};
  const char *type = undef->obj_type ? undef->obj_type : "None", *suffix = undef->obj_type ? " object" : "";
  bool is_text = undef->name.type == JV_STR;
  if (undef->kind == UNDEF_HINT) return jinja_fail(run, "UndefinedError", "%s", undef->hint);
  if (!(is_text && undef->kind != UNDEF_NAME ? jinja_emit_str(run, &name, undef->name) : jinja_emit_repr(run, &name, undef->name)))
    return false;
  int n = (int)(name.size < 80 ? name.size : 80); /* a name, never a whole text */
  switch (undef->kind) {
  case UNDEF_NAME: return jinja_fail(run, "UndefinedError", "%.*s is undefined", n, name.data);
  case UNDEF_UNSAFE: return jinja_fail(run, "SecurityError", "access to attribute '%.*s' of '%s' object is unsafe.", n, name.data, type);
  default:
    if (is_text) return jinja_fail(run, "UndefinedError", "'%s%s' has no attribute '%.*s'", type, suffix, n, name.data);
    return jinja_fail(run, "UndefinedError", "%s%s has no element %.*s", type, suffix, n, name.data);
  }
}

/* ---- Truth and length ---- */

bool jinja_truth(struct jinja_run *run, struct jv v, bool *out)
{
  int64_t n;
  switch ((enum jinja_type)v.type) {
  case JV_ABSENT: case JV_UNDEFINED: case JV_NONE: *out = false; return true;
  case JV_BOOL: *out = v.b; return true;
  case JV_INT: *out = v.i != 0; return true;
  case JV_FLOAT: *out = v.f != 0; return true;
  case JV_STR: case JV_LIST: case JV_TUPLE: case JV_DICT: case JV_RANGE: case JV_VIEW: case JV_LOOP:
    if (!jinja_length(run, v, &n)) return false;
    *out = n != 0;
    return true;
  default: *out = true; return true;
  }
}

bool jinja_length(struct jinja_run *run, struct jv v, int64_t *n)
{
  struct jv length;
  bool found;
  switch ((enum jinja_type)v.type) {
  case JV_UNDEFINED: *n = 0; return true;
  case JV_STR: *n = (int64_t)v.s->n_chars; return true;
  case JV_LIST: case JV_TUPLE: *n = (int64_t)v.seq->n; return true;
  case JV_DICT: *n = (int64_t)v.dict->n; return true;
  case JV_VIEW: *n = (int64_t)v.view->dict->n; return true;
  case JV_RANGE: *n = jinja_range_length(v.range); return true;
  case JV_LOOP:
    if (!jinja_loop_attr(run, v.loop, &(struct jinja_str){.data = "length", .n_bytes = 6, .n_chars = 6}, &length, &found)) return false;
    *n = length.i;
    return true;
  default: return jinja_fail(run, "TypeError", "object of type '%s' has no len()", jinja_type_name(v));
  }
}

/* ---- JSON ---- */

static bool from_json_array(struct jinja_run *run, const json_t *json, struct jv *out)
{
  size_t n = json_array_size(json);
  struct jv *items = jinja_alloc(run, n, sizeof *items);
  if (!items) return false;
  for (size_t i = 0; i < n; i++)
    if (!jinja_from_json(run, json_array_get(json, i), &items[i])) return false;
  return jinja_list_new(run, JV_LIST, items, n, false, out);
}

static bool from_json_object(struct jinja_run *run, const json_t *json, struct jv *out)
{
  if (!jinja_dict_new(run, out)) return false;
  json_t *object = (json_t *)(uintptr_t)json; /* jansson's iterators want a non-const pointer but do not write through it */
  for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at)) {
    const char *name = json_object_iter_key(at);
    struct jv key, value;
    if (!jinja_str_view(run, name, json_object_iter_key_len(at), &key)) return false;
    if (!jinja_from_json(run, json_object_iter_value(at), &value) || !jinja_dict_set(run, out->dict, key, value)) return false;
  }
  return true;
}

bool jinja_from_json(struct jinja_run *run, const json_t *json, struct jv *out)
{
  if (!jinja_charge(run, 1) || !jinja_enter(run)) return false;
  bool ok = true;
  switch (json_typeof(json)) {
  case JSON_OBJECT: ok = from_json_object(run, json, out); break;
  case JSON_ARRAY: ok = from_json_array(run, json, out); break;
  case JSON_STRING: ok = jinja_str_view(run, json_string_value(json), json_string_length(json), out); break;
  case JSON_INTEGER: *out = jv_int(json_integer_value(json)); break;
  case JSON_REAL: *out = jv_float(json_real_value(json)); break;
  case JSON_TRUE: *out = jv_bool(true); break;
  case JSON_FALSE: *out = jv_bool(false); break;
  case JSON_NULL: *out = jv_none(); break;
  }
  jinja_leave(run);
  return ok;
}
