/* Private to src/text/jinja*.c and chat_template.c: the Jinja interpreter's values, syntax tree and evaluation state.
 *
 * Words. A program is a compiled template: tokens (jinja_lex.c) become nodes (jinja_parse.c, jinja_expr.c) in one arena, and never change
 * afterwards. A run is one rendering: its values live in the run's own arena and die with it. `struct jv` is a value, 16 bytes, copied
 * freely.
 *
 * Rules:
 * 1. Values are immutable once another value can see them, except namespaces, loops, generators, cyclers and joiners.
 * 2. A function that can fail returns bool; false means that run->status is set and the error text is filled (jinja_fail, jinja_limit).
 * 3. Whatever costs more than constant time pays for it first with jinja_charge; whatever recurses calls jinja_enter and jinja_leave.
 * 4. Strings are valid UTF-8; lengths and indices seen by templates count code points.
 * 5. Everything in a program is read-only while rendering, so threads may share it. */
#ifndef SITS_TEXT_JINJA_INTERNAL_H
#define SITS_TEXT_JINJA_INTERNAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/buf.h"
#include "sits2026/status.h"

/* Bounds. Over one of them a template fails with "... limit" in its text. */
enum {
  JINJA_MAX_SOURCE_BYTES = 1 << 20,
  JINJA_MAX_PARSE_DEPTH = 150,        /* nesting of blocks and brackets in the source */
  JINJA_MAX_TREE_DEPTH = 400,         /* height of the syntax tree: chains of operators count too */
  JINJA_MAX_DEPTH = 800,              /* nested evaluations, macro calls included */
  JINJA_MAX_VALUE_DEPTH = 200,        /* nesting of lists and dicts that printing, comparing or hashing walks */
  JINJA_MAX_STEPS = 20 * 1000 * 1000, /* units of work of up to about 50 ns: one per node evaluated, one per 32 bytes copied */
  JINJA_MAX_OUTPUT_BYTES = 16 << 20,
  JINJA_MAX_RUN_BYTES = 128 << 20,
  JINJA_MAX_PROGRAM_BYTES = 64 << 20,
  JINJA_MAX_RANGE = 100000,           /* as jinja2's sandbox */
};

/* ---- Values ---- */

enum jinja_type {
  JV_ABSENT, /* no value at all: an argument not given, a name not bound; never visible to a template */
  JV_UNDEFINED, JV_NONE, JV_BOOL, JV_INT, JV_FLOAT, JV_STR, JV_LIST, JV_TUPLE, JV_DICT, JV_NAMESPACE, JV_RANGE, JV_VIEW, JV_GENERATOR,
  JV_MACRO, JV_LOOP, JV_METHOD, JV_FUNCTION, JV_CYCLER, JV_JOINER, JV_SLICE,
};

struct jv {
  uint8_t type;
  bool is_markup; /* JV_STR only: markupsafe.Markup, text that is already escaped */
  union {
    bool b;
    int64_t i;
    double f;
    const struct jinja_str *s;
    const struct jinja_seq *seq;   /* list, tuple */
    struct jinja_dict *dict;       /* dict, namespace */
    const struct jinja_undef *undef;
    const struct jinja_range *range; /* range, slice */
    const struct jinja_view *view;
    struct jinja_gen *gen;
    const struct jinja_macro *macro;
    struct jinja_loop *loop;
    const struct jinja_method *method;
    const struct jinja_builtin *function;
    struct jinja_cycler *cycler;   /* cycler, joiner */
  };
};

struct jinja_str {
  const char *data;
  size_t n_bytes;
  size_t n_chars;             /* code points */
  struct jinja_grow *grow;    /* the growable block that data starts, or NULL: see jinja_concat */
};

struct jinja_seq { size_t n; const struct jv *items; bool is_group; /* a pair of groupby: has .grouper and .list */ };

struct jinja_pair { struct jv key, value; uint64_t hash; };
/* Insertion ordered. slots is an open-addressed index (position + 1), built once there are more than eight pairs. */
struct jinja_dict { size_t n, capacity; struct jinja_pair *pairs; uint32_t *slots; size_t n_slots; };

