/* The planner on a modelled device that has pages for some of its sequences only, in virtual time: what copying pages to and fro costs
 * against memory for all and against fewer sequences, and that no page is taken which makes no room. Pages move as the engine moves them:
 * for an eighth of a step's time, those that leave first, short returns at once. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <math.h>
#include <string.h>

#include <cmocka.h>

#include "alps/alps.h"
#include "base/mem.h"

enum { MAX_IDS = 64, P = 64, MAX_SEQS = 32, HIGH = 0, NORMAL = 1, LOW = 2 };

static const double FIXED_US = 2000, SEQ_US = 300, KV_US = 500, TOKEN_US = 250, DEPTH_US = 40; /* KV and DEPTH by 1,024 tokens */
static const double COPY_SHARE = 0.125, COPY_SHORT_US = 1000, COPY_IDLE_US = 5000;

enum way { STAYS, GOES_OUT, COMES_IN };

struct sequence {
  bool is_used, has_spoken;
  int32_t n_known, n_computed, n_pages, n_left;
  int32_t n_away;              /* pages in host memory, or on their way */
  enum way way;
  int32_t n_to_move;
  double arrival_us, first_us;
};

struct device {
  struct alps *alps;
  struct sequence all[MAX_IDS];
  int32_t n_free;              /* pages */
  int32_t moving[MAX_IDS], n_moving;
  double page_us;              /* to copy one */
  double now_us, step_us, copied_us; /* of this step */
  bool is_busy;
  int32_t n_preempted, n_copied, n_tokens, n_done;
};

static struct device the_device;

static int32_t pages_for(int32_t n_tokens) { return (n_tokens + P - 1) / P; }

static int32_t send(struct device *d, int32_t n_prompt, int32_t n_output, int32_t service_class, uint64_t tenant)
{
  int32_t id = 0;
  while (d->all[id].is_used) assert_true(++id < MAX_IDS);
  d->all[id] = (struct sequence){.is_used = true, .n_known = n_prompt, .n_left = n_output, .arrival_us = d->now_us};
  const struct alps_request request = {.service_class = service_class, .tenant = tenant, .arrival_us = (int64_t)d->now_us,
                                       .n_known = n_prompt, .n_limit = n_prompt + n_output, .width = 1};
  alps_enqueue(d->alps, id, &request);
  return id;
}

static void begin_move(struct device *d, int32_t id, enum way way)
{
  d->all[id].way = way;
  d->all[id].n_to_move = d->all[id].n_away;
  d->moving[d->n_moving++] = id;
}

static void end_move(struct device *d, int32_t id)
{
  int32_t n = 0;
  for (int32_t i = 0; i < d->n_moving; i++) {
    if (d->moving[i] != id) d->moving[n++] = d->moving[i];
  }
  d->n_moving = n;
  d->all[id].way = STAYS;
}

static void arrive(struct device *d, int32_t id)
{
  end_move(d, id);
  d->all[id].n_computed = d->all[id].n_away * P;
  d->all[id].n_away = 0;
}

static void copy_page(struct device *d, struct sequence *s)
{
  s->n_to_move--;
  d->n_copied++;
  d->copied_us += d->page_us;
  if (s->way != GOES_OUT) return;
  s->n_pages--;
  d->n_free++;
}

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  struct device *d = user;
  struct sequence *s = &d->all[id];
  if (s->n_away > d->n_free) s->n_away = 0;
  if (s->n_away > 0) {
    s->n_pages = s->n_away;
    d->n_free -= s->n_pages;
    begin_move(d, id, COMES_IN);
    if (d->page_us * s->n_away <= fmax(COPY_SHARE * d->step_us, COPY_SHORT_US)) {
      while (s->n_to_move > 0) copy_page(d, s);
      arrive(d, id);
    }
  }
  const bool is_coming = s->way == COMES_IN;
  *out = (struct alps_admitted){.n_computed = is_coming ? s->n_away * P : s->n_computed, .n_pages = s->n_pages,
                                .n_available = d->n_free, .is_coming = is_coming};
}

static void move_page(struct device *d)
{
  int32_t i = 0;
  while (i < d->n_moving && d->all[d->moving[i]].way != GOES_OUT) i++;
  const int32_t id = d->moving[i < d->n_moving ? i : 0];
  struct sequence *s = &d->all[id];
  copy_page(d, s);
  if (s->n_to_move > 0) return;
  if (s->way == GOES_OUT) {
    end_move(d, id);
    alps_requeue(d->alps, id, s->n_known);
  } else {
    arrive(d, id);
    alps_arrived(d->alps, id);
  }
}

