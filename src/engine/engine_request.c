/* A request's life outside the loop: checking and copying what was submitted, the inbox, the ring, cancelling, references. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "engine/engine_internal.h"

enum { RING_MIN = 64, RING_PER_CHOICE = 8, TENANT_LATELY_US = 10 * 1000 * 1000 };

static enum sits_status bad(struct sits_error *err, const char *param, const char *text)
{
  return sits_fail_param(err, SITS_INVALID_ARGUMENT, param, "%s", text);
}

static enum sits_status check_sampling(const struct sits_sampling *s, struct sits_error *err)
{
  if (!(s->temperature >= 0) || !isfinite(s->temperature)) return bad(err, "temperature", "temperature must be finite and not negative");
  if (!(s->top_p > 0 && s->top_p <= 1)) return bad(err, "top_p", "top_p must be in (0, 1]");
  if (!(s->min_p >= 0 && s->min_p <= 1)) return bad(err, "min_p", "min_p must be in [0, 1]");
  if (!(s->repetition_penalty > 0) || !isfinite(s->repetition_penalty)) {
    return bad(err, "repetition_penalty", "repetition_penalty must be positive");
  }
  if (!(fabsf(s->presence_penalty) <= 2)) return bad(err, "presence_penalty", "presence_penalty must be in [-2, 2]");
  if (!(fabsf(s->frequency_penalty) <= 2)) return bad(err, "frequency_penalty", "frequency_penalty must be in [-2, 2]");
  if (s->max_tokens < 0) return bad(err, "max_tokens", "max_tokens must not be negative");
  if (s->max_tokens == 0 && s->n_prompt_logprobs < 0) return bad(err, "max_tokens", "max_tokens must be at least 1");
  if (s->min_tokens < 0 || s->min_tokens > s->max_tokens) return bad(err, "min_tokens", "min_tokens must be in [0, max_tokens]");
  if (s->n_top_logprobs > SITS_MAX_TOP_LOGPROBS || s->n_prompt_logprobs > SITS_MAX_TOP_LOGPROBS) {
    return bad(err, "top_logprobs", "at most 20 alternatives can be asked for");
  }
  if (s->n_stop_ids < 0 || s->n_bias < 0) return bad(err, "stop_token_ids", "negative count");
  for (int32_t i = 0; i < s->n_bias; i++) {
    if (!isfinite(s->bias[i].bias)) return bad(err, "logit_bias", "a bias must be finite");
  }
  return SITS_OK;
}

static enum sits_status check_params(const struct sits_engine *engine, const struct sits_request_params *p, struct sits_error *err)
{
  const struct engine_options *o = &engine->options;
  if (p->n_prompt < 1 || !p->prompt) return bad(err, "prompt", "the prompt is empty");
  if (p->n_choices < 1 || p->n_choices > SITS_MAX_CHOICES) return bad(err, "n", "n must be in [1, 128]");
  if (p->n_choices > o->max_num_seqs) {
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "n", "n must be at most %d, the sequences that run at once here", o->max_num_seqs);
  }
  if (p->service_class < 0 || p->service_class >= SITS_CLASS_COUNT) return bad(err, "service_class", "unknown service class");
  enum sits_status status = check_sampling(&p->sampling, err);
  if (status != SITS_OK) return status;
  if ((int64_t)p->n_prompt + p->sampling.max_tokens > o->max_model_len) {
    return sits_fail_param(err, SITS_CONTEXT_LENGTH, "messages",
                           "this model's maximum context length is %d tokens; the prompt has %d and up to %d were asked for",
                           o->max_model_len, p->n_prompt, p->sampling.max_tokens);
  }
  for (int32_t i = 0; i < p->n_prompt; i++) {
    if (p->prompt[i] < 0 || p->prompt[i] >= o->n_vocab) return bad(err, "prompt", "a token id is outside the vocabulary");
  }
  return SITS_OK;
}

static void *copy_of(const void *from, size_t n_bytes)
{
  void *to = mem_alloc(n_bytes ? n_bytes : 1);
  if (to && n_bytes) memcpy(to, from, n_bytes);
  return to;
}

static bool ring_init(struct engine_ring *ring, const struct engine_options *o, const struct sits_request_params *p)
{
  const struct sits_sampling *s = &p->sampling;
  int64_t least = (int64_t)p->n_choices * (RING_PER_CHOICE + o->spec_max_tokens);
  if (s->n_prompt_logprobs >= 0) least += o->max_rows;
  ring->capacity = RING_MIN;
  while (ring->capacity < least) ring->capacity *= 2;
  ring->n_top = s->n_top_logprobs > s->n_prompt_logprobs ? s->n_top_logprobs : s->n_prompt_logprobs;
  ring->records = mem_calloc(ring->capacity, sizeof *ring->records);
  if (!ring->records) return false;
  if (ring->n_top <= 0) return true;
  ring->top_token = mem_calloc((size_t)ring->capacity * (size_t)ring->n_top, sizeof(int32_t));
  ring->top_logprob = mem_calloc((size_t)ring->capacity * (size_t)ring->n_top, sizeof(float));
  return ring->top_token && ring->top_logprob;
}

void engine_request_free(struct sits_request *request)
{
  if (!request) return;
  engine_handover_destroy(request);
  for (int32_t i = 0; request->choices && i < request->n_choices; i++) mem_free(request->choices[i].tokens);
  mem_free(request->choices);
  mem_free((void *)(uintptr_t)request->params.sampling.stop_ids);
  mem_free((void *)(uintptr_t)request->params.sampling.bias);
  mem_free(request->ring.records);
  mem_free(request->ring.top_token);
  mem_free(request->ring.top_logprob);
  mem_free(request);
}

static bool init_choices(struct sits_request *request, const struct sits_request_params *p)
{
  size_t n_tokens = (size_t)p->n_prompt + (size_t)p->sampling.max_tokens;
  request->choices = mem_calloc((size_t)p->n_choices, sizeof *request->choices);
  if (!request->choices) return false;
  for (int32_t i = 0; i < p->n_choices; i++) {
    struct engine_choice *c = &request->choices[i];
    *c = (struct engine_choice){.request = request, .index = i, .id = -1, .slot = -1, .draft_slot = -1, .swap.at.head = -1};
    c->tokens = mem_alloc(n_tokens * sizeof(int32_t));
    if (!c->tokens) return false;
    memcpy(c->tokens, p->prompt, (size_t)p->n_prompt * sizeof(int32_t));
  }
  return true;
}

struct sits_request *engine_request_create(struct sits_engine *engine, const struct sits_request_params *p)
{
  struct sits_request *request = mem_calloc(1, sizeof *request);
  if (!request) return NULL;
  request->engine = engine;
  request->params = *p;
  request->params.id[sizeof request->params.id - 1] = '\0';
  request->n_choices = request->n_unfinished = p->n_choices;
  request->deadline_at = -1;
  request->next_prompt_row = p->sampling.n_prompt_logprobs >= 0 ? 1 : p->n_prompt;
  atomic_init(&request->n_refs, 2);
  struct sits_sampling *s = &request->params.sampling;
  s->stop_ids = copy_of(s->stop_ids, (size_t)s->n_stop_ids * sizeof *s->stop_ids);
  s->bias = copy_of(s->bias, (size_t)s->n_bias * sizeof *s->bias);
  if (!s->stop_ids || !s->bias || !init_choices(request, p) || !ring_init(&request->ring, &engine->options, p)) {
    engine_request_free(request);
    return NULL;
  }
  request->params.prompt = request->choices[0].tokens;
  return request;
}

static struct engine_queue_share *share_of(struct sits_engine *engine, uint64_t tenant)
{
  return &engine->shares[hash_mix(tenant, 0) % ENGINE_QUEUE_SHARES];
}

/* Under the inbox mutex: whether the tenant has its part of the queue already. Alone it may have all of it; while others have been seen
 * lately it may have three quarters, so that a place becomes free for them as the queue moves. */
