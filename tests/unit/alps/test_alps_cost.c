/* The cost model where the machine is taken away again and again: what it cannot see meanwhile does not run away, and it comes back. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <math.h>

#include <cmocka.h>

#include "alps/alps_cost.h"

static double uniform(uint64_t *random)
{
  *random = *random * 6364136223846793005u + 1442695040888963407u;
  return (double)(*random >> 11) * 0x1p-53;
}

static double machine_us(const struct alps_cost_work *work)
{
  return 3000 + 400.0 * work->n_decode + 5 * (double)work->decode_kv_tokens / 1024 + 450.0 * work->n_prompt_tokens +
         60 * work->prompt_depth / 1024;
}

/* Few decodes, or a prompt's few tokens beside them, as where high-class answers leave little time for prompts. */
static struct alps_cost_work some_work(uint64_t *random)
{
  struct alps_cost_work work = {0};
  const int32_t n_decode = (int32_t)(uniform(random) * 4);
  const int32_t n_prompt = uniform(random) < 0.3 || n_decode == 0 ? 1 + (int32_t)(uniform(random) * 12) : 0;
  for (int32_t i = 0; i < n_decode; i++) alps_cost_add_decode(&work, 96 + (int32_t)(uniform(random) * 120));
  if (n_prompt > 0) alps_cost_add_chunk(&work, n_prompt, (int32_t)(uniform(random) * 96));
  return work;
}

static struct alps_cost_work one_decode(uint64_t *random)
{
  struct alps_cost_work work = {0};
  alps_cost_add_decode(&work, 96 + (int32_t)(uniform(random) * 120));
  return work;
}

static void test_what_is_not_seen_does_not_run_away(void **state)
{
  const struct alps_cost_coefficients none = {0};
  const double budget_us = 20000;
  int32_t n_asked = 0, n_far_over = 0;
  double dearest = 0;
  for (uint64_t seed = 1; seed <= 20; seed++) {
    struct alps_cost cost;
    uint64_t random = seed;
    double spell = 1; /* how much slower the machine is for a while */
    alps_cost_init(&cost, &none, 0);
    for (int i = 0; i < 4000; i++) {
      const struct alps_cost_work work = i / 400 % 2 ? some_work(&random) : one_decode(&random); /* prompts in slices are not seen */
      if (i % 40 == 0) spell = uniform(&random) < 0.5 ? 1 : 1 + 4 * uniform(&random);
      const double hiccup = uniform(&random) < 0.1 ? 1 + 4 * uniform(&random) : 1;
      alps_cost_observe(&cost, &work, machine_us(&work) * spell * hiccup);
      struct alps_cost_work step = {0};
      alps_cost_add_decode(&step, 200);
      alps_cost_add_chunk(&step, alps_cost_chunk(&cost, &step, budget_us, 0, 0, 512), 0);
      if (i < 100) continue;
      for (int t = 3; t < 5; t++) {
        for (int k = 0; k < ALPS_COST_KNEES; k++) dearest = fmax(dearest, cost.filters[k].w[t]);
      }
      n_asked++;
      n_far_over += machine_us(&step) > 3 * budget_us;
    }
  }
  print_message("%.2f %% of chunks take more than three times the budget; dearest coefficient %.3g us\n",
                100.0 * n_far_over / n_asked, dearest);
  assert_true(n_far_over * 100 < n_asked);
  assert_true(dearest < 1e6);
}

/* A model that has come to predict nothing at all learns again, at once. */
static void test_nothing_is_not_for_ever(void **state)
{
  const struct alps_cost_coefficients none = {0};
  struct alps_cost cost;
  uint64_t random = 7;
  alps_cost_init(&cost, &none, 0);
  for (int i = 0; i < 200; i++) {
    const struct alps_cost_work work = some_work(&random);
    alps_cost_observe(&cost, &work, machine_us(&work));
  }
  for (int k = 0; k < ALPS_COST_KNEES; k++) {
    for (int i = 0; i < ALPS_COST_TERMS; i++) cost.filters[k].w[i] = 0;
  }
  double error = 0;
  for (int i = 0; i < 60; i++) {
    const struct alps_cost_work work = some_work(&random);
    if (i >= 20) error += fabs(alps_cost_predict(&cost, &work) / machine_us(&work) - 1) / 40;
    alps_cost_observe(&cost, &work, machine_us(&work));
  }
  print_message("after twenty steps: %.1f %% off\n", 100 * error);
  assert_true(error < 0.2);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_what_is_not_seen_does_not_run_away),
                                     cmocka_unit_test(test_nothing_is_not_for_ever)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
