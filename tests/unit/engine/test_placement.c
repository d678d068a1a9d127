/* Prompts read by a second engine over a fake device of its own, whose pages arrive late: answers equal those of a run alone, what is there
 * is not sent again, and cancels, deadlines, small pools and failing devices leave nothing behind. */
#include <pthread.h>
#include <time.h>

#include "unit/engine/engine_rig.h"

#include "base/clock.h"

enum { PAGES = 64 };

struct pair_rig {
  struct rig decode;
  struct fake_rig reader;
};

static struct engine_options pair_options(void)
{
  struct engine_options o = rig_options();
  o.always_hand_over = true;
  return o;
}

static void pair_open(struct pair_rig *pair, struct engine_options options, int32_t n_pages, int32_t n_reader_pages)
{
  struct fake_options fake = {.n_vocab = options.n_vocab, .max_batch_tokens = options.max_num_batched_tokens, .max_rows = options.max_rows,
                              .n_pages = n_reader_pages};
  struct sits_error err = {0};
  assert_int_equal(fake_rig_init(&pair->reader, &fake), 0);
  struct engine_options reader = options;
  reader.vtable = fake_vtable();
  reader.program = pair->reader.program;
  reader.kv = pair->reader.kv;
  reader.geometry = pair->reader.geometry;
  reader.n_host_pages = 0;
  reader.n_sampler_threads = 0;
  reader.on_events = NULL;
  reader.max_waiting_requests = 4096;
  if (reader.max_model_len > n_reader_pages * KV_PAGE_TOKENS) reader.max_model_len = n_reader_pages * KV_PAGE_TOKENS;
  options.reader = &reader;
  rig_open(&pair->decode, options, n_pages);
  assert_int_equal(engine_start(pair->decode.engine, &err), SITS_OK);
}

static void pair_close(struct pair_rig *pair)
{
  rig_close(&pair->decode);
  fake_rig_fini(&pair->reader);
  assert_int_equal(mem_live_blocks(), 0);
}

static void nap_us(long us)
{
  nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static void await_end(struct sits_request *request, struct rig_answer *answers, int32_t n_choices)
{
  int64_t until_us = clock_monotonic_us() + 60000000;
  while (rig_drain(request, answers, n_choices) < n_choices) {
    assert_true(clock_monotonic_us() < until_us);
    nap_us(200);
  }
}

/* The reading side is in this batch (from 1), which is held, or the request has ended. */
static bool await_held(struct pair_rig *pair, int step, struct sits_request *request, struct rig_answer *answers, int32_t n_choices)
{
  int64_t until_us = clock_monotonic_us() + 60000000;
  while (atomic_load(&pair->reader.n_steps) < step) {
    assert_true(clock_monotonic_us() < until_us);
    if (rig_drain(request, answers, n_choices) == n_choices) return false;
    nap_us(200);
  }
  return true;
}

/* Nothing runs or is held any more, pages under way included. */
static void pair_idle(struct pair_rig *pair, struct engine_stats *stats)
{
  for (int i = 0; i < 6000; i++) {
    engine_stats(pair->decode.engine, stats);
    if (stats->n_running == 0 && stats->n_waiting == 0 && stats->n_pages_used == 0) return;
    nap_us(10000);
  }
  fail_msg("running %d, waiting %d, pages used %d", stats->n_running, stats->n_waiting, stats->n_pages_used);
}

static void answer_alone(struct pair_rig *pair, int32_t n_prompt, uint32_t seed, int32_t n_choices, struct sits_request_timing *timing)
{
  static int32_t prompt[1024];
  static struct rig_answer expected, answers[4];
  memset(answers, 0, sizeof answers);
  rig_prompt(prompt, n_prompt, seed);
  rig_expect(prompt, n_prompt, 40, false, &expected);
  struct sits_request *request = rig_submit(&pair->decode, prompt, n_prompt, n_choices, rig_greedy(40));
  await_end(request, answers, n_choices);
  for (int32_t i = 0; i < n_choices; i++) rig_same(&answers[i], &expected);
  if (timing) sits_request_timing(request, timing);
  sits_request_release(request);
}

static void test_answers(void **state)
{
  static const int32_t lengths[] = {1, 63, 64, 65, 128, 129, 130, 300, 640, 641, 900};
  struct pair_rig pair;
  struct engine_stats stats;
  pair_open(&pair, pair_options(), PAGES, PAGES);
  uint64_t n_pages = 0, n_sent = 0;
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    answer_alone(&pair, lengths[i], 100 + (uint32_t)i, i % 3 == 2 ? 4 : 1, NULL);
    n_pages += (uint64_t)(lengths[i] - 1) / KV_PAGE_TOKENS;
    n_sent += lengths[i] > KV_PAGE_TOKENS;
  }
  pair_idle(&pair, &stats);
  assert_int_equal(stats.placement_sent, n_sent);
  assert_int_equal(stats.placement_pages, n_pages);
  /* Here only tails were read. Every prompt's tokens are counted once. */
  long n_here = atomic_load(&pair.decode.fake.n_tokens), n_all = 0;
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) n_all += lengths[i];
  assert_true(n_here < (long)stats.generation_tokens + (long)(sizeof lengths / sizeof *lengths) * KV_PAGE_TOKENS);
  assert_int_equal(stats.prompt_tokens_computed, n_all);
  assert_int_equal(stats.prompt_tokens, n_all);
  assert_int_equal(stats.prefix_query_tokens, n_all);
  assert_int_equal(stats.prefix_hit_tokens, 0);
  assert_int_equal(stats.prompt_tokens_cached, 0);
  pair_close(&pair);
}

