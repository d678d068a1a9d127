/* Pages of pre-empted sequences on their way to host memory and back, one page a step: the others decode on in every step; whatever ends or
 * fails halfway, answers are those of runs alone and nothing is left behind. */
#include "unit/engine/engine_rig.h"

enum { LONG_PROMPT = 600, LONG_PAGES = 9, LONG_OUT = 200, SHORT_PROMPT = 40, SHORT_OUT = 200, GUEST_PROMPT = 700, GUEST_OUT = 40,
       BIG_PROMPT = 970, N_STREAMS = 2, N_PAGES = 22 };

/* A long sequence of low class and two streams have hardly more memory than they need; a guest has none. */
struct scene {
  struct rig rig;
  struct sits_request *longer, *streams[N_STREAMS], *guest;
  struct rig_answer long_got, got[N_STREAMS], guest_got;
  int32_t long_prompt[LONG_PROMPT], prompts[N_STREAMS][SHORT_PROMPT], guest_prompt[BIG_PROMPT];
};

static struct scene scene;

static struct sits_request *submit(struct scene *c, enum sits_class service_class, const int32_t *prompt, int32_t n, int32_t max_tokens)
{
  struct sits_request_params p = {.prompt = prompt, .n_prompt = n, .n_choices = 1, .sampling = rig_greedy(max_tokens),
                                  .service_class = service_class, .id = "t"};
  struct sits_request *request = NULL;
  struct sits_error err = {0};
  p.sampling.ignore_eos = true;
  assert_int_equal(sits_engine_submit(c->rig.engine, &p, &request, &err), SITS_OK);
  return request;
}

static void step(struct scene *c)
{
  engine_step_once(c->rig.engine);
  rig_drain(c->longer, &c->long_got, 1);
  for (int i = 0; i < N_STREAMS; i++) rig_drain(c->streams[i], &c->got[i], 1);
  if (c->guest) rig_drain(c->guest, &c->guest_got, 1);
}

static void invite_of(struct scene *c, enum sits_class service_class, int32_t n_prompt)
{
  memset(&c->guest_got, 0, sizeof c->guest_got);
  c->guest = submit(c, service_class, c->guest_prompt, n_prompt, GUEST_OUT);
}

static void invite(struct scene *c, enum sits_class service_class) { invite_of(c, service_class, GUEST_PROMPT); }

static void dismiss(struct scene *c)
{
  sits_request_cancel(c->guest, -1);
  step(c);
  sits_request_release(c->guest);
  c->guest = NULL;
}

static int n_reads(const struct scene *c) { return atomic_load(&c->rig.fake.n_reads); }
static int n_writes(const struct scene *c) { return atomic_load(&c->rig.fake.n_writes); }

/* Steps until n pages have been read and written; each gives each stream a token, and moves a page at most once they move. */
static void step_until(struct scene *c, int reads, int writes)
{
  for (int i = 0; n_reads(c) < reads || n_writes(c) < writes; i++) {
    const int before = n_reads(c) + n_writes(c);
    const int32_t said[N_STREAMS] = {c->got[0].n, c->got[1].n};
    assert_true(i < 100);
    step(c);
    assert_in_range(n_reads(c) + n_writes(c), before, before + 1);
    for (int k = 0; k < N_STREAMS; k++) assert_int_equal(c->got[k].n, said[k] + 1);
  }
  assert_int_equal(n_reads(c), reads);
  assert_int_equal(n_writes(c), writes);
}

/* All decode, and a guest has come. step_pages: most that are copied between two steps, 0: by time. */
static void open_scene_by(struct scene *c, int32_t step_pages)
{
  struct engine_options options = rig_options();
  options.n_host_pages = LONG_PAGES + 2;
  options.swap_step_pages = step_pages;
  options.max_num_batched_tokens = 256;
  memset(c, 0, sizeof *c);
  rig_open(&c->rig, options, N_PAGES);
  rig_prompt(c->long_prompt, LONG_PROMPT, 1);
  rig_prompt(c->guest_prompt, BIG_PROMPT, 2);
  c->longer = submit(c, SITS_CLASS_LOW, c->long_prompt, LONG_PROMPT, LONG_OUT);
  for (int i = 0; i < N_STREAMS; i++) {
    rig_prompt(c->prompts[i], SHORT_PROMPT, 3 + (uint32_t)i);
    c->streams[i] = submit(c, SITS_CLASS_NORMAL, c->prompts[i], SHORT_PROMPT, SHORT_OUT);
  }
  for (int i = 0; i < 100 && (c->long_got.n < 5 || c->got[0].n < 5 || c->got[1].n < 5); i++) step(c);
  assert_true(c->long_got.n >= 5 && n_reads(c) == 0);
  invite(c, SITS_CLASS_NORMAL);
}

