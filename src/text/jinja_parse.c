/* Statement parser and compilation: jinja_compile turns source into a struct jinja_program.
 *
 * Tags: if, for, set, macro, call, filter, with, generation, break, continue, print, raw (in the lexer). Tags that load other templates
 * or need an extension that transformers does not turn on are refused by name. check_tree then bounds the height of the tree, so that no
 * later walk can recurse too deep, and refuses unknown filters and tests where jinja2 does: inside an if they fail only when reached. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "text/jinja_internal.h"

void *jinja_parse_fail(struct jinja_parser *p, enum sits_status status, int line, const char *format, ...)
{
  if (p->status) return NULL;
  char text[200];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  p->status = sits_fail(p->err, status, "chat template line %d: %s", line, text);
  return NULL;
}

struct jinja_node *jinja_node_new(struct jinja_parser *p, enum jinja_node_kind kind, int line)
{
  struct jinja_node *node = arena_calloc(&p->program->arena, 1, sizeof *node);
  if (!node) return jinja_parse_fail(p, SITS_NOMEM, line, "out of memory");
  node->kind = (uint8_t)kind;
  node->line = line;
  return node;
}

void jinja_list_add(struct jinja_list *list, struct jinja_node *node)
{
  if (list->tail) list->tail->next = node;
  else list->head = node;
  list->tail = node;
  list->n++;
}

const char *jinja_token_text(const struct jinja_token *token)
{
  static const char *const names[] = {
      [T_EOF] = "end of template", [T_DATA] = "text", [T_VAR_BEGIN] = "'{{'", [T_VAR_END] = "'}}'", [T_BLOCK_BEGIN] = "'{%'",
      [T_BLOCK_END] = "'%}'", [T_NAME] = "a name", [T_STR] = "a string", [T_INT] = "a number", [T_FLOAT] = "a number", [T_ADD] = "'+'",
      [T_SUB] = "'-'", [T_MUL] = "'*'", [T_DIV] = "'/'", [T_FLOORDIV] = "'//'", [T_MOD] = "'%'", [T_POW] = "'**'", [T_TILDE] = "'~'",
      [T_LPAREN] = "'('", [T_RPAREN] = "')'", [T_LBRACKET] = "'['", [T_RBRACKET] = "']'", [T_LBRACE] = "'{'", [T_RBRACE] = "'}'",
      [T_EQ] = "'=='", [T_NE] = "'!='", [T_GT] = "'>'", [T_GE] = "'>='", [T_LT] = "'<'", [T_LE] = "'<='", [T_ASSIGN] = "'='",
      [T_DOT] = "'.'", [T_COLON] = "':'", [T_PIPE] = "'|'", [T_COMMA] = "','", [T_SEMICOLON] = "';'", [T_IN] = "'in'",
      [T_NOTIN] = "'not in'",
  };
  return names[token->type];
}

bool jinja_expect(struct jinja_parser *p, enum jinja_token_type type)
{
  if (jinja_now(p)->type == type) {
    p->pos++;
    return true;
  }
  const struct jinja_token wanted = {.type = type};
  jinja_parse_fail(p, SITS_FORMAT, jinja_now(p)->line, "expected %s, got %s", jinja_token_text(&wanted), jinja_token_text(jinja_now(p)));
  return false;
}

bool jinja_at_name(const struct jinja_parser *p, const char *name)
{
  const struct jinja_token *token = jinja_now(p);
  return token->type == T_NAME && token->n_bytes == strlen(name) && memcmp(token->text, name, token->n_bytes) == 0;
}

bool jinja_skip_name(struct jinja_parser *p, const char *name)
{
  if (!jinja_at_name(p, name)) return false;
  p->pos++;
  return true;
}

bool jinja_intern(struct jinja_parser *p, const char *name, size_t n_bytes, uint32_t *symbol)
{
  struct jinja_program *program = p->program;
  struct jv known = jinja_dict_get_text(&p->symbol_ids, name, n_bytes);
  if (jv_given(known)) return *symbol = (uint32_t)known.i, true;
  const struct jinja_str *text = jinja_str_make(&program->arena, name, n_bytes, true);
  if (!text) goto no_memory;
  if (program->n_symbols == p->symbol_capacity) {
    uint32_t capacity = p->symbol_capacity ? p->symbol_capacity * 2 : 64;
    const struct jinja_str **symbols = arena_calloc(&program->arena, capacity, sizeof *symbols);
    const struct jinja_builtin **globals = arena_calloc(&program->arena, capacity, sizeof *globals);
    if (!symbols || !globals) goto no_memory;
    for (uint32_t i = 0; i < program->n_symbols; i++) {
      symbols[i] = program->symbols[i];
      globals[i] = program->globals[i];
    }
    program->symbols = symbols;
    program->globals = globals;
    p->symbol_capacity = capacity;
  }
  if (!jinja_dict_put_str(&program->arena, &p->symbol_ids, text, jv_int(program->n_symbols))) goto no_memory;
  program->symbols[program->n_symbols] = text;
  program->globals[program->n_symbols] = jinja_find(jinja_globals, name, n_bytes);
  *symbol = program->n_symbols++;
  return true;
no_memory:
  return jinja_parse_fail(p, SITS_NOMEM, jinja_now(p)->line, "out of memory"), false;
}

/* ---- Statements ---- */

