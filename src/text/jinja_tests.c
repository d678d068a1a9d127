/* Tests: what may stand behind `is`. */
#include <string.h>

#include "text/jinja_internal.h"

#define TEST(name) static bool test_##name(struct jinja_run *run, const struct jinja_call *call, struct jv *out)
#define SIMPLE(name, condition) \
  TEST(name) \
  { \
    (void)run; \
    struct jv v = call->self; \
    *out = jv_bool(condition); \
    return true; \
  }

SIMPLE(boolean, v.type == JV_BOOL)
SIMPLE(callable, jinja_is_callable(v))
SIMPLE(defined, v.type != JV_UNDEFINED)
SIMPLE(undefined, v.type == JV_UNDEFINED)
SIMPLE(is_false, v.type == JV_BOOL && !v.b)
SIMPLE(is_true, v.type == JV_BOOL && v.b)
SIMPLE(none, v.type == JV_NONE)
SIMPLE(float, v.type == JV_FLOAT)
SIMPLE(integer, v.type == JV_INT)
SIMPLE(number, jv_is_number(v))
SIMPLE(string, v.type == JV_STR)
SIMPLE(mapping, v.type == JV_DICT)
SIMPLE(iterable, jinja_is_iterable(v) || v.type == JV_LOOP)
SIMPLE(sequence, v.type == JV_STR || jv_is_seq(v) || v.type == JV_DICT || v.type == JV_RANGE || v.type == JV_UNDEFINED)
SIMPLE(escaped, v.type == JV_STR && v.is_markup)
SIMPLE(filter, v.type == JV_STR && jinja_find_filter(v.s->data, v.s->n_bytes) != NULL)
SIMPLE(test, v.type == JV_STR && jinja_find(jinja_tests, v.s->data, v.s->n_bytes) != NULL)

static bool compare(struct jinja_run *run, enum jinja_token_type op, const struct jinja_call *call, struct jv *out)
{
  bool holds;
  if (!jinja_compare(run, op, call->self, call->a[0], &holds)) return false;
  *out = jv_bool(holds);
  return true;
}

TEST(eq) { return compare(run, T_EQ, call, out); }
TEST(ne) { return compare(run, T_NE, call, out); }
TEST(lt) { return compare(run, T_LT, call, out); }
TEST(le) { return compare(run, T_LE, call, out); }
TEST(gt) { return compare(run, T_GT, call, out); }
TEST(ge) { return compare(run, T_GE, call, out); }
TEST(in) { return compare(run, T_IN, call, out); }

static bool remainder_is(struct jinja_run *run, struct jv v, struct jv divisor, int64_t wanted, struct jv *out)
{
  struct jv rest;
  bool is_equal;
  if (!jinja_binary(run, T_MOD, v, divisor, &rest) || !jinja_equal(run, rest, jv_int(wanted), &is_equal)) return false;
  *out = jv_bool(is_equal);
  return true;
}

TEST(divisibleby) { return remainder_is(run, call->self, call->a[0], 0, out); }
TEST(even) { return remainder_is(run, call->self, jv_int(2), 0, out); }
TEST(odd) { return remainder_is(run, call->self, jv_int(2), 1, out); }

/* Python's `is`: identity of objects; equal small values of one type count as the same. */
TEST(sameas)
{
  struct jv a = call->self, b = call->a[0];
  bool is_same = a.type == b.type;
  if (is_same && (a.type == JV_STR || a.type == JV_INT || a.type == JV_FLOAT || a.type == JV_BOOL)) {
    if (!jinja_equal(run, a, b, &is_same)) return false;
  } else if (is_same && a.type != JV_NONE) {
    is_same = a.s == b.s;
  }
  *out = jv_bool(is_same);
  return true;
}

/* str(v).islower() and isupper(). */
static bool has_case(struct jinja_run *run, struct jv v, bool wants_upper, struct jv *out)
{
  struct jv text, changed;
  if (!jinja_to_str(run, v, &text)) return false;
  if (!jinja_change_case(run, text, wants_upper ? CASE_UPPER : CASE_LOWER, &changed)) return false;
  bool is_kept = jinja_str_compare(text.s, changed.s) == 0;
  if (is_kept && !jinja_change_case(run, text, wants_upper ? CASE_LOWER : CASE_UPPER, &changed)) return false;
  *out = jv_bool(is_kept && jinja_str_compare(text.s, changed.s) != 0);
  return true;
}

TEST(lower) { return has_case(run, call->self, false, out); }
TEST(upper) { return has_case(run, call->self, true, out); }

const struct jinja_builtin jinja_tests[] = {
    {"boolean", "", 0, test_boolean},
    {"callable", "", 0, test_callable},
    {"defined", "", 0, test_defined},
    {"undefined", "", 0, test_undefined},
    {"false", "", 0, test_is_false},
    {"true", "", 0, test_is_true},
    {"none", "", 0, test_none},
    {"float", "", 0, test_float},
    {"integer", "", 0, test_integer},
    {"number", "", 0, test_number},
    {"string", "", 0, test_string},
    {"mapping", "", 0, test_mapping},
    {"iterable", "", 0, test_iterable},
    {"sequence", "", 0, test_sequence},
    {"escaped", "", 0, test_escaped},
    {"filter", "", 0, test_filter},
    {"test", "", 0, test_test},
    {"eq", "other", 1, test_eq},
    {"==", "other", 1, test_eq},
    {"equalto", "other", 1, test_eq},
    {"ne", "other", 1, test_ne},
    {"!=", "other", 1, test_ne},
    {"lt", "other", 1, test_lt},
    {"<", "other", 1, test_lt},
    {"lessthan", "other", 1, test_lt},
    {"le", "other", 1, test_le},
    {"<=", "other", 1, test_le},
    {"gt", "other", 1, test_gt},
    {">", "other", 1, test_gt},
    {"greaterthan", "other", 1, test_gt},
    {"ge", "other", 1, test_ge},
    {">=", "other", 1, test_ge},
    {"in", "seq", 1, test_in},
    {"divisibleby", "num", 1, test_divisibleby},
    {"even", "", 0, test_even},
    {"odd", "", 0, test_odd},
    {"sameas", "other", 1, test_sameas},
    {"lower", "", 0, test_lower},
    {"upper", "", 0, test_upper},
    {0},
};
