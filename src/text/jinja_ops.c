/* Operators with Python's meaning: arithmetic, comparison, membership. Integers have 64 bits; overflow is an error, never wrapped. */
#include <math.h>
#include <string.h>

#include "text/jinja_internal.h"

static const char *op_text(enum jinja_token_type op)
{
  switch (op) {
  case T_ADD: return "+";
  case T_SUB: return "-";
  case T_MUL: return "*";
  case T_DIV: return "/";
  case T_FLOORDIV: return "//";
  case T_MOD: return "%";
  case T_LT: return "<";
  case T_LE: return "<=";
  case T_GT: return ">";
  case T_GE: return ">=";
  default: return "** or pow()";
  }
}

static bool unsupported(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b)
{
  return jinja_fail(run, "TypeError", "unsupported operand type(s) for %s: '%s' and '%s'", op_text(op), jinja_type_name(a),
                    jinja_type_name(b));
}

static bool overflow(struct jinja_run *run) { return jinja_fail(run, "OverflowError", "integer beyond 64 bits is not supported"); }

/* ---- Numbers ---- */

static bool int_pow(struct jinja_run *run, int64_t base, int64_t exponent, struct jv *out)
{
  if (exponent < 0) {
    if (base == 0) return jinja_fail(run, "ZeroDivisionError", "0.0 cannot be raised to a negative power");
    return *out = jv_float(pow((double)base, (double)exponent)), true;
  }
  int64_t result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return overflow(run);
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) return overflow(run);
  }
  return *out = jv_int(result), true;
}

static bool int_binary(struct jinja_run *run, enum jinja_token_type op, int64_t a, int64_t b, struct jv *out)
{
  int64_t r = 0;
  bool is_over = false;
  if ((op == T_DIV || op == T_FLOORDIV || op == T_MOD) && b == 0)
    return jinja_fail(run, "ZeroDivisionError", op == T_DIV ? "division by zero" : "integer division or modulo by zero");
  switch (op) {
  case T_ADD: is_over = __builtin_add_overflow(a, b, &r); break;
  case T_SUB: is_over = __builtin_sub_overflow(a, b, &r); break;
  case T_MUL: is_over = __builtin_mul_overflow(a, b, &r); break;
  case T_DIV: return *out = jv_float((double)a / (double)b), true;
  case T_FLOORDIV:
    if (a == INT64_MIN && b == -1) return overflow(run);
    r = a / b - (a % b != 0 && (a < 0) != (b < 0));
    break;
  case T_MOD:
    r = b == -1 ? 0 : a % b;
    if (r != 0 && (r < 0) != (b < 0)) r += b;
    break;
  default: return int_pow(run, a, b, out);
  }
  if (is_over) return overflow(run);
  return *out = jv_int(r), true;
}

static bool float_binary(struct jinja_run *run, enum jinja_token_type op, double a, double b, struct jv *out)
{
  if ((op == T_DIV || op == T_FLOORDIV || op == T_MOD) && b == 0) return jinja_fail(run, "ZeroDivisionError", "float division by zero");
  double r;
  switch (op) {
  case T_ADD: r = a + b; break;
  case T_SUB: r = a - b; break;
  case T_MUL: r = a * b; break;
  case T_DIV: r = a / b; break;
  case T_FLOORDIV: r = floor(a / b); break;
  case T_MOD:
    r = fmod(a, b);
    if (r != 0 && (r < 0) != (b < 0)) r += b;
    break;
  default: r = pow(a, b); break;
  }
  if (op == T_POW && a < 0 && isnan(r) && !isnan(b)) return jinja_fail(run, "TypeError", "complex numbers are not supported");
  return *out = jv_float(r), true;
}

bool jinja_negate(struct jinja_run *run, struct jv v, bool is_minus, struct jv *out)
{
  if (v.type == JV_UNDEFINED) return jinja_undefined_fail(run, v);
  if (v.type == JV_FLOAT) return *out = jv_float(is_minus ? -v.f : v.f), true;
  if (!jv_is_intlike(v))
    return jinja_fail(run, "TypeError", "bad operand type for unary %s: '%s'", is_minus ? "-" : "+", jinja_type_name(v));
  int64_t i = jv_as_int(v);
  if (is_minus && i == INT64_MIN) return overflow(run);
  return *out = jv_int(is_minus ? -i : i), true;
}

/* ---- Sequences and strings ---- */

static bool add_strings(struct jinja_run *run, struct jv a, struct jv b, struct jv *out)
{
  bool is_markup = a.is_markup || b.is_markup;
  if (is_markup && (!jinja_escape(run, a, &a) || !jinja_escape(run, b, &b))) return false;
  if (!jinja_concat(run, a.s, b.s, out)) return false;
  out->is_markup = is_markup;
  return true;
}

static bool add_seqs(struct jinja_run *run, struct jv a, struct jv b, struct jv *out)
{
  size_t n = a.seq->n + b.seq->n;
  struct jv *items = jinja_alloc(run, n, sizeof *items);
  if (!items || !jinja_charge(run, n / 8)) return false;
  if (a.seq->n) memcpy(items, a.seq->items, a.seq->n * sizeof *items);
  if (b.seq->n) memcpy(items + a.seq->n, b.seq->items, b.seq->n * sizeof *items);
  return jinja_list_new(run, (enum jinja_type)a.type, items, n, false, out);
}

