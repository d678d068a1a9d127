/* Global functions, and the methods of dicts, lists and cyclers. */
#include <string.h>
#include <time.h>

#include "text/jinja_internal.h"

#define BUILTIN(name) static bool name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)

BUILTIN(global_range)
{
  struct jinja_range *range = jinja_alloc(run, 1, sizeof *range);
  int64_t n[3] = {0, 0, 1};
  if (!range) return false;
  for (int i = 0; i < 3 && jv_given(call->a[i]); i++) {
    if (call->a[i].type == JV_NONE) return jinja_fail(run, "TypeError", "'NoneType' object cannot be interpreted as an integer");
    if (!jinja_int_arg(run, call->a[i], 0, &n[i])) return false;
  }
  bool has_start = jv_given(call->a[1]);
  *range = (struct jinja_range){.start = has_start ? n[0] : 0, .stop = has_start ? n[1] : n[0], .step = n[2]};
  if (range->step == 0) return jinja_fail(run, "ValueError", "range() arg 3 must not be zero");
  if (jinja_range_length(range) > JINJA_MAX_RANGE)
    return jinja_fail(run, "OverflowError", "range over the limit of %d items", JINJA_MAX_RANGE);
  *out = (struct jv){.type = JV_RANGE, .range = range};
  return true;
}

/* dict(mapping or pairs, **names) */
static bool fill_dict(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  struct jinja_vec items = {0};
  if (!jinja_dict_new(run, out)) return false;
  if (call->n_pos > 1) return jinja_fail(run, "TypeError", "dict expected at most 1 argument, got %zu", call->n_pos);
  if (call->n_pos == 1 && (call->pos[0].type == JV_DICT || call->pos[0].type == JV_NAMESPACE)) {
    const struct jinja_dict *from = call->pos[0].dict;
    for (size_t i = 0; i < from->n; i++)
      if (!jinja_dict_set(run, out->dict, from->pairs[i].key, from->pairs[i].value)) return false;
  } else if (call->n_pos == 1) {
    if (!jinja_to_vec(run, call->pos[0], &items)) return false;
    for (size_t i = 0; i < items.n; i++) {
      struct jinja_vec pair = {0};
      if (!jinja_to_vec(run, items.items[i], &pair)) return false;
      if (pair.n != 2) return jinja_fail(run, "ValueError", "dictionary update sequence element has length %zu; 2 is required", pair.n);
      if (!jinja_dict_set(run, out->dict, pair.items[0], pair.items[1])) return false;
    }
  }
  for (size_t i = 0; i < call->n_kw; i++)
    if (!jinja_dict_set(run, out->dict, jv_str(call->kw[i].name), call->kw[i].value)) return false;
  return true;
}

BUILTIN(global_namespace)
{
  if (!fill_dict(run, call, out)) return false;
  out->type = JV_NAMESPACE;
  return true;
}

BUILTIN(global_raise_exception)
{
  struct jv text;
  if (!jinja_to_str(run, call->a[0], &text)) return false;
  return jinja_raise(run, text.s->data, text.s->n_bytes);
}

/* Each directive is formatted alone, so that its length is bounded; %f (microseconds) is Python's own. */
BUILTIN(global_strftime_now)
{
  struct jinja_out text = {0};
  struct tm tm;
  time_t now = (time_t)run->now_unix;
  if (call->a[0].type != JV_STR)
    return jinja_fail(run, "TypeError", "strftime_now() argument must be str, not %s", jinja_type_name(call->a[0]));
  const struct jinja_str *format = call->a[0].s;
  if (!gmtime_r(&now, &tm)) return jinja_fail(run, "ValueError", "time out of range");
  for (size_t i = 0; i < format->n_bytes;) {
    char directive[8] = "%", field[128];
    size_t n = 1;
    if (format->data[i] != '%') {
      if (!jinja_emit(run, &text, format->data + i++, 1)) return false;
      continue;
    }
    i++;
    while (i < format->n_bytes && n < 3 && strchr("-_0^#E:", format->data[i]) && format->data[i]) directive[n++] = format->data[i++];
    if (i == format->n_bytes || !strchr("aAbBcCdDeFgGhHIjklmMnprRsStTuUVwWxXyYzZ%fP", format->data[i]) || !format->data[i])
      return jinja_fail(run, "ValueError", "unsupported strftime directive");
    directive[n++] = format->data[i++];
    directive[n] = '\0';
    if (directive[n - 1] == 'f') memcpy(field, "000000", 7), n = 6;
    else if (directive[n - 1] == 'z' || directive[n - 1] == 'Z') n = 0; /* Python's clock is naive here: no zone */
    else n = strftime(field, sizeof field, directive, &tm);
    if (!jinja_emit(run, &text, field, n)) return false;
  }
  return jinja_out_str(run, &text, out);
}

