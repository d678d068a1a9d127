/* Filters on sequences. map, select, reject, unique, batch, slice and items give lazy generators, as in jinja2: errors come when they are
 * iterated, they have no length, and a second iteration finds them empty. */
#include <string.h>

#include "text/jinja_internal.h"

#define FILTER(name) static bool filter_##name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)

/* ---- Generators ---- */

static struct jinja_gen *gen_new(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  struct jinja_gen *gen = jinja_alloc(run, 1, sizeof *gen);
  struct jinja_call *copy = jinja_alloc(run, 1, sizeof *copy);
  if (!gen || !copy) return NULL;
  *copy = *call;
  gen->call = copy;
  *out = (struct jv){.type = JV_GENERATOR, .gen = gen};
  return gen;
}

/* The rest of a generator whose items were all made on the first call. */
static bool hand_out(struct jinja_gen *gen, struct jv *out, bool *has)
{
  *has = gen->pos < gen->items->n;
  if (*has) *out = gen->items->items[gen->pos++];
  return true;
}

static bool make_items(struct jinja_run *run, struct jinja_gen *gen, struct jinja_vec *vec)
{
  struct jv list;
  if (!jinja_vec_list(run, vec, &list)) return false;
  gen->items = list.seq;
  return true;
}

static bool begin(struct jinja_run *run, struct jinja_gen *gen, bool *is_empty)
{
  bool truth;
  if (!jinja_truth(run, gen->call->self, &truth)) return false;
  *is_empty = !truth; /* None, undefined and empty values give nothing */
  return !truth || jinja_iter_init(run, gen->call->self, &gen->source);
}

static const struct jinja_kw *keyword(const struct jinja_call *call, const char *name)
{
  for (size_t i = 0; i < call->n_kw; i++)
    if (jinja_str_is(jv_str(call->kw[i].name), name)) return &call->kw[i];
  return NULL;
}

/* ---- map, select, reject ---- */

/* The filter or test named by positional argument `at`; the arguments behind it go along. */
static bool choose_function(struct jinja_run *run, struct jinja_gen *gen, size_t at, bool is_test)
{
  const struct jinja_call *call = gen->call;
  struct jv name = call->pos[at];
  if (name.type == JV_STR)
    gen->function = is_test ? jinja_find(jinja_tests, name.s->data, name.s->n_bytes) : jinja_find_filter(name.s->data, name.s->n_bytes);
  if (!gen->function) return jinja_fail(run, "TemplateRuntimeError", "no such %s in map, select or reject", is_test ? "test" : "filter");
  struct jinja_call *inner = jinja_alloc(run, 1, sizeof *inner);
  if (!inner) return false;
  *inner =
      (struct jinja_call){.self = call->self, .pos = call->pos + at + 1, .n_pos = call->n_pos - at - 1, .kw = call->kw, .n_kw = call->n_kw};
  gen->call = inner;
  return true;
}

static bool map_begin(struct jinja_run *run, struct jinja_gen *gen)
{
  const struct jinja_kw *path = keyword(gen->call, "attribute"), *fallback = keyword(gen->call, "default");
  bool has_path = gen->call->n_pos == 0 && path;
  if (!has_path && gen->call->n_pos == 0) return jinja_fail(run, "FilterArgumentError", "map requires a filter argument");
  if (!has_path) return choose_function(run, gen, 0, false);
  if (gen->call->n_kw > (fallback ? 2 : 1)) return jinja_fail(run, "FilterArgumentError", "unexpected keyword argument for map");
  gen->path = path->value;
  gen->fallback = fallback && fallback->value.type != JV_NONE ? fallback->value : jv_absent();
  return true;
}

static bool map_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  bool is_empty = false;
  if (!gen->is_begun) {
    gen->is_begun = true;
    if (!begin(run, gen, &is_empty) || (!is_empty && !map_begin(run, gen))) return false;
    if (is_empty) return *has = false, true;
  }
  if (!jinja_iter_next(run, &gen->source, out, has) || !*has) return !run->status;
  if (!gen->function) return jinja_getpath(run, *out, gen->path, gen->fallback, out);
  struct jinja_call call = *gen->call;
  call.self = *out;
  return jinja_invoke(run, gen->function, &call, out);
}

static bool select_begin(struct jinja_run *run, struct jinja_gen *gen)
{
  if (gen->by_attribute && gen->call->n_pos == 0) return jinja_fail(run, "FilterArgumentError", "Missing parameter for attribute name");
  if (gen->by_attribute) gen->path = gen->call->pos[0];
  size_t at = gen->by_attribute ? 1 : 0;
  return gen->call->n_pos <= at || choose_function(run, gen, at, true);
}

