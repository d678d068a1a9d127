/* Evaluator of expressions and statements: jinja_render, jinja_eval, jinja_call_macro, jinja_call_loop.
 *
 * Names are looked up through frames at run time: loop bodies, macros, with, set blocks and filter blocks open a frame; if does not. A name
 * set in an inner frame never changes an outer one (that is what namespace() is for). jinja2 resolves names when it compiles; the one
 * visible difference is described in JINJA.md. */
#include <string.h>

#include "text/jinja_internal.h"

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE, FLOW_FAIL };

static enum flow exec_list(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_list *body);

/* ---- Names ---- */

static bool lookup(struct jinja_run *run, const struct jinja_scope *scope, uint32_t symbol, struct jv *out)
{
  for (; scope; scope = scope->parent)
    for (uint32_t i = scope->n; i-- > 0;)
      if (scope->vars[i].symbol == symbol && jv_given(scope->vars[i].value)) return *out = scope->vars[i].value, true;
  const struct jinja_program *program = run->program;
  if (jv_given(run->root[symbol])) return *out = run->root[symbol], true;
  if (jv_given(run->context[symbol])) return *out = run->context[symbol], true;
  if (program->globals[symbol]) return *out = (struct jv){.type = JV_FUNCTION, .function = program->globals[symbol]}, true;
  return jinja_undefined(run, UNDEF_NAME, jv_none(), jv_str(program->symbols[symbol]), NULL, out);
}

bool jinja_scope_set(struct jinja_run *run, struct jinja_scope *scope, uint32_t symbol, struct jv value)
{
  if (!scope) return run->root[symbol] = value, true;
  for (uint32_t i = 0; i < scope->n; i++)
    if (scope->vars[i].symbol == symbol) return scope->vars[i].value = value, true;
  if (scope->n == scope->capacity) {
    uint32_t capacity = scope->capacity ? scope->capacity * 2 : 4;
    struct jinja_var *vars = jinja_alloc(run, capacity, sizeof *vars);
    if (!vars) return false;
    if (scope->n) memcpy(vars, scope->vars, scope->n * sizeof *vars);
    scope->vars = vars;
    scope->capacity = capacity;
  }
  scope->vars[scope->n++] = (struct jinja_var){.symbol = symbol, .value = value};
  return true;
}

static struct jinja_scope *scope_new(struct jinja_run *run, struct jinja_scope *parent)
{
  struct jinja_scope *scope = jinja_alloc(run, 1, sizeof *scope);
  if (scope) scope->parent = parent;
  return scope;
}

static bool unpack(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *target, struct jv value);

static bool assign(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *target, struct jv value)
{
  struct jv space;
  run->line = target->line;
  switch (target->kind) {
  case N_NAME: return jinja_scope_set(run, scope, target->symbol, value);
  case N_NSREF:
    if (!lookup(run, scope, target->symbol, &space)) return false;
    if (space.type != JV_NAMESPACE) return jinja_fail(run, "TemplateRuntimeError", "cannot assign attribute on non-namespace object");
    return jinja_dict_set(run, space.dict, jv_str(target->text), value);
  default: return unpack(run, scope, target, value);
  }
}

static bool unpack(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *target, struct jv value)
{
  struct jinja_vec items = {0};
  if (!jinja_is_iterable(value)) return jinja_fail(run, "TypeError", "cannot unpack non-iterable %s object", jinja_type_name(value));
  if (!jinja_to_vec(run, value, &items)) return false;
  if (items.n < target->list.n)
    return jinja_fail(run, "ValueError", "not enough values to unpack (expected %u, got %zu)", target->list.n, items.n);
  if (items.n > target->list.n) return jinja_fail(run, "ValueError", "too many values to unpack (expected %u)", target->list.n);
  size_t i = 0;
  for (const struct jinja_node *item = target->list.head; item; item = item->next)
    if (!assign(run, scope, item, items.items[i++])) return false;
  return true;
}

/* ---- Calls ---- */

struct gathered { struct jinja_vec pos; struct jinja_kw *kw; size_t n_kw, kw_capacity; };

