/* Requests through the engine over the fake backend: every answer must be the one of the model's definition, whatever shares the step. */
#include <pthread.h>
#include <unistd.h>

#include "unit/engine/engine_rig.h"

#include "base/clock.h"

static struct rig_answer got[SITS_MAX_CHOICES], expected;

static void test_one_request(void **state)
{
  struct rig rig;
  int32_t prompt[300];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 300, 1);
  struct sits_request *request = rig_submit(&rig, prompt, 300, 1, rig_greedy(40));
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  rig_expect(prompt, 300, 40, false, &expected);
  rig_same(&got[0], &expected);
  struct sits_request_timing t;
  sits_request_timing(request, &t);
  assert_int_equal(t.n_prompt_tokens, 300);
  assert_int_equal(t.n_output_tokens, expected.n);
  assert_true(t.submitted_us > 0 && t.first_scheduled_us >= t.submitted_us && t.first_token_us >= t.first_scheduled_us);
  assert_true(t.done_us >= t.first_token_us);
  assert_int_equal(t.queue_us + t.prefill_us + t.decode_us + t.scheduling_us, t.done_us - t.submitted_us);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

/* Every stage is where its time was spent: steps that take a known time, a second request that waits for the first one's place, and a
 * pause before anybody turns the loop again. */
static void test_timing_stages(void **state)
{
  enum { STEP_US = 2000, PAUSE_US = 20000 };
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[300];
  options.max_num_seqs = 1;
  options.prefix_caching = false;
  rig_open(&rig, options, 64);
  atomic_store(&rig.fake.step_delay_us, STEP_US);
  rig_prompt(prompt, 300, 1);
  struct sits_sampling s = rig_greedy(5);
  s.ignore_eos = true;
  struct sits_request *first = rig_submit(&rig, prompt, 300, 1, s), *second = rig_submit(&rig, prompt, 300, 1, s);
  struct sits_request_timing t;
  do engine_step_once(rig.engine), sits_request_timing(first, &t);
  while (t.first_token_us == 0);
  usleep(PAUSE_US);
  memset(got, 0, sizeof got);
  rig_run(&rig, first, got, 1);
  memset(got, 0, sizeof got);
  rig_run(&rig, second, got, 1);
  struct sits_request *requests[] = {first, second};
  for (int i = 0; i < 2; i++) {
    sits_request_timing(requests[i], &t);
    assert_int_equal(t.queue_us + t.prefill_us + t.decode_us + t.scheduling_us, t.done_us - t.submitted_us);
    assert_true(t.prefill_us >= 3 * STEP_US && t.decode_us >= 4 * STEP_US); /* 300 tokens in steps of 128; the first token is prefill's */
    assert_true(i == 0 ? t.scheduling_us >= PAUSE_US : t.queue_us >= 7 * STEP_US + PAUSE_US);
    sits_request_release(requests[i]);
  }
  rig_idle(&rig);
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_true(stats.scheduling_seconds.count == 2 && stats.scheduling_seconds.sum * 1e6 >= PAUSE_US);
  rig_close(&rig);
}

static void test_many_share_steps(void **state)
{
  enum { N = 40 };
  static int32_t prompts[N][400];
  static struct rig_answer answers[N];
  struct sits_request *requests[N];
  struct rig rig;
  rig_open(&rig, rig_options(), 100);
  memset(answers, 0, sizeof answers);
  for (int i = 0; i < N; i++) {
    rig_prompt(prompts[i], 400, (uint32_t)i + 10);
    requests[i] = rig_submit(&rig, prompts[i], 3 + i * 9, 1, rig_greedy(20 + i));
  }
  for (int i = 0; i < N; i++) rig_run(&rig, requests[i], &answers[i], 1);
  for (int i = 0; i < N; i++) {
    rig_expect(prompts[i], 3 + i * 9, 20 + i, false, &expected);
    rig_same(&answers[i], &expected);
    sits_request_release(requests[i]);
  }
  assert_true(atomic_load(&rig.fake.largest_seqs) > 4); /* they did share */
  rig_idle(&rig);
  rig_close(&rig);
}

enum { CAPTURE_US = 3000 };
static struct { int32_t n_steps, n_captured; bool is_seen[8]; } captures;

