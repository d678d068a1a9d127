/* Many requests with random lengths, choices, classes, tenants, cancels and deadlines, over a pool too small for them, some swapped:
 * every answer that was not cut short equals that of a run alone, every cut one is a beginning of it, and at the end nothing is held.
 * First stepped on one thread (SITS_DEBUG_CHECKS verifies all rules after each step), then with the engine's own thread, several
 * submitting threads and a consumer. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "unit/engine/engine_rig.h"

#include "base/clock.h"

enum { MAX_OUT = 80, MAX_PROMPT = 300, N_STEMS = 5 };

struct job {
  struct sits_request *request;
  int32_t prompt[MAX_PROMPT];
  int32_t n_prompt, n_choices, max_tokens;
  bool is_cancelled, has_deadline;
  uint64_t random;
  struct rig_answer answers[4];
};

static uint32_t draw(uint64_t *random, uint32_t n)
{
  *random = *random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((*random >> 33) % n);
}

static struct engine_options small_options(int32_t n_host_pages)
{
  struct engine_options o = rig_options();
  o.max_model_len = 512;
  o.max_num_batched_tokens = 96;
  o.n_host_pages = n_host_pages;
  o.swap_step_pages = 1; /* many steps with sequences half out or half in */
  o.n_sampler_threads = n_host_pages ? 2 : 0;
  o.overlap = n_host_pages > 0;
  o.itl_target_us = n_host_pages ? 2000 : 0;
  o.max_waiting_requests = 64;
  return o;
}

/* Hardly any time for prompts beside decodes, so that they are read in slices. */
static struct engine_options slicing_options(void)
{
  struct engine_options o = small_options(24);
  o.vtable = fake_slicing_vtable();
  o.overlap = false;
  o.itl_target_us = 40;
  return o;
}

static void make_job(struct job *j, uint64_t seed)
{
  memset(j, 0, sizeof *j);
  j->random = seed;
  draw(&j->random, 2);
  j->n_prompt = 1 + (int32_t)draw(&j->random, draw(&j->random, 3) ? 90 : MAX_PROMPT);
  j->n_choices = draw(&j->random, 5) ? 1 : 1 + (int32_t)draw(&j->random, 4);
  j->max_tokens = 1 + (int32_t)draw(&j->random, MAX_OUT);
  rig_prompt(j->prompt, j->n_prompt, 1000 + draw(&j->random, N_STEMS)); /* stems: prefixes meet */
  if (draw(&j->random, 2)) j->prompt[draw(&j->random, (uint32_t)j->n_prompt)] = 9;
}

static enum sits_status submit_job(struct rig *rig, struct job *j)
{
  struct sits_error err;
  struct sits_request_params p = {.prompt = j->prompt, .n_prompt = j->n_prompt, .n_choices = j->n_choices,
                                  .sampling = rig_greedy(j->max_tokens), .service_class = (enum sits_class)draw(&j->random, 3),
                                  .priority = (int32_t)draw(&j->random, 3), .tenant = draw(&j->random, 3), .id = "job", .user = j};
  p.sampling.ignore_eos = true;
  j->has_deadline = draw(&j->random, 12) == 0;
  if (j->has_deadline) p.deadline_us = clock_monotonic_us() + draw(&j->random, 20000);
  return sits_engine_submit(rig->engine, &p, &j->request, &err);
}

static void check_job(const struct job *j)
{
  static _Thread_local struct rig_answer expected;
  rig_expect(j->prompt, j->n_prompt, j->max_tokens, true, &expected);
  for (int32_t i = 0; i < j->n_choices; i++) {
    const struct rig_answer *a = &j->answers[i];
    MUST(a->n_finish == 1);
    MUST(a->n >= 0 && a->n <= j->max_tokens);
    if (a->finish == SITS_FINISH_LENGTH) MUST(a->n == j->max_tokens);
    else if (a->finish == SITS_FINISH_CANCELLED) MUST(j->is_cancelled);
    else MUST(a->finish == SITS_FINISH_DEADLINE && j->has_deadline);
    MUST(memcmp(a->tokens, expected.tokens, (size_t)a->n * sizeof(int32_t)) == 0);
  }
}

static void maybe_cancel(struct job *j)
{
  if (draw(&j->random, 300)) return;
  j->is_cancelled = true;
  sits_request_cancel(j->request, draw(&j->random, 2) ? -1 : (int32_t)draw(&j->random, (uint32_t)j->n_choices));
}