static bool parse_body(struct jinja_parser *p, struct jinja_list *body, const char *end, const char *end2, const char *end3);

static bool block_end(struct jinja_parser *p) { return jinja_expect(p, T_BLOCK_END); }

static struct jinja_node *parse_if(struct jinja_parser *p, int line)
{
  struct jinja_node *first = NULL, *last = NULL;
  for (;;) {
    struct jinja_node *node = jinja_node_new(p, N_IF, line);
    if (!node || !(node->a = jinja_parse_tuple(p, TUPLE_NO_COND)) || !parse_body(p, &node->list, "elif", "else", "endif")) return NULL;
    if (last) last->b = node;
    else first = node;
    last = node;
    line = jinja_now(p)->line;
    if (jinja_skip_name(p, "elif")) continue;
    if (jinja_skip_name(p, "else") && !parse_body(p, &node->list2, "endif", NULL, NULL)) return NULL;
    jinja_skip_name(p, "endif");
    return first;
  }
}

/* Whether a target binds the name `loop`. */
static bool binds_loop(const struct jinja_parser *p, const struct jinja_node *target)
{
  if (target->kind == N_NAME) return target->symbol == p->program->sym_loop;
  for (const struct jinja_node *item = target->list.head; item; item = item->next)
    if (binds_loop(p, item)) return true;
  return false;
}

static struct jinja_node *parse_for(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_FOR, line);
  if (!node || !(node->a = jinja_parse_target(p, false))) return NULL;
  if (binds_loop(p, node->a)) return jinja_parse_fail(p, SITS_FORMAT, line, "cannot assign to the special name 'loop'");
  if (!jinja_skip_name(p, "in")) return jinja_parse_fail(p, SITS_FORMAT, line, "expected 'in' in a for tag");
  if (!(node->b = jinja_parse_tuple(p, TUPLE_NO_COND | TUPLE_END_RECURSIVE))) return NULL;
  if (jinja_skip_name(p, "if") && !(node->c = jinja_parse_expression(p, true))) return NULL;
  node->flag = jinja_skip_name(p, "recursive");
  p->loop_depth++;
  bool ok = parse_body(p, &node->list, "endfor", "else", NULL);
  p->loop_depth--;
  if (!ok) return NULL;
  if (jinja_skip_name(p, "else") && !parse_body(p, &node->list2, "endfor", NULL, NULL)) return NULL;
  jinja_skip_name(p, "endfor");
  return node;
}

static struct jinja_node *parse_set(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_SET, line);
  if (!node || !(node->a = jinja_parse_target(p, true))) return NULL;
  if (jinja_now(p)->type == T_ASSIGN) {
    p->pos++;
    return (node->b = jinja_parse_tuple(p, 0)) ? node : NULL;
  }
  node->kind = N_SET_BLOCK;
  if (jinja_now(p)->type == T_PIPE) {
    struct jinja_node *input = jinja_node_new(p, N_PIPE_INPUT, line);
    if (!input || !(node->b = jinja_parse_filter_chain(p, input, false))) return NULL;
  }
  if (!parse_body(p, &node->list, "endset", NULL, NULL)) return NULL;
  p->pos++;
  return node;
}