static bool has_its_share(struct sits_engine *engine, const struct sits_request *request)
{
  int64_t now_us = atomic_load(&request->times[TIME_SUBMITTED]);
  struct engine_queue_share *mine = share_of(engine, request->params.tenant);
  mine->seen_us = now_us;
  if (atomic_load(&mine->n_queued) < engine->options.max_waiting_requests - engine->options.max_waiting_requests / 4) return false;
  for (int32_t i = 0; i < ENGINE_QUEUE_SHARES; i++) {
    if (&engine->shares[i] != mine && engine->shares[i].seen_us > now_us - TENANT_LATELY_US) return true;
  }
  return false;
}

void engine_unqueue(struct sits_engine *engine, const struct sits_request *request)
{
  atomic_fetch_sub(&engine->n_queued, 1);
  atomic_fetch_sub(&engine->queued_tokens, request->params.n_prompt);
  atomic_fetch_sub(&share_of(engine, request->params.tenant)->n_queued, 1);
}

/* Under the inbox mutex: whether one more request may wait. */
static enum sits_status admit_to_queue(struct sits_engine *engine, const struct sits_request *request, struct sits_error *err)
{
  const struct engine_options *o = &engine->options;
  int32_t state = atomic_load(&engine->state);
  if (state == ENGINE_FAILED) return sits_fail(err, SITS_UNAVAILABLE, "the device has failed");
  if (state != ENGINE_RUNNING && state != ENGINE_CREATED) return sits_fail(err, SITS_UNAVAILABLE, "the server is shutting down");
  bool is_greedy = has_its_share(engine, request);
  if (is_greedy || atomic_load(&engine->n_queued) >= o->max_waiting_requests ||
      atomic_load(&engine->n_alive) + request->n_choices > engine->max_entries) {
    atomic_fetch_add(&engine->n_rejected_requests, 1);
    return sits_fail(err, SITS_QUEUE_FULL, "too many requests are waiting");
  }
  if (o->max_waiting_tokens > 0 && atomic_load(&engine->n_queued) > 0 &&
      atomic_load(&engine->queued_tokens) + request->params.n_prompt > o->max_waiting_tokens) {
    atomic_fetch_add(&engine->n_rejected_tokens, 1);
    return sits_fail(err, SITS_QUEUE_FULL, "too many prompt tokens are waiting");
  }
  atomic_fetch_add(&share_of(engine, request->params.tenant)->n_queued, 1);
  atomic_fetch_add(&engine->n_queued, 1);
  atomic_fetch_add(&engine->queued_tokens, request->params.n_prompt);
  atomic_fetch_add(&engine->n_alive, request->n_choices);
  atomic_fetch_add(&engine->n_requests, 1);
  return SITS_OK;
}