enum jinja_undef_kind { UNDEF_NAME, UNDEF_ATTRIBUTE, UNDEF_HINT, UNDEF_UNSAFE };
struct jinja_undef {
  enum jinja_undef_kind kind;
  const char *obj_type;       /* UNDEF_ATTRIBUTE, UNDEF_UNSAFE: name of the type of the object asked; NULL: None was */
  const char *hint;           /* UNDEF_HINT */
  struct jv name;             /* name, attribute or index asked for */
};

struct jinja_range { int64_t start, stop, step; bool has_start, has_stop, has_step; }; /* has_*: for slices */
enum jinja_view_kind { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS };
struct jinja_view { enum jinja_view_kind kind; const struct jinja_dict *dict; };

struct jinja_run;
struct jinja_node;

/* One pass over an iterable. */
struct jinja_iter { struct jv source; size_t pos; };

/* A lazy sequence (map, select, ...): next sets *has to false at the end. Consumed by iterating, as in Python. */
struct jinja_gen {
  bool (*next)(struct jinja_run *run, struct jinja_gen *gen, struct jv *out, bool *has);
  struct jinja_iter source;
  const struct jinja_builtin *function; /* filter or test to apply, or NULL */
  struct jv path;                       /* attribute path, or absent */
  struct jv fallback;                   /* map's default, or absent */
  const struct jinja_call *call;        /* arguments for function */
  bool keeps;                           /* select keeps where the test is true; reject where false */
  bool by_attribute, is_begun, done;
  const struct jinja_seq *items;        /* eager results to hand out */
  size_t pos;
};

/* Arguments of a call. Builtins with a parameter list find them bound by position in `a`. */
struct jinja_kw { const struct jinja_str *name; struct jv value; };
enum { JINJA_MAX_BOUND = 6 };
struct jinja_call {
  struct jv self;              /* filters and tests: the value; methods: the object */
  size_t n_pos, n_kw;
  const struct jv *pos;
  const struct jinja_kw *kw;
  struct jv a[JINJA_MAX_BOUND];
};

/* A filter, test, method or global function. params: names in order, space-separated, the first n_required of them obligatory;
 * "*" leaves the arguments unbound in pos and kw. */
struct jinja_builtin {
  const char *name;
  const char *params;
  int n_required;
  bool (*fn)(struct jinja_run *run, const struct jinja_call *call, struct jv *out);
};
struct jinja_method { struct jv self; const struct jinja_builtin *fn; };

struct jinja_var { uint32_t symbol; struct jv value; };
/* A frame of names, innermost first; NULL is the template's own top level (run->root). */
struct jinja_scope { struct jinja_scope *parent; struct jinja_var *vars; uint32_t n, capacity; bool is_captured; };

struct jinja_macro { const struct jinja_node *node; struct jinja_scope *scope; };

struct jinja_loop {
  const struct jinja_node *node;
  struct jinja_scope *scope;      /* where the loop stands */
  struct jv iterable;
  struct jinja_iter iter;
  const struct jinja_seq *drained; /* items fetched ahead for `length` */
  size_t drained_pos;
  struct jv after, current, before, last_changed;
  bool at_end;
  int64_t index0, length;         /* length -1: not known yet */
  int depth0;
};

struct jinja_cycler { const struct jv *items; size_t n, pos; struct jv separator; bool used; };

/* ---- Syntax tree ---- */

enum jinja_token_type {
  T_EOF, T_DATA, T_VAR_BEGIN, T_VAR_END, T_BLOCK_BEGIN, T_BLOCK_END, T_NAME, T_STR, T_INT, T_FLOAT,
  T_ADD, T_SUB, T_MUL, T_DIV, T_FLOORDIV, T_MOD, T_POW, T_TILDE, T_LPAREN, T_RPAREN, T_LBRACKET, T_RBRACKET, T_LBRACE, T_RBRACE,
  T_EQ, T_NE, T_GT, T_GE, T_LT, T_LE, T_ASSIGN, T_DOT, T_COLON, T_PIPE, T_COMMA, T_SEMICOLON,
  T_IN, T_NOTIN, /* made by the parser from names */
};

struct jinja_token {
  enum jinja_token_type type;
  int line;
  const char *text; /* data, name, decoded string */
  size_t n_bytes;
  union { int64_t i; double f; };
};