/* engine_options.on_step: the first batch of each number of sequences, all of one token, captures, and no other. */
static void note_captures(void *user, const struct engine_step_times *t)
{
  (void)user;
  const bool is_first = t->n_prompt_tokens == 0 && !captures.is_seen[t->n_decode];
  captures.is_seen[t->n_decode] |= is_first;
  captures.n_captured += is_first;
  captures.n_steps++;
  assert_int_equal(t->once_us, is_first ? CAPTURE_US : 0);
  assert_true(t->step_us >= t->batch_us && t->batch_us >= t->once_us);
}

/* The planner is told what of a step's time the backend spent on capturing it. */
static void test_captures_are_told(void **state)
{
  static struct rig rig;
  static struct rig_answer answers[3];
  struct sits_request *requests[3];
  int32_t prompt[20];
  struct engine_options options = rig_options();
  (void)state;
  memset(&captures, 0, sizeof captures);
  memset(answers, 0, sizeof answers);
  options.on_step = note_captures;
  rig_open(&rig, options, 64);
  atomic_store(&rig.fake.capture_delay_us, CAPTURE_US);
  for (int i = 0; i < 3; i++) {
    struct sits_sampling sampling = rig_greedy(10 + 10 * i);
    sampling.ignore_eos = true;
    rig_prompt(prompt, 20, 70 + (uint32_t)i);
    requests[i] = rig_submit(&rig, prompt, 20, 1, sampling);
  }
  for (int i = 0; i < 3; i++) {
    rig_run(&rig, requests[i], &answers[i], 1);
    sits_request_release(requests[i]);
  }
  assert_int_equal(captures.n_captured, 3); /* three, two, one */
  assert_true(captures.n_steps >= 30);
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_tiny_pool_preempts(void **state)
{
  enum { N = 12 };
  static int32_t prompts[N][200];
  static struct rig_answer answers[N];
  struct sits_request *requests[N];
  for (int swap = 0; swap < 2; swap++) {
    struct rig rig;
    struct engine_options options = rig_options();
    options.max_model_len = 640;
    options.n_host_pages = swap ? 40 : 0;
    rig_open(&rig, options, 12);
    memset(answers, 0, sizeof answers);
    for (int i = 0; i < N; i++) {
      struct sits_sampling s = rig_greedy(i == 0 ? 4 : 250); /* the first teaches the planner that answers are short */
      s.ignore_eos = true;
      rig_prompt(prompts[i], 200, (uint32_t)i + 99);
      requests[i] = rig_submit(&rig, prompts[i], 70, 1, s);
      if (i == 0) rig_run(&rig, requests[0], &answers[0], 1);
    }
    for (int i = 0; i < N; i++) rig_run(&rig, requests[i], &answers[i], 1);
    struct engine_stats stats;
    engine_stats(rig.engine, &stats);
    assert_true(stats.n_preemptions > 0);
    if (swap) assert_int_equal(stats.n_preemptions_swapped > 0, 1);
    for (int i = 0; i < N; i++) {
      rig_expect(prompts[i], 70, i == 0 ? 4 : 250, true, &expected);
      rig_same(&answers[i], &expected);
      sits_request_release(requests[i]);
    }
    rig_idle(&rig);
    rig_close(&rig);
  }
}

static void test_choices_fork(void **state)
{
  struct rig rig;
  int32_t prompt[200];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 200, 5);
  struct sits_sampling s = rig_greedy(60);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 150, 6, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 6);
  rig_expect(prompt, 150, 60, true, &expected);
  for (int i = 0; i < 6; i++) rig_same(&got[i], &expected); /* greedy: all alike, from pages of their own */
  /* The prompt was computed once: 150 + 6 x 59 tokens. */
  assert_int_equal(atomic_load(&rig.fake.n_tokens), 150 + 6 * 59);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

/* Choices that share all pages there are: those that make room leave the first one nothing to copy, and come back when it has ended. */
static void test_choices_share_all_pages(void **state)
{
  (void)state;
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[100];
  options.max_model_len = 128;
  rig_open(&rig, options, 2);
  rig_prompt(prompt, 100, 5);
  struct sits_sampling s = rig_greedy(20);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 100, 3, s);
  memset(got, 0, 3 * sizeof got[0]);
  rig_run(&rig, request, got, 3);
  rig_expect(prompt, 100, 20, true, &expected);
  for (int i = 0; i < 3; i++) rig_same(&got[i], &expected);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