static void test_known_pages_are_not_sent_again(void **state)
{
  struct pair_rig pair;
  struct engine_stats stats;
  struct sits_request_timing timing;
  pair_open(&pair, pair_options(), PAGES, PAGES);
  answer_alone(&pair, 400, 5, 1, &timing);
  assert_int_equal(timing.n_cached_tokens, 0);
  assert_true(timing.prefill_us > 0 && timing.first_scheduled_us > 0);
  answer_alone(&pair, 400, 5, 1, &timing); /* all of it is here: not handed over */
  assert_int_equal(timing.n_cached_tokens, 384);
  pair_idle(&pair, &stats);
  assert_int_equal(stats.placement_sent, 1);
  assert_int_equal(stats.placement_pages, 6);
  answer_alone(&pair, 600, 5, 1, &timing); /* the same beginning */
  assert_int_equal(timing.n_cached_tokens, 384);
  pair_idle(&pair, &stats);
  assert_int_equal(stats.placement_sent, 2);
  assert_int_equal(stats.placement_pages, 9);
  assert_int_equal(stats.prefix_hit_tokens, 2 * 384);
  pair_close(&pair);
}

static void test_what_stays_here(void **state)
{
  static struct rig_answer answer;
  int32_t prompt[300];
  struct pair_rig pair;
  struct engine_stats stats;
  pair_open(&pair, pair_options(), PAGES, 3); /* the reader holds 192 tokens */
  answer_alone(&pair, 300, 1, 1, NULL);
  rig_prompt(prompt, 150, 2);
  struct sits_sampling sampling = rig_greedy(3);
  sampling.n_prompt_logprobs = 0;
  struct sits_request *request = rig_submit(&pair.decode, prompt, 150, 1, sampling);
  await_end(request, &answer, 1);
  sits_request_release(request);
  pair_idle(&pair, &stats);
  assert_int_equal(stats.placement_sent, 0);
  answer_alone(&pair, 150, 3, 1, NULL);
  pair_idle(&pair, &stats);
  assert_int_equal(stats.placement_sent, 1);
  pair_close(&pair);
}