static bool cycler_new(struct jinja_run *run, enum jinja_type type, const struct jinja_call *call, struct jv *out)
{
  struct jinja_cycler *cycler = jinja_alloc(run, 1, sizeof *cycler);
  struct jv items;
  if (!cycler || !jinja_list_new(run, JV_TUPLE, call->pos, call->n_pos, true, &items)) return false;
  cycler->items = items.seq->items;
  cycler->n = call->n_pos;
  *out = (struct jv){.type = (uint8_t)type, .cycler = cycler};
  return true;
}

BUILTIN(global_cycler)
{
  if (call->n_pos == 0 || call->n_kw) return jinja_fail(run, "RuntimeError", "at least one item has to be provided");
  return cycler_new(run, JV_CYCLER, call, out);
}

BUILTIN(global_joiner)
{
  if (!cycler_new(run, JV_JOINER, call, out)) return false;
  if (jv_given(call->a[0])) return out->cycler->separator = call->a[0], true;
  return jinja_str_view(run, ", ", 2, &out->cycler->separator);
}

const struct jinja_builtin jinja_globals[] = {
    {"range", "start stop step", 1, global_range},
    {"dict", "*", 0, fill_dict},
    {"namespace", "*", 0, global_namespace},
    {"raise_exception", "message", 1, global_raise_exception},
    {"strftime_now", "format", 1, global_strftime_now},
    {"cycler", "*", 0, global_cycler},
    {"joiner", "sep", 0, global_joiner},
    {0},
};

BUILTIN(cycler_next)
{
  struct jinja_cycler *cycler = call->self.cycler;
  (void)run;
  *out = cycler->items[cycler->pos];
  cycler->pos = (cycler->pos + 1) % cycler->n;
  return true;
}

BUILTIN(cycler_reset)
{
  (void)run;
  call->self.cycler->pos = 0;
  *out = jv_none();
  return true;
}

const struct jinja_builtin jinja_cycler_methods[] = {{"next", "", 0, cycler_next}, {"reset", "", 0, cycler_reset}, {0}};

/* ---- dict ---- */

static bool view_new(struct jinja_run *run, enum jinja_view_kind kind, struct jv dict, struct jv *out)
{
  struct jinja_view *view = jinja_alloc(run, 1, sizeof *view);
  if (!view) return false;
  *view = (struct jinja_view){.kind = kind, .dict = dict.dict};
  *out = (struct jv){.type = JV_VIEW, .view = view};
  return true;
}

BUILTIN(dict_items) { return view_new(run, VIEW_ITEMS, call->self, out); }
BUILTIN(dict_keys) { return view_new(run, VIEW_KEYS, call->self, out); }
BUILTIN(dict_values) { return view_new(run, VIEW_VALUES, call->self, out); }

BUILTIN(dict_get)
{
  if (!jinja_dict_find(run, call->self.dict, call->a[0], out)) return false;
  if (!jv_given(*out)) *out = jv_given(call->a[1]) ? call->a[1] : jv_none();
  return true;
}

BUILTIN(dict_copy)
{
  struct jinja_call copy = {.pos = &call->self, .n_pos = 1};
  return fill_dict(run, &copy, out);
}

const struct jinja_builtin jinja_dict_methods[] = {
    {"items", "", 0, dict_items}, {"keys", "", 0, dict_keys}, {"values", "", 0, dict_values},
    {"get", "key default", 1, dict_get}, {"copy", "", 0, dict_copy}, {0},
};

/* ---- list, tuple ---- */

BUILTIN(seq_count)
{
  int64_t n = 0;
  for (size_t i = 0; i < call->self.seq->n; i++) {
    bool is_equal;
    if (!jinja_equal(run, call->self.seq->items[i], call->a[0], &is_equal)) return false;
    n += is_equal;
  }
  *out = jv_int(n);
  return true;
}

BUILTIN(seq_index)
{
  for (size_t i = 0; i < call->self.seq->n; i++) {
    bool is_equal;
    if (!jinja_equal(run, call->self.seq->items[i], call->a[0], &is_equal)) return false;
    if (is_equal) return *out = jv_int((int64_t)i), true;
  }
  return jinja_fail(run, "ValueError", "value is not in the sequence");
}

BUILTIN(seq_copy) { return jinja_list_new(run, JV_LIST, call->self.seq->items, call->self.seq->n, false, out); }

const struct jinja_builtin jinja_seq_methods[] = {
    {"count", "value", 1, seq_count}, {"index", "value", 1, seq_index}, {"copy", "", 0, seq_copy}, {0},
};
