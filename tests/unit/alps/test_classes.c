/* Who makes room for whom, and when again: held entries of one's own class count for nothing, and a chunk in slices is given up for a
 * higher class as often as its own class has read one since. In virtual time, where each token and each decode takes a fixed time. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alps/alps.h"
#include "base/mem.h"

enum { MAX_IDS = 64, P = 64, N_PAGES = 100000, HIGH = 0, NORMAL = 1, LOW = 2, READS = 20 };

struct sequence { int32_t n_known, n_computed, n_limit, n_sliced; };

struct device {
  struct alps *alps;
  struct sequence all[MAX_IDS];
  int64_t now_us, step_us, decode_us, token_us, slice_token_us;
  int32_t n_evicted;
};

static struct device the_device;

static void send(struct device *d, int32_t id, int32_t service_class, int32_t n_prompt, int32_t n_output)
{
  const struct alps_request request = {.service_class = service_class, .tenant = (uint64_t)id, .arrival_us = d->now_us,
                                       .n_known = n_prompt, .n_limit = n_prompt + n_output, .width = 1};
  d->all[id] = (struct sequence){.n_known = n_prompt, .n_limit = n_prompt + n_output};
  alps_enqueue(d->alps, id, &request);
}

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  (void)user, (void)id;
  *out = (struct alps_admitted){.n_available = N_PAGES};
}

static void compute(struct device *d, const struct alps_item *item)
{
  struct sequence *s = &d->all[item->id];
  s->n_computed += item->n_tokens;
  s->n_known += item->is_last;
  if (s->n_known >= s->n_limit) alps_remove(d->alps, item->id);
  else alps_update(d->alps, item->id, s->n_known, s->n_computed, (s->n_computed + P - 1) / P, 0);
}

/* One step, whose slice reads so many tokens; the plan as it was carried out. */
static struct alps_plan step(struct device *d, int32_t n_sliced)
{
  struct alps_plan plan;
  while (alps_plan(d->alps, d->now_us, N_PAGES, admit, d, &plan) == SITS_AGAIN) {
    for (int32_t i = 0; i < plan.n_victims; i++) {
      struct sequence *s = &d->all[plan.victims[i]];
      s->n_computed = 0;
      d->n_evicted++;
      alps_requeue(d->alps, plan.victims[i], s->n_known);
    }
  }
  int64_t us = d->step_us + d->decode_us * plan.n_decode;
  for (int32_t i = plan.n_decode; i < plan.n_items; i++) us += d->token_us * plan.items[i].n_tokens;
  for (int32_t i = 0; i < plan.n_items; i++) compute(d, &plan.items[i]);
  if (plan.slice.id >= 0) {
    struct sequence *s = &d->all[plan.slice.id];
    s->n_sliced = (plan.slice_begins ? 0 : s->n_sliced) + n_sliced;
    plan.sliced_us = n_sliced * d->slice_token_us;
    plan.slice_ended = s->n_sliced >= plan.slice.n_tokens;
    us += plan.sliced_us;
    if (plan.slice_ended) compute(d, &plan.slice);
  }
  d->now_us += us;
  alps_report(d->alps, &plan, us);
  alps_check(d->alps);
  return plan;
}

static bool is_running(const struct device *d, int32_t id)
{
  const int32_t *ids;
  const int32_t n = alps_running(d->alps, &ids);
  for (int32_t i = 0; i < n; i++)
    if (ids[i] == id) return true;
  return false;
}

static struct device *open_device(struct alps_options options)
{
  struct device *d = &the_device;
  options.max_entries = MAX_IDS, options.max_seqs = 32, options.max_batch_tokens = 512, options.max_rows = 32;
  options.page_tokens = P, options.n_pages = N_PAGES, options.itl_target_us = 20000;
  *d = (struct device){.now_us = 1000000, .slice_token_us = 300};
  assert_int_equal(alps_create(&options, &d->alps), SITS_OK);
  return d;
}

static void close_device(struct device *d)
{
  alps_destroy(d->alps);
  assert_int_equal(mem_live_blocks(), 0);
}

/* As many of a class run as the target has time for. Some clients stop reading: those take no time, and leave for who comes. */
static void test_held_ones_make_room(void **state)
{
  (void)state;
  for (int32_t n_reading = 0; n_reading <= 6; n_reading += 2) {
    struct device *d = open_device((struct alps_options){.prior = {2000, 2000, 0.1, 50, 0.1}});
    d->step_us = 2000, d->decode_us = 2000, d->token_us = 50;
    for (int32_t i = 0; i < 12; i++) {
      send(d, i, NORMAL, 64, 4000);
      for (int k = 0; k < 50; k++) step(d, 0);
    }
    int32_t n_running = 0;
    for (int32_t i = 0; i < 12; i++) {
      if (!is_running(d, i)) alps_remove(d->alps, i);
      else if (n_running++ >= n_reading) alps_hold(d->alps, i, true);
    }
    assert_in_range(n_running, 7, 9);
    send(d, 40, NORMAL, 64, 100);
    for (int k = 0; k < 3; k++) step(d, 0);
    assert_true(is_running(d, 40));
    assert_in_range(d->n_evicted, n_reading > 0, n_running - n_reading);
    close_device(d);
  }
}

enum end { READ_ONE, CANCELLED, SAID_ONE_TOKEN };

/* A first low-class chunk has been given up for high class and has ended one way or another. Steps until the next one makes room. */
static int steps_to_take(enum end end, int32_t owner_class)
{
  struct device *d = open_device((struct alps_options){.slice_tokens = 128, .slices_behind = true, .slices_by_rate = true,
                                                       .prior = {12000, 500, 0.1, 1000, 0.1}});
  d->step_us = 12000, d->decode_us = 500, d->token_us = 1000;
  struct alps_plan plan;
  send(d, 0, HIGH, 1, 100000);
  for (int i = 0; i < 50; i++) step(d, 0);
  send(d, 1, LOW, 100, end == SAID_ONE_TOKEN ? 1 : 1000);
  while (step(d, 1).slice.id != 1) {}
  step(d, READS);
  send(d, 2, HIGH, 100, 1);
  int n = 0;
  while (step(d, 4).slice.id != 2) assert_true(++n < 100);
  do plan = step(d, READS); while (plan.slice.id == 2);
  if (end == CANCELLED) alps_remove(d->alps, 1);
  else for (int i = 0; i < 400; i++) step(d, READS);
  d->now_us += 11000000; /* chunks are long again */
  for (int i = 0; i < 5; i++) step(d, 0);
  send(d, 3, owner_class, 1000, 1000);
  while (step(d, 1).slice.id != 3) {}
  step(d, 8);
  send(d, 4, HIGH, 100, 1);
  for (n = 0; n < 300 && step(d, 2).slice.id != 4; n++) {}
  close_device(d);
  return n;
}

static void test_a_chunk_makes_room_again(void **state)
{
  (void)state;
  for (int32_t c = NORMAL; c <= LOW; c++) {
    const int least = steps_to_take(READ_ONE, c);
    assert_in_range(least, 0, 20);
    assert_int_equal(steps_to_take(CANCELLED, c), least);
    assert_int_equal(steps_to_take(SAID_ONE_TOKEN, c), least);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_held_ones_make_room), cmocka_unit_test(test_a_chunk_makes_room_again)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
