/* Expression parser: jinja_parse_expression, jinja_parse_tuple, jinja_parse_target, jinja_parse_filter_chain.
 *
 * Recursive descent in jinja2's own order of precedence, low to high: inline if, or, and, not, comparisons, + -, ~, * / // %, **, unary,
 * then postfix (attribute, item, call), filters and tests. Note jinja2's two oddities: `~` binds tighter than `+`, and `**` groups left. */
#include <string.h>

#include "text/jinja_internal.h"

static struct jinja_node *parse_unary(struct jinja_parser *p, bool with_filter);

static bool enter(struct jinja_parser *p)
{
  if (p->depth >= JINJA_MAX_PARSE_DEPTH) {
    jinja_parse_fail(p, SITS_FORMAT, jinja_now(p)->line, "over the nesting limit of %d", JINJA_MAX_PARSE_DEPTH);
    return false;
  }
  p->depth++;
  return true;
}

static bool at(const struct jinja_parser *p, enum jinja_token_type type) { return jinja_now(p)->type == type; }

static bool skip(struct jinja_parser *p, enum jinja_token_type type)
{
  if (!at(p, type)) return false;
  p->pos++;
  return true;
}

static struct jinja_node *node_with(struct jinja_parser *p, enum jinja_node_kind kind, int line, struct jinja_node *a, struct jinja_node *b)
{
  struct jinja_node *node = jinja_node_new(p, kind, line);
  if (!node) return NULL;
  node->a = a;
  node->b = b;
  return node;
}

/* ---- Precedence levels ---- */

static struct jinja_node *parse_pow(struct jinja_parser *p)
{
  struct jinja_node *left = parse_unary(p, true);
  while (left && at(p, T_POW)) {
    int line = jinja_now(p)->line;
    p->pos++;
    struct jinja_node *right = parse_unary(p, true);
    if (!right) return NULL;
    left = node_with(p, N_BINARY, line, left, right);
    if (left) left->op = T_POW;
  }
  return left;
}

static struct jinja_node *parse_math2(struct jinja_parser *p)
{
  struct jinja_node *left = parse_pow(p);
  while (left && (at(p, T_MUL) || at(p, T_DIV) || at(p, T_FLOORDIV) || at(p, T_MOD))) {
    enum jinja_token_type op = jinja_now(p)->type;
    int line = jinja_now(p)->line;
    p->pos++;
    struct jinja_node *right = parse_pow(p);
    if (!right) return NULL;
    left = node_with(p, N_BINARY, line, left, right);
    if (left) left->op = (uint8_t)op;
  }
  return left;
}

static struct jinja_node *parse_concat(struct jinja_parser *p)
{
  struct jinja_node *first = parse_math2(p);
  if (!first || !at(p, T_TILDE)) return first;
  struct jinja_node *node = jinja_node_new(p, N_CONCAT, jinja_now(p)->line);
  if (!node) return NULL;
  jinja_list_add(&node->list, first);
  while (skip(p, T_TILDE)) {
    struct jinja_node *more = parse_math2(p);
    if (!more) return NULL;
    jinja_list_add(&node->list, more);
  }
  return node;
}

static struct jinja_node *parse_math1(struct jinja_parser *p)
{
  struct jinja_node *left = parse_concat(p);
  while (left && (at(p, T_ADD) || at(p, T_SUB))) {
    enum jinja_token_type op = jinja_now(p)->type;
    int line = jinja_now(p)->line;
    p->pos++;
    struct jinja_node *right = parse_concat(p);
    if (!right) return NULL;
    left = node_with(p, N_BINARY, line, left, right);
    if (left) left->op = (uint8_t)op;
  }
  return left;
}

/* The comparison operator at hand (skipped), or T_EOF. */
static enum jinja_token_type comparison(struct jinja_parser *p)
{
  enum jinja_token_type type = jinja_now(p)->type;
  if (type >= T_EQ && type <= T_LE) {
    p->pos++;
    return type;
  }
  if (jinja_skip_name(p, "in")) return T_IN;
  if (jinja_at_name(p, "not")) {
    p->pos++;
    if (jinja_skip_name(p, "in")) return T_NOTIN;
    p->pos--;
  }
  return T_EOF;
}

