/* A call's life over a scripted engine: deltas, stop strings, failures, cancelling, back-pressure, admission of batches, and what the
 * engine may still say after a call is over. */
#include "front_rig.h"

#include <time.h>

struct recorder {
  pthread_mutex_t mutex;
  pthread_cond_t change;
  char log[8192];                /* "choice:text|" ..., finish as "choice=stop|" */
  size_t n_log;
  int n_done, n_flush;
  enum sits_status status;
  struct api_usage usage;
  bool is_full;
};

static void note(struct recorder *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void note(struct recorder *r, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  r->n_log += (size_t)vsnprintf(r->log + r->n_log, sizeof r->log - r->n_log, format, args);
  va_end(args);
  assert_true(r->n_log < sizeof r->log);
}

static void on_delta(void *context, const struct api_delta *d)
{
  struct recorder *r = context;
  pthread_mutex_lock(&r->mutex);
  note(r, "%d%s:%.*s", d->choice, d->is_echo ? "e" : "", (int)d->n_bytes, d->text ? d->text : "");
  if (d->n_tokens != 1 || d->finish) note(r, "/%d", d->n_tokens);
  if (d->finish) note(r, "=%s", d->finish == API_FINISH_STOP ? "stop" : "length");
  if (d->stop_text) note(r, "(%s)", d->stop_text);
  if (d->stop_token >= 0) note(r, "(%d%s)", d->stop_token, d->stop_token_is_end ? " end" : "");
  note(r, "|");
  pthread_mutex_unlock(&r->mutex);
}

static void on_flush(void *context)
{
  struct recorder *r = context;
  pthread_mutex_lock(&r->mutex);
  r->n_flush++;
  pthread_cond_broadcast(&r->change);
  pthread_mutex_unlock(&r->mutex);
}

static bool on_is_full(void *context)
{
  struct recorder *r = context;
  pthread_mutex_lock(&r->mutex);
  bool is_full = r->is_full;
  pthread_mutex_unlock(&r->mutex);
  return is_full;
}

static void on_done(void *context, const struct api_result *result)
{
  struct recorder *r = context;
  pthread_mutex_lock(&r->mutex);
  r->n_done++;
  r->status = result->status;
  r->usage = result->usage;
  pthread_cond_broadcast(&r->change);
  pthread_mutex_unlock(&r->mutex);
}

static const struct api_sink sink = {.delta = on_delta, .flush = on_flush, .is_full = on_is_full, .done = on_done};

static void recorder_init(struct recorder *r)
{
  *r = (struct recorder){.n_done = 0};
  pthread_mutex_init(&r->mutex, NULL);
  pthread_cond_init(&r->change, NULL);
}

/* Until *counter reaches n; fails after five seconds. */
static void wait_for(struct recorder *r, const int *counter, int n)
{
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 5;
  pthread_mutex_lock(&r->mutex);
  while (*counter < n)
    if (pthread_cond_timedwait(&r->change, &r->mutex, &end)) break;
  int got = *counter;
  pthread_mutex_unlock(&r->mutex);
  assert_true(got >= n);
}

static void notify(struct rig *rig)
{
  struct sits_request *list[FAKE_MAX_REQUESTS];
  pthread_mutex_lock(&fake.mutex);
  int n = fake.n_requests;
  memcpy(list, fake.requests, sizeof list);
  pthread_mutex_unlock(&fake.mutex);
  api_on_events(rig->api, list, n);
}

static struct api_call *start(struct rig *rig, struct recorder *r, enum api_kind kind, const char *body)
{
  struct api_call *call = NULL;
  struct sits_error err = {0};
  recorder_init(r);
  if (api_call_create(rig->api, rig_parse(kind, body), &sink, r, &call, &err)) fail_msg("%s", err.text);
  if (api_call_submit(call, "id", &err)) fail_msg("%s", err.text);
  return call;
}

static void type(int request, int32_t choice, const char *text)
{
  for (; *text; text++) fake_token(request, choice, (unsigned char)*text);
}

static void finish_and_check(struct rig *rig, struct recorder *r, struct api_call *call, enum sits_status status, const char *log)
{
  wait_for(r, &r->n_done, 1);
  notify(rig); /* the engine may name the request once more */
  assert_true(api_wait_idle(rig->api, 5000000));
  pthread_mutex_lock(&r->mutex);
  assert_int_equal(r->n_done, 1);
  assert_int_equal(r->status, status);
  assert_string_equal(r->log, log);
  pthread_mutex_unlock(&r->mutex);
  api_call_release(call);
  for (int i = 0; i < fake.n_requests; i++) assert_true(fake_look(i).is_released);
}

static void test_text_comes_out_by_whole_characters(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"ab\",\"max_tokens\":9}");
  type(0, 0, "a\xE2\x82\xAC");
  fake_token(0, 0, 0xE2);
  fake_finish(0, 0, SITS_FINISH_LENGTH, -1, SITS_OK);
  notify(&rig);
  finish_and_check(&rig, &r, call, SITS_OK, "0:a|0:\xE2\x82\xAC/3|0:\xEF\xBF\xBD/1=length|");
  assert_int_equal(r.usage.n_output_tokens, 5);
  assert_int_equal(r.usage.n_prompt_tokens, 2);
  assert_int_equal(r.usage.n_cached_tokens, 1);
  rig_close(&rig);
}