enum jinja_node_kind {
  /* statements */
  N_TEXT, N_PRINT, N_IF, N_FOR, N_SET, N_SET_BLOCK, N_MACRO, N_CALL_BLOCK, N_FILTER_BLOCK, N_WITH, N_SCOPE, N_BREAK, N_CONTINUE,
  /* expressions */
  N_CONST, N_NAME, N_ATTR, N_ITEM, N_SLICE, N_CALL, N_FILTER, N_TEST, N_NEG, N_POS, N_NOT, N_BINARY, N_AND, N_OR, N_COMPARE, N_CONCAT,
  N_COND, N_LIST, N_TUPLE, N_DICT, N_PIPE_INPUT,
  /* parts */
  N_NSREF, N_ARG,
};
enum jinja_arg_kind { ARG_POS, ARG_KW, ARG_STAR, ARG_STAR2 };

/* Children by kind:
 *   TEXT value            PRINT a              IF a=test list=body b=elif (an IF) list2=else
 *   FOR a=target b=iterable c=condition list=body list2=else    SET a=target b=value      SET_BLOCK a=target b=filter list=body
 *   MACRO symbol list=body list2=parameters (NAME; default in a)  CALL_BLOCK a=call b=MACRO  FILTER_BLOCK b=filter list=body
 *   WITH list=body list2=pairs (SET)  SCOPE list=body
 *   CONST value  NAME symbol  ATTR a text  ITEM a b  SLICE a b c  CALL a list=ARGs  FILTER, TEST a=input text builtin list=ARGs
 *   NEG POS NOT a  BINARY op a b  AND OR a b  COMPARE a list=operands (op on each)  CONCAT list  COND a=test b=then c=else
 *   LIST TUPLE list  DICT list (ARG: a=key b=value)  NSREF symbol text  ARG op=kind a text */
struct jinja_list { struct jinja_node *head, *tail; uint32_t n; };
struct jinja_node {
  uint8_t kind, op;
  bool flag;                      /* FOR: recursive */
  bool wants_varargs, wants_kwargs, wants_caller; /* MACRO */
  int line;
  uint32_t symbol;
  struct jinja_node *next;
  struct jinja_node *a, *b, *c;
  struct jinja_list list, list2;
  const struct jinja_builtin *builtin;
  const struct jinja_str *text;
  struct jv value;
};

struct jinja_program {
  struct arena arena;
  struct jinja_list body;
  const struct jinja_str **symbols;          /* name by symbol */
  const struct jinja_builtin **globals;      /* builtin function of that name, or NULL, by symbol */
  uint32_t n_symbols;
  bool reads_tools;
  uint32_t sym_loop, sym_tools, sym_caller, sym_varargs, sym_kwargs;
};

/* ---- A rendering ---- */

struct jinja_out { char *data; size_t size, capacity; size_t limit; };

struct jinja_run {
  const struct jinja_program *program;
  struct arena arena;
  struct jinja_out *out;
  struct jv *root;             /* [n_symbols] names set at top level */
  const struct jv *context;    /* [n_symbols] the caller's variables */
  int64_t steps_left;
  int depth, line;
  int64_t now_unix;
  struct jv pipe_input;        /* what a set or filter block hands to its filters */
  enum sits_status status;     /* first failure */
  struct sits_error *err;
};

/* jinja_lex.c: split source (normalised to LF) into tokens. */
enum sits_status jinja_lex(struct arena *arena, const char *source, size_t n_bytes, struct jinja_token **out, size_t *n_out,
                           struct sits_error *err) SITS_MUST_CHECK;

/* jinja_parse.c: compile into *program, whose arena is initialised by the call; jinja_program_fini also after a failure. */
enum sits_status jinja_compile(struct jinja_program *program, const char *source, size_t n_bytes, struct sits_error *err) SITS_MUST_CHECK;
void jinja_program_fini(struct jinja_program *program);