static bool gather_kw(struct jinja_run *run, struct gathered *args, const struct jinja_str *name, struct jv value)
{
  for (size_t i = 0; i < args->n_kw; i++)
    if (jinja_str_compare(args->kw[i].name, name) == 0) return jinja_fail(run, "TypeError", "got multiple values for a keyword argument");
  if (args->n_kw == args->kw_capacity) {
    if (args->n_kw > 1000) return jinja_limit(run, "keyword argument");
    size_t capacity = args->kw_capacity ? args->kw_capacity * 2 : 4;
    struct jinja_kw *kw = jinja_alloc(run, capacity, sizeof *kw);
    if (!kw) return false;
    if (args->n_kw) memcpy(kw, args->kw, args->n_kw * sizeof *kw);
    args->kw = kw;
    args->kw_capacity = capacity;
  }
  args->kw[args->n_kw++] = (struct jinja_kw){.name = name, .value = value};
  return true;
}

static bool gather_star2(struct jinja_run *run, struct gathered *args, struct jv value)
{
  if (value.type != JV_DICT) return jinja_fail(run, "TypeError", "argument after ** must be a mapping, not %s", jinja_type_name(value));
  for (size_t i = 0; i < value.dict->n; i++) {
    struct jv key = value.dict->pairs[i].key;
    if (key.type != JV_STR) return jinja_fail(run, "TypeError", "keywords must be strings");
    if (!gather_kw(run, args, key.s, value.dict->pairs[i].value)) return false;
  }
  return true;
}

static bool gather(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_list *list, struct gathered *args)
{
  struct jv value;
  for (const struct jinja_node *arg = list->head; arg; arg = arg->next) {
    if (!jinja_eval(run, scope, arg->a, &value)) return false;
    bool ok;
    switch ((enum jinja_arg_kind)arg->op) {
    case ARG_POS: ok = jinja_vec_push(run, &args->pos, value); break;
    case ARG_KW: ok = gather_kw(run, args, arg->text, value); break;
    case ARG_STAR: ok = jinja_to_vec(run, value, &args->pos); break;
    default: ok = gather_star2(run, args, value); break;
    }
    if (!ok) return false;
  }
  return true;
}

static struct jinja_call as_call(const struct gathered *args, struct jv self)
{
  return (struct jinja_call){.self = self, .n_pos = args->pos.n, .pos = args->pos.items, .n_kw = args->n_kw, .kw = args->kw};
}

/* Callee and arguments; caller (absent for a plain call) goes along as the keyword `caller`. */
static bool call_node(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv caller, struct jv *out)
{
  struct gathered args = {0};
  struct jv callee;
  if (!jinja_eval(run, scope, node->a, &callee) || !gather(run, scope, &node->list, &args)) return false;
  if (jv_given(caller) && !gather_kw(run, &args, run->program->symbols[run->program->sym_caller], caller)) return false;
  run->line = node->line;
  struct jinja_call call = as_call(&args, jv_absent());
  return jinja_call_value(run, callee, &call, out);
}

static bool eval_filter_or_test(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct gathered args = {0};
  struct jv input;
  if (!jinja_eval(run, scope, node->a, &input)) return false;
  run->line = node->line;
  if (!node->builtin)
    return jinja_fail(run, "TemplateRuntimeError", "No %s named '%.*s' found.", node->kind == N_FILTER ? "filter" : "test",
                      (int)(node->text->n_bytes < 40 ? node->text->n_bytes : 40), node->text->data);
  if (!gather(run, scope, &node->list, &args)) return false;
  run->line = node->line;
  struct jinja_call call = as_call(&args, input);
  return jinja_invoke(run, node->builtin, &call, out);
}

/* ---- Expressions ---- */

static bool eval_seq(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv *items = jinja_alloc(run, node->list.n, sizeof *items);
  if (!items) return false;
  size_t n = 0;
  for (const struct jinja_node *item = node->list.head; item; item = item->next)
    if (!jinja_eval(run, scope, item, &items[n++])) return false;
  return jinja_list_new(run, node->kind == N_LIST ? JV_LIST : JV_TUPLE, items, n, false, out);
}