static void open_scene(struct scene *c) { open_scene_by(c, 1); }

static void expect_answer(const struct rig_answer *got, const int32_t *prompt, int32_t n_prompt, int32_t n_out)
{
  static struct rig_answer expected;
  rig_expect(prompt, n_prompt, n_out, true, &expected);
  rig_same(got, &expected);
}

/* To the end of all; the long one's answer is whole unless it was cancelled. */
static void close_scene(struct scene *c, bool is_cancelled)
{
  for (int i = 0; i < 3000 && (c->got[0].n_finish + c->got[1].n_finish < 2 || c->long_got.n_finish == 0); i++) step(c);
  for (int i = 0; i < N_STREAMS; i++) {
    expect_answer(&c->got[i], c->prompts[i], SHORT_PROMPT, SHORT_OUT);
    sits_request_release(c->streams[i]);
  }
  if (is_cancelled) assert_int_equal(c->long_got.finish, SITS_FINISH_CANCELLED);
  else expect_answer(&c->long_got, c->long_prompt, LONG_PROMPT, LONG_OUT);
  sits_request_release(c->longer);
  if (c->guest) {
    if (c->guest_got.n_finish == 0) rig_run(&c->rig, c->guest, &c->guest_got, 1);
    sits_request_release(c->guest);
  }
  rig_idle(&c->rig);
  rig_close(&c->rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static struct engine_stats stats_of(const struct scene *c)
{
  struct engine_stats stats;
  engine_stats(c->rig.engine, &stats);
  return stats;
}

/* Out and in beside the streams; the guest is let in as soon as there is room for it, and the long one goes on where it was. */
static void test_streams_decode_on(void **state)
{
  struct scene *c = &scene;
  (void)state;
  open_scene(c);
  step_until(c, 1, 0);
  struct engine_stats stats = stats_of(c);
  assert_int_equal(stats.n_host_pages_total - stats.n_host_pages_free, LONG_PAGES);
  assert_true(stats.n_preemptions == 1 && stats.n_preemptions_swapped == 0 && stats.n_waiting >= 1);
  step_until(c, LONG_PAGES, 0);
  const int32_t said = c->long_got.n;
  assert_int_equal(stats_of(c).n_preemptions_swapped, 1);
  for (int i = 0; i < 20; i++) step(c);
  assert_true(c->guest_got.n > 10 && c->long_got.n == said);
  dismiss(c);
  const uint64_t computed = stats_of(c).prompt_tokens_computed;
  step_until(c, LONG_PAGES, LONG_PAGES - 1);
  assert_int_equal(c->long_got.n, said);
  step_until(c, LONG_PAGES, LONG_PAGES);
  for (int i = 0; i < 3; i++) step(c);
  assert_true(c->long_got.n > said);
  stats = stats_of(c);
  assert_int_equal(stats.n_host_pages_free, stats.n_host_pages_total);
  assert_true(stats.prompt_tokens_computed - computed < KV_PAGE_TOKENS); /* the partial page alone */
  assert_int_equal(stats.n_preemptions, 1);
  close_scene(c, false);
}

/* Cancelled when so many pages have been moved, out or back in. */
static void test_cancel_halfway(void **state)
{
  struct scene *c = &scene;
  (void)state;
  for (int moved = 1; moved < 2 * LONG_PAGES; moved++) {
    open_scene(c);
    step_until(c, moved < LONG_PAGES ? moved : LONG_PAGES, 0);
    if (moved >= LONG_PAGES) dismiss(c);
    if (moved > LONG_PAGES) step_until(c, LONG_PAGES, moved - LONG_PAGES);
    sits_request_cancel(c->longer, -1);
    step(c);
    assert_int_equal(c->long_got.finish, SITS_FINISH_CANCELLED);
    const struct engine_stats stats = stats_of(c);
    assert_int_equal(stats.n_host_pages_free, stats.n_host_pages_total);
    close_scene(c, true);
  }
}

/* A page cannot be copied: the sequence is computed again. */
static void test_failure_halfway(void **state)
{
  struct scene *c = &scene;
  (void)state;
  log_set_level(LOG_ERROR);
  for (int at = 1; at <= 2 * LONG_PAGES; at++) {
    open_scene(c);
    atomic_store(&c->rig.fake.fail_at_page, at);
    for (int i = 0; i < 60; i++) step(c);
    dismiss(c);
    for (int i = 0; i < 60; i++) step(c);
    assert_int_equal(n_reads(c) + n_writes(c), at);
    assert_int_equal(stats_of(c).n_preemptions_swapped, at > LONG_PAGES);
    close_scene(c, false);
  }
}

/* On its way back it loses its new pages to another guest: what lies in host memory need not be copied once more. */
static void test_leaves_while_coming(void **state)
{
  struct scene *c = &scene;
  (void)state;
  open_scene(c);
  step_until(c, LONG_PAGES, 0);
  for (int i = 0; i < 10; i++) step(c);
  dismiss(c);
  step_until(c, LONG_PAGES, 4);
  invite(c, SITS_CLASS_HIGH);
  for (int i = 0; i < 20; i++) step(c);
  assert_true(c->guest_got.n > 5);
  struct engine_stats stats = stats_of(c);
  assert_int_equal(stats.n_preemptions, 2);
  assert_int_equal(stats.n_preemptions_swapped, 2);
  assert_int_equal(stats.n_host_pages_total - stats.n_host_pages_free, LONG_PAGES);
  assert_in_range(n_writes(c), 4, 5);
  assert_int_equal(n_reads(c), LONG_PAGES);
  dismiss(c);
  close_scene(c, false);
}

/* Decodes that need pages at once get them, however few are copied between steps. */
static void test_decodes_do_not_wait(void **state)
{
  struct scene *c = &scene;
  static int32_t prompt[LONG_PROMPT];
  static struct rig_answer got[3];
  struct sits_request *requests[3];
  (void)state;
  struct engine_options options = rig_options();
  options.n_host_pages = 40;
  options.swap_step_pages = 1;
  rig_open(&c->rig, options, 16);
  for (int i = 0; i < 3; i++) {
    rig_prompt(prompt, 250, 20 + (uint32_t)i);
    requests[i] = submit(c, SITS_CLASS_NORMAL, prompt, 250, 300);
  }
  memset(got, 0, sizeof got);
  for (int i = 0; i < 3; i++) rig_run(&c->rig, requests[i], &got[i], 1);
  for (int i = 0; i < 3; i++) {
    rig_prompt(prompt, 250, 20 + (uint32_t)i);
    expect_answer(&got[i], prompt, 250, 300);
    sits_request_release(requests[i]);
  }
  rig_idle(&c->rig);
  rig_close(&c->rig);
}

/* The engine stops, or its device fails, with pages on their way. */
static void test_end_halfway(void **state)
{
  struct scene *c = &scene;
  (void)state;
  log_set_level(LOG_ERROR);
  for (int round = 0; round < 4; round++) {
    open_scene(c);
    step_until(c, round % 2 ? LONG_PAGES : 3, 0);
    if (round % 2) {
      dismiss(c);
      step_until(c, LONG_PAGES, 3);
    }
    if (round < 2) engine_stop(c->rig.engine, 0);
    else atomic_store(&c->rig.fake.fail_at_step, 1);
    for (int i = 0; i < 3 && c->long_got.n_finish == 0; i++) step(c);
    assert_int_equal(c->long_got.finish, round < 2 ? SITS_FINISH_CANCELLED : SITS_FINISH_ERROR);
    sits_request_release(c->longer);
    for (int i = 0; i < N_STREAMS; i++) sits_request_release(c->streams[i]);
    if (c->guest) sits_request_release(c->guest);
    if (round >= 2) rig_idle(&c->rig);
    rig_close(&c->rig);
    assert_int_equal(mem_live_blocks(), 0);
  }
}

/* A guest for whom there is no room beside the streams waits for their ends, and the long one decodes on until its pages are of use. */
static void test_nothing_leaves_in_vain(void **state)
{
  (void)state;
  struct scene *c = &scene;
  open_scene(c);
  dismiss(c);
  for (int i = 0; i < 100 && n_writes(c) < n_reads(c); i++) step(c);
  for (int i = 0; i < 10; i++) step(c);
  const uint64_t before = stats_of(c).n_preemptions;
  invite_of(c, SITS_CLASS_NORMAL, BIG_PROMPT);
  const int32_t said = c->long_got.n;
  int32_t n_steps = 0;
  while (c->got[0].n_finish + c->got[1].n_finish == 0) {
    const int32_t streams_said = c->got[0].n;
    step(c);
    n_steps += c->got[0].n > streams_said;
    assert_int_equal(stats_of(c).n_preemptions, before);
    assert_int_equal(c->guest_got.n, 0);
  }
  assert_true(n_steps > 100 && c->long_got.n > said + 10);
  for (int i = 0; i < 1000 && c->guest_got.n == 0; i++) step(c);
  assert_true(c->guest_got.n > 0);
  assert_int_equal(stats_of(c).n_preemptions, before + 1);
  close_scene(c, false);
}

/* The same where the long one has most of its pages from a stream: evicted, it would leave the few behind them. */
static void test_shared_pages_do_not_count(void **state)
{
  enum { SHARED = 9 * KV_PAGE_TOKENS, LONGER_OUT = 250, MORE_PAGES = 28 };
  (void)state;
  struct scene *c = &scene;
  struct engine_options options = rig_options();
  struct sits_request *requests[3];
  static struct rig_answer got[3];
  static int32_t prompts[3][BIG_PROMPT];
  static const int32_t n_prompt[] = {SHARED + 10, LONG_PROMPT, BIG_PROMPT}, n_out[] = {LONG_OUT, LONGER_OUT, GUEST_OUT};
  options.n_host_pages = 40;
  options.swap_step_pages = 1;
  rig_open(&c->rig, options, MORE_PAGES);
  memset(got, 0, sizeof got);
  for (int i = 0; i < 3; i++) rig_prompt(prompts[i], n_prompt[i], 30 + (uint32_t)i);
  memcpy(prompts[1], prompts[0], SHARED * sizeof(int32_t));
  for (int i = 0; i < 3; i++) {
    requests[i] = submit(c, i == 1 ? SITS_CLASS_LOW : SITS_CLASS_NORMAL, prompts[i], n_prompt[i], n_out[i]);
    for (int k = 0; i < 2 && k < 100 && got[i].n < 3; k++) {
      engine_step_once(c->rig.engine);
      rig_drain(requests[i], &got[i], 1);
    }
  }
  assert_true(got[1].n >= 3 && stats_of(c).prompt_tokens_cached == SHARED);
  for (int i = 0; i < 1000 && rig_drain(requests[0], &got[0], 1) == 0; i++) {
    assert_int_equal(stats_of(c).n_preemptions, 0);
    engine_step_once(c->rig.engine);
  }
  for (int i = 0; i < 3; i++) {
    if (got[i].n_finish == 0) rig_run(&c->rig, requests[i], &got[i], 1);
    expect_answer(&got[i], prompts[i], n_prompt[i], n_out[i]);
    sits_request_release(requests[i]);
  }
  assert_int_equal(stats_of(c).n_preemptions, 1);
  rig_idle(&c->rig);
  rig_close(&c->rig);
}

/* One that only has its pages is the next victim; where copying is short it computes in the step that brings it back. */
static void test_short_copies_take_no_step(void **state)
{
  (void)state;
  struct scene *c = &scene;
  int32_t said = 0;
  open_scene_by(c, 0);
  for (int i = 0; i < 100 && n_reads(c) == 0; i++) step(c);
  sits_request_cancel(c->guest, -1);
  for (int i = 0; i < 100 && n_writes(c) == 0; i++) {
    said = c->long_got.n;
    step(c);
  }
  assert_true(n_reads(c) > 1);
  assert_int_equal(n_writes(c), n_reads(c));
  assert_int_equal(c->long_got.n, said + 1);
  close_scene(c, false);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_streams_decode_on), cmocka_unit_test(test_cancel_halfway),
                                     cmocka_unit_test(test_failure_halfway), cmocka_unit_test(test_leaves_while_coming),
                                     cmocka_unit_test(test_decodes_do_not_wait), cmocka_unit_test(test_end_halfway),
                                     cmocka_unit_test(test_nothing_leaves_in_vain), cmocka_unit_test(test_shared_pages_do_not_count),
                                     cmocka_unit_test(test_short_copies_take_no_step)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
