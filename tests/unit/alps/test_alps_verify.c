/* What drafted tokens cost on a device that computes rows in pairs: each number of tokens is predicted as its own steps took, others by
 * those around them, and the planner takes as many drafted tokens as pay at those times. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>

#include "alps/alps_internal.h"

enum { P = 64, MOST = 8 };

/* Each token 100 us, those of every second pair 200 us more. */
static double step_us(int32_t n_tokens)
{
  return 1000 + 100.0 * n_tokens + 200.0 * ((n_tokens - 1) / 2);
}

static void learn(struct alps_verify *v, int32_t skipped, int32_t n)
{
  for (int32_t i = 0; i < n; i++) {
    const int32_t n_tokens = 1 + i * 5 % MOST;
    if (n_tokens != skipped) alps_verify_observe(v, n_tokens, step_us(n_tokens));
  }
}

static void test_each_number_of_tokens(void **state)
{
  struct alps_verify v;
  alps_verify_init(&v);
  assert_true(alps_verify_predict(&v, 1) <= 0);
  alps_verify_observe(&v, 1, step_us(1));
  assert_true(alps_verify_predict(&v, 1) == step_us(1));
  assert_true(alps_verify_predict(&v, 8) > alps_verify_predict(&v, 7)); /* a guess, until there are others */
  learn(&v, 7, 400);
  for (int32_t n = 1; n <= MOST; n++) {
    const double us = alps_verify_predict(&v, n), error = us / step_us(n) - 1;
    print_message("%d tokens: %.0f us, predicted %.0f\n", (int)n, step_us(n), us);
    if (n != 7) assert_true(error > -0.01 && error < 0.01);
    else assert_true(error > -0.05 && error < 0.05);
  }
  assert_true(alps_verify_predict(&v, ALPS_VERIFY_TOKENS + 1) > alps_verify_predict(&v, ALPS_VERIFY_TOKENS));
  alps_verify_observe(&v, ALPS_VERIFY_TOKENS + 1, 1); /* left out */
  assert_true(alps_verify_predict(&v, 1) > 0.99 * step_us(1));
}

static void test_follows_a_slower_machine(void **state)
{
  struct alps_verify v;
  alps_verify_init(&v);
  learn(&v, 0, 400);
  for (int32_t i = 0; i < 600; i++) alps_verify_observe(&v, 1 + i * 5 % MOST, 3 * step_us(1 + i * 5 % MOST));
  for (int32_t n = 1; n <= MOST; n++) {
    const double times = alps_verify_predict(&v, n) / step_us(n);
    assert_true(times > 2.9 && times < 3.1);
  }
}

static double times(const struct alps_verify *v, int32_t n_tokens)
{
  return alps_verify_predict(v, n_tokens) / alps_verify_predict(v, 1);
}

static void test_a_rare_long_step(void **state)
{
  struct alps_verify v;
  alps_verify_init(&v);
  learn(&v, 0, 400);
  const double before = times(&v, 4);
  alps_verify_observe(&v, 1, step_us(1));
  alps_verify_observe(&v, 4, 10 * step_us(4));
  assert_true(times(&v, 4) > before && times(&v, 4) < 1.02 * before); /* as an average of 20 steps it would be 1.45 times */
}

/* What meets all steps says nothing of their tokens: a machine whose speed swings by half, and single steps of twice the time. */
static void test_a_disturbed_machine(void **state)
{
  struct alps_verify v;
  uint64_t random = 1;
  alps_verify_init(&v);
  for (int32_t i = 0; i < 2000; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const int32_t n_tokens = 1 + (int32_t)((random >> 33) % MOST);
    const double swing = 1 + 0.5 * (i % 200 < 100 ? i % 100 : 100 - i % 100) / 100, hiccup = (random >> 40) % 25 == 0 ? 2 : 1;
    alps_verify_observe(&v, n_tokens, step_us(n_tokens) * swing * hiccup);
    for (int32_t n = 2; i >= 400 && i % 100 == 0 && n <= MOST; n++) {
      const double error = times(&v, n) / (step_us(n) / step_us(1)) - 1;
      assert_true(error > -0.1 && error < 0.1);
    }
  }
}