/* Of choices that leave a page in one step all but the last copy it: room for just that many copies is room enough. */
static void test_last_choice_copies_nothing(void **state)
{
  (void)state;
  int32_t prompt[100];
  rig_prompt(prompt, 100, 5);
  rig_expect(prompt, 100, 20, true, &expected);
  for (int32_t n = 2; n <= 4; n++) {
    struct rig rig;
    struct engine_options options = rig_options();
    struct engine_stats stats;
    options.max_model_len = 128;
    rig_open(&rig, options, 1 + n);
    struct sits_sampling s = rig_greedy(20);
    s.ignore_eos = true;
    struct sits_request *request = rig_submit(&rig, prompt, 100, n, s);
    memset(got, 0, (size_t)n * sizeof got[0]);
    rig_run(&rig, request, got, n);
    for (int i = 0; i < n; i++) rig_same(&got[i], &expected);
    sits_request_release(request);
    rig_idle(&rig);
    engine_stats(rig.engine, &stats);
    assert_int_equal(stats.n_preemptions, 0);
    rig_close(&rig);
  }
}

/* Who draws is the request's matter: beside one that needs the host, a plain draw is still the device's. */
static void test_neighbours_do_not_decide_who_draws(void **state)
{
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[60];
  rig_prompt(prompt, 60, 12);
  options.vtable = fake_sampling_vtable();
  rig_open(&rig, options, 64);
  struct sits_sampling plain = rig_greedy(30), host = rig_greedy(30);
  plain.ignore_eos = host.ignore_eos = true;
  plain.temperature = host.temperature = 0.9f;
  plain.seed = host.seed = 5;
  host.n_top_logprobs = 2;
  struct sits_request *a = rig_submit(&rig, prompt, 60, 1, plain), *b = rig_submit(&rig, prompt, 60, 1, host);
  memset(got, 0, sizeof got[0]);
  rig_run(&rig, a, got, 1);
  assert_int_equal(got[0].n, 30);
  assert_true(atomic_load(&rig.fake.n_sampled) >= 30); /* every step that had it in it */
  sits_request_release(a);
  sits_request_release(b);
  rig_idle(&rig);
  rig_close(&rig);
}

/* A stop string that the consumer found is an end like any other, not an abort. */
static void test_stop_is_counted_as_stop(void **state)
{
  struct rig rig;
  int32_t prompt[20];
  rig_prompt(prompt, 20, 13);
  rig_open(&rig, rig_options(), 64);
  struct sits_sampling s = rig_greedy(200);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 20, 1, s);
  for (int i = 0; i < 5; i++) engine_step_once(rig.engine);
  sits_request_stop(request, 0);
  sits_request_release(request); /* cancels, but the stop came first */
  rig_idle(&rig);
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.finished[SITS_FINISH_STOP], 1);
  assert_int_equal(stats.finished[SITS_FINISH_CANCELLED], 0);
  rig_close(&rig);
}

static void test_batch_beyond_the_queue_is_no_retry(void **state)
{
  struct rig rig;
  struct sits_error err = {0};
  struct engine_options options = rig_options();
  options.max_waiting_requests = 8;
  options.max_waiting_tokens = 1000;
  rig_open(&rig, options, 64);
  assert_int_equal(sits_engine_may_queue(rig.engine, 8, 1, 1000, &err), SITS_OK);
  assert_int_equal(sits_engine_may_queue(rig.engine, 9, 1, 90, &err), SITS_INVALID_ARGUMENT);
  assert_int_equal(sits_engine_may_queue(rig.engine, 2, 1, 1001, &err), SITS_INVALID_ARGUMENT);
  assert_int_equal(sits_engine_may_queue(rig.engine, 1, 1, 1001, &err), SITS_OK); /* alone it may come when nothing waits */
  rig_close(&rig);
}