static struct jinja_node *parse_compare(struct jinja_parser *p)
{
  int line = jinja_now(p)->line;
  struct jinja_node *first = parse_math1(p), *node = NULL;
  while (first) {
    enum jinja_token_type op = comparison(p);
    if (op == T_EOF) break;
    struct jinja_node *right = parse_math1(p);
    if (!right) return NULL;
    if (!node && !(node = node_with(p, N_COMPARE, line, first, NULL))) return NULL;
    struct jinja_node *operand = node_with(p, N_ARG, right->line, right, NULL);
    if (!operand) return NULL;
    operand->op = (uint8_t)op;
    jinja_list_add(&node->list, operand);
  }
  return node ? node : first;
}

static struct jinja_node *parse_not(struct jinja_parser *p)
{
  if (!jinja_at_name(p, "not")) return parse_compare(p);
  int line = jinja_now(p)->line;
  if (!enter(p)) return NULL;
  p->pos++;
  struct jinja_node *inner = parse_not(p);
  p->depth--;
  return inner ? node_with(p, N_NOT, line, inner, NULL) : NULL;
}

static struct jinja_node *parse_and(struct jinja_parser *p)
{
  struct jinja_node *left = parse_not(p);
  while (left && jinja_skip_name(p, "and")) {
    struct jinja_node *right = parse_not(p);
    if (!right) return NULL;
    left = node_with(p, N_AND, left->line, left, right);
  }
  return left;
}

static struct jinja_node *parse_or(struct jinja_parser *p)
{
  struct jinja_node *left = parse_and(p);
  while (left && jinja_skip_name(p, "or")) {
    struct jinja_node *right = parse_and(p);
    if (!right) return NULL;
    left = node_with(p, N_OR, left->line, left, right);
  }
  return left;
}

static struct jinja_node *parse_cond(struct jinja_parser *p)
{
  int line = jinja_now(p)->line;
  struct jinja_node *value = parse_or(p);
  while (value && jinja_skip_name(p, "if")) {
    struct jinja_node *test = parse_or(p), *otherwise = NULL;
    if (!test) return NULL;
    if (jinja_skip_name(p, "else") && !(otherwise = jinja_parse_expression(p, true))) return NULL;
    struct jinja_node *node = node_with(p, N_COND, line, test, value);
    if (!node) return NULL;
    node->c = otherwise;
    value = node;
  }
  return value;
}

struct jinja_node *jinja_parse_expression(struct jinja_parser *p, bool with_cond)
{
  if (!enter(p)) return NULL;
  struct jinja_node *node = with_cond ? parse_cond(p) : parse_or(p);
  p->depth--;
  return node;
}

/* ---- Primaries ---- */

static bool is_parameter(const struct jinja_parser *p, uint32_t symbol)
{
  for (const struct jinja_scope_note *note = p->macros; note; note = note->outer)
    for (const struct jinja_node *parameter = note->macro->list2.head; parameter; parameter = parameter->next)
      if (parameter->symbol == symbol) return true;
  return false;
}

static struct jinja_node *parse_name(struct jinja_parser *p)
{
  const struct jinja_token *token = jinja_now(p);
  struct jinja_node *node = jinja_node_new(p, N_CONST, token->line);
  if (!node) return NULL;
  if (jinja_skip_name(p, "true") || jinja_skip_name(p, "True")) return node->value = jv_bool(true), node;
  if (jinja_skip_name(p, "false") || jinja_skip_name(p, "False")) return node->value = jv_bool(false), node;
  if (jinja_skip_name(p, "none") || jinja_skip_name(p, "None")) return node->value = jv_none(), node;
  node->kind = N_NAME;
  p->pos++;
  if (!jinja_intern(p, token->text, token->n_bytes, &node->symbol)) return NULL;
  const struct jinja_program *program = p->program;
  for (struct jinja_scope_note *note = p->macros; note; note = note->outer) {
    note->macro->wants_varargs |= node->symbol == program->sym_varargs;
    note->macro->wants_kwargs |= node->symbol == program->sym_kwargs;
    note->macro->wants_caller |= node->symbol == program->sym_caller;
  }
  if (node->symbol == program->sym_tools && !is_parameter(p, node->symbol)) p->program->reads_tools = true;
  return node;
}