static void preempt(struct device *d, int32_t id)
{
  struct sequence *s = &d->all[id];
  struct alps_cost_work work = {0};
  alps_cost_add_chunk(&work, s->n_computed, 0);
  d->n_preempted++;
  const bool was_coming = s->way == COMES_IN;
  if (was_coming) end_move(d, id);
  if (!was_coming && s->n_computed >= P && 2 * d->page_us * s->n_pages < alps_cost_predict(alps_cost_model(d->alps), &work)) {
    s->n_away = s->n_computed / P;
    d->n_free += s->n_pages - s->n_away;
    s->n_pages = s->n_away;
    s->n_computed = 0;
    begin_move(d, id, GOES_OUT);
    alps_leave(d->alps, id);
    return;
  }
  d->n_free += s->n_pages;
  s->n_pages = s->n_computed = 0;
  alps_requeue(d->alps, id, s->n_known);
}

static void compute(struct device *d, const struct alps_item *item)
{
  struct sequence *s = &d->all[item->id];
  s->n_computed += item->n_tokens;
  d->n_free += s->n_pages - pages_for(s->n_computed);
  s->n_pages = pages_for(s->n_computed);
  assert_true(d->n_free >= 0);
  if (item->is_last) {
    d->n_tokens++;
    if (!s->has_spoken) s->first_us = d->now_us;
    s->has_spoken = true;
    s->n_known++;
    if (--s->n_left == 0) {
      d->n_free += s->n_pages;
      d->n_done++;
      s->is_used = false;
      alps_remove(d->alps, item->id);
      return;
    }
  }
  alps_update(d->alps, item->id, s->n_known, s->n_computed, s->n_pages, 0);
}

static void move_pages(struct device *d)
{
  const double most_us = d->is_busy ? COPY_SHARE * d->step_us : COPY_IDLE_US;
  for (int32_t n = 0; d->n_moving > 0 && (n == 0 || d->copied_us + d->page_us <= most_us); n++) move_page(d);
  if (d->copied_us > 0) alps_spend(d->alps, (int64_t)d->copied_us);
}

static void step(struct device *d)
{
  struct alps_plan plan;
  d->copied_us = 0;
  move_pages(d);
  while (alps_plan(d->alps, (int64_t)d->now_us, d->n_free, admit, d, &plan) == SITS_AGAIN) {
    for (int32_t i = 0; i < plan.n_victims; i++) preempt(d, plan.victims[i]);
    if (plan.n_victims == 0) move_page(d);
  }
  d->is_busy = plan.n_items > 0;
  assert_true(d->is_busy || d->copied_us > 0 || d->n_moving > 0); /* an engine would sleep */
  d->now_us += d->copied_us;
  if (!d->is_busy) return;
  const struct alps_cost_work *w = &plan.work;
  const double us = FIXED_US + SEQ_US * w->n_decode + KV_US * (double)w->decode_kv_tokens / 1024 + TOKEN_US * w->n_prompt_tokens +
                    DEPTH_US * w->prompt_depth / 1024;
  d->now_us += us;
  for (int32_t i = 0; i < plan.n_items; i++) compute(d, &plan.items[i]);
  plan.once_us = (int64_t)d->copied_us;
  alps_report(d->alps, &plan, (int64_t)(us + d->copied_us));
  d->step_us += 0.1 * (us + d->copied_us - d->step_us);
  alps_check(d->alps);
}

static void run_until(struct device *d, int32_t n_done)
{
  for (int32_t i = 0; d->n_done < n_done; i++) {
    assert_true(i < 1000000);
    step(d);
  }
}

/* Three requests have told the planner how long answers are: so long. Later ones are longer, and it admits too many. */
static struct device *open_device(int32_t n_pages, int32_t max_seqs, double page_us, int32_t n_output)
{
  struct device *d = &the_device;
  const struct alps_options options = {.max_entries = MAX_IDS, .max_seqs = max_seqs, .max_batch_tokens = 2048, .max_rows = 64,
                                       .page_tokens = P, .n_pages = n_pages};
  *d = (struct device){.n_free = n_pages, .page_us = page_us};
  assert_int_equal(alps_create(&options, &d->alps), SITS_OK);
  for (int i = 0; i < 3; i++) {
    send(d, 100, n_output, NORMAL, 99);
    run_until(d, i + 1);
  }
  d->now_us = 0;
  d->n_tokens = d->n_done = 0;
  return d;
}