/* "(a, b=1)" into macro->list2. */
static bool parse_signature(struct jinja_parser *p, struct jinja_node *macro)
{
  if (!jinja_expect(p, T_LPAREN)) return false;
  bool has_default = false;
  while (jinja_now(p)->type != T_RPAREN) {
    if (macro->list2.n && !jinja_expect(p, T_COMMA)) return false;
    const struct jinja_token *token = jinja_now(p);
    if (!jinja_expect(p, T_NAME)) return false;
    struct jinja_node *parameter = jinja_node_new(p, N_NAME, token->line);
    if (!parameter || !jinja_intern(p, token->text, token->n_bytes, &parameter->symbol)) return false;
    if (jinja_now(p)->type == T_ASSIGN) {
      p->pos++;
      has_default = true;
      if (!(parameter->a = jinja_parse_expression(p, true))) return false;
    } else if (has_default) {
      return jinja_parse_fail(p, SITS_FORMAT, token->line, "parameter without a default after one with a default"), false;
    }
    jinja_list_add(&macro->list2, parameter);
    if (macro->list2.n > 255) return jinja_parse_fail(p, SITS_FORMAT, token->line, "over the limit of 255 parameters"), false;
  }
  return jinja_expect(p, T_RPAREN);
}

static bool parse_macro_body(struct jinja_parser *p, struct jinja_node *macro, const char *end)
{
  struct jinja_scope_note note = {.outer = p->macros, .macro = macro};
  int loop_depth = p->loop_depth;
  p->macros = &note;
  p->loop_depth = 0;
  bool ok = parse_body(p, &macro->list, end, NULL, NULL);
  p->macros = note.outer;
  p->loop_depth = loop_depth;
  if (ok) p->pos++;
  return ok;
}

static struct jinja_node *parse_macro(struct jinja_parser *p, int line)
{
  const struct jinja_token *name = jinja_now(p);
  struct jinja_node *node = jinja_node_new(p, N_MACRO, line);
  if (!node || !jinja_expect(p, T_NAME) || !jinja_intern(p, name->text, name->n_bytes, &node->symbol)) return NULL;
  node->text = p->program->symbols[node->symbol];
  return parse_signature(p, node) && parse_macro_body(p, node, "endmacro") ? node : NULL;
}

static struct jinja_node *parse_call_block(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_CALL_BLOCK, line);
  if (!node || !(node->b = jinja_node_new(p, N_MACRO, line))) return NULL;
  if (jinja_now(p)->type == T_LPAREN && !parse_signature(p, node->b)) return NULL;
  if (!(node->a = jinja_parse_expression(p, true))) return NULL;
  if (node->a->kind != N_CALL) return jinja_parse_fail(p, SITS_FORMAT, line, "expected a call in a call tag");
  return parse_macro_body(p, node->b, "endcall") ? node : NULL;
}

static struct jinja_node *parse_filter_block(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_FILTER_BLOCK, line), *input = jinja_node_new(p, N_PIPE_INPUT, line);
  if (!node || !input || !(node->b = jinja_parse_filter_chain(p, input, true))) return NULL;
  if (!parse_body(p, &node->list, "endfilter", NULL, NULL)) return NULL;
  p->pos++;
  return node;
}

static struct jinja_node *parse_with(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_WITH, line);
  while (node && jinja_now(p)->type != T_BLOCK_END) {
    if (node->list2.n && !jinja_expect(p, T_COMMA)) return NULL;
    struct jinja_node *pair = jinja_node_new(p, N_SET, jinja_now(p)->line);
    if (!pair || !(pair->a = jinja_parse_target(p, false)) || !jinja_expect(p, T_ASSIGN)) return NULL;
    if (!(pair->b = jinja_parse_expression(p, true))) return NULL;
    jinja_list_add(&node->list2, pair);
  }
  if (!node || !parse_body(p, &node->list, "endwith", NULL, NULL)) return NULL;
  p->pos++;
  return node;
}

/* {% generation %} marks what the model is to write (for training masks); rendering gives its body. */
static struct jinja_node *parse_generation(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_SCOPE, line);
  if (!node || !parse_body(p, &node->list, "endgeneration", NULL, NULL)) return NULL;
  p->pos++;
  return node;
}

