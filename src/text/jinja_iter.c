/* Iteration over everything that Python can iterate: lists, tuples, dicts (keys), views, strings (characters), ranges, generators. */
#include "text/jinja_internal.h"

int64_t jinja_range_length(const struct jinja_range *range)
{
  bool is_up = range->step > 0;
  if (is_up ? range->start >= range->stop : range->start <= range->stop) return 0;
  uint64_t span = is_up ? (uint64_t)range->stop - (uint64_t)range->start : (uint64_t)range->start - (uint64_t)range->stop;
  uint64_t step = is_up ? (uint64_t)range->step : 0 - (uint64_t)range->step, n = (span - 1) / step + 1;
  return n > INT64_MAX ? INT64_MAX : (int64_t)n;
}

bool jinja_is_iterable(struct jv v)
{
  switch ((enum jinja_type)v.type) {
  case JV_UNDEFINED: case JV_STR: case JV_LIST: case JV_TUPLE: case JV_DICT: case JV_RANGE: case JV_VIEW: case JV_GENERATOR: return true;
  default: return false;
  }
}

bool jinja_iter_init(struct jinja_run *run, struct jv v, struct jinja_iter *iter)
{
  if (!jinja_is_iterable(v)) return jinja_fail(run, "TypeError", "'%s' object is not iterable", jinja_type_name(v));
  *iter = (struct jinja_iter){.source = v};
  return true;
}

static bool next_char(struct jinja_run *run, struct jinja_iter *iter, struct jv *out, bool *has)
{
  const struct jinja_str *s = iter->source.s;
  if (iter->pos >= s->n_bytes) return *has = false, true;
  size_t start = iter->pos;
  for (iter->pos++; iter->pos < s->n_bytes && ((unsigned char)s->data[iter->pos] & 0xC0) == 0x80;) iter->pos++;
  return jinja_str_view(run, s->data + start, iter->pos - start, out);
}

static bool next_pair(struct jinja_run *run, struct jinja_iter *iter, enum jinja_view_kind kind, const struct jinja_dict *dict,
                      struct jv *out, bool *has)
{
  if (iter->pos >= dict->n) return *has = false, true;
  const struct jinja_pair *pair = &dict->pairs[iter->pos++];
  if (kind == VIEW_ITEMS) return jinja_list_new(run, JV_TUPLE, (struct jv[]){pair->key, pair->value}, 2, true, out);
  *out = kind == VIEW_KEYS ? pair->key : pair->value;
  return true;
}

bool jinja_iter_next(struct jinja_run *run, struct jinja_iter *iter, struct jv *out, bool *has)
{
  struct jv v = iter->source;
  *has = true;
  if (!jinja_charge(run, 1)) return false;
  switch ((enum jinja_type)v.type) {
  case JV_LIST: case JV_TUPLE:
    *has = iter->pos < v.seq->n;
    if (*has) *out = v.seq->items[iter->pos++];
    return true;
  case JV_DICT: return next_pair(run, iter, VIEW_KEYS, v.dict, out, has);
  case JV_VIEW: return next_pair(run, iter, v.view->kind, v.view->dict, out, has);
  case JV_STR: return next_char(run, iter, out, has);
  case JV_RANGE:
    *has = (int64_t)iter->pos < jinja_range_length(v.range);
    if (*has) *out = jv_int(jinja_range_at(v.range, (int64_t)iter->pos++));
    return true;
  case JV_GENERATOR:
    if (v.gen->done) return *has = false, true;
    if (!jinja_enter(run) || !v.gen->next(run, v.gen, out, has)) return false;
    jinja_leave(run);
    v.gen->done = !*has;
    return true;
  default: *has = false; return true; /* undefined */
  }
}

bool jinja_to_vec(struct jinja_run *run, struct jv v, struct jinja_vec *vec)
{
  struct jinja_iter iter;
  struct jv item;
  bool has;
  if (!jinja_iter_init(run, v, &iter)) return false;
  for (;;) {
    if (!jinja_iter_next(run, &iter, &item, &has)) return false;
    if (!has) return true;
    if (!jinja_vec_push(run, vec, item)) return false;
  }
}