/* A device that draws gives every request the tokens that the host's sampler would; steps with log probabilities still bring logits. */
static void test_device_draws_the_same(void **state)
{
  static const float temperatures[3] = {0, 0.8f, 1.3f};
  struct rig_answer *host = mem_calloc(3, sizeof *host);
  int32_t prompt[60];
  rig_prompt(prompt, 60, 11);
  for (int device = 0; device < 2; device++) {
    struct rig rig;
    struct engine_options options = rig_options();
    options.vtable = device ? fake_sampling_vtable() : NULL;
    rig_open(&rig, options, 64);
    for (int i = 0; i < 3; i++) {
      struct sits_sampling s = rig_greedy(40);
      s.temperature = temperatures[i];
      s.seed = 7 + (uint64_t)i;
      s.ignore_eos = true;
      struct sits_request *request = rig_submit(&rig, prompt, 60, 1, s);
      memset(got, 0, sizeof got[0]);
      rig_run(&rig, request, got, 1);
      assert_int_equal(got[0].n, 40);
      if (device) assert_memory_equal(got[0].tokens, host[i].tokens, 40 * sizeof(int32_t));
      else host[i] = got[0];
      sits_request_release(request);
    }
    int n_sampled = atomic_load(&rig.fake.n_sampled);
    if (device) assert_true(n_sampled >= 3 * 40);
    else assert_int_equal(n_sampled, 0);
    struct sits_sampling s = rig_greedy(5);
    s.n_top_logprobs = 2;
    struct sits_request *request = rig_submit(&rig, prompt, 60, 1, s);
    memset(got, 0, sizeof got[0]);
    rig_run(&rig, request, got, 1);
    assert_int_equal(got[0].n, 5);
    assert_int_equal(atomic_load(&rig.fake.n_sampled), n_sampled);
    sits_request_release(request);
    rig_close(&rig);
  }
  mem_free(host);
}

static void test_sampled_choices_differ_and_repeat(void **state)
{
  struct rig_answer *first = mem_calloc(4, sizeof *first);
  int32_t prompt[100];
  rig_prompt(prompt, 100, 3);
  for (int round = 0; round < 2; round++) {
    struct rig rig;
    rig_open(&rig, rig_options(), 64);
    struct sits_sampling s = rig_greedy(50);
    s.temperature = 0.9f;
    s.seed = 42;
    s.ignore_eos = true;
    /* In the second round other requests share every step. */
    struct sits_request *noise = round ? rig_submit(&rig, prompt, 90, 3, rig_greedy(60)) : NULL;
    struct sits_request *request = rig_submit(&rig, prompt, 100, 4, s);
    memset(got, 0, sizeof got);
    rig_run(&rig, request, got, 4);
    for (int i = 0; i < 4; i++) {
      assert_int_equal(got[i].n, 50);
      if (round) assert_memory_equal(got[i].tokens, first[i].tokens, 50 * sizeof(int32_t));
      for (int k = 0; k < i; k++) assert_memory_not_equal(got[i].tokens, got[k].tokens, 50 * sizeof(int32_t));
    }
    memcpy(first, got, 4 * sizeof *first);
    sits_request_release(request);
    sits_request_release(noise);
    rig_close(&rig);
  }
  mem_free(first);
}

static void test_prefix_is_reused(void **state)
{
  struct rig rig;
  int32_t prompt[400];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 400, 8);
  for (int i = 0; i < 3; i++) {
    prompt[390] = 20 + i; /* five full pages and a bit are shared */
    struct sits_request *request = rig_submit(&rig, prompt, 400, 1, rig_greedy(10));
    memset(got, 0, sizeof got);
    rig_run(&rig, request, got, 1);
    rig_expect(prompt, 400, 10, false, &expected);
    rig_same(&got[0], &expected);
    struct sits_request_timing t;
    sits_request_timing(request, &t);
    assert_int_equal(t.n_cached_tokens, i == 0 ? 0 : 6 * 64);
    sits_request_release(request);
  }
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.prefix_query_tokens, 1200);
  assert_int_equal(stats.prefix_hit_tokens, 2 * 6 * 64);
  rig_close(&rig);
}