static bool select_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  bool is_empty = false, truth;
  if (!gen->is_begun) {
    gen->is_begun = true;
    if (!begin(run, gen, &is_empty) || (!is_empty && !select_begin(run, gen))) return false;
    if (is_empty) return *has = false, true;
  }
  for (;;) {
    struct jv verdict;
    if (!jinja_iter_next(run, &gen->source, out, has)) return false;
    if (!*has) return true;
    if (!jinja_getpath(run, *out, gen->path, jv_absent(), &verdict)) return false;
    if (gen->function) {
      struct jinja_call call = *gen->call;
      call.self = verdict;
      if (!jinja_invoke(run, gen->function, &call, &verdict)) return false;
    }
    if (!jinja_truth(run, verdict, &truth)) return false;
    if (truth == gen->keeps) return true;
  }
}

FILTER(map)
{
  struct jinja_gen *gen = gen_new(run, call, out);
  if (!gen) return false;
  gen->next = map_next;
  return true;
}

static bool select_new(struct jinja_run *run, const struct jinja_call *call, bool keeps, bool by_attribute, struct jv *out)
{
  struct jinja_gen *gen = gen_new(run, call, out);
  if (!gen) return false;
  gen->next = select_next;
  gen->keeps = keeps;
  gen->by_attribute = by_attribute;
  return true;
}

FILTER(select) { return select_new(run, call, true, false, out); }
FILTER(reject) { return select_new(run, call, false, false, out); }
FILTER(selectattr) { return select_new(run, call, true, true, out); }
FILTER(rejectattr) { return select_new(run, call, false, true, out); }

/* ---- batch, slice, unique, items: all items made when the first is asked for ---- */

static bool batch_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  struct jinja_vec rows = {0}, row = {0};
  struct jinja_iter iter;
  struct jv item, list, fill = gen->call->a[1];
  int64_t size;
  bool more = true;
  if (gen->items) return hand_out(gen, out, has);
  if (!jinja_int_arg(run, gen->call->a[0], 0, &size) || !jinja_iter_init(run, gen->call->self, &iter)) return false;
  while (more) {
    if (!jinja_iter_next(run, &iter, &item, &more)) return false;
    bool is_full = (int64_t)row.n == size, is_end = !more && row.n > 0;
    bool fills = is_end && jv_given(fill) && fill.type != JV_NONE;
    if (fills && size > JINJA_MAX_RANGE) return jinja_limit(run, "batch size");
    while (fills && (int64_t)row.n < size)
      if (!jinja_vec_push(run, &row, fill)) return false;
    if (is_full || is_end) {
      if (!jinja_vec_list(run, &row, &list) || !jinja_vec_push(run, &rows, list)) return false;
      row = (struct jinja_vec){0};
    }
    if (more && !jinja_vec_push(run, &row, item)) return false;
  }
  return make_items(run, gen, &rows) && hand_out(gen, out, has);
}

static bool slice_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  struct jinja_vec all = {0}, rows = {0};
  int64_t n_slices;
  struct jv fill = gen->call->a[1], list;
  if (gen->items) return hand_out(gen, out, has);
  if (!jinja_int_arg(run, gen->call->a[0], 0, &n_slices) || !jinja_to_vec(run, gen->call->self, &all)) return false;
  if (n_slices == 0) return jinja_fail(run, "ZeroDivisionError", "integer division or modulo by zero");
  if (n_slices > JINJA_MAX_RANGE) return jinja_limit(run, "slice count");
  size_t at = 0;
  for (int64_t i = 0; i < n_slices; i++) {
    size_t share = all.n / (size_t)n_slices, n_longer = all.n % (size_t)n_slices, n = share + ((size_t)i < n_longer);
    struct jinja_vec row = {0};
    for (size_t j = 0; j < n; j++)
      if (!jinja_vec_push(run, &row, all.items[at++])) return false;
    bool fills = jv_given(fill) && fill.type != JV_NONE && (size_t)i >= n_longer;
    if (fills && !jinja_vec_push(run, &row, fill)) return false;
    if (!jinja_vec_list(run, &row, &list) || !jinja_vec_push(run, &rows, list)) return false;
  }
  return make_items(run, gen, &rows) && hand_out(gen, out, has);
}

