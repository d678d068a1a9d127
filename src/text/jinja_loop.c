/* The `loop` object: jinja_loop_attr answers loop.index, loop.last, loop.cycle and the rest. Looking ahead fetches one item early; `length`
 * of something that has no length fetches the rest, as jinja2's LoopContext does. */
#include "text/jinja_internal.h"

/* Make sure that loop->after holds the next item, unless the loop is at its end. */
bool jinja_loop_peek(struct jinja_run *run, struct jinja_loop *loop)
{
  bool has;
  if (jv_given(loop->after) || loop->at_end) return true;
  struct jv item;
  if (!jinja_loop_fetch(run, loop, &item, &has)) return false;
  if (has) loop->after = item;
  else loop->at_end = true;
  return true;
}

static bool known_length(struct jinja_run *run, struct jinja_loop *loop)
{
  struct jinja_vec rest = {0};
  struct jv item, list;
  bool has;
  if (loop->length >= 0) return true;
  bool has_length = !loop->node->c && loop->iterable.type != JV_GENERATOR;
  if (has_length) return jinja_length(run, loop->iterable, &loop->length);
  for (;;) {
    if (!jinja_loop_fetch(run, loop, &item, &has)) return false;
    if (!has) break;
    if (!jinja_vec_push(run, &rest, item)) return false;
  }
  if (!jinja_vec_list(run, &rest, &list)) return false;
  loop->drained = list.seq;
  loop->drained_pos = 0;
  loop->length = (int64_t)rest.n + loop->index0 + 1 + jv_given(loop->after);
  return true;
}

static struct jinja_loop *loop_of(const struct jinja_call *call) { return call->self.loop; }

static bool loop_cycle(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  if (call->n_pos == 0) return jinja_fail(run, "TypeError", "no items for cycling given");
  *out = call->pos[(size_t)loop_of(call)->index0 % call->n_pos];
  return true;
}

static bool loop_changed(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
{
  struct jinja_loop *loop = loop_of(call);
  struct jv values;
  bool is_equal = false;
  if (!jinja_list_new(run, JV_TUPLE, call->pos, call->n_pos, true, &values)) return false;
  if (jv_given(loop->last_changed) && !jinja_equal(run, loop->last_changed, values, &is_equal)) return false;
  if (!is_equal) loop->last_changed = values;
  *out = jv_bool(!is_equal);
  return true;
}

static const struct jinja_builtin loop_methods[] = {
    {"cycle", "*", 0, loop_cycle},
    {"changed", "*", 0, loop_changed},
    {0},
};

static bool loop_neighbour(struct jinja_run *run, struct jv item, const char *hint, struct jv *out)
{
  if (jv_given(item)) return *out = item, true;
  return jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), hint, out);
}

bool jinja_loop_attr(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_str *name, struct jv *out, bool *found)
{
  struct jv text = jv_str(name);
  *found = true;
  if (jinja_str_is(text, "index0")) return *out = jv_int(loop->index0), true;
  if (jinja_str_is(text, "index")) return *out = jv_int(loop->index0 + 1), true;
  if (jinja_str_is(text, "first")) return *out = jv_bool(loop->index0 == 0), true;
  if (jinja_str_is(text, "depth0")) return *out = jv_int(loop->depth0), true;
  if (jinja_str_is(text, "depth")) return *out = jv_int(loop->depth0 + 1), true;
  if (jinja_str_is(text, "previtem"))
    return loop_neighbour(run, loop->index0 > 0 ? loop->before : jv_absent(), "there is no previous item", out);
  bool is_last = jinja_str_is(text, "last");
  if (is_last || jinja_str_is(text, "nextitem")) {
    if (!jinja_loop_peek(run, loop)) return false;
    if (!is_last) return loop_neighbour(run, loop->after, "there is no next item", out);
    *out = jv_bool(!jv_given(loop->after));
    return true;
  }
  bool is_length = jinja_str_is(text, "length"), is_rev = jinja_str_is(text, "revindex"), is_rev0 = jinja_str_is(text, "revindex0");
  if (is_length || is_rev || is_rev0) {
    if (!known_length(run, loop)) return false;
    *out = jv_int(is_length ? loop->length : loop->length - loop->index0 - is_rev0);
    return true;
  }
  const struct jinja_builtin *fn = jinja_find(loop_methods, name->data, name->n_bytes);
  *found = fn != NULL;
  if (!fn) return true;
  struct jinja_method *method = jinja_alloc(run, 1, sizeof *method);
  if (!method) return false;
  *method = (struct jinja_method){.self = {.type = JV_LOOP, .loop = loop}, .fn = fn};
  *out = (struct jv){.type = JV_METHOD, .method = method};
  return true;
}
