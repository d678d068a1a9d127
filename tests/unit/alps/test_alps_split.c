/* When a prompt is handed to the prefill device and when not: the cases of alps_split.h, on a planner that has learned a device of which
 * 2,000 us a step, 100 us a sequence and 20 us a prompt token are known. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alps/alps_internal.h"
#include "alps/alps_split.h"
#include "base/mem.h"

enum { P = 64, SEQS = 32 };

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  (void)user;
  (void)id;
  *out = (struct alps_admitted){.n_available = 4000};
}

static double step_us(const struct alps_cost_work *work)
{
  return 2000 + 100.0 * work->n_decode + 20.0 * work->n_prompt_tokens;
}

/* A planner with n sequences in decode that knows its device. */
static struct alps *open_decode(int32_t n)
{
  struct alps_options options = {.max_entries = 64, .max_seqs = SEQS, .max_batch_tokens = 8192, .page_tokens = P, .n_pages = 4000,
                                 .itl_target_us = 20000, .ttft_target_us = 1000000};
  struct alps *alps;
  struct alps_plan plan;
  int32_t n_computed[SEQS] = {0}, n_known[SEQS];
  int64_t now_us = 0;
  assert_int_equal(alps_create(&options, &alps), SITS_OK);
  for (int32_t i = 0; i < SEQS; i++) {
    struct alps_request r = {.service_class = 1, .n_known = 400 + 13 * i, .n_limit = 4000, .width = 1};
    n_known[i] = r.n_known;
    alps_enqueue(alps, i, &r);
  }
  for (int32_t step = 0; step < 200; step++) {
    assert_int_equal(alps_plan(alps, now_us, 4000, admit, NULL, &plan), SITS_OK);
    now_us += (int64_t)step_us(&plan.work);
    for (int32_t i = 0; i < plan.n_items; i++) {
      int32_t id = plan.items[i].id;
      n_computed[id] += plan.items[i].n_tokens;
      n_known[id] += plan.items[i].is_last;
      alps_update(alps, id, n_known[id], n_computed[id], (n_computed[id] + P - 1) / P, 0);
    }
    alps_report(alps, &plan, (int64_t)step_us(&plan.work));
  }
  for (int32_t i = n; i < SEQS; i++) alps_remove(alps, i);
  alps_check(alps);
  return alps;
}

static void close_decode(struct alps *alps)
{
  alps_destroy(alps);
  assert_int_equal(mem_live_blocks(), 0);
}

/* A prefill device that reads a token in 10 us. */
static struct alps_split fast_reader(void)
{
  struct alps_split split = {.ttft_target_us = 1000000};
  alps_split_sent(&split, 10000, 0);
  alps_split_back(&split, 10000, true, 100000);
  assert_int_equal(split.n_away_tokens, 0);
  return split;
}

static void test_long_prompts_are_handed_over(void **state)
{
  struct alps *alps = open_decode(16);
  struct alps_split split = fast_reader();
  assert_true(alps_split_pays(&split, alps, 2048, 30, 0, 0));
  split.read_us = split.read_tokens = 0; /* nothing known of the reader */
  assert_true(alps_split_pays(&split, alps, 2048, 30, 0, 0));
  assert_false(alps_split_pays(&split, alps, 0, 30, 0, 0));
  close_decode(alps);
}

static void test_short_ones_are_not(void **state)
{
  struct alps *alps = open_decode(16); /* a step of 3,600 us */
  struct alps_split split = fast_reader();
  assert_false(alps_split_pays(&split, alps, 40, 10, 0, 0)); /* 1,000 us more */
  assert_true(alps_split_pays(&split, alps, 128, 10, 0, 0)); /* 2,760 */
  split.always = true;
  assert_true(alps_split_pays(&split, alps, 40, 10, 0, 0));
  close_decode(alps);
}

static void test_a_reader_that_is_behind_gets_no_more(void **state)
{
  struct alps *alps = open_decode(16);
  struct alps_split split = fast_reader();
  alps_split_sent(&split, 60000, 0); /* 0.6 s of work */
  assert_true(alps_split_pays(&split, alps, 2048, 30, 0, 0));
  assert_false(alps_split_pays(&split, alps, 2048, 30, 0, 500000)); /* it has waited for half a second */
  alps_split_sent(&split, 60000, 0);
  assert_false(alps_split_pays(&split, alps, 2048, 30, 0, 0));
  alps_split_back(&split, 60000, false, 0); /* cancelled: it says nothing about the speed */
  assert_true(alps_split_pays(&split, alps, 2048, 30, 0, 0));
  assert_int_equal(split.n_sent, 3);
  close_decode(alps);
}

static void test_an_idle_decode_device_helps(void **state)
{
  struct alps *alps = open_decode(0);
  struct alps_split split = fast_reader();
  assert_true(alps_split_pays(&split, alps, 4096, 30, 0, 0)); /* 41 ms there, 84 here */
  alps_split_sent(&split, 8192, 0);
  assert_false(alps_split_pays(&split, alps, 4096, 30, 0, 0)); /* 123 ms there */
  close_decode(alps);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_long_prompts_are_handed_over), cmocka_unit_test(test_short_ones_are_not),
                                     cmocka_unit_test(test_a_reader_that_is_behind_gets_no_more),
                                     cmocka_unit_test(test_an_idle_decode_device_helps)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