static struct jinja_node *parse_string(struct jinja_parser *p)
{
  struct jinja_node *node = jinja_node_new(p, N_CONST, jinja_now(p)->line);
  if (!node) return NULL;
  size_t n = 0, first = p->pos;
  while (at(p, T_STR)) n += p->tokens[p->pos++].n_bytes; /* adjacent literals join */
  char *text = arena_alloc(&p->program->arena, n + 1);
  if (!text) return jinja_parse_fail(p, SITS_NOMEM, node->line, "out of memory");
  size_t used = 0;
  for (size_t i = first; i < p->pos; i++) {
    memcpy(text + used, p->tokens[i].text, p->tokens[i].n_bytes);
    used += p->tokens[i].n_bytes;
  }
  const struct jinja_str *s = jinja_str_make(&p->program->arena, text, n, false);
  if (!s) return jinja_parse_fail(p, SITS_NOMEM, node->line, "out of memory");
  node->value = jv_str(s);
  return node;
}

static struct jinja_node *parse_list(struct jinja_parser *p)
{
  struct jinja_node *node = jinja_node_new(p, N_LIST, jinja_now(p)->line);
  p->pos++;
  while (node && !at(p, T_RBRACKET)) {
    if (node->list.n && !jinja_expect(p, T_COMMA)) return NULL;
    if (at(p, T_RBRACKET)) break;
    struct jinja_node *item = jinja_parse_expression(p, true);
    if (!item) return NULL;
    jinja_list_add(&node->list, item);
  }
  return node && jinja_expect(p, T_RBRACKET) ? node : NULL;
}

static struct jinja_node *parse_dict(struct jinja_parser *p)
{
  struct jinja_node *node = jinja_node_new(p, N_DICT, jinja_now(p)->line);
  p->pos++;
  while (node && !at(p, T_RBRACE)) {
    if (node->list.n && !jinja_expect(p, T_COMMA)) return NULL;
    if (at(p, T_RBRACE)) break;
    struct jinja_node *key = jinja_parse_expression(p, true);
    if (!key || !jinja_expect(p, T_COLON)) return NULL;
    struct jinja_node *value = jinja_parse_expression(p, true);
    struct jinja_node *pair = value ? node_with(p, N_ARG, key->line, key, value) : NULL;
    if (!pair) return NULL;
    jinja_list_add(&node->list, pair);
  }
  return node && jinja_expect(p, T_RBRACE) ? node : NULL;
}

static struct jinja_node *parse_primary(struct jinja_parser *p)
{
  const struct jinja_token *token = jinja_now(p);
  struct jinja_node *node;
  switch (token->type) {
  case T_NAME: return parse_name(p);
  case T_STR: return parse_string(p);
  case T_INT:
  case T_FLOAT:
    node = jinja_node_new(p, N_CONST, token->line);
    if (node) node->value = token->type == T_INT ? jv_int(token->i) : jv_float(token->f);
    p->pos++;
    return node;
  case T_LPAREN:
    p->pos++;
    node = jinja_parse_tuple(p, TUPLE_PARENS);
    return node && jinja_expect(p, T_RPAREN) ? node : NULL;
  case T_LBRACKET: return parse_list(p);
  case T_LBRACE: return parse_dict(p);
  default: return jinja_parse_fail(p, SITS_FORMAT, token->line, "unexpected %s in an expression", jinja_token_text(token));
  }
}

static bool is_tuple_end(const struct jinja_parser *p, int flags)
{
  if (at(p, T_VAR_END) || at(p, T_BLOCK_END) || at(p, T_RPAREN)) return true;
  if ((flags & TUPLE_END_IN) && jinja_at_name(p, "in")) return true;
  return (flags & TUPLE_END_RECURSIVE) && jinja_at_name(p, "recursive");
}