enum sits_status sits_engine_may_queue(const struct sits_engine *engine, int64_t n, int64_t n_choices, int64_t n_prompt_tokens,
                                       struct sits_error *err)
{
  const struct engine_options *o = &engine->options;
  int64_t most = o->max_waiting_requests;
  if (n_choices > 0 && most > engine->max_entries / n_choices) most = engine->max_entries / n_choices;
  if (n > most) {
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "%lld prompts at once are more than can wait here, %lld", (long long)n,
                           (long long)most);
  }
  if (n > 1 && o->max_waiting_tokens > 0 && n_prompt_tokens > o->max_waiting_tokens) {
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "prompts of %lld tokens at once are more than can wait here, %lld",
                           (long long)n_prompt_tokens, (long long)o->max_waiting_tokens);
  }
  return SITS_OK;
}

enum sits_status engine_request_enter(struct sits_engine *engine, struct sits_request *request, struct sits_error *err)
{
  pthread_mutex_lock(&engine->inbox_mutex);
  enum sits_status status = admit_to_queue(engine, request, err);
  if (status == SITS_OK) {
    if (engine->inbox_last) engine->inbox_last->next = request;
    else engine->inbox_first = request;
    engine->inbox_last = request;
    int service_class = (int)request->params.service_class;
    if (service_class < atomic_load(&engine->inbox_class)) atomic_store(&engine->inbox_class, service_class);
    if (engine->is_sleeping) pthread_cond_signal(&engine->inbox_cond);
  }
  pthread_mutex_unlock(&engine->inbox_mutex);
  return status;
}