static bool unique_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  struct jinja_vec kept = {0};
  struct jinja_iter iter;
  struct jv seen, item, key, known;
  bool is_case_sensitive, more = true;
  if (gen->items) return hand_out(gen, out, has);
  if (!jinja_dict_new(run, &seen) || !jinja_iter_init(run, gen->call->self, &iter)) return false;
  if (!jinja_truth(run, gen->call->a[0], &is_case_sensitive)) return false;
  for (;;) {
    if (!jinja_iter_next(run, &iter, &item, &more)) return false;
    if (!more) return make_items(run, gen, &kept) && hand_out(gen, out, has);
    if (!jinja_getpath(run, item, gen->call->a[1], jv_absent(), &key) || !jinja_fold_key(run, key, is_case_sensitive, &key)) return false;
    if (!jinja_dict_find(run, seen.dict, key, &known)) return false;
    if (jv_given(known)) continue;
    if (!jinja_dict_set(run, seen.dict, key, jv_none()) || !jinja_vec_push(run, &kept, item)) return false;
  }
}

static bool items_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  struct jinja_vec pairs = {0};
  struct jv view;
  if (gen->items) return hand_out(gen, out, has);
  if (gen->call->self.type == JV_UNDEFINED) return *has = false, true;
  if (gen->call->self.type != JV_DICT) return jinja_fail(run, "TypeError", "Can only get item pairs from a mapping.");
  if (!jinja_invoke(run, jinja_find(jinja_dict_methods, "items", 5), &(struct jinja_call){.self = gen->call->self}, &view)) return false;
  return jinja_to_vec(run, view, &pairs) && make_items(run, gen, &pairs) && hand_out(gen, out, has);
}

static bool gen_with(struct jinja_run *run, const struct jinja_call *call, struct jv *out,
                     bool (*next)(struct jinja_run *, struct jinja_gen *, struct jv *, bool *))
{
  struct jinja_gen *gen = gen_new(run, call, out);
  if (!gen) return false;
  gen->next = next;
  return true;
}

FILTER(batch) { return gen_with(run, call, out, batch_next); }
FILTER(slice) { return gen_with(run, call, out, slice_next); }
FILTER(unique) { return gen_with(run, call, out, unique_next); }
FILTER(items) { return gen_with(run, call, out, items_next); }

static bool reversed_next(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has)
{
  (void)run;
  return hand_out(gen, out, has);
}

FILTER(reverse)
{
  struct jv v = call->self;
  struct jinja_vec items = {0};
  if (!jinja_is_iterable(v)) return jinja_fail(run, "FilterArgumentError", "argument must be iterable");
  if (v.type == JV_STR) return jinja_getslice(run, v, &(struct jinja_range){.step = -1, .has_step = true}, out);
  if (!jinja_to_vec(run, v, &items)) return false;
  for (size_t i = 0; i < items.n / 2; i++) {
    struct jv swapped = items.items[i];
    items.items[i] = items.items[items.n - 1 - i];
    items.items[items.n - 1 - i] = swapped;
  }
  struct jinja_gen *gen = gen_new(run, call, out);
  if (!gen) return false;
  gen->next = reversed_next;
  return make_items(run, gen, &items);
}

/* ---- Ends, join, list ---- */

FILTER(first)
{
  struct jinja_iter iter;
  bool has;
  if (!jinja_iter_init(run, call->self, &iter) || !jinja_iter_next(run, &iter, out, &has)) return false;
  return has || jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), "No first item, sequence was empty.", out);
}

FILTER(last)
{
  struct jinja_vec items = {0};
  struct jv v = call->self;
  if (v.type == JV_GENERATOR || !jinja_is_iterable(v))
    return jinja_fail(run, "TypeError", "'%s' object is not reversible", jinja_type_name(v));
  if (v.type == JV_STR && v.s->n_chars) return jinja_substr(run, v.s, v.s->n_chars - 1, v.s->n_chars, out);
  if (!jinja_to_vec(run, v, &items)) return false;
  if (items.n) return *out = items.items[items.n - 1], true;
  return jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), "No last item, sequence was empty.", out);
}

FILTER(list)
{
  struct jinja_vec items = {0};
  return jinja_to_vec(run, call->self, &items) && jinja_vec_list(run, &items, out);
}

FILTER(join)
{
  struct jv separator;
  if (!(jv_given(call->a[0]) ? jinja_to_str(run, call->a[0], &separator) : jinja_str_view(run, "", 0, &separator))) return false;
  return jinja_join(run, separator, call->self, call->a[1], false, out);
}

/* ---- Order ---- */

struct sort_item { struct jv item, key; };