static bool repeat(struct jinja_run *run, struct jv v, int64_t times, struct jv *out)
{
  size_t n = v.type == JV_STR ? v.s->n_bytes : v.seq->n, total;
  if (times < 0) times = 0;
  if (__builtin_mul_overflow(n, (size_t)times, &total) || total > JINJA_MAX_RUN_BYTES) return jinja_limit(run, "memory");
  if (!jinja_charge(run, total / 32)) return false;
  if (v.type == JV_STR) {
    char *text = jinja_alloc(run, total + 1, 1);
    if (!text) return false;
    for (size_t at = 0; n && at < total; at += n) memcpy(text + at, v.s->data, n);
    bool is_markup = v.is_markup;
    if (!jinja_str_view(run, text, total, out)) return false;
    out->is_markup = is_markup;
    return true;
  }
  struct jv *items = jinja_alloc(run, total, sizeof *items);
  if (!items) return false;
  for (size_t at = 0; n && at < total; at += n) memcpy(items + at, v.seq->items, n * sizeof *items);
  return jinja_list_new(run, (enum jinja_type)v.type, items, total, false, out);
}

static bool add_failed(struct jinja_run *run, struct jv a, struct jv b)
{
  if (a.type == JV_STR) return jinja_fail(run, "TypeError", "can only concatenate str (not \"%s\") to str", jinja_type_name(b));
  if (jv_is_seq(a))
    return jinja_fail(run, "TypeError", "can only concatenate %s (not \"%s\") to %s", jinja_type_name(a), jinja_type_name(b),
                      jinja_type_name(a));
  return unsupported(run, T_ADD, a, b);
}

bool jinja_binary(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b, struct jv *out)
{
  if (jv_is_intlike(a) && jv_is_intlike(b)) return int_binary(run, op, jv_as_int(a), jv_as_int(b), out);
  if (jv_is_number(a) && jv_is_number(b)) return float_binary(run, op, jv_as_float(a), jv_as_float(b), out);
  if (op == T_MOD && a.type == JV_STR) return jinja_percent(run, a, b, out);
  if (a.type == JV_UNDEFINED) return jinja_undefined_fail(run, a);
  if (b.type == JV_UNDEFINED) return jinja_undefined_fail(run, b);
  if (op == T_ADD) {
    if (a.type == JV_STR && b.type == JV_STR) return add_strings(run, a, b, out);
    if (jv_is_seq(a) && a.type == b.type) return add_seqs(run, a, b, out);
    return add_failed(run, a, b);
  }
  if (op == T_MUL) {
    if ((a.type == JV_STR || jv_is_seq(a)) && jv_is_intlike(b)) return repeat(run, a, jv_as_int(b), out);
    if ((b.type == JV_STR || jv_is_seq(b)) && jv_is_intlike(a)) return repeat(run, b, jv_as_int(a), out);
  }
  return unsupported(run, op, a, b);
}

/* ---- Comparison ---- */

static bool equal_dicts(struct jinja_run *run, const struct jinja_dict *a, const struct jinja_dict *b, bool *out)
{
  *out = a->n == b->n;
  for (size_t i = 0; *out && i < a->n; i++) {
    struct jv other;
    if (!jinja_dict_find(run, b, a->pairs[i].key, &other)) return false;
    if (!jv_given(other)) return *out = false, true;
    if (!jinja_equal(run, a->pairs[i].value, other, out)) return false;
  }
  return true;
}

static bool equal_seqs(struct jinja_run *run, const struct jinja_seq *a, const struct jinja_seq *b, bool *out)
{
  *out = a->n == b->n;
  for (size_t i = 0; *out && i < a->n; i++)
    if (!jinja_equal(run, a->items[i], b->items[i], out)) return false;
  return true;
}

static bool equal_ranges(const struct jinja_range *a, const struct jinja_range *b)
{
  int64_t n = jinja_range_length(a);
  if (n != jinja_range_length(b)) return false;
  return n == 0 || (a->start == b->start && (n == 1 || a->step == b->step));
}

bool jinja_equal(struct jinja_run *run, struct jv a, struct jv b, bool *out)
{
  if (!jinja_charge(run, 1)) return false;
  if (jv_is_intlike(a) && jv_is_intlike(b)) return *out = jv_as_int(a) == jv_as_int(b), true;
  if (jv_is_number(a) && jv_is_number(b)) return *out = jv_as_float(a) == jv_as_float(b), true;
  if (a.type != b.type) return *out = false, true;
  bool ok = true;
  switch ((enum jinja_type)a.type) {
  case JV_ABSENT: case JV_UNDEFINED: case JV_NONE: *out = true; return true;
  case JV_STR:
    *out = a.s == b.s || (a.s->n_bytes == b.s->n_bytes && memcmp(a.s->data, b.s->data, a.s->n_bytes) == 0);
    return jinja_charge(run, a.s->n_bytes == b.s->n_bytes ? a.s->n_bytes / 64 : 0);
  case JV_LIST: case JV_TUPLE: case JV_DICT:
    if (!jinja_enter(run)) return false;
    ok = a.type == JV_DICT ? equal_dicts(run, a.dict, b.dict, out) : equal_seqs(run, a.seq, b.seq, out);
    jinja_leave(run);
    return ok;
  case JV_RANGE: *out = equal_ranges(a.range, b.range); return true;
  case JV_METHOD:
    *out = a.method->fn == b.method->fn && a.method->self.type == b.method->self.type && a.method->self.s == b.method->self.s;
    return true;
  default: *out = a.s == b.s; return true; /* identity */
  }
}