enum sits_status sits_engine_submit(struct sits_engine *engine, const struct sits_request_params *params, struct sits_request **out,
                                    struct sits_error *err)
{
  enum sits_status status = check_params(engine, params, err);
  if (status != SITS_OK) return status;
  struct sits_request *request = engine_request_create(engine, params);
  if (!request) return sits_fail(err, SITS_NOMEM, "out of memory for the request");
  atomic_store(&request->times[TIME_SUBMITTED], clock_monotonic_us());
  status = engine->placement ? engine_handover_create(engine, request) : SITS_OK;
  if (status != SITS_OK) (void)sits_fail(err, status, "out of memory for the request");
  else status = engine_request_enter(engine, request, err);
  if (status != SITS_OK) {
    engine_request_free(request);
    return status;
  }
  *out = request;
  return SITS_OK;
}

void engine_request_unref(struct sits_request *request)
{
  if (atomic_fetch_sub(&request->n_refs, 1) == 1) engine_request_free(request);
}

int32_t engine_ring_room(const struct engine_ring *ring)
{
  uint32_t used = atomic_load_explicit(&ring->tail, memory_order_relaxed) - atomic_load_explicit(&ring->head, memory_order_acquire);
  return (int32_t)(ring->capacity - used);
}

void engine_ring_push(struct engine_ring *ring, const struct sits_event *event)
{
  uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed), at = tail & (ring->capacity - 1);
  assert(engine_ring_room(ring) > 0); /* engine_hold_full keeps a choice out of a step that could overflow it */
  ring->records[at] = (struct engine_record){.kind = (uint8_t)event->kind, .finish = (uint8_t)event->finish, .n_top = (int16_t)event->n_top,
                                             .choice = event->choice, .token = event->token, .logprob = event->logprob,
                                             .status = (int32_t)event->status, .emitted_us = event->emitted_us};
  if (event->n_top > 0) {
    memcpy(ring->top_token + (size_t)at * (size_t)ring->n_top, event->top_token, (size_t)event->n_top * sizeof(int32_t));
    memcpy(ring->top_logprob + (size_t)at * (size_t)ring->n_top, event->top_logprob, (size_t)event->n_top * sizeof(float));
  }
  atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
}

enum sits_status sits_request_poll(struct sits_request *request, struct sits_event *event)
{
  struct engine_ring *ring = &request->ring;
  uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed), at = head & (ring->capacity - 1);
  if (head == atomic_load_explicit(&ring->tail, memory_order_acquire)) return SITS_AGAIN;
  const struct engine_record *r = &ring->records[at];
  event->kind = (enum sits_event_kind)r->kind;
  event->choice = r->choice;
  event->token = r->token;
  event->finish = (enum sits_finish)r->finish;
  event->status = (enum sits_status)r->status;
  event->logprob = r->logprob;
  event->n_top = r->n_top;
  event->emitted_us = r->emitted_us;
  if (r->n_top > 0) {
    memcpy(event->top_token, ring->top_token + (size_t)at * (size_t)ring->n_top, (size_t)r->n_top * sizeof(int32_t));
    memcpy(event->top_logprob, ring->top_logprob + (size_t)at * (size_t)ring->n_top, (size_t)r->n_top * sizeof(float));
  }
  atomic_store_explicit(&ring->head, head + 1, memory_order_release);
  return SITS_OK;
}