static void test_cancel_and_deadline_under_way(void **state)
{
  static struct rig_answer answers[3];
  int32_t prompt[900];
  struct pair_rig pair;
  struct engine_stats stats;
  memset(answers, 0, sizeof answers);
  pair_open(&pair, pair_options(), PAGES, PAGES);
  atomic_store(&pair.reader.hold_at_step, 3); /* of seven, of 128 tokens each */
  rig_prompt(prompt, 900, 1);
  struct sits_request *request = rig_submit(&pair.decode, prompt, 900, 3, rig_greedy(10));
  assert_true(await_held(&pair, 3, request, answers, 3));
  sits_request_cancel(request, 0); /* the leader; another choice takes its place */
  atomic_store(&pair.reader.hold_at_step, 4);
  assert_true(await_held(&pair, 4, request, answers, 3));
  sits_request_cancel(request, -1);
  atomic_store(&pair.reader.hold_at_step, 0);
  await_end(request, answers, 3);
  for (int i = 0; i < 3; i++) assert_int_equal(answers[i].finish, SITS_FINISH_CANCELLED);
  sits_request_release(request);
  memset(answers, 0, sizeof answers);
  struct sits_request_params params = {.prompt = prompt, .n_prompt = 900, .n_choices = 1, .sampling = rig_greedy(10),
                                       .deadline_us = clock_monotonic_us() + 60000, .tenant = 9, .id = "late"};
  struct sits_error err;
  int step = atomic_load(&pair.reader.n_steps) + 1;
  atomic_store(&pair.reader.hold_at_step, step);
  assert_int_equal(sits_engine_submit(pair.decode.engine, &params, &request, &err), SITS_OK);
  bool is_sent = await_held(&pair, step, request, answers, 1); /* not on a machine that stood still for the 60 ms */
  nap_us(params.deadline_us - clock_monotonic_us() + 1);
  atomic_store(&pair.reader.hold_at_step, 0);
  await_end(request, answers, 1);
  assert_int_equal(answers[0].finish, SITS_FINISH_DEADLINE);
  sits_request_release(request);
  pair_idle(&pair, &stats);
  assert_in_range(stats.placement_sent, 1 + is_sent, 2);
  /* One choice less on the way, the others answer. */
  memset(answers, 0, sizeof answers);
  step = atomic_load(&pair.reader.n_steps) + 2;
  atomic_store(&pair.reader.hold_at_step, step);
  request = rig_submit(&pair.decode, prompt, 900, 3, rig_greedy(10));
  assert_true(await_held(&pair, step, request, answers, 3));
  sits_request_cancel(request, 0);
  atomic_store(&pair.reader.hold_at_step, 0);
  await_end(request, answers, 3);
  static struct rig_answer expected;
  rig_expect(prompt, 900, 10, false, &expected);
  rig_same(&answers[1], &expected);
  rig_same(&answers[2], &expected);
  assert_int_equal(answers[0].finish, SITS_FINISH_CANCELLED);
  sits_request_release(request);
  pair_idle(&pair, &stats);
  pair_close(&pair);
}

static void fail_one(bool fails_reader)
{
  enum { N = 8 };
  static struct rig_answer answers[N];
  static int32_t prompts[N][400];
  struct sits_request *requests[N];
  struct pair_rig pair;
  struct engine_stats stats;
  memset(answers, 0, sizeof answers);
  pair_open(&pair, pair_options(), PAGES, PAGES);
  atomic_store(&pair.reader.step_delay_us, 3000);
  atomic_store(&pair.decode.fake.step_delay_us, 1000);
  atomic_store(fails_reader ? &pair.reader.fail_at_step : &pair.decode.fake.fail_at_step, fails_reader ? 9 : 6);
  for (int i = 0; i < N; i++) {
    rig_prompt(prompts[i], 400, (uint32_t)i);
    requests[i] = rig_submit(&pair.decode, prompts[i], 400, 1, rig_greedy(100));
  }
  int n_failed = 0;
  for (int i = 0; i < N; i++) {
    await_end(requests[i], &answers[i], 1);
    n_failed += answers[i].finish == SITS_FINISH_ERROR;
    if (answers[i].finish == SITS_FINISH_ERROR) assert_int_equal(answers[i].status, SITS_DEVICE);
    sits_request_release(requests[i]);
  }
  assert_true(n_failed > 0);
  assert_int_equal(engine_state(pair.decode.engine), ENGINE_FAILED);
  struct sits_request_params params = {.prompt = prompts[0], .n_prompt = 400, .n_choices = 1, .sampling = rig_greedy(10)};
  struct sits_request *request;
  struct sits_error err;
  assert_int_equal(sits_engine_submit(pair.decode.engine, &params, &request, &err), SITS_UNAVAILABLE);
  pair_idle(&pair, &stats);
  pair_close(&pair);
}

static void test_a_dead_device_ends_all(void **state)
{
  fail_one(true);
  fail_one(false);
}

/* ---- many at once ---- */

enum { MAX_OUT = 60, MAX_PROMPT = 420, N_STEMS = 5, LIVE = 16, WORKERS = 3 };

struct job {
  struct sits_request *request;
  int32_t prompt[MAX_PROMPT];
  int32_t n_prompt, n_choices, max_tokens;
  bool is_cancelled, has_deadline;
  struct rig_answer answers[3];
};

struct worker {
  struct pair_rig *pair;
  int32_t n_jobs;
  uint64_t random;
};

static uint32_t draw(struct worker *w, uint32_t n)
{
  w->random = w->random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((w->random >> 33) % n);
}