/* Merges two sorted halves; equal keys keep their order, also when reversed, as in Python. */
static bool merge(struct jinja_run *run, struct sort_item *items, struct sort_item *spare, size_t n, bool is_reverse)
{
  if (n < 2) return true;
  size_t half = n / 2, a = 0, b = half, to = 0;
  if (!merge(run, items, spare, half, is_reverse) || !merge(run, items + half, spare, n - half, is_reverse)) return false;
  while (a < half && b < n) {
    bool takes_second;
    struct jv first = is_reverse ? items[a].key : items[b].key, second = is_reverse ? items[b].key : items[a].key;
    if (!jinja_less(run, first, second, &takes_second)) return false;
    spare[to++] = takes_second ? items[b++] : items[a++];
  }
  while (a < half) spare[to++] = items[a++];
  while (b < n) spare[to++] = items[b++];
  memcpy(items, spare, n * sizeof *items);
  return jinja_charge(run, n);
}

bool jinja_sort(struct jinja_run *run, struct jv *items, const struct jv *keys, size_t n, bool is_reverse)
{
  struct sort_item *work = jinja_alloc(run, n + 1, 2 * sizeof *work);
  if (!work) return false;
  for (size_t i = 0; i < n; i++) work[i] = (struct sort_item){.item = items[i], .key = keys[i]};
  if (!merge(run, work, work + n, n, is_reverse)) return false;
  for (size_t i = 0; i < n; i++) items[i] = work[i].item;
  return true;
}

/* One key per item; for sort, "a,b" gives tuples of keys. */
static bool sort_key(struct jinja_run *run, struct jv item, struct jv path, bool is_case_sensitive, bool splits, struct jv *out)
{
  if (!splits || path.type != JV_STR || !path.s->n_bytes || !memchr(path.s->data, ',', path.s->n_bytes))
    return jinja_getpath(run, item, path, jv_absent(), out) && jinja_fold_key(run, *out, is_case_sensitive, out);
  struct jinja_vec keys = {0};
  for (size_t from = 0; from <= path.s->n_bytes;) {
    const char *comma = memchr(path.s->data + from, ',', path.s->n_bytes - from);
    size_t end = comma ? (size_t)(comma - path.s->data) : path.s->n_bytes;
    struct jv part, key;
    if (!jinja_str_view(run, path.s->data + from, end - from, &part) || !jinja_getpath(run, item, part, jv_absent(), &key)) return false;
    if (!jinja_fold_key(run, key, is_case_sensitive, &key) || !jinja_vec_push(run, &keys, key)) return false;
    from = end + 1;
  }
  return jinja_list_new(run, JV_TUPLE, keys.items, keys.n, false, out);
}

static bool sorted(struct jinja_run *run, struct jv v, struct jv path, bool is_case_sensitive, bool is_reverse, bool splits,
                   struct jinja_vec *items, struct jv **keys_out)
{
  if (!jinja_to_vec(run, v, items)) return false;
  struct jv *keys = jinja_alloc(run, items->n + 1, sizeof *keys);
  if (!keys) return false;
  for (size_t i = 0; i < items->n; i++)
    if (!sort_key(run, items->items[i], path, is_case_sensitive, splits, &keys[i])) return false;
  if (keys_out) *keys_out = keys;
  return jinja_sort(run, items->items, keys, items->n, is_reverse);
}

FILTER(sort)
{
  struct jinja_vec items = {0};
  bool is_reverse, is_case_sensitive;
  if (!jinja_truth(run, call->a[0], &is_reverse) || !jinja_truth(run, call->a[1], &is_case_sensitive)) return false;
  if (!sorted(run, call->self, call->a[2], is_case_sensitive, is_reverse, true, &items, NULL)) return false;
  return jinja_vec_list(run, &items, out);
}

FILTER(dictsort)
{
  struct jinja_vec items = {0};
  struct jv pairs;
  bool is_reverse, is_case_sensitive, by_value = jinja_str_is(call->a[1], "value");
  if (call->self.type != JV_DICT) return jinja_fail(run, "TypeError", "dictsort needs a mapping, not %s", jinja_type_name(call->self));
  if (jv_given(call->a[1]) && !by_value && !jinja_str_is(call->a[1], "key"))
    return jinja_fail(run, "FilterArgumentError", "You can only sort by either \"key\" or \"value\"");
  if (!jinja_truth(run, call->a[0], &is_case_sensitive) || !jinja_truth(run, call->a[2], &is_reverse)) return false;
  if (!jinja_invoke(run, jinja_find(jinja_dict_methods, "items", 5), &(struct jinja_call){.self = call->self}, &pairs)) return false;
  if (!sorted(run, pairs, jv_int(by_value), is_case_sensitive, is_reverse, false, &items, NULL)) return false;
  return jinja_vec_list(run, &items, out);
}