static bool eval_dict(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv key, value;
  if (!jinja_dict_new(run, out)) return false;
  for (const struct jinja_node *pair = node->list.head; pair; pair = pair->next) {
    if (!jinja_eval(run, scope, pair->a, &key) || !jinja_eval(run, scope, pair->b, &value)) return false;
    if (!jinja_dict_set(run, out->dict, key, value)) return false;
  }
  return true;
}

static bool eval_concat(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv all, part;
  if (!jinja_eval(run, scope, node->list.head, &part) || !jinja_to_str(run, part, &all)) return false;
  all.is_markup = false;
  for (const struct jinja_node *item = node->list.head->next; item; item = item->next) {
    if (!jinja_eval(run, scope, item, &part) || !jinja_to_str(run, part, &part)) return false;
    if (!jinja_concat(run, all.s, part.s, &all)) return false;
  }
  *out = all;
  return true;
}

static bool eval_compare(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv left, right;
  bool holds = true;
  if (!jinja_eval(run, scope, node->a, &left)) return false;
  for (const struct jinja_node *operand = node->list.head; operand && holds; operand = operand->next) {
    if (!jinja_eval(run, scope, operand->a, &right)) return false;
    run->line = node->line;
    if (!jinja_compare(run, (enum jinja_token_type)operand->op, left, right, &holds)) return false;
    left = right;
  }
  *out = jv_bool(holds);
  return true;
}

static bool eval_bound(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, int64_t *value, bool *has)
{
  struct jv bound = jv_none();
  if (node && !jinja_eval(run, scope, node, &bound)) return false;
  *has = bound.type != JV_NONE;
  if (*has && !jv_is_intlike(bound))
    return jinja_fail(run, "TypeError", "slice indices must be integers or None or have an __index__ method");
  return jinja_int_arg(run, bound, 0, value);
}

static bool eval_slice(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jinja_range *slice)
{
  return eval_bound(run, scope, node->a, &slice->start, &slice->has_start) &&
         eval_bound(run, scope, node->b, &slice->stop, &slice->has_stop) && eval_bound(run, scope, node->c, &slice->step, &slice->has_step);
}

static bool eval_item(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv obj, key;
  struct jinja_range slice = {0};
  if (!jinja_eval(run, scope, node->a, &obj)) return false;
  if (node->b->kind == N_SLICE) {
    if (!eval_slice(run, scope, node->b, &slice)) return false;
    run->line = node->line;
    return jinja_getslice(run, obj, &slice, out);
  }
  if (!jinja_eval(run, scope, node->b, &key)) return false;
  run->line = node->line;
  return jinja_getitem(run, obj, key, out);
}

static bool eval_binary(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv a, b;
  if (!jinja_eval(run, scope, node->a, &a) || !jinja_eval(run, scope, node->b, &b)) return false;
  run->line = node->line;
  return jinja_binary(run, (enum jinja_token_type)node->op, a, b, out);
}

/* not, and, or, if-else: what decides by truth. */
static bool eval_logic(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  bool truth;
  if (!jinja_eval(run, scope, node->a, out) || !jinja_truth(run, *out, &truth)) return false;
  switch (node->kind) {
  case N_NOT: *out = jv_bool(!truth); return true;
  case N_AND: return truth ? jinja_eval(run, scope, node->b, out) : true;
  case N_OR: return truth ? true : jinja_eval(run, scope, node->b, out);
  default: break;
  }
  const struct jinja_node *chosen = truth ? node->b : node->c;
  if (chosen) return jinja_eval(run, scope, chosen, out);
  return jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(),
                         "the inline if-expression evaluated to false and no else section was defined.", out);
}

