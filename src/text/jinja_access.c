/* Attributes, items and slices, with the sandbox's rules.
 *
 * `a.b` looks for Python's attribute first and for the item 'b' then; `a['b']` the other way round, as jinja2 does: `m.items` is the method
 * even where m has a key "items". Methods that would change a list or dict, and names with double underscores, give an undefined value
 * whose use raises SecurityError (ImmutableSandboxedEnvironment). */
#include <string.h>

#include "text/jinja_internal.h"

/* ---- Attributes ---- */

static bool bind_method(struct jinja_run *run, struct jv obj, const struct jinja_builtin *fn, struct jv *out)
{
  struct jinja_method *method = jinja_alloc(run, 1, sizeof *method);
  if (!method) return false;
  *method = (struct jinja_method){.self = obj, .fn = fn};
  *out = (struct jv){.type = JV_METHOD, .method = method};
  return true;
}

static const struct jinja_builtin *find_method(struct jv obj, const struct jinja_str *name)
{
  switch ((enum jinja_type)obj.type) {
  case JV_STR: return jinja_find(jinja_str_methods, name->data, name->n_bytes);
  case JV_DICT: return jinja_find(jinja_dict_methods, name->data, name->n_bytes);
  case JV_LIST: case JV_TUPLE: return jinja_find(jinja_seq_methods, name->data, name->n_bytes);
  case JV_CYCLER: return jinja_find(jinja_cycler_methods, name->data, name->n_bytes);
  default: return NULL;
  }
}