bool engine_is_cancelled(const struct sits_request *request, int32_t choice)
{
  return atomic_load(&request->cancelled[choice / 64]) >> (choice % 64) & 1;
}

bool engine_is_stopped(const struct sits_request *request, int32_t choice)
{
  return atomic_load(&request->stopped[choice / 64]) >> (choice % 64) & 1;
}

void sits_request_stop(struct sits_request *request, int32_t choice)
{
  if (choice < 0 || choice >= request->n_choices) return;
  if (!engine_is_cancelled(request, choice)) atomic_fetch_or(&request->stopped[choice / 64], (uint64_t)1 << (choice % 64));
  sits_request_cancel(request, choice);
}

void sits_request_cancel(struct sits_request *request, int32_t choice)
{
  if (choice >= request->n_choices || atomic_load(&request->is_done)) return;
  for (int32_t i = 0; i < SITS_MAX_CHOICES / 64; i++) {
    if (choice < 0) atomic_store(&request->cancelled[i], UINT64_MAX);
    else if (choice / 64 == i) atomic_fetch_or(&request->cancelled[i], (uint64_t)1 << (choice % 64));
  }
  struct sits_engine *engine = request->engine;
  pthread_mutex_lock(&engine->inbox_mutex);
  if (!request->in_cancel_list) {
    request->in_cancel_list = true;
    request->cancel_step = atomic_load(&engine->n_steps_begun);
    atomic_fetch_add(&request->n_refs, 1); /* the list's */
    request->cancel_next = engine->cancel_first;
    engine->cancel_first = request;
    if (engine->is_sleeping) pthread_cond_signal(&engine->inbox_cond);
  }
  pthread_mutex_unlock(&engine->inbox_mutex);
}

void *sits_request_user(const struct sits_request *request)
{
  return request->params.user;
}

static int64_t span(int64_t from, int64_t to)
{
  return from > 0 && to > from ? to - from : 0;
}

static int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

void sits_request_timing(const struct sits_request *request, struct sits_request_timing *out)
{
  int64_t t[TIME_COUNT];
  for (int i = 0; i < TIME_COUNT; i++) t[i] = atomic_load(&request->times[i]);
  *out = (struct sits_request_timing){
      .submitted_us = t[TIME_SUBMITTED], .first_scheduled_us = t[TIME_SCHEDULED], .first_token_us = t[TIME_FIRST_TOKEN],
      .done_us = t[TIME_DONE], .n_prompt_tokens = request->params.n_prompt, .n_cached_tokens = (int32_t)t[TIME_CACHED_TOKENS],
      .n_output_tokens = (int32_t)t[TIME_OUTPUT_TOKENS], .n_preemptions = (int32_t)t[TIME_PREEMPTIONS]};
  int64_t end = t[TIME_DONE] ? t[TIME_DONE] : clock_monotonic_us(), scheduled = t[TIME_SCHEDULED] ? t[TIME_SCHEDULED] : end;
  int64_t first = t[TIME_FIRST_TOKEN] ? t[TIME_FIRST_TOKEN] : end;
  int64_t computed_first = t[TIME_FIRST_TOKEN] ? t[TIME_COMPUTED_FIRST] : t[TIME_COMPUTED];
  out->queue_us = span(t[TIME_SUBMITTED], scheduled);
  out->prefill_us = least(computed_first, span(t[TIME_SCHEDULED], first));
  out->decode_us = least(t[TIME_COMPUTED] - computed_first, span(t[TIME_FIRST_TOKEN], end));
  out->scheduling_us = span(t[TIME_SCHEDULED], end) - out->prefill_us - out->decode_us;
}

void sits_request_release(struct sits_request *request)
{
  if (!request) return;
  atomic_store(&request->is_released, true);
  sits_request_cancel(request, -1);
  engine_request_unref(request);
}