static void test_prompt_logprobs(void **state)
{
  struct rig rig;
  int32_t prompt[200];
  struct sits_event e;
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 200, 4);
  for (int round = 0; round < 2; round++) { /* the second time its pages are cached, and must not be used */
    struct sits_sampling s = rig_greedy(round ? 0 : 2);
    s.n_prompt_logprobs = 3;
    struct sits_request *request = rig_submit(&rig, prompt, 200, 1, s);
    int32_t next = 1, n_finish = 0;
    for (int i = 0; i < 1000 && !n_finish; i++) {
      engine_step_once(rig.engine);
      while (sits_request_poll(request, &e) == SITS_OK) {
        n_finish += e.kind == SITS_EVENT_FINISH;
        if (e.kind != SITS_EVENT_PROMPT_LOGPROB) continue;
        float logits[RIG_VOCAB];
        fake_logits(RIG_VOCAB, prompt, next, logits);
        double sum = 0, best = -1e9;
        int best_id = -1;
        for (int v = 0; v < RIG_VOCAB; v++) {
          sum += __builtin_exp(logits[v]);
          if (logits[v] > best) {
            best = logits[v];
            best_id = v;
          }
        }
        assert_int_equal(e.token, prompt[next]);
        assert_true(__builtin_fabs(e.logprob - (logits[prompt[next]] - __builtin_log(sum))) < 1e-4);
        assert_int_equal(e.n_top, 3);
        assert_int_equal(e.top_token[0], best_id);
        assert_true(__builtin_fabs(e.top_logprob[0] - (best - __builtin_log(sum))) < 1e-4);
        assert_true(e.top_logprob[0] >= e.top_logprob[1] && e.top_logprob[1] >= e.top_logprob[2]);
        next++;
      }
    }
    assert_int_equal(next, 200);
    assert_int_equal(n_finish, 1);
    sits_request_release(request);
  }
  rig_idle(&rig);
  rig_close(&rig);
}

static void test_slow_consumer_is_left_out(void **state)
{
  struct rig rig;
  int32_t prompt[50];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 50, 6);
  struct sits_sampling s = rig_greedy(500);
  s.ignore_eos = true;
  struct sits_request *slow = rig_submit(&rig, prompt, 50, 1, s), *fast = rig_submit(&rig, prompt, 40, 1, s);
  static struct rig_answer a_slow, a_fast;
  memset(&a_slow, 0, sizeof a_slow);
  memset(&a_fast, 0, sizeof a_fast);
  rig_run(&rig, fast, &a_fast, 1); /* nobody reads `slow`: it must neither stop `fast` nor lose anything */
  rig_run(&rig, slow, &a_slow, 1);
  rig_expect(prompt, 40, 500, true, &expected);
  rig_same(&a_fast, &expected);
  rig_expect(prompt, 50, 500, true, &expected);
  rig_same(&a_slow, &expected);
  sits_request_release(slow);
  sits_request_release(fast);
  rig_idle(&rig);
  rig_close(&rig);
}

/* A sequence that nobody reads is pre-empted and comes back: its ring is still full then, and nothing in it may be overwritten. */
static void test_full_ring_survives_preemption(void **state)
{
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[100];
  options.max_model_len = 512;
  rig_open(&rig, options, 9);
  rig_prompt(prompt, 100, 6);
  struct sits_sampling s = rig_greedy(1), t = rig_greedy(300);
  s.ignore_eos = t.ignore_eos = true;
  struct sits_request *first = rig_submit(&rig, prompt, 40, 1, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, first, got, 1); /* answers seem to be short, so both of the next are admitted */
  struct sits_request_params p = {.prompt = prompt, .n_prompt = 100, .n_choices = 1, .sampling = t, .service_class = SITS_CLASS_LOW};
  struct sits_request *slow, *fast;
  struct sits_error err;
  assert_int_equal(sits_engine_submit(rig.engine, &p, &slow, &err), SITS_OK);
  for (int i = 0; i < 120; i++) engine_step_once(rig.engine); /* its ring is full */
  p.n_prompt = 90;
  p.service_class = SITS_CLASS_NORMAL;
  static struct rig_answer a_slow, a_fast;
  memset(&a_slow, 0, sizeof a_slow);
  memset(&a_fast, 0, sizeof a_fast);
  assert_int_equal(sits_engine_submit(rig.engine, &p, &fast, &err), SITS_OK);
  rig_run(&rig, fast, &a_fast, 1);
  p.sampling.max_tokens = 400;
  struct sits_request *second;
  assert_int_equal(sits_engine_submit(rig.engine, &p, &second, &err), SITS_OK);
  static struct rig_answer a_second;
  memset(&a_second, 0, sizeof a_second);
  rig_run(&rig, second, &a_second, 1);
  for (int i = 0; i < 20; i++) engine_step_once(rig.engine);
  struct sits_request_timing timing;
  sits_request_timing(slow, &timing);
  assert_true(timing.n_preemptions > 0);
  rig_run(&rig, slow, &a_slow, 1);
  rig_expect(prompt, 100, 300, true, &expected);
  rig_same(&a_slow, &expected);
  rig_expect(prompt, 90, 300, true, &expected);
  rig_same(&a_fast, &expected);
  sits_request_release(first);
  sits_request_release(slow);
  sits_request_release(fast);
  sits_request_release(second);
  rig_idle(&rig);
  rig_close(&rig);
}