static bool eval_node(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jv a;
  switch (node->kind) {
  case N_ATTR:
    if (!jinja_eval(run, scope, node->a, &a)) return false;
    run->line = node->line;
    return jinja_getattr(run, a, node->text, out);
  case N_ITEM: return eval_item(run, scope, node, out);
  case N_CALL: return call_node(run, scope, node, jv_absent(), out);
  case N_FILTER: case N_TEST: return eval_filter_or_test(run, scope, node, out);
  case N_NEG: case N_POS: return jinja_eval(run, scope, node->a, &a) && jinja_negate(run, a, node->kind == N_NEG, out);
  case N_NOT: case N_AND: case N_OR: case N_COND: return eval_logic(run, scope, node, out);
  case N_BINARY: return eval_binary(run, scope, node, out);
  case N_COMPARE: return eval_compare(run, scope, node, out);
  case N_CONCAT: return eval_concat(run, scope, node, out);
  case N_LIST: case N_TUPLE: return eval_seq(run, scope, node, out);
  case N_DICT: return eval_dict(run, scope, node, out);
  default: return jinja_fail(run, "TemplateRuntimeError", "misplaced expression");
  }
}

bool jinja_eval(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  if (!jinja_charge(run, 1)) return false;
  run->line = node->line;
  switch (node->kind) { /* leaves need no depth */
  case N_CONST: *out = node->value; return true;
  case N_NAME: return lookup(run, scope, node->symbol, out);
  case N_PIPE_INPUT: *out = run->pipe_input; return true;
  default: break;
  }
  if (!jinja_enter(run)) return false;
  bool ok = eval_node(run, scope, node, out);
  jinja_leave(run);
  return ok;
}

/* ---- Bodies whose output becomes a string ---- */

static enum flow capture(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_list *body, struct jv *out)
{
  struct jinja_out text = {0}, *outer = run->out;
  run->out = &text;
  enum flow flow = exec_list(run, scope, body);
  run->out = outer;
  if (flow != FLOW_FAIL && !jinja_out_str(run, &text, out)) return FLOW_FAIL;
  return flow;
}

/* ---- Macros ---- */

static const struct jinja_kw *find_kw(const struct jinja_call *call, const struct jinja_str *name)
{
  for (size_t i = 0; i < call->n_kw; i++)
    if (jinja_str_compare(call->kw[i].name, name) == 0) return &call->kw[i];
  return NULL;
}

/* Keywords that name no parameter: into **kwargs, the caller, or an error. */
static bool bind_extra_keywords(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node,
                                const struct jinja_call *call)
{
  const struct jinja_program *program = run->program;
  struct jv kwargs;
  if (!jinja_dict_new(run, &kwargs)) return false;
  for (size_t i = 0; i < call->n_kw; i++) {
    const struct jinja_str *name = call->kw[i].name;
    bool is_known = false, is_caller = jinja_str_compare(name, program->symbols[program->sym_caller]) == 0;
    size_t index = 0;
    for (const struct jinja_node *parameter = node->list2.head; parameter; parameter = parameter->next, index++)
      if (index >= call->n_pos && jinja_str_compare(program->symbols[parameter->symbol], name) == 0) is_known = true;
    if (is_known) continue;
    if (is_caller && node->wants_caller) {
      if (!jinja_scope_set(run, scope, program->sym_caller, call->kw[i].value)) return false;
    } else if (!node->wants_kwargs) {
      return jinja_fail(run, "TypeError", "macro '%.*s' takes no keyword argument '%.*s'", node->text ? (int)node->text->n_bytes : 0,
                        node->text ? node->text->data : "", (int)(name->n_bytes < 40 ? name->n_bytes : 40), name->data);
    } else if (!jinja_dict_set(run, kwargs.dict, jv_str(name), call->kw[i].value)) {
      return false;
    }
  }
  return !node->wants_kwargs || jinja_scope_set(run, scope, program->sym_kwargs, kwargs);
}

static bool bind_parameter(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *parameter, size_t index,
                           const struct jinja_call *call)
{
  const struct jinja_str *name = run->program->symbols[parameter->symbol];
  const struct jinja_kw *kw = index < call->n_pos ? NULL : find_kw(call, name);
  struct jv value;
  if (index < call->n_pos) value = call->pos[index];
  else if (kw) value = kw->value;
  else if (parameter->a) {
    if (!jinja_eval(run, scope, parameter->a, &value)) return false;
  } else if (!jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), "a macro's parameter was not provided", &value)) {
    return false;
  }
  return jinja_scope_set(run, scope, parameter->symbol, value);
}