static void test_end_token_is_counted_and_not_shown(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"ab\",\"max_tokens\":9,\"stop_token_ids\":[65]}");
  type(0, 0, "hi");
  fake_finish(0, 0, SITS_FINISH_STOP, 65, SITS_OK);
  notify(&rig);
  finish_and_check(&rig, &r, call, SITS_OK, "0:h|0:i|0:/0=stop(65)|");
  assert_int_equal(r.usage.n_output_tokens, 3);
  rig_close(&rig);
}

static void test_stop_string_over_tokens_ends_the_choice(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"ab\",\"n\":2,\"max_tokens\":50,\"stop\":[\"END\"]}");
  type(0, 0, "aENENDxx"); /* the engine goes on until it sees the cancellation */
  type(0, 1, "b");
  notify(&rig);
  wait_for(&r, &r.n_flush, 1);
  assert_int_equal(fake_look(0).cancelled, 1);
  type(0, 1, "EN");
  fake_finish(0, 0, SITS_FINISH_CANCELLED, -1, SITS_OK);
  fake_finish(0, 1, SITS_FINISH_LENGTH, -1, SITS_OK);
  notify(&rig);
  finish_and_check(&rig, &r, call, SITS_OK, "0:a|0:EN/2|0:/0=stop(END)|1:b|1:EN/2=length|");
  rig_close(&rig);
}

static void test_engine_error_ends_the_call(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":[\"a\",\"b\"],\"max_tokens\":9}");
  type(0, 0, "x");
  fake_finish(1, 0, SITS_FINISH_ERROR, -1, SITS_DEVICE);
  notify(&rig);
  finish_and_check(&rig, &r, call, SITS_DEVICE, "0:x|");
  rig_close(&rig);
}

static void test_cancel_twice(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":9}");
  api_call_cancel(call, SITS_CANCELLED);
  api_call_cancel(call, SITS_UNAVAILABLE);
  wait_for(&r, &r.n_done, 1);
  api_call_cancel(call, SITS_CANCELLED);
  type(0, 0, "late");
  finish_and_check(&rig, &r, call, SITS_CANCELLED, "");
  rig_close(&rig);
}

/* The engine hears of it on the thread that cancels, not when the delivery thread comes to it: that one is held up in a sink here. */
static void test_cancel_does_not_wait_for_the_delivery(void **state)
{
  struct rig rig;
  struct recorder busy, r;
  rig_open(&rig);
  struct api_call *first = start(&rig, &busy, API_COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":9}");
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":[\"a\",\"b\"],\"max_tokens\":9}");
  pthread_mutex_lock(&busy.mutex); /* its sink waits for this */
  type(0, 0, "x");
  notify(&rig);
  api_call_cancel(call, SITS_CANCELLED);
  uint64_t second = fake_look(1).cancelled, third = fake_look(2).cancelled;
  pthread_mutex_unlock(&busy.mutex);
  assert_true(second == UINT64_MAX && third == UINT64_MAX);
  api_call_cancel(first, SITS_CANCELLED);
  wait_for(&busy, &busy.n_done, 1);
  finish_and_check(&rig, &r, call, SITS_CANCELLED, "");
  api_call_release(first);
  rig_close(&rig);
}

static void test_abort_all(void **state)
{
  struct rig rig;
  struct recorder r[3];
  struct api_call *calls[3];
  rig_open(&rig);
  for (int i = 0; i < 3; i++) calls[i] = start(&rig, &r[i], API_COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":9}");
  assert_int_equal(api_n_active(rig.api), 3);
  assert_false(api_wait_idle(rig.api, 1000));
  api_stop_admission(rig.api);
  api_abort_all(rig.api, SITS_UNAVAILABLE);
  for (int i = 0; i < 3; i++) {
    wait_for(&r[i], &r[i].n_done, 1);
    assert_int_equal(r[i].status, SITS_UNAVAILABLE);
    api_call_release(calls[i]);
  }
  struct api_call *call = NULL;
  struct api_request *request = rig_parse(API_COMPLETION, "{\"prompt\":\"a\"}");
  struct sits_error err;
  assert_int_equal(api_call_create(rig.api, request, &sink, &r[0], &call, &err), SITS_UNAVAILABLE);
  api_request_destroy(request);
  rig_close(&rig);
}