static bool start_job(struct worker *w, struct job *j)
{
  struct sits_error err;
  memset(j, 0, sizeof *j);
  j->n_prompt = 1 + (int32_t)draw(w, draw(w, 3) ? MAX_PROMPT : 80);
  j->n_choices = draw(w, 4) ? 1 : 1 + (int32_t)draw(w, 3);
  j->max_tokens = 1 + (int32_t)draw(w, MAX_OUT);
  rig_prompt(j->prompt, j->n_prompt, 1000 + draw(w, N_STEMS));
  if (draw(w, 2)) j->prompt[draw(w, (uint32_t)j->n_prompt)] = 9;
  struct sits_request_params p = {.prompt = j->prompt, .n_prompt = j->n_prompt, .n_choices = j->n_choices,
                                  .sampling = rig_greedy(j->max_tokens), .service_class = (enum sits_class)draw(w, 3),
                                  .tenant = draw(w, 3), .id = "job", .user = j};
  p.sampling.ignore_eos = true;
  j->has_deadline = draw(w, 12) == 0;
  if (j->has_deadline) p.deadline_us = clock_monotonic_us() + draw(w, 20000);
  return sits_engine_submit(w->pair->decode.engine, &p, &j->request, &err) == SITS_OK;
}

static void check_job(const struct job *j)
{
  static _Thread_local struct rig_answer expected;
  rig_expect(j->prompt, j->n_prompt, j->max_tokens, true, &expected);
  for (int32_t i = 0; i < j->n_choices; i++) {
    const struct rig_answer *a = &j->answers[i];
    MUST(a->n_finish == 1 && a->n <= j->max_tokens);
    if (a->finish == SITS_FINISH_LENGTH) MUST(a->n == j->max_tokens);
    else if (a->finish == SITS_FINISH_CANCELLED) MUST(j->is_cancelled);
    else MUST(a->finish == SITS_FINISH_DEADLINE && j->has_deadline);
    MUST(memcmp(a->tokens, expected.tokens, (size_t)a->n * sizeof(int32_t)) == 0);
  }
}

static void *work(void *user)
{
  struct worker *w = user;
  struct job *jobs = mem_calloc(LIVE, sizeof *jobs);
  bool is_live[LIVE] = {false};
  int32_t n_started = 0, n_live = 0;
  while (n_started < w->n_jobs || n_live > 0) {
    for (int i = 0; i < LIVE; i++) {
      struct job *j = &jobs[i];
      if (!is_live[i] && n_started < w->n_jobs) {
        is_live[i] = start_job(w, j);
        n_started += is_live[i];
        n_live += is_live[i];
      }
      if (!is_live[i]) continue;
      if (draw(w, 150) == 0) {
        j->is_cancelled = true;
        sits_request_cancel(j->request, draw(w, 2) ? -1 : (int32_t)draw(w, (uint32_t)j->n_choices));
      }
      if (rig_drain(j->request, j->answers, j->n_choices) < j->n_choices) continue;
      check_job(j);
      sits_request_release(j->request);
      is_live[i] = false;
      n_live--;
    }
    nap_us(100);
  }
  mem_free(jobs);
  return NULL;
}

static void run_many(struct engine_options options, int32_t n_pages, int32_t n_reader_pages, struct engine_stats *stats)
{
  const char *text = getenv("SITS_ENGINE_JOBS");
  int32_t n_jobs = text ? (int32_t)strtol(text, NULL, 10) : 1500;
  struct worker workers[WORKERS];
  pthread_t threads[WORKERS];
  struct pair_rig pair;
  options.max_model_len = 512;
  pair_open(&pair, options, n_pages, n_reader_pages);
  for (int i = 0; i < WORKERS; i++) {
    workers[i] = (struct worker){.pair = &pair, .n_jobs = n_jobs / WORKERS, .random = (uint64_t)i + 1};
    assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  }
  for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
  pair_idle(&pair, stats);
  assert_true(clock_monotonic_us() - engine_heartbeat_us(pair.decode.engine) < 5000000);
  pair_close(&pair);
}

static void test_many(void **state)
{
  struct engine_stats stats;
  struct engine_options o = pair_options();
  run_many(o, 48, 24, &stats);
  assert_true(stats.placement_sent > 20 && stats.placement_pages > 20); /* how many depends on the time that others take */
  o.n_host_pages = 16;
  o.overlap = true;
  o.itl_target_us = 2000;
  run_many(o, 12, 10, &stats); /* pages are refused, lost and recomputed */
  assert_true(stats.placement_sent > 20 && stats.n_preemptions > 0);
  o.always_hand_over = false;
  run_many(o, 48, 24, &stats);
}