static struct jinja_node *parse_print(struct jinja_parser *p, int line)
{
  struct jinja_node *node = jinja_node_new(p, N_CONCAT, line), *print = jinja_node_new(p, N_PRINT, line);
  while (node && jinja_now(p)->type != T_BLOCK_END) {
    if (node->list.n && !jinja_expect(p, T_COMMA)) return NULL;
    struct jinja_node *item = jinja_parse_expression(p, true);
    if (!item) return NULL;
    jinja_list_add(&node->list, item);
  }
  if (print) print->a = node;
  return node ? print : NULL;
}

static struct jinja_node *parse_jump(struct jinja_parser *p, enum jinja_node_kind kind, int line)
{
  if (p->loop_depth == 0) return jinja_parse_fail(p, SITS_FORMAT, line, "break or continue outside a loop");
  return jinja_node_new(p, kind, line);
}

static struct jinja_node *parse_statement(struct jinja_parser *p)
{
  const struct jinja_token *token = jinja_now(p);
  int line = token->line;
  if (jinja_skip_name(p, "if")) return parse_if(p, line);
  if (jinja_skip_name(p, "for")) return parse_for(p, line);
  if (jinja_skip_name(p, "set")) return parse_set(p, line);
  if (jinja_skip_name(p, "macro")) return parse_macro(p, line);
  if (jinja_skip_name(p, "call")) return parse_call_block(p, line);
  if (jinja_skip_name(p, "filter")) return parse_filter_block(p, line);
  if (jinja_skip_name(p, "with")) return parse_with(p, line);
  if (jinja_skip_name(p, "generation")) return parse_generation(p, line);
  if (jinja_skip_name(p, "print")) return parse_print(p, line);
  if (jinja_skip_name(p, "break")) return parse_jump(p, N_BREAK, line);
  if (jinja_skip_name(p, "continue")) return parse_jump(p, N_CONTINUE, line);
  static const char *const refused[] = {"include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug"};
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
    if (jinja_at_name(p, refused[i])) return jinja_parse_fail(p, SITS_UNSUPPORTED, line, "tag '%s' is not supported", refused[i]);
  if (token->type == T_NAME)
    return jinja_parse_fail(p, SITS_FORMAT, line, "unknown or misplaced tag '%.*s'", (int)(token->n_bytes < 40 ? token->n_bytes : 40),
                            token->text);
  return jinja_parse_fail(p, SITS_FORMAT, line, "expected a tag name, got %s", jinja_token_text(token));
}

/* One text, {{ }} or {% %} into body. *is_end is set, with the end word as the current token, at one of the ends. */
static bool parse_piece(struct jinja_parser *p, struct jinja_list *body, const char *const ends[3], bool *is_end)
{
  const struct jinja_token *token = jinja_now(p);
  struct jinja_node *node = NULL;
  p->pos++;
  if (token->type == T_DATA) {
    if (!(node = jinja_node_new(p, N_TEXT, token->line))) return false;
    const struct jinja_str *text = jinja_str_make(&p->program->arena, token->text, token->n_bytes, false);
    if (!text) return jinja_parse_fail(p, SITS_NOMEM, token->line, "out of memory"), false;
    node->value = jv_str(text);
  } else if (token->type == T_VAR_BEGIN) {
    node = jinja_node_new(p, N_PRINT, token->line);
    if (!node || !(node->a = jinja_parse_tuple(p, 0)) || !jinja_expect(p, T_VAR_END)) return false;
  } else { /* T_BLOCK_BEGIN: the lexer yields nothing else between tags */
    for (int i = 0; i < 3; i++)
      if (ends[i] && jinja_at_name(p, ends[i])) return *is_end = true, true;
    node = parse_statement(p);
    if (!node || !block_end(p)) return false;
  }
  jinja_list_add(body, node);
  return true;
}