/* jinja_parser: shared by jinja_parse.c and jinja_expr.c. */
struct jinja_scope_note { struct jinja_scope_note *outer; struct jinja_node *macro; };
struct jinja_parser {
  struct jinja_program *program;
  struct jinja_token *tokens;
  size_t pos;
  int depth, loop_depth;
  struct jinja_scope_note *macros;   /* enclosing macros, innermost first */
  struct jinja_dict symbol_ids;
  uint32_t symbol_capacity;
  struct sits_error *err;
  enum sits_status status;
};
enum jinja_tuple_flags { TUPLE_NO_COND = 1, TUPLE_END_IN = 2, TUPLE_END_RECURSIVE = 4, TUPLE_PARENS = 8 };
struct jinja_node *jinja_parse_tuple(struct jinja_parser *p, int flags);
struct jinja_node *jinja_parse_expression(struct jinja_parser *p, bool with_cond);
struct jinja_node *jinja_parse_target(struct jinja_parser *p, bool with_namespace);
struct jinja_node *jinja_parse_filter_chain(struct jinja_parser *p, struct jinja_node *input, bool start_inline);
struct jinja_node *jinja_node_new(struct jinja_parser *p, enum jinja_node_kind kind, int line); /* NULL: failed */
void *jinja_parse_fail(struct jinja_parser *p, enum sits_status status, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5))); /* records the first failure; returns NULL */
void jinja_list_add(struct jinja_list *list, struct jinja_node *node);
bool jinja_expect(struct jinja_parser *p, enum jinja_token_type type);
bool jinja_at_name(const struct jinja_parser *p, const char *name);
bool jinja_skip_name(struct jinja_parser *p, const char *name);
bool jinja_intern(struct jinja_parser *p, const char *name, size_t n_bytes, uint32_t *symbol);
const char *jinja_token_text(const struct jinja_token *token);
static inline struct jinja_token *jinja_now(const struct jinja_parser *p) { return &p->tokens[p->pos]; }