static void test_cancel_full_ring_still_ends(void **state)
{
  struct rig rig;
  int32_t prompt[50];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 50, 6);
  struct sits_sampling s = rig_greedy(500);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 50, 3, s);
  for (int i = 0; i < 300; i++) engine_step_once(rig.engine);
  sits_request_cancel(request, 1);
  for (int i = 0; i < 5; i++) engine_step_once(rig.engine);
  sits_request_cancel(request, -1);
  sits_request_cancel(request, -1);
  for (int i = 0; i < 5; i++) engine_step_once(rig.engine);
  memset(got, 0, sizeof got);
  assert_int_equal(rig_drain(request, got, 3), 3);
  for (int i = 0; i < 3; i++) assert_int_equal(got[i].finish, SITS_FINISH_CANCELLED);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

struct held { struct fake_rig *fake; struct sits_request *request; };

/* Once the step that is to be held has begun. */
static void *cancel_held(void *user)
{
  struct held *held = user;
  while (atomic_load(&held->fake->n_steps) < atomic_load(&held->fake->hold_at_step)) usleep(200);
  sits_request_cancel(held->request, -1);
  atomic_store(&held->fake->hold_at_step, 0);
  return NULL;
}

/* A cancellation between two steps keeps the request out of the next one; during a step, its pages are free before the next is planned. */
static void test_cancel_costs_no_further_step(void **state)
{
  for (int during = 0; during < 2; during++) {
    struct rig rig;
    struct engine_options options = rig_options();
    struct engine_stats stats;
    int32_t prompt[50];
    pthread_t thread;
    options.overlap = during;
    rig_open(&rig, options, 64);
    rig_prompt(prompt, 50, 6);
    struct sits_sampling s = rig_greedy(500);
    s.ignore_eos = true;
    struct sits_request *request = rig_submit(&rig, prompt, 50, 3, s);
    for (int i = 0; i < 5; i++) engine_step_once(rig.engine);
    if (during) {
      struct held held = {&rig.fake, request};
      atomic_store(&rig.fake.hold_at_step, atomic_load(&rig.fake.n_steps) + 1);
      assert_int_equal(pthread_create(&thread, NULL, cancel_held, &held), 0);
      assert_true(engine_step_once(rig.engine)); /* it is in this one */
      pthread_join(thread, NULL);
    } else {
      sits_request_cancel(request, -1);
    }
    int n_steps = atomic_load(&rig.fake.n_steps);
    assert_false(engine_step_once(rig.engine));
    assert_int_equal(atomic_load(&rig.fake.n_steps), n_steps);
    engine_stats(rig.engine, &stats);
    assert_int_equal(stats.n_running, 0);
    assert_int_equal(stats.n_pages_used, 0);
    assert_true(stats.cancel_steps_hist.count == 1 && stats.cancel_steps_hist.sum == 0);
    sits_request_release(request);
    rig_idle(&rig);
    rig_close(&rig);
  }
}

static void test_leader_cancelled_during_prefill(void **state)
{
  struct rig rig;
  int32_t prompt[600];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 600, 16);
  struct sits_sampling s = rig_greedy(30);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 600, 3, s);
  engine_step_once(rig.engine);
  engine_step_once(rig.engine);
  sits_request_cancel(request, 0); /* it leads the prefill */
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 3);
  rig_expect(prompt, 600, 30, true, &expected);
  assert_int_equal(got[0].finish, SITS_FINISH_CANCELLED);
  assert_int_equal(got[0].n, 0);
  rig_same(&got[1], &expected);
  rig_same(&got[2], &expected);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

static void test_deadline(void **state)
{
  struct rig rig;
  int32_t prompt[50];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 50, 6);
  struct sits_request_params params = {.prompt = prompt, .n_prompt = 50, .n_choices = 2, .sampling = rig_greedy(900),
                                       .service_class = SITS_CLASS_LOW, .deadline_us = clock_monotonic_us() + 20000};
  params.sampling.ignore_eos = true;
  struct sits_request *request;
  struct sits_error err;
  atomic_store(&rig.fake.step_delay_us, 1000);
  assert_int_equal(sits_engine_submit(rig.engine, &params, &request, &err), SITS_OK);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 2);
  struct sits_request_timing t;
  sits_request_timing(request, &t);
  const bool is_seen = t.first_scheduled_us > 0; /* not on a machine that stood still for the 20 ms */
  for (int i = 0; i < 2; i++) {
    assert_int_equal(got[i].finish, SITS_FINISH_DEADLINE);
    assert_int_equal(got[i].status, SITS_DEADLINE);
    assert_in_range(got[i].n, is_seen, 40); /* a first step that had begun gave a token */
  }
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