static void stop_everything(void *context)
{
  struct api *api = context;
  api_stop_admission(api);
  assert_int_equal(api_n_active(api), 1); /* a drain must wait for it */
  assert_false(api_wait_idle(api, 1000));
  api_abort_all(api, SITS_UNAVAILABLE);
}

/* A stop between a call's admission and its publication: it used to be missed by both the drain and the abort. */
static void test_a_stop_during_submission(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  fake.on_submit = stop_everything;
  fake.on_submit_context = rig.api;
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":9}");
  fake.on_submit = NULL;
  wait_for(&r, &r.n_done, 1);
  assert_int_equal(r.status, SITS_UNAVAILABLE);
  assert_true(api_wait_idle(rig.api, 5000000));
  api_call_release(call);
  rig_close(&rig);
}

static void test_a_full_sink_leaves_events_in_the_ring(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"a\",\"max_tokens\":9}");
  type(0, 0, "a");
  notify(&rig);
  wait_for(&r, &r.n_flush, 1);
  pthread_mutex_lock(&r.mutex);
  r.is_full = true;
  pthread_mutex_unlock(&r.mutex);
  type(0, 0, "bc");
  fake_finish(0, 0, SITS_FINISH_LENGTH, -1, SITS_OK);
  notify(&rig);
  usleep(50000);
  struct sits_request look = fake_look(0);
  assert_int_equal(look.tail - look.head, 3);
  pthread_mutex_lock(&r.mutex);
  r.is_full = false;
  pthread_mutex_unlock(&r.mutex);
  api_call_resume(call);
  finish_and_check(&rig, &r, call, SITS_OK, "0:a|0:b|0:c|0:/0=length|");
  rig_close(&rig);
}

static void test_a_batch_is_admitted_whole_or_not(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  recorder_init(&r);
  struct api_call *call = NULL;
  struct sits_error err = {0};
  fake.fail_at = 2;
  fake.next_status = SITS_QUEUE_FULL;
  assert_int_equal(api_call_create(rig.api, rig_parse(API_COMPLETION, "{\"prompt\":[\"a\",\"b\",\"c\"]}"), &sink, &r, &call, &err),
                   SITS_OK);
  assert_int_equal(api_call_submit(call, "id", &err), SITS_QUEUE_FULL);
  type(0, 0, "x");
  notify(&rig);
  api_call_release(call);
  usleep(20000);
  assert_int_equal(fake.n_requests, 2);
  for (int i = 0; i < 2; i++) assert_true(fake_look(i).is_released);
  assert_int_equal(r.n_done + r.n_flush, 0);
  assert_int_equal(api_n_active(rig.api), 0);
  rig_close(&rig);
}

static void test_echo_and_prompt_logprobs(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"abc\",\"max_tokens\":2,\"echo\":true,\"logprobs\":1}");
  struct sits_request look = fake_look(0);
  assert_int_equal(look.params.sampling.n_prompt_logprobs, 1);
  assert_int_equal(look.params.sampling.n_top_logprobs, 1);
  for (int i = 1; i < 3; i++) fake_push(0, (struct sits_event){.kind = SITS_EVENT_PROMPT_LOGPROB, .token = "abc"[i], .logprob = -1});
  type(0, 0, "d");
  fake_finish(0, 0, SITS_FINISH_LENGTH, -1, SITS_OK);
  notify(&rig);
  finish_and_check(&rig, &r, call, SITS_OK, "0e:abc/3|0:d|0:/0=length|");
  rig_close(&rig);
}

static void test_parameters_reach_the_engine(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  struct api_call *call = start(&rig, &r, API_CHAT,
    "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"temperature\":0.25,\"top_p\":0.5,\"top_k\":7,\"min_p\":0.125,\"seed\":42,"
    "\"presence_penalty\":1.5,\"frequency_penalty\":-1,\"repetition_penalty\":1.25,\"n\":3,\"max_tokens\":11,\"min_tokens\":2,"
    "\"ignore_eos\":true,\"logit_bias\":{\"9\":-3},\"stop_token_ids\":[4,5],\"logprobs\":true,\"top_logprobs\":2,\"priority\":-1}");
  struct sits_request look = fake_look(0);
  const struct sits_sampling *s = &look.params.sampling;
  assert_true(s->temperature == 0.25f && s->top_p == 0.5f && s->top_k == 7 && s->min_p == 0.125f && s->seed == 42);
  assert_true(s->presence_penalty == 1.5f && s->frequency_penalty == -1 && s->repetition_penalty == 1.25f);
  assert_true(s->max_tokens == 11 && s->min_tokens == 2 && s->ignore_eos && s->n_top_logprobs == 2 && s->n_prompt_logprobs == -1);
  assert_true(s->n_stop_ids == 2 && s->n_bias == 1 && look.params.n_choices == 3 && look.params.priority == -1);
  assert_string_equal(look.params.id, "id");
  api_call_cancel(call, SITS_CANCELLED);
  finish_and_check(&rig, &r, call, SITS_CANCELLED, "");
  rig_close(&rig);
}