/* jinja_run.c: failure, bounds, memory. */
bool jinja_fail(struct jinja_run *run, const char *kind, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool jinja_raise(struct jinja_run *run, const char *text, size_t n_bytes); /* raise_exception: the text alone, cut at a character */
bool jinja_limit(struct jinja_run *run, const char *what);
bool jinja_charge(struct jinja_run *run, size_t steps);
bool jinja_enter(struct jinja_run *run);
void jinja_leave(struct jinja_run *run);
bool jinja_no_memory(struct jinja_run *run, size_t n_bytes); /* an allocation of n_bytes failed: memory limit or SITS_NOMEM */
void *jinja_alloc(struct jinja_run *run, size_t count, size_t n_bytes);   /* zeroed; NULL: failure recorded */
bool jinja_emit(struct jinja_run *run, struct jinja_out *out, const char *text, size_t n_bytes);
bool jinja_emit_text(struct jinja_run *run, struct jinja_out *out, const char *text);
bool jinja_out_str(struct jinja_run *run, struct jinja_out *out, struct jv *str); /* the bytes gathered become a string */

/* jinja_value.c: making and looking at values. */
static inline struct jv jv_absent(void) { return (struct jv){.type = JV_ABSENT}; }
static inline struct jv jv_none(void) { return (struct jv){.type = JV_NONE}; }
static inline struct jv jv_bool(bool b) { return (struct jv){.type = JV_BOOL, .b = b}; }
static inline struct jv jv_int(int64_t i) { return (struct jv){.type = JV_INT, .i = i}; }
static inline struct jv jv_float(double f) { return (struct jv){.type = JV_FLOAT, .f = f}; }
static inline struct jv jv_str(const struct jinja_str *s) { return (struct jv){.type = JV_STR, .s = s}; }
static inline bool jv_is(struct jv v, enum jinja_type type) { return v.type == type; }
static inline bool jv_given(struct jv v) { return v.type != JV_ABSENT; }
static inline bool jv_is_seq(struct jv v) { return v.type == JV_LIST || v.type == JV_TUPLE; }
static inline bool jv_is_intlike(struct jv v) { return v.type == JV_INT || v.type == JV_BOOL; }
static inline bool jv_is_number(struct jv v) { return jv_is_intlike(v) || v.type == JV_FLOAT; }
static inline int64_t jv_as_int(struct jv v) { return v.type == JV_BOOL ? v.b : v.i; }
static inline double jv_as_float(struct jv v) { return v.type == JV_FLOAT ? v.f : (double)jv_as_int(v); }
const char *jinja_type_name(struct jv v);                    /* Python's name: "str", "NoneType", "dict" */
struct jinja_str *jinja_str_make(struct arena *arena, const char *text, size_t n_bytes, bool copies); /* NULL: no memory */
bool jinja_str_new(struct jinja_run *run, const char *text, size_t n_bytes, struct jv *out);   /* copies */
bool jinja_str_view(struct jinja_run *run, const char *text, size_t n_bytes, struct jv *out);  /* borrows: text lives as long as the run */
bool jinja_str_is(struct jv v, const char *text);
int jinja_str_compare(const struct jinja_str *a, const struct jinja_str *b);
bool jinja_concat(struct jinja_run *run, const struct jinja_str *a, const struct jinja_str *b, struct jv *out);
size_t jinja_str_offset(const struct jinja_str *s, size_t index); /* byte offset of a code point, index <= n_chars */
bool jinja_substr(struct jinja_run *run, const struct jinja_str *s, size_t from, size_t to, struct jv *out); /* code points */
bool jinja_list_new(struct jinja_run *run, enum jinja_type type, const struct jv *items, size_t n, bool copies, struct jv *out);
struct jinja_vec { struct jv *items; size_t n, capacity; };
bool jinja_vec_push(struct jinja_run *run, struct jinja_vec *vec, struct jv item);
bool jinja_vec_list(struct jinja_run *run, struct jinja_vec *vec, struct jv *out);
bool jinja_undefined(struct jinja_run *run, enum jinja_undef_kind kind, struct jv obj, struct jv name, const char *hint, struct jv *out);
bool jinja_undefined_fail(struct jinja_run *run, struct jv undef);  /* raise what using the undefined value raises */
bool jinja_truth(struct jinja_run *run, struct jv v, bool *out);
bool jinja_length(struct jinja_run *run, struct jv v, int64_t *n);   /* len(v) */
bool jinja_from_json(struct jinja_run *run, const json_t *json, struct jv *out);

/* jinja_dict.c */
bool jinja_hash(struct jinja_run *run, struct jv key, uint64_t *hash);           /* fails with TypeError: unhashable */
bool jinja_is_hashable(struct jv key);
bool jinja_dict_new(struct jinja_run *run, struct jv *out);
bool jinja_dict_find(struct jinja_run *run, const struct jinja_dict *dict, struct jv key, struct jv *out); /* absent when missing */
bool jinja_dict_set(struct jinja_run *run, struct jinja_dict *dict, struct jv key, struct jv value);
struct jv jinja_dict_get_text(const struct jinja_dict *dict, const char *text, size_t n_bytes); /* absent when missing */
bool jinja_dict_put_str(struct arena *arena, struct jinja_dict *dict, const struct jinja_str *key, struct jv value);

/* jinja_iter.c */
bool jinja_iter_init(struct jinja_run *run, struct jv v, struct jinja_iter *iter);  /* TypeError when not iterable */
bool jinja_iter_next(struct jinja_run *run, struct jinja_iter *iter, struct jv *out, bool *has);
bool jinja_is_iterable(struct jv v);
bool jinja_to_vec(struct jinja_run *run, struct jv v, struct jinja_vec *vec);
int64_t jinja_range_length(const struct jinja_range *range);
/* Element i of a range; wraps nowhere for 0 <= i < length (unsigned, because i * step alone may pass 64 bits). */
static inline int64_t jinja_range_at(const struct jinja_range *range, int64_t i)
{
  return (int64_t)((uint64_t)range->start + (uint64_t)i * (uint64_t)range->step);
}

/* jinja_repr.c */
bool jinja_emit_str(struct jinja_run *run, struct jinja_out *out, struct jv v);   /* str(v) */
bool jinja_emit_repr(struct jinja_run *run, struct jinja_out *out, struct jv v);  /* repr(v) */
bool jinja_to_str(struct jinja_run *run, struct jv v, struct jv *out);            /* str(v), Markup kept */
size_t jinja_float_text(double f, char text[40]);
bool jinja_emit_escaped(struct jinja_run *run, struct jinja_out *out, const char *text, size_t n_bytes);
bool jinja_escape(struct jinja_run *run, struct jv v, struct jv *out);            /* markupsafe.escape */

/* jinja_ops.c */
bool jinja_binary(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b, struct jv *out);
bool jinja_equal(struct jinja_run *run, struct jv a, struct jv b, bool *out);
bool jinja_compare(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b, bool *out); /* all comparison operators, in */
bool jinja_less(struct jinja_run *run, struct jv a, struct jv b, bool *out);
bool jinja_negate(struct jinja_run *run, struct jv v, bool is_minus, struct jv *out);

/* jinja_access.c */
bool jinja_getattr(struct jinja_run *run, struct jv obj, const struct jinja_str *name, struct jv *out);
bool jinja_getitem(struct jinja_run *run, struct jv obj, struct jv key, struct jv *out);
bool jinja_getslice(struct jinja_run *run, struct jv obj, const struct jinja_range *slice, struct jv *out);
bool jinja_getpath(struct jinja_run *run, struct jv obj, struct jv path, struct jv fallback, struct jv *out); /* "a.0.b" or index */

/* jinja_call.c */
bool jinja_invoke(struct jinja_run *run, const struct jinja_builtin *fn, const struct jinja_call *call, struct jv *out);
bool jinja_call_value(struct jinja_run *run, struct jv callee, const struct jinja_call *call, struct jv *out);
bool jinja_is_callable(struct jv v);
bool jinja_call_loop(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_call *call, struct jv *out); /* jinja_eval.c */
bool jinja_call_macro(struct jinja_run *run, const struct jinja_macro *macro, const struct jinja_call *call, struct jv *out);
bool jinja_loop_attr(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_str *name, struct jv *out, bool *found);
bool jinja_loop_peek(struct jinja_run *run, struct jinja_loop *loop);
bool jinja_loop_fetch(struct jinja_run *run, struct jinja_loop *loop, struct jv *out, bool *has);

/* jinja_eval.c */
enum sits_status jinja_render(const struct jinja_program *program, const json_t *variables, int64_t now_unix, struct buf *out,
                              struct sits_error *err) SITS_MUST_CHECK;
bool jinja_eval(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *node, struct jv *out);
bool jinja_scope_set(struct jinja_run *run, struct jinja_scope *scope, uint32_t symbol, struct jv value);

/* Tables of builtins; each ends with a NULL name. */
extern const struct jinja_builtin jinja_filters[], jinja_sequence_filters[], jinja_text_filters[], jinja_tests[], jinja_globals[];
extern const struct jinja_builtin jinja_str_methods[], jinja_dict_methods[], jinja_seq_methods[], jinja_cycler_methods[];
const struct jinja_builtin *jinja_find(const struct jinja_builtin *table, const char *name, size_t n_bytes);
const struct jinja_builtin *jinja_find_filter(const char *name, size_t n_bytes);

/* Shared between builtins. */
bool jinja_tojson(struct jinja_run *run, const struct jinja_call *call, struct jv *out);                        /* jinja_tojson.c */
bool jinja_percent(struct jinja_run *run, struct jv format, struct jv arg, struct jv *out);                     /* jinja_format.c: % */
bool jinja_format_method(struct jinja_run *run, const struct jinja_call *call, struct jv *out);                 /* str.format */
bool jinja_strip(struct jinja_run *run, struct jv s, struct jv chars, int sides, struct jv *out);               /* sides: 1 left, 2 right */
bool jinja_replace(struct jinja_run *run, struct jv s, struct jv from, struct jv to, int64_t count, struct jv *out);
bool jinja_splitlines(struct jinja_run *run, struct jv s, bool keeps_ends, struct jinja_vec *vec);
enum jinja_case { CASE_UPPER, CASE_LOWER, CASE_TITLE, CASE_CAPITALIZE, CASE_SWAP };
bool jinja_change_case(struct jinja_run *run, struct jv s, enum jinja_case how, struct jv *out);
bool jinja_join(struct jinja_run *run, struct jv separator, struct jv items, struct jv path, bool strict, struct jv *out);
bool jinja_int_arg(struct jinja_run *run, struct jv v, int64_t fallback, int64_t *out); /* absent or None: fallback; TypeError otherwise */
bool jinja_sort(struct jinja_run *run, struct jv *items, const struct jv *keys, size_t n, bool is_reverse);     /* stable */
bool jinja_fold_key(struct jinja_run *run, struct jv v, bool is_case_sensitive, struct jv *out);

/* jinja_unicode.c: tables generated from the Unicode Character Database. */
uint32_t jinja_upper(uint32_t c);
uint32_t jinja_lower(uint32_t c);
const char *jinja_upper_special(uint32_t c); /* upper case of more than one character (UTF-8), or NULL */
bool jinja_is_space(uint32_t c);   /* as str.isspace and re's \s */
bool jinja_is_alpha(uint32_t c);
bool jinja_is_digit(uint32_t c);
bool jinja_is_printable(uint32_t c);

#endif