/* Closes it; tokens per second. */
static double close_device(struct device *d, const char *what)
{
  const double rate = d->n_tokens / d->now_us * 1e6;
  print_message("%s, %.1f ms a page: %.0f tokens/s, %d pre-emptions, %.3f pages copied a token\n", what, d->page_us * 1e-3, rate,
                d->n_preempted, (double)d->n_copied / d->n_tokens);
  alps_destroy(d->alps);
  assert_int_equal(mem_live_blocks(), 0);
  return rate;
}

/* Sequences of one class in memory for fewer: each is pre-empted a few times, and more is made than by as many as surely fit. */
static void test_one_class(void **state)
{
  static const struct { int32_t n, n_prompt, n_output, n_fit, n_pages; } cases[] = {
    {20, 300, 1500, 4, 4 * 29}, {20, 40, 250, 4, 4 * 5}, {4, 4000, 1500, 1, 138}};
  (void)state;
  for (int c = 0; c < 6; c++) {
    double rate[3];
    const double page_us = c < 3 ? 100 : 1000;
    const int32_t n = cases[c % 3].n, n_prompt = cases[c % 3].n_prompt, n_output = cases[c % 3].n_output;
    for (int i = 0; i < 3; i++) { /* enough memory, fewer sequences, and neither */
      const int32_t n_pages = i == 0 ? n * pages_for(n_prompt + n_output) : cases[c % 3].n_pages;
      struct device *d = open_device(n_pages, i == 1 ? cases[c % 3].n_fit : MAX_SEQS, page_us, 30);
      for (int32_t k = 0; k < n; k++) send(d, n_prompt, n_output, NORMAL, (uint64_t)k);
      run_until(d, n);
      if (i < 2) assert_int_equal(d->n_preempted, 0);
      else assert_in_range(d->n_preempted, 1, 3 * n);
      rate[i] = close_device(d, i == 0 ? "enough memory" : i == 1 ? "fewer sequences" : "all");
    }
    assert_true(rate[2] > rate[1] && rate[2] < rate[0]);
  }
}

/* One of high class waits for room that the others of it have; what the low class holds does not suffice, so it stays there. Read again or
 * copied, it would have come back at once, to be evicted in the next step. */
static void test_nothing_is_taken_in_vain(void **state)
{
  (void)state;
  for (int c = 0; c < 3; c++) {
    struct device *d = open_device(125, MAX_SEQS, c == 0 ? 100 : c == 1 ? 1000 : 1e6, 50);
    send(d, 1000, 3000, HIGH, 1);
    send(d, 500, 3000, HIGH, 2);
    while (d->n_free > 30) step(d);
    const int32_t waits = send(d, 2000, 400, HIGH, 3);
    for (uint64_t i = 0; i < 3; i++) send(d, 300, 600, LOW, 9);
    run_until(d, 6);
    assert_true(d->all[waits].has_spoken);
    assert_in_range(d->n_preempted, 0, 12);
    assert_true(close_device(d, "in vain") > 330);
  }
}

/* A long one of high class needs the pages of several of low class, of which more wait: what has been freed so far is not for those. */
static void test_room_is_kept_together(void **state)
{
  (void)state;
  for (int c = 0; c < 4; c++) {
    const int32_t n_prompt = c % 2 ? 4000 : 2000;
    struct device *d = open_device(100, 16, c < 2 ? 100 : 1000, 50);
    for (uint64_t i = 0; i < 50; i++) send(d, 400, 600, LOW, i % 5);
    for (int i = 0; i < 150; i++) step(d);
    const double came_us = d->now_us, read_us = n_prompt * (TOKEN_US + 0.5 * n_prompt * DEPTH_US / 1024);
    const int32_t id = send(d, n_prompt, 200, HIGH, 100);
    while (!d->all[id].has_spoken) step(d);
    print_message("first token after %.0f ms, of which reading takes %.0f\n", (d->now_us - came_us) * 1e-3, read_us * 1e-3);
    assert_true(d->now_us - came_us < 1.5 * read_us);
    run_until(d, 51);
    assert_in_range(d->n_preempted, 1, 40);
    close_device(d, "kept together");
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_class), cmocka_unit_test(test_nothing_is_taken_in_vain),
                                     cmocka_unit_test(test_room_is_kept_together)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