static void test_stop_cancels_what_is_away(void **state)
{
  static struct rig_answer answer;
  int32_t prompt[900];
  struct pair_rig pair;
  memset(&answer, 0, sizeof answer);
  pair_open(&pair, pair_options(), PAGES, PAGES);
  atomic_store(&pair.reader.step_delay_us, 20000);
  rig_prompt(prompt, 900, 1);
  struct sits_request *request = rig_submit(&pair.decode, prompt, 900, 1, rig_greedy(10));
  assert_true(await_held(&pair, 2, request, &answer, 1));
  atomic_store(&pair.reader.step_delay_us, 500000); /* the five steps that are left take seconds */
  engine_stop(pair.decode.engine, 0);
  assert_int_equal(rig_drain(request, &answer, 1), 1);
  assert_int_equal(answer.finish, SITS_FINISH_CANCELLED);
  sits_request_release(request);
  pair_close(&pair);
}

/* One engine's options over the decode side's device, for tests that create engines themselves. */
static struct engine_options options_over(const struct pair_rig *pair)
{
  struct engine_options o = pair_options();
  o.vtable = fake_vtable();
  o.program = pair->decode.fake.program;
  o.kv = pair->decode.fake.kv;
  o.geometry = pair->decode.fake.geometry;
  return o;
}

static void test_refusals(void **state)
{
  struct pair_rig pair;
  struct sits_error err;
  pair_open(&pair, pair_options(), PAGES, PAGES);
  struct engine_options reader = options_over(&pair), o = reader;
  o.reader = &reader;
  struct sits_engine *engine = NULL;
  o.prefix_caching = false;
  assert_int_equal(engine_create(&o, &engine, &err), SITS_CONFIG);
  assert_string_equal(err.param, "placement");
  o.prefix_caching = true;
  struct backend_vtable mute = *fake_vtable();
  mute.kv_send = NULL;
  o.vtable = reader.vtable = &mute;
  assert_int_equal(engine_create(&o, &engine, &err), SITS_UNSUPPORTED);
  o.vtable = reader.vtable = fake_vtable();
  reader.geometry.codec = KV_INT8;
  assert_int_equal(engine_create(&o, &engine, &err), SITS_INVALID_ARGUMENT);
  pair_close(&pair);
}

/* Every allocation of a submission and of creation fails once. */
static void test_no_memory(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip(); /* allocations cannot be made to fail in this build */
#endif
  struct pair_rig pair;
  int32_t prompt[300];
  rig_prompt(prompt, 300, 1);
  pair_open(&pair, pair_options(), PAGES, PAGES);
  engine_stop(pair.decode.engine, 0); /* its threads check the pages now and then, with memory of their own */
  struct engine_options reader = options_over(&pair), o = reader;
  o.reader = &reader;
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 300; n++) {
    struct sits_engine *engine = NULL;
    struct sits_error err;
    mem_fault_arm(n);
    enum sits_status status = engine_create(&o, &engine, &err);
    mem_fault_arm(0);
    if (status == SITS_OK) {
      assert_true(n > 40);
      for (uint64_t k = 1; k < 60; k++) {
        struct sits_request_params p = {.prompt = prompt, .n_prompt = 300, .n_choices = 1, .sampling = rig_greedy(4)};
        struct sits_request *request = NULL;
        int64_t live = mem_live_blocks();
        mem_fault_arm(k);
        status = sits_engine_submit(engine, &p, &request, &err);
        mem_fault_arm(0);
        if (status == SITS_OK) {
          assert_true(k > 8);
          sits_request_release(request);
          break;
        }
        assert_int_equal(status, SITS_NOMEM);
        assert_int_equal(mem_live_blocks(), live);
      }
      assert_int_equal(status, SITS_OK);
      engine_stop(engine, 0);
      engine_destroy(engine);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
  }
  pair_close(&pair);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_answers), cmocka_unit_test(test_known_pages_are_not_sent_again), cmocka_unit_test(test_what_stays_here),
      cmocka_unit_test(test_cancel_and_deadline_under_way), cmocka_unit_test(test_a_dead_device_ends_all), cmocka_unit_test(test_many),
      cmocka_unit_test(test_stop_cancels_what_is_away), cmocka_unit_test(test_refusals), cmocka_unit_test(test_no_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
