/* Calls: binding arguments to builtins (jinja_invoke) and calling whatever a template calls (jinja_call_value). */
#include <string.h>

#include "text/jinja_internal.h"

const struct jinja_builtin *jinja_find(const struct jinja_builtin *table, const char *name, size_t n_bytes)
{
  for (; table->name; table++)
    if (strlen(table->name) == n_bytes && memcmp(table->name, name, n_bytes) == 0) return table;
  return NULL;
}

const struct jinja_builtin *jinja_find_filter(const char *name, size_t n_bytes)
{
  const struct jinja_builtin *const tables[] = {jinja_filters, jinja_sequence_filters, jinja_text_filters};
  for (size_t i = 0; i < 3; i++) {
    const struct jinja_builtin *fn = jinja_find(tables[i], name, n_bytes);
    if (fn) return fn;
  }
  return NULL;
}

/* Position of a name in a space-separated list, or -1. */
static int parameter_index(const char *params, const struct jinja_str *name)
{
  for (int index = 0; *params; index++) {
    size_t n = strcspn(params, " ");
    if (n == name->n_bytes && memcmp(params, name->data, n) == 0) return index;
    params += n + (params[n] == ' ');
  }
  return -1;
}

static int parameter_count(const char *params)
{
  int n = *params != '\0';
  for (; *params; params++) n += *params == ' ';
  return n;
}

bool jinja_invoke(struct jinja_run *run, const struct jinja_builtin *fn, const struct jinja_call *call, struct jv *out)
{
  if (fn->params[0] == '*') return fn->fn(run, call, out);
  struct jinja_call bound = *call;
  int n = parameter_count(fn->params);
  if (call->n_pos > (size_t)n)
    return jinja_fail(run, "TypeError", "%s() takes at most %d arguments (%zu given)", fn->name, n, call->n_pos);
  for (size_t i = 0; i < JINJA_MAX_BOUND; i++) bound.a[i] = i < call->n_pos ? call->pos[i] : jv_absent();
  for (size_t i = 0; i < call->n_kw; i++) {
    const struct jinja_str *name = call->kw[i].name;
    int index = parameter_index(fn->params, name);
    if (index < 0)
      return jinja_fail(run, "TypeError", "%s() got an unexpected keyword argument '%.*s'", fn->name,
                        (int)(name->n_bytes < 40 ? name->n_bytes : 40), name->data);
    if (jv_given(bound.a[index])) return jinja_fail(run, "TypeError", "%s() got multiple values for an argument", fn->name);
    bound.a[index] = call->kw[i].value;
  }
  for (int i = 0; i < fn->n_required; i++)
    if (!jv_given(bound.a[i])) return jinja_fail(run, "TypeError", "%s() is missing a required argument", fn->name);
  return fn->fn(run, &bound, out);
}

bool jinja_is_callable(struct jv v)
{
  switch ((enum jinja_type)v.type) {
  case JV_MACRO: case JV_METHOD: case JV_FUNCTION: case JV_LOOP: case JV_JOINER: case JV_UNDEFINED: return true;
  default: return false;
  }
}

static bool call_joiner(struct jinja_run *run, struct jinja_cycler *joiner, struct jv *out)
{
  if (joiner->used) return *out = joiner->separator, true;
  joiner->used = true;
  return jinja_str_view(run, "", 0, out);
}

bool jinja_call_value(struct jinja_run *run, struct jv callee, const struct jinja_call *call, struct jv *out)
{
  struct jinja_call with_self = *call;
  switch ((enum jinja_type)callee.type) {
  case JV_MACRO: return jinja_call_macro(run, callee.macro, call, out);
  case JV_FUNCTION: return jinja_invoke(run, callee.function, call, out);
  case JV_METHOD:
    with_self.self = callee.method->self;
    return jinja_invoke(run, callee.method->fn, &with_self, out);
  case JV_LOOP: return jinja_call_loop(run, callee.loop, call, out);
  case JV_JOINER: return call_joiner(run, callee.cycler, out);
  case JV_UNDEFINED: return jinja_undefined_fail(run, callee);
  default: return jinja_fail(run, "TypeError", "'%s' object is not callable", jinja_type_name(callee));
  }
}

bool jinja_int_arg(struct jinja_run *run, struct jv v, int64_t fallback, int64_t *out)
{
  if (v.type == JV_ABSENT || v.type == JV_NONE) return *out = fallback, true;
  if (v.type == JV_UNDEFINED) return jinja_undefined_fail(run, v);
  if (!jv_is_intlike(v)) return jinja_fail(run, "TypeError", "'%s' object cannot be interpreted as an integer", jinja_type_name(v));
  *out = jv_as_int(v);
  return true;
}