struct jinja_node *jinja_parse_tuple(struct jinja_parser *p, int flags)
{
  int line = jinja_now(p)->line;
  struct jinja_list items = {0};
  bool is_tuple = false;
  for (;;) {
    if (items.n && !jinja_expect(p, T_COMMA)) return NULL;
    if (is_tuple_end(p, flags)) break;
    struct jinja_node *item = jinja_parse_expression(p, !(flags & TUPLE_NO_COND));
    if (!item) return NULL;
    jinja_list_add(&items, item);
    if (!at(p, T_COMMA)) break;
    is_tuple = true;
  }
  if (!is_tuple && items.n) return items.head;
  if (!is_tuple && !(flags & TUPLE_PARENS))
    return jinja_parse_fail(p, SITS_FORMAT, line, "expected an expression, got %s", jinja_token_text(jinja_now(p)));
  struct jinja_node *node = jinja_node_new(p, N_TUPLE, line);
  if (node) node->list = items;
  return node;
}

/* ---- Postfix ---- */

static bool parse_slice_part(struct jinja_parser *p, struct jinja_node **part)
{
  if (at(p, T_COLON) || at(p, T_RBRACKET) || at(p, T_COMMA)) return true;
  return (*part = jinja_parse_expression(p, true)) != NULL;
}

static struct jinja_node *parse_subscribed(struct jinja_parser *p)
{
  int line = jinja_now(p)->line;
  struct jinja_node *start = NULL;
  if (!at(p, T_COLON)) {
    start = jinja_parse_expression(p, true);
    if (!start || !at(p, T_COLON)) return start;
  }
  struct jinja_node *node = jinja_node_new(p, N_SLICE, line);
  p->pos++;
  if (!node || !parse_slice_part(p, &node->b)) return NULL;
  if (skip(p, T_COLON) && !parse_slice_part(p, &node->c)) return NULL;
  node->a = start;
  return node;
}

static struct jinja_node *parse_attribute(struct jinja_parser *p, struct jinja_node *object)
{
  const struct jinja_token *token = jinja_now(p);
  if (token->type != T_NAME && token->type != T_INT)
    return jinja_parse_fail(p, SITS_FORMAT, token->line, "expected a name or number after '.'");
  struct jinja_node *node = node_with(p, token->type == T_NAME ? N_ATTR : N_ITEM, token->line, object, NULL);
  p->pos++;
  if (!node) return NULL;
  if (token->type == T_INT) {
    if ((node->b = jinja_node_new(p, N_CONST, token->line))) node->b->value = jv_int(token->i);
    return node->b ? node : NULL;
  }
  node->text = jinja_str_make(&p->program->arena, token->text, token->n_bytes, false);
  return node->text ? node : jinja_parse_fail(p, SITS_NOMEM, token->line, "out of memory");
}

static struct jinja_node *parse_item(struct jinja_parser *p, struct jinja_node *object)
{
  int line = jinja_now(p)->line;
  p->pos++;
  struct jinja_list args = {0};
  while (!at(p, T_RBRACKET)) {
    if (args.n && !jinja_expect(p, T_COMMA)) return NULL;
    struct jinja_node *arg = parse_subscribed(p);
    if (!arg) return NULL;
    jinja_list_add(&args, arg);
  }
  if (!jinja_expect(p, T_RBRACKET)) return NULL;
  struct jinja_node *key = args.head;
  if (args.n != 1) {
    for (struct jinja_node *arg = args.head; arg; arg = arg->next)
      if (arg->kind == N_SLICE) return jinja_parse_fail(p, SITS_FORMAT, line, "a slice in a tuple index is not supported");
    key = jinja_node_new(p, N_TUPLE, line);
    if (!key) return NULL;
    key->list = args;
  }
  return node_with(p, N_ITEM, line, object, key);
}

/* One argument; *stage holds how far the order positional, keyword, *, ** has come. */
static struct jinja_node *parse_arg(struct jinja_parser *p, int *stage)
{
  struct jinja_token *token = jinja_now(p);
  enum jinja_arg_kind kind = ARG_POS;
  if (skip(p, T_MUL)) kind = ARG_STAR;
  else if (skip(p, T_POW)) kind = ARG_STAR2;
  else if (token->type == T_NAME && token[1].type == T_ASSIGN) {
    kind = ARG_KW;
    p->pos += 2;
  }
  bool in_order = kind == ARG_POS ? *stage == ARG_POS : kind == ARG_KW ? *stage <= ARG_STAR : *stage < (int)kind;
  if (!in_order) return jinja_parse_fail(p, SITS_FORMAT, token->line, "invalid order of call arguments");
  if ((int)kind > *stage) *stage = (int)kind;
  struct jinja_node *value = jinja_parse_expression(p, true);
  struct jinja_node *arg = value ? node_with(p, N_ARG, value->line, value, NULL) : NULL;
  if (!arg) return NULL;
  arg->op = (uint8_t)kind;
  if (kind == ARG_KW && !(arg->text = jinja_str_make(&p->program->arena, token->text, token->n_bytes, false)))
    return jinja_parse_fail(p, SITS_NOMEM, token->line, "out of memory");
  return arg;
}