bool jinja_call_macro(struct jinja_run *run, const struct jinja_macro *macro, const struct jinja_call *call, struct jv *out)
{
  const struct jinja_node *node = macro->node;
  const struct jinja_program *program = run->program;
  struct jinja_scope *scope = scope_new(run, macro->scope);
  if (!scope || !jinja_enter(run)) return false;
  size_t index = 0;
  if (node->wants_caller) { /* replaced when given; hides an outer macro's caller */
    struct jv none;
    if (!jinja_undefined(run, UNDEF_HINT, jv_none(), jv_none(), "No caller defined", &none)) return false;
    if (!jinja_scope_set(run, scope, program->sym_caller, none)) return false;
  }
  if (!bind_extra_keywords(run, scope, node, call)) return false;
  for (const struct jinja_node *parameter = node->list2.head; parameter; parameter = parameter->next)
    if (!bind_parameter(run, scope, parameter, index++, call)) return false;
  if (node->wants_varargs) {
    struct jv rest;
    size_t n = call->n_pos > index ? call->n_pos - index : 0;
    if (!jinja_list_new(run, JV_TUPLE, n ? call->pos + index : NULL, n, true, &rest)) return false;
    if (!jinja_scope_set(run, scope, program->sym_varargs, rest)) return false;
  } else if (call->n_pos > index) {
    return jinja_fail(run, "TypeError", "macro '%.*s' takes not more than %zu argument(s)", node->text ? (int)node->text->n_bytes : 0,
                      node->text ? node->text->data : "", index);
  }
  if (capture(run, scope, &node->list, out) == FLOW_FAIL) return false;
  jinja_leave(run);
  return true;
}

static bool macro_new(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out)
{
  struct jinja_macro *macro = jinja_alloc(run, 1, sizeof *macro);
  if (!macro) return false;
  *macro = (struct jinja_macro){.node = node, .scope = scope};
  for (; scope; scope = scope->parent) scope->is_captured = true;
  *out = (struct jv){.type = JV_MACRO, .macro = macro};
  return true;
}

/* ---- Loops ---- */

/* The next item that the loop's condition lets through. */
static bool loop_source(struct jinja_run *run, struct jinja_loop *loop, struct jv *out, bool *has)
{
  const struct jinja_node *condition = loop->node->c;
  struct jinja_scope *scope = NULL;
  for (;;) {
    bool keeps = true;
    struct jv test;
    if (!jinja_iter_next(run, &loop->iter, out, has)) return false;
    if (!*has || !condition) return true;
    if (!scope && !(scope = scope_new(run, loop->scope))) return false;
    if (!assign(run, scope, loop->node->a, *out) || !jinja_eval(run, scope, condition, &test) || !jinja_truth(run, test, &keeps))
      return false;
    if (keeps) return true;
  }
}

bool jinja_loop_fetch(struct jinja_run *run, struct jinja_loop *loop, struct jv *out, bool *has)
{
  if (loop->drained) {
    *has = loop->drained_pos < loop->drained->n;
    if (*has) *out = loop->drained->items[loop->drained_pos++];
    return true;
  }
  return loop_source(run, loop, out, has);
}

static enum flow loop_body(struct jinja_run *run, struct jinja_loop *loop, struct jv item, struct jinja_scope **frame)
{
  struct jinja_scope *scope = *frame;
  if (!jinja_charge(run, 4)) return FLOW_FAIL;
  if (!scope || scope->is_captured) { /* a macro may still see the names of the round that defined it */
    if (!(scope = *frame = scope_new(run, loop->scope))) return FLOW_FAIL;
  }
  scope->n = 0;
  if (!assign(run, scope, loop->node->a, item)) return FLOW_FAIL;
  if (!jinja_scope_set(run, scope, run->program->sym_loop, (struct jv){.type = JV_LOOP, .loop = loop})) return FLOW_FAIL;
  return exec_list(run, scope, &loop->node->list);
}