static void test_default_lengths_and_context(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig); /* max_model_len 1000 */
  struct api_call *call = start(&rig, &r, API_COMPLETION, "{\"prompt\":\"ab\"}");
  assert_int_equal(fake_look(0).params.sampling.max_tokens, 16);
  api_call_cancel(call, SITS_CANCELLED);
  finish_and_check(&rig, &r, call, SITS_CANCELLED, "");
  fake_reset();
  call = start(&rig, &r, API_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}");
  assert_int_equal(fake_look(0).params.sampling.max_tokens, 1000 - fake_look(0).params.n_prompt);
  api_call_cancel(call, SITS_CANCELLED);
  finish_and_check(&rig, &r, call, SITS_CANCELLED, "");
  fake_reset();
  struct sits_error err = {0};
  assert_int_equal(api_call_create(rig.api, rig_parse(API_COMPLETION, "{\"prompt\":\"ab\",\"max_tokens\":999}"), &sink, &r, &call, &err),
                   SITS_OK);
  assert_int_equal(api_call_submit(call, "id", &err), SITS_CONTEXT_LENGTH);
  assert_string_equal(err.param, "prompt");
  api_call_release(call);
  rig_close(&rig);
}

/* Fail each allocation of creating and submitting in turn: an error, and nothing left behind. */
static void test_every_allocation_may_fail(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  const char *body = "{\"messages\":[{\"role\":\"user\",\"content\":\"<end>\"}],\"n\":2,\"stop\":[\"x\"],\"logprobs\":true}";
  recorder_init(&r);
  bool fired = true;
  for (uint64_t n = 1; fired && n < 5000; n++) {
    struct api_request *request = rig_parse(API_CHAT, body);
    struct api_call *call = NULL;
    struct sits_error err = {0};
    fake_reset();
    mem_fault_arm(n);
    enum sits_status status = api_call_create(rig.api, request, &sink, &r, &call, &err);
    if (status) api_request_destroy(request);
    else status = api_call_submit(call, "id", &err);
    fired = mem_fault_fired();
    mem_fault_arm(0);
    if (fired && status && status != SITS_NOMEM)
      fail_msg("allocation %llu: %s %s", (unsigned long long)n, sits_status_info(status)->name, err.text);
    if (!status) {
      r.n_done = 0;
      api_call_cancel(call, SITS_CANCELLED);
      wait_for(&r, &r.n_done, 1);
    }
    if (call) api_call_release(call);
    assert_true(api_wait_idle(rig.api, 5000000));
  }
  assert_false(fired);
  rig_close(&rig);
}

/* Everything is given back: the live block count before and after a call of each kind is the same. */
static void test_nothing_is_left(void **state)
{
  struct rig rig;
  struct recorder r;
  rig_open(&rig);
  static const char *const bodies[] = {"{\"prompt\":\"a\",\"stop\":\"z\"}", "{\"prompt\":[\"a\",\"b\"],\"n\":2,\"logprobs\":3}",
                                       "{\"prompt\":\"a\"}"};
  int64_t before = 0;
  for (int round = 0; round < 3; round++) {
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
      struct api_call *call = start(&rig, &r, API_COMPLETION, bodies[i]);
      type(0, 0, "abc\xE2");
      notify(&rig);
      api_call_cancel(call, SITS_CANCELLED);
      wait_for(&r, &r.n_done, 1);
      api_call_release(call);
      assert_true(api_wait_idle(rig.api, 5000000));
      fake_reset();
    }
    usleep(20000); /* the delivery thread's own last reference */
    if (round == 1) before = mem_live_blocks();
  }
  assert_int_equal(mem_live_blocks(), before);
  rig_close(&rig);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_text_comes_out_by_whole_characters), cmocka_unit_test(test_end_token_is_counted_and_not_shown),
    cmocka_unit_test(test_stop_string_over_tokens_ends_the_choice), cmocka_unit_test(test_engine_error_ends_the_call),
    cmocka_unit_test(test_cancel_twice), cmocka_unit_test(test_cancel_does_not_wait_for_the_delivery),
    cmocka_unit_test(test_abort_all), cmocka_unit_test(test_a_stop_during_submission),
    cmocka_unit_test(test_a_full_sink_leaves_events_in_the_ring),
    cmocka_unit_test(test_a_batch_is_admitted_whole_or_not), cmocka_unit_test(test_echo_and_prompt_logprobs),
    cmocka_unit_test(test_parameters_reach_the_engine), cmocka_unit_test(test_default_lengths_and_context),
    cmocka_unit_test(test_every_allocation_may_fail), cmocka_unit_test(test_nothing_is_left)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