/* Lanes are begun where the clock says that a chunk does not fit, so how often is the machine's to say. */
static bool has_sliced(struct rig *rig) { return atomic_load(&rig->fake.n_lanes_begun) > 100 && atomic_load(&rig->fake.n_slices) > 100; }

static void run_stepped(int32_t n_jobs, struct engine_options options, struct engine_stats *stats)
{
  enum { LIVE = 30 };
  static struct job jobs[LIVE];
  struct rig rig;
  int32_t n_started = 0, n_ended = 0;
  const int32_t most_jobs = 20 * n_jobs;
  const bool is_slicing = options.vtable == fake_slicing_vtable();
  bool is_live[LIVE] = {false};
  rig_open(&rig, options, 16);
  while (n_ended < n_jobs) {
    if (is_slicing && n_started == n_jobs && n_jobs < most_jobs && !has_sliced(&rig)) n_jobs += LIVE;
    for (int i = 0; i < LIVE; i++) {
      if (!is_live[i] && n_started < n_jobs) {
        make_job(&jobs[i], (uint64_t)n_started++ * 7919 + (uint64_t)options.n_host_pages);
        is_live[i] = submit_job(&rig, &jobs[i]) == SITS_OK;
        assert_true(is_live[i]);
      }
      if (!is_live[i]) continue;
      maybe_cancel(&jobs[i]);
      if (draw(&jobs[i].random, 3) == 0 && rig_drain(jobs[i].request, jobs[i].answers, jobs[i].n_choices) == jobs[i].n_choices) {
        check_job(&jobs[i]);
        sits_request_release(jobs[i].request);
        is_live[i] = false;
        n_ended++;
      }
    }
    engine_step_once(rig.engine);
  }
  engine_step_once(rig.engine);
  rig_idle(&rig);
  engine_stats(rig.engine, stats);
  if (is_slicing) assert_true(has_sliced(&rig));
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_stepped(void **state)
{
  struct engine_stats stats;
  run_stepped(3000, small_options(0), &stats);
  assert_true(stats.n_preemptions > 0 && stats.prefix_hit_tokens > 0);
  assert_true(stats.finished[SITS_FINISH_CANCELLED] > 0 && stats.finished[SITS_FINISH_DEADLINE] > 0);
  run_stepped(3000, small_options(24), &stats);
  assert_true(stats.n_preemptions_swapped > 0);
}

static void test_slices(void **state)
{
  struct engine_stats stats;
  run_stepped(3000, slicing_options(), &stats);
  assert_true(stats.n_preemptions > 0 && stats.finished[SITS_FINISH_CANCELLED] > 0);
}

struct worker {
  struct rig *rig;
  int32_t n_jobs;
  uint64_t seed;
  int32_t n_refused;
};

/* Submits and consumes its own requests, a dozen at a time. */
static void *work(void *user)
{
  enum { LIVE = 12 };
  struct worker *w = user;
  struct job *jobs = mem_calloc(LIVE, sizeof *jobs);
  bool is_live[LIVE] = {false};
  int32_t n_started = 0, n_live = 0;
  while (n_started < w->n_jobs || n_live > 0) {
    bool is_quiet = true;
    for (int i = 0; i < LIVE; i++) {
      if (!is_live[i] && n_started < w->n_jobs) {
        make_job(&jobs[i], w->seed * 1000003 + (uint64_t)n_started);
        is_live[i] = submit_job(w->rig, &jobs[i]) == SITS_OK;
        w->n_refused += !is_live[i];
        n_started += is_live[i];
        n_live += is_live[i];
      }
      if (!is_live[i]) continue;
      maybe_cancel(&jobs[i]);
      if (rig_drain(jobs[i].request, jobs[i].answers, jobs[i].n_choices) == jobs[i].n_choices) {
        check_job(&jobs[i]);
        sits_request_release(jobs[i].request);
        is_live[i] = false;
        n_live--;
        is_quiet = false;
      }
    }
    if (is_quiet) nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
  }
  mem_free(jobs);
  return NULL;
}

static void count_news(void *user, struct sits_request *const *requests, int32_t n)
{
  int64_t *total = user;
  for (int32_t i = 0; i < n; i++) MUST(sits_request_user(requests[i]) != NULL);
  *total += n;
}

static void run_threaded(struct engine_options options)
{
  enum { WORKERS = 4 };
  const char *text = getenv("SITS_ENGINE_JOBS");
  int32_t n_jobs = text ? (int32_t)strtol(text, NULL, 10) : 4000;
  struct rig rig;
  struct worker workers[WORKERS];
  pthread_t threads[WORKERS];
  struct sits_error err;
  int64_t n_news = 0;
  options.on_events = count_news;
  options.events_user = &n_news;
  rig_open(&rig, options, 16);
  assert_int_equal(engine_start(rig.engine, &err), SITS_OK);
  for (int i = 0; i < WORKERS; i++) {
    workers[i] = (struct worker){.rig = &rig, .n_jobs = n_jobs / WORKERS, .seed = (uint64_t)i + 1};
    assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  }
  for (int i = 0; i < WORKERS; i++) pthread_join(threads[i], NULL);
  struct engine_stats stats;
  for (int i = 0; i < 100; i++) { /* the loop may still be in its last turn */
    engine_stats(rig.engine, &stats);
    if (stats.n_running == 0 && stats.n_waiting == 0) break;
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  assert_int_equal(stats.n_running, 0);
  assert_int_equal(stats.n_waiting, 0);
  assert_int_equal(stats.n_pages_used, 0);
  assert_true(n_news > n_jobs);
  assert_true(clock_monotonic_us() - engine_heartbeat_us(rig.engine) < 2000000);
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_threaded(void **state)
{
  run_threaded(small_options(24));
  run_threaded(slicing_options());
}

static void test_stop_cancels_what_is_left(void **state)
{
  struct rig rig;
  struct sits_error err;
  static struct job job;
  rig_open(&rig, small_options(0), 16);
  atomic_store(&rig.fake.step_delay_us, 2000);
  assert_int_equal(engine_start(rig.engine, &err), SITS_OK);
  make_job(&job, 3);
  job.has_deadline = false;
  struct sits_request_params p = {.prompt = job.prompt, .n_prompt = job.n_prompt, .n_choices = 1, .sampling = rig_greedy(200)};
  p.sampling.ignore_eos = true;
  job.n_choices = 1;
  assert_int_equal(sits_engine_submit(rig.engine, &p, &job.request, &err), SITS_OK);
  while (job.answers[0].n <= 3) {
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    rig_drain(job.request, job.answers, 1);
  }
  atomic_store(&rig.fake.step_delay_us, 50000);
  engine_stop(rig.engine, clock_monotonic_us() + 50000); /* seconds of work, 50 ms of grace */
  assert_int_equal(engine_state(rig.engine), ENGINE_STOPPED);
  assert_int_equal(rig_drain(job.request, job.answers, 1), 1);
  assert_int_equal(job.answers[0].finish, SITS_FINISH_CANCELLED);
  assert_true(job.answers[0].n > 3);
  sits_request_release(job.request);
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

/* Every allocation of creation and of a submission is made to fail once. */
static void test_no_memory(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip(); /* allocations cannot be made to fail in this build */
#endif
  int32_t prompt[100];
  rig_prompt(prompt, 100, 1);
  struct rig rig;
  rig_open(&rig, small_options(4), 16);
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 100; n++) {
    struct sits_request_params p = {.prompt = prompt, .n_prompt = 100, .n_choices = 3, .sampling = rig_greedy(4)};
    struct sits_request *request = NULL;
    struct sits_error err;
    p.sampling.n_top_logprobs = 2;
    mem_fault_arm(n);
    enum sits_status status = sits_engine_submit(rig.engine, &p, &request, &err);
    mem_fault_arm(0);
    if (status == SITS_OK) {
      assert_true(n > 6);
      static struct rig_answer answers[3];
      memset(answers, 0, sizeof answers);
      rig_run(&rig, request, answers, 3);
      sits_request_release(request);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
  }
  rig_idle(&rig);
  struct engine_options o = small_options(4);
  o.vtable = fake_slicing_vtable();
  o.program = rig.fake.program;
  o.kv = rig.fake.kv;
  o.geometry = rig.fake.geometry;
  before = mem_live_blocks();
  log_set_level(LOG_ERROR);
  for (uint64_t n = 1; n < 200; n++) {
    struct sits_engine *engine = NULL;
    struct sits_error err;
    mem_fault_arm(n);
    enum sits_status status = engine_create(&o, &engine, &err);
    const int n_fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) engine_destroy(engine); /* also where the lane failed: prompts are not read in slices then */
    else assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
    if (n_fired > 0) continue;
    assert_true(status == SITS_OK && n > 20);
    break;
  }
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_stepped), cmocka_unit_test(test_slices), cmocka_unit_test(test_threaded),
                                     cmocka_unit_test(test_stop_cancels_what_is_left), cmocka_unit_test(test_no_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