static bool parse_args(struct jinja_parser *p, struct jinja_list *args)
{
  int stage = ARG_POS;
  if (!jinja_expect(p, T_LPAREN)) return false;
  while (!at(p, T_RPAREN)) {
    if (args->n && !jinja_expect(p, T_COMMA)) return false;
    if (at(p, T_RPAREN)) break;
    struct jinja_node *arg = parse_arg(p, &stage);
    if (!arg) return false;
    for (struct jinja_node *other = args->head; arg->text && other; other = other->next)
      if (other->text && jinja_str_compare(other->text, arg->text) == 0)
        return jinja_parse_fail(p, SITS_FORMAT, arg->line, "keyword argument repeated"), false;
    jinja_list_add(args, arg);
    if (args->n > 255) return jinja_parse_fail(p, SITS_FORMAT, arg->line, "over the limit of 255 call arguments"), false;
  }
  return jinja_expect(p, T_RPAREN);
}

static struct jinja_node *parse_call(struct jinja_parser *p, struct jinja_node *callee)
{
  struct jinja_node *node = node_with(p, N_CALL, jinja_now(p)->line, callee, NULL);
  return node && parse_args(p, &node->list) ? node : NULL;
}

static struct jinja_node *parse_postfix(struct jinja_parser *p, struct jinja_node *node)
{
  while (node) {
    if (skip(p, T_DOT)) node = parse_attribute(p, node);
    else if (at(p, T_LBRACKET)) node = parse_item(p, node);
    else if (at(p, T_LPAREN)) node = parse_call(p, node);
    else return node;
  }
  return NULL;
}

/* The dotted name of a filter or test into node->text. */
static bool parse_dotted_name(struct jinja_parser *p, struct jinja_node *node)
{
  const struct jinja_token *token = jinja_now(p);
  if (!jinja_expect(p, T_NAME)) return false;
  node->text = jinja_str_make(&p->program->arena, token->text, token->n_bytes, false);
  if (!node->text) return jinja_parse_fail(p, SITS_NOMEM, token->line, "out of memory"), false;
  if (at(p, T_DOT)) return jinja_parse_fail(p, SITS_FORMAT, token->line, "no filter or test has a dotted name"), false;
  return true;
}

struct jinja_node *jinja_parse_filter_chain(struct jinja_parser *p, struct jinja_node *input, bool start_inline)
{
  while (start_inline || at(p, T_PIPE)) {
    if (!start_inline) p->pos++;
    start_inline = false;
    struct jinja_node *node = node_with(p, N_FILTER, jinja_now(p)->line, input, NULL);
    if (!node || !parse_dotted_name(p, node)) return NULL;
    node->builtin = jinja_find_filter(node->text->data, node->text->n_bytes);
      if (at(p, T_LPAREN) && !parse_args(p, &node->list)) return NULL;
    input = node;
  }
  return input;
}

static bool starts_test_argument(const struct jinja_parser *p)
{
  switch (jinja_now(p)->type) {
  case T_STR: case T_INT: case T_FLOAT: case T_LBRACKET: case T_LBRACE: return true;
  case T_NAME: return !jinja_at_name(p, "else") && !jinja_at_name(p, "or") && !jinja_at_name(p, "and");
  default: return false;
  }
}