static enum flow run_loop(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv iterable, int depth0)
{
  struct jinja_loop *loop = jinja_alloc(run, 1, sizeof *loop);
  struct jinja_scope *frame = NULL;
  if (!loop) return FLOW_FAIL;
  *loop = (struct jinja_loop){.node = node, .scope = scope, .iterable = iterable, .index0 = -1, .length = -1, .depth0 = depth0};
  if (!jinja_iter_init(run, iterable, &loop->iter)) return FLOW_FAIL;
  bool needs_else = true; /* cleared where a round ends by itself: after break or continue in every round, else runs, as in jinja2 */
  for (;;) {
    struct jv item = loop->after;
    bool has = true;
    if (jv_given(item)) loop->after = jv_absent();
    else if (loop->at_end) has = false;
    else if (!jinja_loop_fetch(run, loop, &item, &has)) return FLOW_FAIL;
    if (!has) break;
    loop->index0++;
    loop->before = loop->current;
    loop->current = item;
    enum flow flow = loop_body(run, loop, item, &frame);
    if (flow == FLOW_FAIL) return flow;
    if (flow == FLOW_BREAK) break;
    if (flow == FLOW_NEXT) needs_else = false;
  }
  if (!needs_else || node->list2.n == 0) return FLOW_NEXT;
  struct jinja_scope *other = scope_new(run, scope);
  return other ? exec_list(run, other, &node->list2) : FLOW_FAIL;
}

static enum flow exec_for(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node)
{
  struct jv iterable;
  if (!jinja_eval(run, scope, node->b, &iterable)) return FLOW_FAIL;
  run->line = node->line;
  return run_loop(run, scope, node, iterable, 0);
}

bool jinja_call_loop(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_call *call, struct jv *out)
{
  if (!loop->node->flag) return jinja_fail(run, "TypeError", "The loop must have the 'recursive' marker to be called recursively.");
  if (call->n_pos != 1 || call->n_kw) return jinja_fail(run, "TypeError", "loop() takes exactly one argument");
  struct jinja_out text = {0}, *outer = run->out;
  if (!jinja_enter(run)) return false;
  run->out = &text;
  enum flow flow = run_loop(run, loop->scope, loop->node, call->pos[0], loop->depth0 + 1);
  run->out = outer;
  jinja_leave(run);
  return flow != FLOW_FAIL && jinja_out_str(run, &text, out);
}

/* ---- Statements ---- */

static bool exec_set_block(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, enum flow *flow, struct jv *out)
{
  struct jinja_scope *inner = scope_new(run, scope);
  *flow = inner ? capture(run, inner, &node->list, out) : FLOW_FAIL;
  if (*flow != FLOW_NEXT) return *flow != FLOW_FAIL;
  if (!node->b) return true;
  struct jv outer = run->pipe_input;
  run->pipe_input = *out;
  bool ok = jinja_eval(run, scope, node->b, out);
  run->pipe_input = outer;
  return ok;
}

static bool exec_call_block(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node)
{
  struct jv caller, result;
  return macro_new(run, scope, node->b, &caller) && call_node(run, scope, node->a, caller, &result) &&
         jinja_emit_str(run, run->out, result);
}

static enum flow exec_if(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node)
{
  for (;; node = node->b) {
    struct jv test;
    bool truth;
    if (!jinja_eval(run, scope, node->a, &test) || !jinja_truth(run, test, &truth)) return FLOW_FAIL;
    if (truth) return exec_list(run, scope, &node->list);
    if (!node->b) return exec_list(run, scope, &node->list2);
  }
}

static enum flow exec_with(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node)
{
  struct jinja_scope *inner = scope_new(run, scope);
  struct jv value;
  if (!inner) return FLOW_FAIL;
  for (const struct jinja_node *pair = node->list2.head; pair; pair = pair->next) /* values do not see the names beside them */
    if (!jinja_eval(run, scope, pair->b, &value) || !assign(run, inner, pair->a, value)) return FLOW_FAIL;
  return exec_list(run, inner, &node->list);
}