/* -1, 0, 1 for values that have an order (nan: 2, less and greater both false). */
static bool order(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b, int *out)
{
  if (!jinja_charge(run, 1)) return false;
  if (jv_is_intlike(a) && jv_is_intlike(b)) {
    int64_t x = jv_as_int(a), y = jv_as_int(b);
    return *out = (x > y) - (x < y), true;
  }
  if (jv_is_number(a) && jv_is_number(b)) {
    double x = jv_as_float(a), y = jv_as_float(b);
    return *out = isnan(x) || isnan(y) ? 2 : (x > y) - (x < y), true;
  }
  if (a.type == JV_STR && b.type == JV_STR) {
    int sign = jinja_str_compare(a.s, b.s);
    *out = (sign > 0) - (sign < 0);
    return jinja_charge(run, a.s->n_bytes / 64);
  }
  if (!jv_is_seq(a) || a.type != b.type) {
    if (a.type == JV_UNDEFINED) return jinja_undefined_fail(run, a);
    if (b.type == JV_UNDEFINED) return jinja_undefined_fail(run, b);
    return jinja_fail(run, "TypeError", "'%s' not supported between instances of '%s' and '%s'", op_text(op), jinja_type_name(a),
                      jinja_type_name(b));
  }
  size_t n = a.seq->n < b.seq->n ? a.seq->n : b.seq->n;
  if (!jinja_enter(run)) return false;
  for (size_t i = 0; i < n; i++) {
    bool is_equal;
    if (!jinja_equal(run, a.seq->items[i], b.seq->items[i], &is_equal)) return false;
    if (is_equal) continue;
    bool ok = order(run, op, a.seq->items[i], b.seq->items[i], out);
    jinja_leave(run);
    return ok;
  }
  jinja_leave(run);
  *out = (a.seq->n > b.seq->n) - (a.seq->n < b.seq->n);
  return true;
}

bool jinja_less(struct jinja_run *run, struct jv a, struct jv b, bool *out)
{
  int sign;
  if (!order(run, T_LT, a, b, &sign)) return false;
  *out = sign < 0;
  return true;
}

static bool contains_str(struct jinja_run *run, struct jv needle, const struct jinja_str *hay, bool *out)
{
  if (needle.type == JV_UNDEFINED) return jinja_undefined_fail(run, needle);
  if (needle.type != JV_STR)
    return jinja_fail(run, "TypeError", "'in <string>' requires string as left operand, not %s", jinja_type_name(needle));
  if (!jinja_charge(run, hay->n_bytes / 32)) return false;
  *out = needle.s->n_bytes == 0 || memmem(hay->data, hay->n_bytes, needle.s->data, needle.s->n_bytes) != NULL;
  return true;
}

static bool contains(struct jinja_run *run, struct jv item, struct jv container, bool *out)
{
  struct jinja_iter iter;
  struct jv other;
  bool has;
  if (container.type == JV_STR) return contains_str(run, item, container.s, out);
  if (container.type == JV_DICT || (container.type == JV_VIEW && container.view->kind == VIEW_KEYS)) {
    const struct jinja_dict *dict = container.type == JV_DICT ? container.dict : container.view->dict;
    if (!jinja_dict_find(run, dict, item, &other)) return false;
    return *out = jv_given(other), true;
  }
  if (!jinja_is_iterable(container))
    return jinja_fail(run, "TypeError", "argument of type '%s' is not iterable", jinja_type_name(container));
  if (!jinja_iter_init(run, container, &iter)) return false;
  for (*out = false; !*out;) {
    if (!jinja_iter_next(run, &iter, &other, &has)) return false;
    if (!has) return true;
    if (!jinja_equal(run, item, other, out)) return false;
  }
  return true;
}

bool jinja_compare(struct jinja_run *run, enum jinja_token_type op, struct jv a, struct jv b, bool *out)
{
  int sign;
  switch (op) {
  case T_EQ: return jinja_equal(run, a, b, out);
  case T_NE:
    if (!jinja_equal(run, a, b, out)) return false;
    *out = !*out;
    return true;
  case T_IN: return contains(run, a, b, out);
  case T_NOTIN:
    if (!contains(run, a, b, out)) return false;
    *out = !*out;
    return true;
  default:
    if (!order(run, op, a, b, &sign)) return false;
    *out = sign != 2 && (op == T_LT ? sign < 0 : op == T_LE ? sign <= 0 : op == T_GT ? sign > 0 : sign >= 0);
    return true;
  }
}