static struct jinja_node *parse_test(struct jinja_parser *p, struct jinja_node *input)
{
  p->pos++;
  bool is_negated = jinja_skip_name(p, "not");
  struct jinja_node *node = node_with(p, N_TEST, jinja_now(p)->line, input, NULL);
  if (!node || !parse_dotted_name(p, node)) return NULL;
  node->builtin = jinja_find(jinja_tests, node->text->data, node->text->n_bytes);
  if (at(p, T_LPAREN)) {
    if (!parse_args(p, &node->list)) return NULL;
  } else if (starts_test_argument(p)) {
    if (jinja_at_name(p, "is")) return jinja_parse_fail(p, SITS_FORMAT, node->line, "tests cannot be chained with 'is'");
    struct jinja_node *value = parse_primary(p);
    value = value ? parse_postfix(p, value) : NULL;
    struct jinja_node *arg = value ? node_with(p, N_ARG, value->line, value, NULL) : NULL;
    if (!arg) return NULL;
    arg->op = ARG_POS;
    jinja_list_add(&node->list, arg);
  }
  return is_negated ? node_with(p, N_NOT, node->line, node, NULL) : node;
}

static struct jinja_node *parse_filters_and_tests(struct jinja_parser *p, struct jinja_node *node)
{
  while (node) {
    if (at(p, T_PIPE)) node = jinja_parse_filter_chain(p, node, false);
    else if (jinja_at_name(p, "is")) node = parse_test(p, node);
    else if (at(p, T_LPAREN)) node = parse_call(p, node);
    else return node;
  }
  return NULL;
}

static struct jinja_node *parse_unary(struct jinja_parser *p, bool with_filter)
{
  struct jinja_node *node;
  if (at(p, T_SUB) || at(p, T_ADD)) {
    enum jinja_node_kind kind = at(p, T_SUB) ? N_NEG : N_POS;
    int line = jinja_now(p)->line;
    if (!enter(p)) return NULL;
    p->pos++;
    struct jinja_node *inner = parse_unary(p, false);
    p->depth--;
    node = inner ? node_with(p, kind, line, inner, NULL) : NULL;
  } else {
    node = parse_primary(p);
  }
  node = node ? parse_postfix(p, node) : NULL;
  return node && with_filter ? parse_filters_and_tests(p, node) : node;
}

/* ---- Assignment targets ---- */

static struct jinja_node *parse_target_item(struct jinja_parser *p, bool with_namespace)
{
  const struct jinja_token *token = jinja_now(p);
  if (token->type == T_LPAREN) {
    p->pos++;
    struct jinja_node *inner = enter(p) ? jinja_parse_target(p, with_namespace) : NULL;
    p->depth--;
    return inner && jinja_expect(p, T_RPAREN) ? inner : NULL;
  }
  static const char *const reserved[] = {"true", "false", "none", "True", "False", "None"};
  for (size_t i = 0; i < 6; i++)
    if (jinja_at_name(p, reserved[i])) return jinja_parse_fail(p, SITS_FORMAT, token->line, "cannot assign to a constant");
  if (!jinja_expect(p, T_NAME)) return NULL;
  struct jinja_node *node = jinja_node_new(p, N_NAME, token->line);
  if (!node || !jinja_intern(p, token->text, token->n_bytes, &node->symbol)) return NULL;
  if (!with_namespace || !skip(p, T_DOT)) return node;
  const struct jinja_token *attribute = jinja_now(p);
  if (!jinja_expect(p, T_NAME)) return NULL;
  node->kind = N_NSREF;
  node->text = jinja_str_make(&p->program->arena, attribute->text, attribute->n_bytes, false);
  return node->text ? node : jinja_parse_fail(p, SITS_NOMEM, token->line, "out of memory");
}

struct jinja_node *jinja_parse_target(struct jinja_parser *p, bool with_namespace)
{
  int line = jinja_now(p)->line;
  struct jinja_node *first = parse_target_item(p, with_namespace);
  if (!first || !at(p, T_COMMA)) return first;
  struct jinja_node *node = jinja_node_new(p, N_TUPLE, line);
  if (!node) return NULL;
  jinja_list_add(&node->list, first);
  while (skip(p, T_COMMA)) {
    if (!at(p, T_NAME) && !at(p, T_LPAREN)) break;
    if (jinja_at_name(p, "in")) break;
    struct jinja_node *item = parse_target_item(p, with_namespace);
    if (!item) return NULL;
    jinja_list_add(&node->list, item);
  }
  return node;
}