/* Statements until {% end %}; afterwards the end word is the current token. Entered with the opening tag's own end at hand. */
static bool parse_body(struct jinja_parser *p, struct jinja_list *body, const char *end, const char *end2, const char *end3)
{
  const char *const ends[3] = {end, end2, end3};
  int line = jinja_now(p)->line;
  if (jinja_now(p)->type == T_COLON) p->pos++; /* tolerated, as in jinja2 */
  if (!block_end(p)) return false;
  if (p->depth >= JINJA_MAX_PARSE_DEPTH)
    return jinja_parse_fail(p, SITS_FORMAT, line, "over the nesting limit of %d", JINJA_MAX_PARSE_DEPTH), false;
  p->depth++;
  bool is_end = false, ok = true;
  while (ok && !is_end) {
    if (jinja_now(p)->type == T_EOF) {
      jinja_parse_fail(p, SITS_FORMAT, line, "tag is never closed: expected '%s'", end3 ? end3 : end);
      ok = false;
    } else {
      ok = parse_piece(p, body, ends, &is_end);
    }
  }
  p->depth--;
  return ok;
}

/* ---- Checks on the finished tree ---- */

static bool check_tree(struct jinja_parser *p, const struct jinja_node *node, bool is_soft, int depth);

static bool check_list(struct jinja_parser *p, const struct jinja_list *list, bool is_soft, int depth)
{
  for (const struct jinja_node *node = list->head; node; node = node->next)
    if (!check_tree(p, node, is_soft, depth)) return false;
  return true;
}

static bool check_tree(struct jinja_parser *p, const struct jinja_node *node, bool is_soft, int depth)
{
  if (depth > JINJA_MAX_TREE_DEPTH)
    return jinja_parse_fail(p, SITS_FORMAT, node->line, "over the nesting limit of %d", JINJA_MAX_TREE_DEPTH), false;
  if ((node->kind == N_FILTER || node->kind == N_TEST) && !node->builtin && !is_soft)
    return jinja_parse_fail(p, SITS_FORMAT, node->line, "no %s named '%.*s'", node->kind == N_FILTER ? "filter" : "test",
                            (int)(node->text->n_bytes < 40 ? node->text->n_bytes : 40), node->text->data), false;
  if (node->kind == N_IF) { /* a long chain of elif is walked, not recursed into */
    for (; node; node = node->b)
      if (!check_tree(p, node->a, true, depth + 1) || !check_list(p, &node->list, true, depth + 1) ||
          !check_list(p, &node->list2, true, depth + 1))
        return false;
    return true;
  }
  bool has_frame = node->kind == N_FOR || node->kind == N_SET_BLOCK || node->kind == N_MACRO || node->kind == N_FILTER_BLOCK ||
                   node->kind == N_WITH || node->kind == N_SCOPE;
  bool is_soft_inside = is_soft || node->kind == N_COND;
  const struct jinja_node *const children[] = {node->a, node->b, node->c};
  for (int i = 0; i < 3; i++)
    if (children[i] && !check_tree(p, children[i], is_soft_inside, depth + 1)) return false;
  is_soft_inside = is_soft_inside && !has_frame;
  return check_list(p, &node->list, is_soft_inside, depth + 1) && check_list(p, &node->list2, is_soft_inside, depth + 1);
}

static bool parse_template(struct jinja_parser *p)
{
  static const char *const names[] = {"loop", "tools", "caller", "varargs", "kwargs"};
  struct jinja_program *program = p->program;
  uint32_t *const symbols[] = {&program->sym_loop, &program->sym_tools, &program->sym_caller, &program->sym_varargs, &program->sym_kwargs};
  for (size_t i = 0; i < 5; i++)
    if (!jinja_intern(p, names[i], strlen(names[i]), symbols[i])) return false;
  static const char *const no_ends[3] = {NULL, NULL, NULL};
  bool is_end = false;
  while (jinja_now(p)->type != T_EOF)
    if (!parse_piece(p, &program->body, no_ends, &is_end)) return false;
  return check_list(p, &program->body, false, 1);
}

enum sits_status jinja_compile(struct jinja_program *program, const char *source, size_t n_bytes, struct sits_error *err)
{
  *program = (struct jinja_program){0};
  arena_init(&program->arena, JINJA_MAX_PROGRAM_BYTES);
  struct jinja_parser p = {.program = program, .err = err};
  size_t n_tokens;
  enum sits_status status = jinja_lex(&program->arena, source, n_bytes, &p.tokens, &n_tokens, err);
  if (status) return status;
  if (!parse_template(&p)) return p.status;
  return SITS_OK;
}

void jinja_program_fini(struct jinja_program *program) { arena_fini(&program->arena); }