static bool is_mutator(struct jv obj, const struct jinja_str *name)
{
  static const char *const list_names[] = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", NULL};
  static const char *const dict_names[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
  const char *const *names = obj.type == JV_LIST ? list_names : obj.type == JV_DICT ? dict_names : NULL;
  for (; names && *names; names++)
    if (jinja_str_is(jv_str(name), *names)) return true;
  return false;
}

static bool macro_attr(struct jinja_run *run, const struct jinja_node *node, const struct jinja_str *name, struct jv *out, bool *found)
{
  struct jv text = jv_str(name);
  *found = true;
  if (jinja_str_is(text, "name")) return *out = node->text ? jv_str(node->text) : jv_none(), true;
  if (jinja_str_is(text, "catch_kwargs")) return *out = jv_bool(node->wants_kwargs), true;
  if (jinja_str_is(text, "catch_varargs")) return *out = jv_bool(node->wants_varargs), true;
  if (jinja_str_is(text, "caller")) return *out = jv_bool(node->wants_caller), true;
  *found = jinja_str_is(text, "arguments");
  if (!*found) return true;
  struct jinja_vec names = {0};
  for (const struct jinja_node *parameter = node->list2.head; parameter; parameter = parameter->next)
    if (!jinja_vec_push(run, &names, jv_str(run->program->symbols[parameter->symbol]))) return false;
  return jinja_list_new(run, JV_TUPLE, names.items, names.n, false, out);
}

/* Python's getattr. *found false when there is no such attribute. */
static bool python_attr(struct jinja_run *run, struct jv obj, const struct jinja_str *name, struct jv *out, bool *found)
{
  *found = true;
  bool is_dunder = name->n_bytes > 4 && memcmp(name->data, "__", 2) == 0 && memcmp(name->data + name->n_bytes - 2, "__", 2) == 0;
  if (is_dunder || is_mutator(obj, name)) return jinja_undefined(run, UNDEF_UNSAFE, obj, jv_str(name), NULL, out);
  const struct jinja_builtin *fn = find_method(obj, name);
  if (fn) return bind_method(run, obj, fn, out);
  switch ((enum jinja_type)obj.type) {
  case JV_NAMESPACE:
    if (!jinja_dict_find(run, obj.dict, jv_str(name), out)) return false;
    *found = jv_given(*out);
    if (*found && name->n_bytes && name->data[0] == '_') return jinja_undefined(run, UNDEF_UNSAFE, obj, jv_str(name), NULL, out);
    return true;
  case JV_TUPLE:
    *found = obj.seq->is_group && (jinja_str_is(jv_str(name), "grouper") || jinja_str_is(jv_str(name), "list"));
    if (*found) *out = obj.seq->items[name->data[0] == 'l'];
    return true;
  case JV_LOOP: return jinja_loop_attr(run, obj.loop, name, out, found);
  case JV_MACRO: return macro_attr(run, obj.macro->node, name, out, found);
  case JV_CYCLER:
    *found = jinja_str_is(jv_str(name), "current");
    if (*found) *out = obj.cycler->items[obj.cycler->pos];
    return true;
  case JV_RANGE:
    if (jinja_str_is(jv_str(name), "start")) *out = jv_int(obj.range->start);
    else if (jinja_str_is(jv_str(name), "stop")) *out = jv_int(obj.range->stop);
    else if (jinja_str_is(jv_str(name), "step")) *out = jv_int(obj.range->step);
    else *found = false;
    return true;
  default: *found = false; return true;
  }
}

/* ---- Items ---- */

/* A part of a string; a part of Markup is Markup. */
static bool substr_like(struct jinja_run *run, struct jv v, size_t from, size_t to, struct jv *out)
{
  if (!jinja_substr(run, v.s, from, to, out)) return false;
  out->is_markup = v.is_markup;
  return true;
}

/* obj[key] without falling back on attributes. *found false for what Python raises TypeError or LookupError for. */
static bool python_item(struct jinja_run *run, struct jv obj, struct jv key, struct jv *out, bool *found)
{
  int64_t n, at;
  *found = false;
  if (key.type == JV_SLICE && (obj.type == JV_STR || jv_is_seq(obj) || obj.type == JV_RANGE))
    return *found = true, jinja_getslice(run, obj, key.range, out);
  switch ((enum jinja_type)obj.type) {
  case JV_DICT:
    if (!jinja_is_hashable(key)) return true;
    if (!jinja_dict_find(run, obj.dict, key, out)) return false;
    *found = jv_given(*out);
    return true;
  case JV_STR: case JV_LIST: case JV_TUPLE: case JV_RANGE:
    if (!jv_is_intlike(key)) return true;
    if (!jinja_length(run, obj, &n)) return false;
    at = jv_as_int(key);
    if (at < 0) at += n;
    if (at < 0 || at >= n) return true;
    *found = true;
    if (obj.type == JV_RANGE) return *out = jv_int(jinja_range_at(obj.range, at)), true;
    if (obj.type != JV_STR) return *out = obj.seq->items[at], true;
    return substr_like(run, obj, (size_t)at, (size_t)at + 1, out);
  default: return true;
  }
}

bool jinja_getattr(struct jinja_run *run, struct jv obj, const struct jinja_str *name, struct jv *out)
{
  bool found;
  if (obj.type == JV_UNDEFINED) return jinja_undefined_fail(run, obj);
  if (!python_attr(run, obj, name, out, &found)) return false;
  if (found) return true;
  if (!python_item(run, obj, jv_str(name), out, &found)) return false;
  return found || jinja_undefined(run, UNDEF_ATTRIBUTE, obj, jv_str(name), NULL, out);
}

bool jinja_getitem(struct jinja_run *run, struct jv obj, struct jv key, struct jv *out)
{
  bool found;
  if (obj.type == JV_UNDEFINED) return jinja_undefined_fail(run, obj);
  if (!python_item(run, obj, key, out, &found)) return false;
  if (found) return true;
  if (key.type == JV_STR) {
    if (!python_attr(run, obj, key.s, out, &found)) return false;
    if (found) return true;
  }
  return jinja_undefined(run, UNDEF_ATTRIBUTE, obj, key, NULL, out);
}

/* ---- Slices ---- */

/* Python's slice.indices: the first index, the step and the number of items. */
static bool slice_indices(struct jinja_run *run, const struct jinja_range *slice, int64_t length, int64_t *first, int64_t *step, int64_t *n)
{
  *step = slice->has_step ? slice->step : 1;
  if (*step == 0) return jinja_fail(run, "ValueError", "slice step cannot be zero");
  bool is_back = *step < 0;
  int64_t low = is_back ? -1 : 0, high = is_back ? length - 1 : length;
  int64_t ends[2] = {is_back ? high : low, is_back ? low : high};
  const int64_t given[2] = {slice->start, slice->stop};
  const bool has[2] = {slice->has_start, slice->has_stop};
  for (int i = 0; i < 2; i++) {
    if (!has[i]) continue;
    int64_t value = given[i];
    if (value < 0) value = value < -length ? low : value + length;
    ends[i] = value < low ? low : value > high ? high : value;
  }
  *first = ends[0];
  *n = jinja_range_length(&(struct jinja_range){.start = ends[0], .stop = ends[1], .step = *step});
  return true;
}

bool jinja_getslice(struct jinja_run *run, struct jv obj, const struct jinja_range *slice, struct jv *out)
{
  int64_t length, first = 0, step = 1, n = 0;
  if (obj.type == JV_UNDEFINED) return jinja_undefined_fail(run, obj);
  if (obj.type == JV_DICT) return jinja_fail(run, "TypeError", "unhashable type: 'slice'");
  if (obj.type != JV_STR && !jv_is_seq(obj) && obj.type != JV_RANGE)
    return jinja_fail(run, "TypeError", "'%s' object is not subscriptable", jinja_type_name(obj));
  if (!jinja_length(run, obj, &length) || !slice_indices(run, slice, length, &first, &step, &n)) return false;
  if (!jinja_charge(run, (size_t)n)) return false;
  if (obj.type == JV_STR && (step == 1 || n <= 1)) return substr_like(run, obj, (size_t)first, (size_t)(first + n), out);
  if (obj.type == JV_RANGE) {
    struct jinja_range *range = jinja_alloc(run, 1, sizeof *range);
    if (!range) return false;
    range->start = jinja_range_at(obj.range, first);
    if (__builtin_mul_overflow(obj.range->step, step, &range->step) || __builtin_mul_overflow(n, range->step, &range->stop) ||
        __builtin_add_overflow(range->start, range->stop, &range->stop))
      return jinja_fail(run, "OverflowError", "range beyond 64 bits is not supported");
    *out = (struct jv){.type = JV_RANGE, .range = range};
    return true;
  }
  struct jinja_out text = {0};
  struct jv *items = obj.type == JV_STR ? NULL : jinja_alloc(run, (size_t)n, sizeof *items);
  if (obj.type != JV_STR && !items) return false;
  for (int64_t i = 0; i < n; i++) {
    struct jv item;
    size_t at = (size_t)(first + i * step);
    if (items) items[i] = obj.seq->items[at];
    else if (!jinja_substr(run, obj.s, at, at + 1, &item) || !jinja_emit_str(run, &text, item)) return false;
  }
  if (!items) {
    if (!jinja_out_str(run, &text, out)) return false;
    out->is_markup = obj.is_markup;
    return true;
  }
  return jinja_list_new(run, (enum jinja_type)obj.type, items, (size_t)n, false, out);
}

/* ---- Paths of filters' `attribute` ---- */

static bool path_step(struct jinja_run *run, struct jv *obj, struct jv key, struct jv fallback)
{
  if (!jinja_getitem(run, *obj, key, obj)) return false;
  if (obj->type == JV_UNDEFINED && jv_given(fallback)) *obj = fallback;
  return true;
}

static struct jv path_part(const struct jinja_str *part)
{
  int64_t value = 0;
  if (part->n_bytes == 0 || part->n_bytes > 15) return jv_str(part);
  for (size_t i = 0; i < part->n_bytes; i++) {
    if (part->data[i] < '0' || part->data[i] > '9') return jv_str(part);
    value = value * 10 + (part->data[i] - '0');
  }
  return jv_int(value);
}

bool jinja_getpath(struct jinja_run *run, struct jv obj, struct jv path, struct jv fallback, struct jv *out)
{
  *out = obj;
  if (path.type == JV_ABSENT || path.type == JV_NONE) return true;
  if (path.type != JV_STR) return path_step(run, out, path, fallback);
  const struct jinja_str *s = path.s;
  for (size_t from = 0; from <= s->n_bytes;) {
    const char *dot = from < s->n_bytes ? memchr(s->data + from, '.', s->n_bytes - from) : NULL;
    size_t end = dot ? (size_t)(dot - s->data) : s->n_bytes;
    struct jv part;
    if (!jinja_str_view(run, s->data + from, end - from, &part) || !path_step(run, out, path_part(part.s), fallback)) return false;
    from = end + 1;
  }
  return true;
}