static enum flow exec_node(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node)
{
  struct jv value;
  enum flow flow;
  bool ok;
  switch (node->kind) {
  case N_TEXT: ok = jinja_emit(run, run->out, node->value.s->data, node->value.s->n_bytes); break;
  case N_PRINT: ok = jinja_eval(run, scope, node->a, &value) && jinja_emit_str(run, run->out, value); break;
  case N_IF: return exec_if(run, scope, node);
  case N_FOR: return exec_for(run, scope, node);
  case N_SET: ok = jinja_eval(run, scope, node->b, &value) && assign(run, scope, node->a, value); break;
  case N_SET_BLOCK:
    ok = exec_set_block(run, scope, node, &flow, &value);
    if (ok && flow != FLOW_NEXT) return flow;
    ok = ok && assign(run, scope, node->a, value);
    break;
  case N_MACRO: ok = macro_new(run, scope, node, &value) && jinja_scope_set(run, scope, node->symbol, value); break;
  case N_CALL_BLOCK: ok = exec_call_block(run, scope, node); break;
  case N_FILTER_BLOCK:
    ok = exec_set_block(run, scope, node, &flow, &value);
    if (ok && flow != FLOW_NEXT) return flow;
    ok = ok && jinja_emit_str(run, run->out, value);
    break;
  case N_WITH: return exec_with(run, scope, node);
  case N_SCOPE: {
    struct jinja_scope *inner = scope_new(run, scope);
    return inner ? exec_list(run, inner, &node->list) : FLOW_FAIL;
  }
  case N_BREAK: return FLOW_BREAK;
  case N_CONTINUE: return FLOW_CONTINUE;
  default: ok = jinja_fail(run, "TemplateRuntimeError", "misplaced statement"); break;
  }
  return ok ? FLOW_NEXT : FLOW_FAIL;
}

static enum flow exec_list(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_list *body)
{
  for (const struct jinja_node *node = body->head; node; node = node->next) {
    run->line = node->line;
    if (!jinja_charge(run, 1) || !jinja_enter(run)) return FLOW_FAIL;
    enum flow flow = exec_node(run, scope, node);
    jinja_leave(run);
    if (flow != FLOW_NEXT) return flow;
  }
  return FLOW_NEXT;
}

/* ---- Rendering ---- */

/* Only variables that the template names are converted. */
static bool load_context(struct jinja_run *run, const json_t *variables)
{
  uint32_t n = run->program->n_symbols;
  struct jv *context = jinja_alloc(run, n, sizeof *context);
  run->root = jinja_alloc(run, n, sizeof *run->root);
  if (!context || !run->root) return false;
  run->context = context;
  for (uint32_t i = 0; i < n; i++) {
    const struct jinja_str *name = run->program->symbols[i];
    const json_t *value = json_object_getn(variables, name->data, name->n_bytes);
    if (value && !jinja_from_json(run, value, &context[i])) return false;
  }
  return true;
}

enum sits_status jinja_render(const struct jinja_program *program, const json_t *variables, int64_t now_unix, struct buf *out,
                              struct sits_error *err)
{
  struct jinja_out text = {.limit = JINJA_MAX_OUTPUT_BYTES};
  struct jinja_run run = {.program = program, .out = &text, .steps_left = JINJA_MAX_STEPS, .now_unix = now_unix, .err = err};
  arena_init(&run.arena, JINJA_MAX_RUN_BYTES);
  if (load_context(&run, variables) && exec_list(&run, NULL, &program->body) != FLOW_FAIL) {
    bool was_failed = out->failed;
    if (!buf_append(out, text.data ? text.data : "", text.size)) {
      if (text.size > out->limit - out->size) jinja_limit(&run, "output");
      else run.status = sits_fail(err, SITS_NOMEM, "out of memory for a chat template's output");
      out->failed = was_failed;
    }
  }
  arena_fini(&run.arena);
  return run.status;
}