FILTER(groupby)
{
  struct jinja_vec items = {0}, groups = {0};
  struct jv *keys = NULL, key, group, list;
  bool is_case_sensitive;
  if (!jinja_truth(run, call->a[2], &is_case_sensitive)) return false;
  struct jv fallback = call->a[1].type == JV_NONE ? jv_absent() : call->a[1];
  if (!sorted(run, call->self, call->a[0], is_case_sensitive, false, false, &items, &keys)) return false;
  for (size_t i = 0; i < items.n;) {
    struct jinja_vec members = {0};
    struct jv first, folded;
    bool is_equal = true;
    if (!jinja_getpath(run, items.items[i], call->a[0], fallback, &first) || !jinja_fold_key(run, first, is_case_sensitive, &folded))
      return false;
    while (i < items.n) {
      if (!jinja_getpath(run, items.items[i], call->a[0], fallback, &key) || !jinja_fold_key(run, key, is_case_sensitive, &key))
        return false;
      if (!jinja_equal(run, key, folded, &is_equal)) return false;
      if (!is_equal) break;
      if (!jinja_vec_push(run, &members, items.items[i++])) return false;
    }
    if (!jinja_vec_list(run, &members, &list)) return false;
    if (!jinja_list_new(run, JV_TUPLE, (struct jv[]){first, list}, 2, true, &group)) return false;
    ((struct jinja_seq *)(uintptr_t)group.seq)->is_group = true; /* just made here, so still ours to change */
    if (!jinja_vec_push(run, &groups, group)) return false;
  }
  return jinja_vec_list(run, &groups, out);
}

static bool extreme(struct jinja_run *run, const struct jinja_call *call, bool wants_max, struct jv *out)
{
  struct jinja_iter iter;
  struct jv item, key, best;
  bool has, is_better, is_case_sensitive, has_best = false;
  if (!jinja_iter_init(run, call->self, &iter) || !jinja_truth(run, call->a[0], &is_case_sensitive)) return false;
  for (;;) {
    if (!jinja_iter_next(run, &iter, &item, &has)) return false;
    if (!has) break;
    if (!sort_key(run, item, call->a[1], is_case_sensitive, false, &key)) return false;
    is_better = !has_best;
    if (has_best && !(wants_max ? jinja_less(run, best, key, &is_better) : jinja_less(run, key, best, &is_better))) return false;
    if (!is_better) continue;
    has_best = true;
    best = key;
    *out = item;
  }
  return has_best || jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), "No aggregated item, sequence was empty.", out);
}

FILTER(min) { return extreme(run, call, false, out); }
FILTER(max) { return extreme(run, call, true, out); }

FILTER(sum)
{
  struct jinja_iter iter;
  struct jv item;
  bool has;
  *out = jv_given(call->a[1]) ? call->a[1] : jv_int(0);
  if (!jinja_iter_init(run, call->self, &iter)) return false;
  if (out->type == JV_STR) return jinja_fail(run, "TypeError", "sum() can't sum strings [use ''.join(seq) instead]");
  for (;;) {
    if (!jinja_iter_next(run, &iter, &item, &has)) return false;
    if (!has) return true;
    if (!jinja_getpath(run, item, call->a[0], jv_absent(), &item) || !jinja_binary(run, T_ADD, *out, item, out)) return false;
  }
}

const struct jinja_builtin jinja_sequence_filters[] = {
    {"map", "*", 0, filter_map},
    {"select", "*", 0, filter_select},
    {"reject", "*", 0, filter_reject},
    {"selectattr", "*", 0, filter_selectattr},
    {"rejectattr", "*", 0, filter_rejectattr},
    {"batch", "linecount fill_with", 1, filter_batch},
    {"slice", "slices fill_with", 1, filter_slice},
    {"unique", "case_sensitive attribute", 0, filter_unique},
    {"items", "", 0, filter_items},
    {"reverse", "", 0, filter_reverse},
    {"first", "", 0, filter_first},
    {"last", "", 0, filter_last},
    {"list", "", 0, filter_list},
    {"join", "d attribute", 0, filter_join},
    {"sort", "reverse case_sensitive attribute", 0, filter_sort},
    {"dictsort", "case_sensitive by reverse", 0, filter_dictsort},
    {"groupby", "attribute default case_sensitive", 1, filter_groupby},
    {"min", "case_sensitive attribute", 0, filter_min},
    {"max", "case_sensitive attribute", 0, filter_max},
    {"sum", "attribute start", 0, filter_sum},
    {0},
};