static void test_device_error(void **state)
{
  struct rig rig;
  int32_t prompt[50];
  struct sits_error err;
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 50, 6);
  atomic_store(&rig.fake.fail_at_step, 5);
  struct sits_request *request = rig_submit(&rig, prompt, 50, 2, rig_greedy(100)), *second;
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 2);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(got[i].finish, SITS_FINISH_ERROR);
    assert_int_equal(got[i].status, SITS_DEVICE);
  }
  assert_int_equal(engine_state(rig.engine), ENGINE_FAILED);
  struct sits_request_params params = {.prompt = prompt, .n_prompt = 50, .n_choices = 1, .sampling = rig_greedy(10)};
  assert_int_equal(sits_engine_submit(rig.engine, &params, &second, &err), SITS_UNAVAILABLE);
  sits_request_release(request);
  rig_idle(&rig);
  rig_close(&rig);
}

static void expect_refused(struct rig *rig, struct sits_request_params params, enum sits_status status, const char *param)
{
  struct sits_request *request = (struct sits_request *)1;
  struct sits_error err = {0};
  assert_int_equal(sits_engine_submit(rig->engine, &params, &request, &err), status);
  assert_ptr_equal(request, (struct sits_request *)1);
  assert_string_equal(err.param, param);
}

static void test_bad_requests_are_refused(void **state)
{
  struct rig rig;
  int32_t prompt[1100];
  struct engine_options options = rig_options();
  options.max_waiting_requests = 3;
  options.max_waiting_tokens = 250;
  rig_open(&rig, options, 64);
  rig_prompt(prompt, 1100, 6);
  struct sits_request_params ok = {.prompt = prompt, .n_prompt = 100, .n_choices = 1, .sampling = rig_greedy(10)}, p;
  p = ok, p.n_prompt = 0, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "prompt");
  p = ok, p.n_choices = 9, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "n");
  p = ok, p.sampling.temperature = -1, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "temperature");
  p = ok, p.sampling.top_p = 0, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "top_p");
  p = ok, p.sampling.max_tokens = 0, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "max_tokens");
  p = ok, p.n_prompt = 1020, expect_refused(&rig, p, SITS_CONTEXT_LENGTH, "messages");
  int32_t bad_token = RIG_VOCAB;
  p = ok, p.prompt = &bad_token, p.n_prompt = 1, expect_refused(&rig, p, SITS_INVALID_ARGUMENT, "prompt");
  struct sits_request *a = rig_submit(&rig, prompt, 100, 1, rig_greedy(3)), *b = rig_submit(&rig, prompt, 120, 1, rig_greedy(3));
  expect_refused(&rig, ok, SITS_QUEUE_FULL, ""); /* 320 tokens */
  p = ok, p.n_prompt = 20;
  struct sits_request *c = rig_submit(&rig, prompt, 20, 1, rig_greedy(3));
  expect_refused(&rig, p, SITS_QUEUE_FULL, ""); /* the fourth request */
  engine_drain(rig.engine);
  expect_refused(&rig, ok, SITS_UNAVAILABLE, "");
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.rejected_tokens, 1);
  assert_int_equal(stats.rejected_requests, 1);
  memset(got, 0, sizeof got);
  rig_run(&rig, a, &got[0], 1);
  rig_run(&rig, b, &got[1], 1);
  rig_run(&rig, c, &got[2], 1);
  sits_request_release(a);
  sits_request_release(b);
  sits_request_release(c);
  rig_idle(&rig);
  rig_close(&rig);
}