/* Steps of 3 tokens were met by something each time; then others are chosen. What was learned of 3 fades, and 2 and 4 tell of it. */
static void test_a_wrong_lesson_fades(void **state)
{
  struct alps_verify v;
  alps_verify_init(&v);
  for (int32_t i = 0; i < 100; i++) {
    alps_verify_observe(&v, 1 + i % 4, 1000 + 100 * (i % 4) + (i % 4 == 2 ? 600 : 0));
  }
  assert_true(times(&v, 3) > 1.25 * 1.2);
  for (int32_t i = 0; i < 3000; i++) {
    static const int32_t chosen[] = {1, 2, 4};
    alps_verify_observe(&v, chosen[i % 3], 900 + 100 * chosen[i % 3]);
  }
  assert_true(times(&v, 3) > 0.97 * 1.2 && times(&v, 3) < 1.05 * 1.2);
}

/* Steps of other kinds lie between: these two are no pair. */
static void test_a_pause(void **state)
{
  struct alps_verify v;
  alps_verify_init(&v);
  learn(&v, 0, 400);
  const double before = times(&v, 4);
  alps_verify_observe(&v, 1, step_us(1));
  const double paired = times(&v, 4);
  alps_verify_pause(&v);
  alps_verify_observe(&v, 4, 1.2 * step_us(4));
  assert_true(times(&v, 4) == paired);
  assert_true(paired > 0.99 * before && paired < 1.01 * before);
}

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  (void)user;
  (void)id;
  *out = (struct alps_admitted){.n_available = 100};
}

/* Tokens of the step of a lone sequence with seven guesses of that chance. */
static int32_t planned(float chance)
{
  struct alps_options options = {.max_entries = 4, .max_seqs = 4, .max_batch_tokens = 64, .max_rows = 64, .page_tokens = P, .n_pages = 100,
                                 .prior = {.fixed_us = 1000, .per_token_us = 200}};
  struct alps *alps;
  struct alps_plan plan;
  float chances[MOST];
  for (int i = 0; i < MOST; i++) chances[i] = chance;
  assert_int_equal(alps_create(&options, &alps), SITS_OK);
  struct alps_request r = {.service_class = 1, .n_known = 10, .n_limit = 1000, .width = 1};
  alps_enqueue(alps, 0, &r);
  assert_int_equal(alps_plan(alps, 0, 100, admit, NULL, &plan), SITS_OK);
  assert_int_equal(plan.items[0].n_tokens, 10);
  alps_update(alps, 0, 11, 10, 1, 0);
  alps_report(alps, &plan, 1000);
  learn(&alps->verify, 0, 400);
  alps_offer(alps, 0, 7, chances);
  assert_int_equal(alps_plan(alps, 0, 100, admit, NULL, &plan), SITS_OK);
  assert_int_equal(plan.n_items, 1);
  const int32_t n_tokens = plan.items[0].n_tokens;
  alps_destroy(alps);
  return n_tokens;
}

static void test_planner_fills_pairs(void **state)
{
  for (int i = 0; i < 20; i++) {
    const int32_t n_tokens = planned(0.05f * (float)i);
    assert_true(n_tokens == 1 || n_tokens % 2 == 0);
  }
  assert_int_equal(planned(0.02f), 1);  /* nothing pays */
  assert_int_equal(planned(0.3f), 2);
  assert_int_equal(planned(0.95f), 8);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_number_of_tokens),
      cmocka_unit_test(test_follows_a_slower_machine), cmocka_unit_test(test_a_rare_long_step),
      cmocka_unit_test(test_a_disturbed_machine),
      cmocka_unit_test(test_a_wrong_lesson_fades), cmocka_unit_test(test_a_pause),
      cmocka_unit_test(test_planner_fills_pairs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