/* One tenant may fill the queue while it is alone; once another has been seen, a quarter stays open for others. */
static void test_queue_is_shared(void **state)
{
  struct rig rig;
  int32_t prompt[20];
  struct engine_options options = rig_options();
  struct sits_request *requests[20];
  struct sits_error err;
  int n = 0;
  options.max_waiting_requests = 8;
  rig_open(&rig, options, 64);
  rig_prompt(prompt, 20, 6);
  struct sits_request_params p = {.prompt = prompt, .n_prompt = 20, .n_choices = 1, .sampling = rig_greedy(3), .tenant = 1};
  for (int i = 0; i < 8; i++) assert_int_equal(sits_engine_submit(rig.engine, &p, &requests[n++], &err), SITS_OK);
  p.tenant = 2;
  expect_refused(&rig, p, SITS_QUEUE_FULL, ""); /* full, but noted */
  for (int i = 0; i < 8; i++) rig_run(&rig, requests[i], (memset(got, 0, sizeof got[0]), got), 1);
  p.tenant = 1;
  for (int i = 0; i < 6; i++) assert_int_equal(sits_engine_submit(rig.engine, &p, &requests[n++], &err), SITS_OK);
  expect_refused(&rig, p, SITS_QUEUE_FULL, "");
  p.tenant = 2;
  for (int i = 0; i < 2; i++) assert_int_equal(sits_engine_submit(rig.engine, &p, &requests[n++], &err), SITS_OK);
  expect_refused(&rig, p, SITS_QUEUE_FULL, "");
  for (int i = 0; i < n; i++) sits_request_release(requests[i]);
  rig_idle(&rig);
  rig_close(&rig);
}

static void test_release_cancels(void **state)
{
  struct rig rig;
  int32_t prompt[50];
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 50, 6);
  struct sits_sampling s = rig_greedy(500);
  s.ignore_eos = true;
  for (int i = 0; i < 20; i++) {
    struct sits_request *request = rig_submit(&rig, prompt, 50, 1 + i % 3, s);
    for (int k = 0; k < i; k++) engine_step_once(rig.engine);
    sits_request_release(request);
  }
  for (int k = 0; k < 3; k++) engine_step_once(rig.engine);
  rig_idle(&rig);
  rig_close(&rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_stop_ids_and_min_tokens(void **state)
{
  struct rig rig;
  int32_t prompt[30], stop;
  rig_open(&rig, rig_options(), 64);
  rig_prompt(prompt, 30, 9);
  rig_expect(prompt, 30, 20, true, &expected);
  stop = expected.tokens[5];
  int32_t first = 0;
  while (expected.tokens[first] != stop) first++;
  struct sits_sampling s = rig_greedy(20);
  s.ignore_eos = true;
  s.stop_ids = &stop;
  s.n_stop_ids = 1;
  struct sits_request *request = rig_submit(&rig, prompt, 30, 1, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  assert_int_equal(got[0].finish, SITS_FINISH_STOP);
  assert_int_equal(got[0].stop_token, stop);
  assert_int_equal(got[0].n, first); /* the stop token is not part of the answer */
  sits_request_release(request);
  s.min_tokens = first + 1;
  request = rig_submit(&rig, prompt, 30, 1, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  assert_true(got[0].n > first);
  for (int i = 0; i <= first; i++) assert_int_not_equal(got[0].tokens[i], stop);
  sits_request_release(request);
  rig_close(&rig);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_timing_stages),
      cmocka_unit_test(test_one_request), cmocka_unit_test(test_many_share_steps), cmocka_unit_test(test_captures_are_told),
      cmocka_unit_test(test_tiny_pool_preempts),
      cmocka_unit_test(test_choices_fork), cmocka_unit_test(test_choices_share_all_pages),
      cmocka_unit_test(test_last_choice_copies_nothing),
      cmocka_unit_test(test_neighbours_do_not_decide_who_draws),
      cmocka_unit_test(test_stop_is_counted_as_stop), cmocka_unit_test(test_batch_beyond_the_queue_is_no_retry),
      cmocka_unit_test(test_sampled_choices_differ_and_repeat),
      cmocka_unit_test(test_device_draws_the_same),
      cmocka_unit_test(test_prefix_is_reused),
      cmocka_unit_test(test_prompt_logprobs), cmocka_unit_test(test_slow_consumer_is_left_out),
      cmocka_unit_test(test_full_ring_survives_preemption), cmocka_unit_test(test_cancel_full_ring_still_ends),
      cmocka_unit_test(test_leader_cancelled_during_prefill), cmocka_unit_test(test_cancel_costs_no_further_step),
      cmocka_unit_test(test_deadline), cmocka_unit_test(test_device_error), cmocka_unit_test(test_bad_requests_are_refused),
      cmocka_unit_test(test_queue_is_shared), cmocka_unit_test(test_release_cancels), cmocka_unit_test(test_stop_ids_and_min_tokens),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
