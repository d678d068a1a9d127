/* See api_call.h. api_call_create and api_call_submit run on a transport's worker; everything from "delivery" on runs on the delivery
 * thread.
 *
 * Ownership: the transport and the delivery side hold one reference each, and every queued part one. The delivery reference is dropped in
 * finish_call, after sink->done. Engine requests are touched by api_call_submit until the call is RUNNING and by the delivery thread
 * after. */
#include "front/api/api_call.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/api/api_internal.h"

void api_call_free(struct api_call *call)
{
  for (int32_t p = 0; call->parts && p < call->n_parts; p++) {
    struct api_part *part = &call->parts[p];
    for (int32_t c = 0; part->choices && c < call->n_choices; c++) {
      detok_destroy(part->choices[c].detok);
      mem_free(part->choices[c].pending);
    }
    mem_free(part->choices);
    mem_free(part->prompt_tokens);
    token_list_fini(&part->prompt);
    if (part->request) sits_request_release(part->request);
  }
  mem_free(call->parts);
  buf_fini(&call->prompt);
  api_request_destroy(call->request);
  if (call->is_submitted) atomic_fetch_sub(&call->api->n_owed, 1);
  mem_free(call);
}

/* ---- start ---- */

static enum sits_status tokenize_parts(struct api_call *call, const struct api_model *model, struct sits_error *err)
{
  for (int32_t p = 0; p < call->n_parts; p++) {
    struct api_part *part = &call->parts[p];
    enum sits_status status = call->request->kind == API_CHAT
      ? api_prompt_chat(model, call->api->specials, &call->api->limits, call->request, &part->prompt, err)
      : api_prompt_text(model, call->request, p, &part->prompt, err);
    if (status) return status;
    part->n_prompt = part->prompt.n;
    call->usage.n_prompt_tokens += part->n_prompt;
  }
  return SITS_OK;
}

static int append_dump(const char *bytes, size_t n_bytes, void *context) { return buf_append(context, bytes, n_bytes) ? 0 : -1; }

/* The prompt as the client wrote it: the messages or the prompt, as one JSON value. */
static void keep_prompt(struct api_call *call)
{
  const struct api_request *request = call->request;
  const json_t *value = request->messages ? request->messages : json_object_get(request->body, "prompt");
  buf_init(&call->prompt, call->api->prompt_bytes);
  if (call->api->prompt_bytes && value) json_dump_callback(value, append_dump, &call->prompt, JSON_COMPACT | JSON_ENCODE_ANY);
}

/* The parsed messages or prompts are not needed any more once they are tokens; a waiting call should not hold megabytes of JSON. */
static void drop_texts(struct api_request *request)
{
  if (!request->body || request->echo) return;
  request->messages = NULL;
  for (int64_t p = 0; p < request->n_prompts; p++) request->prompts[p] = (struct api_prompt){0};
  json_object_del(request->body, "messages");
  json_object_del(request->body, "prompt");
}

static enum sits_status check_bias(const struct api_request *request, const struct api_model *model, struct sits_error *err)
{
  int32_t n_vocab = tokenizer_n_vocab(model->tokenizer);
  for (int64_t i = 0; i < request->n_bias; i++)
    if (request->bias[i].token >= n_vocab)
      return sits_fail_param(err, SITS_INVALID_ARGUMENT, "logit_bias", "a token id of 'logit_bias' is outside the vocabulary of %d",
                             n_vocab);
  return SITS_OK;
}

static enum sits_status create_choices(struct api_part *part, const struct api_model *model, struct sits_error *err)
{
  const struct api_request *request = part->call->request;
  struct detok_options options = {.skip_special = request->skip_special_tokens, .include_stop = request->include_stop_str_in_output,
                                  .stops = request->stops, .n_stops = (int32_t)request->n_stops,
                                  .min_tokens = (int32_t)request->min_tokens};
  part->choices = mem_calloc((size_t)request->n, sizeof *part->choices);
  if (!part->choices) return sits_fail(err, SITS_NOMEM, "no memory for the request's choices");
  part->n_left = (int32_t)request->n;
  for (int64_t c = 0; c < request->n; c++) {
    enum sits_status status = detok_create(model->tokenizer, &options, &part->choices[c].detok);
    if (status) return sits_fail(err, status, "no memory for the request's choices");
  }
  if (request->echo && api_request_logprobs(request) >= 0) {
    part->prompt_tokens = mem_calloc((size_t)part->n_prompt, sizeof *part->prompt_tokens);
    if (!part->prompt_tokens) return sits_fail(err, SITS_NOMEM, "no memory for the prompt's log probabilities");
    part->prompt_tokens[0].id = part->prompt.ids[0];
    part->n_prompt_tokens = 1;
  }
  return SITS_OK;
}

static void fill_sampling(const struct api_part *part, int32_t max_tokens, uint64_t seed, struct sits_sampling *out)
{
  const struct api_request *r = part->call->request;
  int32_t logprobs = api_request_logprobs(r);
  *out = (struct sits_sampling){
    .temperature = (float)r->temperature, .top_p = (float)r->top_p, .min_p = (float)r->min_p, .top_k = (int32_t)r->top_k,
    .repetition_penalty = (float)r->repetition_penalty, .presence_penalty = (float)r->presence_penalty,
    .frequency_penalty = (float)r->frequency_penalty, .seed = seed, .max_tokens = max_tokens, .min_tokens = (int32_t)r->min_tokens,
    .ignore_eos = r->ignore_eos, .n_top_logprobs = logprobs, .n_prompt_logprobs = r->echo && (logprobs >= 0 || max_tokens == 0)
      ? (logprobs > 0 ? logprobs : 0) : -1,
    .stop_ids = r->stop_ids, .n_stop_ids = (int32_t)r->n_stop_ids, .bias = r->bias, .n_bias = (int32_t)r->n_bias};
}

static enum sits_status submit_part(struct api_part *part, const struct api_model *model, const char *id, uint64_t seed,
                                    struct sits_error *err)
{
  const struct api_request *request = part->call->request;
  int32_t max_tokens;
  enum sits_status status = api_prompt_budget(model, request, part->n_prompt, &max_tokens, err);
  if (!status) status = create_choices(part, model, err);
  if (!status && api_handle_acquire(part->call->api, part)) status = sits_fail(err, SITS_NOMEM, "no memory for another request");
  if (status) return status;
  struct sits_request_params params = {.prompt = part->prompt.ids, .n_prompt = (int32_t)part->prompt.n, .n_choices = (int32_t)request->n,
                                       .service_class = request->service_class, .priority = (int32_t)request->priority,
                                       .tenant = access_tenant(request->grant),
                                       .user = (void *)(uintptr_t)part->handle};
  if (request->cache_salt) params.cache_salt = hash_bytes(1, request->cache_salt, strlen(request->cache_salt)) | 1;
  if (part->call->api->deadline_us) params.deadline_us = clock_monotonic_us() + part->call->api->deadline_us;
  size_t n_id = strnlen(id, sizeof params.id - 1);
  memcpy(params.id, id, n_id);
  fill_sampling(part, max_tokens, seed, &params.sampling);
  status = sits_engine_submit(model->engine, &params, &part->request, err);
  if (!status && !request->echo && !request->return_token_ids) token_list_fini(&part->prompt);
  return status;
}

/* Count the call before anything of it is started, so that a drain waits for it from then on. False: no more calls are admitted. */
static bool enter(struct api *api)
{
  pthread_mutex_lock(&api->mutex);
  bool is_admitted = atomic_load(&api->is_admitting);
  api->n_active += is_admitted;
  pthread_mutex_unlock(&api->mutex);
  return is_admitted;
}

static void leave(struct api *api)
{
  pthread_mutex_lock(&api->mutex);
  if (--api->n_active == 0) pthread_cond_broadcast(&api->idle);
  pthread_mutex_unlock(&api->mutex);
}

/* Publish the call: from here on the delivery thread owns its parts. Events that came earlier are in the rings, so each part is queued. */
static void publish(struct api_call *call)
{
  struct api *api = call->api;
  pthread_mutex_lock(&api->mutex);
  call->state = API_CALL_RUNNING;
  call->next = api->calls;
  if (api->calls) api->calls->previous = call;
  api->calls = call;
  int none = SITS_OK;
  if (api->abort_status) atomic_compare_exchange_strong(&call->cancel_status, &none, (int)api->abort_status);
  if (atomic_load(&call->cancel_status)) api_tell_engine_locked(call);
  for (int32_t p = 0; p < call->n_parts; p++) api_queue_locked(api, &call->parts[p]);
  pthread_cond_signal(&api->wake);
  pthread_mutex_unlock(&api->mutex);
}

/* Nothing was published: give back what was taken. */
static void abandon(struct api_call *call)
{
  pthread_mutex_lock(&call->api->mutex);
  call->state = API_CALL_DONE;
  for (int32_t p = 0; p < call->n_parts; p++) api_handle_release_locked(call->api, &call->parts[p]);
  pthread_mutex_unlock(&call->api->mutex);
  for (int32_t p = 0; p < call->n_parts; p++) {
    if (call->parts[p].request) sits_request_release(call->parts[p].request);
    call->parts[p].request = NULL;
  }
}

static enum sits_status choose_seed(const struct api_request *request, uint64_t *seed, struct sits_error *err)
{
  *seed = (uint64_t)request->seed;
  if (request->has_seed || getrandom(seed, sizeof *seed, 0) == (ssize_t)sizeof *seed) return SITS_OK;
  return sits_fail(err, SITS_INTERNAL, "no random seed could be drawn");
}

enum sits_status api_call_create(struct api *api, struct api_request *request, const struct api_sink *sink, void *context,
                                 struct api_call **out, struct sits_error *err)
{
  const struct api_model *model = api_model(api);
  enum sits_status status = api_model_check(model, request->model, "'model'", request->grant, err);
  if (status) return status;
  if (!atomic_load(&api->is_admitting)) return sits_fail(err, SITS_UNAVAILABLE, "the server is shutting down");
  struct api_call *call = mem_calloc(1, sizeof *call);
  if (!call) return sits_fail(err, SITS_NOMEM, "no memory for another request");
  *call = (struct api_call){.api = api, .request = request, .sink = sink, .context = context, .n_choices = (int32_t)request->n};
  atomic_init(&call->n_refs, 1);
  atomic_init(&call->cancel_status, SITS_OK);
  int32_t n_parts = request->kind == API_CHAT ? 1 : (int32_t)request->n_prompts;
  call->parts = mem_calloc((size_t)n_parts, sizeof *call->parts);
  status = call->parts ? SITS_OK : sits_fail(err, SITS_NOMEM, "no memory for another request");
  if (call->parts) call->n_parts = call->n_parts_left = n_parts;
  for (int32_t p = 0; p < call->n_parts; p++) {
    call->parts[p].call = call;
    call->parts[p].index = p;
  }
  if (!status) status = check_bias(request, model, err);
  if (!status) status = tokenize_parts(call, model, err);
  if (status) {
    call->request = NULL; /* stays the caller's */
    api_call_unref(call);
    return status;
  }
  keep_prompt(call);
  drop_texts(request);
  *out = call;
  return SITS_OK;
}

enum sits_status api_call_submit(struct api_call *call, const char *id, struct sits_error *err)
{
  const struct api_model *model = api_model(call->api);
  uint64_t seed = 0;
  enum sits_status status = choose_seed(call->request, &seed, err);
  int64_t n_tokens = 0;
  for (int32_t p = 0; p < call->n_parts; p++) n_tokens += (int64_t)call->parts[p].prompt.n;
  if (!status) status = sits_engine_may_queue(model->engine, call->n_parts, call->n_choices, n_tokens, err);
  if (status) return status;
  if (!enter(call->api)) return sits_fail(err, SITS_UNAVAILABLE, "the server is shutting down");
  call->is_submitted = true;
  atomic_fetch_add(&call->api->n_owed, 1);
  status = access_start_call(call->request->grant, call->usage.n_prompt_tokens, err);
  if (status) {
    leave(call->api);
    return status;
  }
  for (int32_t p = 0; p < call->n_parts && !status; p++) status = submit_part(&call->parts[p], model, id, seed, err);
  if (status) {
    abandon(call);
    access_end_call(call->request->grant, call->usage.n_prompt_tokens, 0, false);
    leave(call->api);
    return status;
  }
  atomic_fetch_add(&call->n_refs, 1); /* the delivery side's */
  publish(call);
  return SITS_OK;
}

/* ---- use by the transport ---- */

void api_tell_engine_locked(struct api_call *call)
{
  for (int32_t p = 0; p < call->n_parts; p++)
    if (call->parts[p].request) sits_request_cancel(call->parts[p].request, -1);
}

static void kick(struct api_call *call, bool is_cancelled)
{
  struct api *api = call->api;
  pthread_mutex_lock(&api->mutex);
  if (call->state == API_CALL_RUNNING) {
    if (is_cancelled) api_tell_engine_locked(call);
    for (int32_t p = 0; p < call->n_parts; p++) api_queue_locked(api, &call->parts[p]);
    pthread_cond_signal(&api->wake);
  }
  pthread_mutex_unlock(&api->mutex);
}

void api_call_cancel(struct api_call *call, enum sits_status status)
{
  int none = SITS_OK;
  atomic_compare_exchange_strong(&call->cancel_status, &none, (int)status);
  kick(call, true);
}

void api_call_resume(struct api_call *call) { kick(call, false); }
void api_call_release(struct api_call *call) { api_call_unref(call); }
const struct api_request *api_call_request(const struct api_call *call) { return call->request; }
int32_t api_call_n_choices(const struct api_call *call) { return call->n_parts * call->n_choices; }
int64_t api_call_n_prompt_tokens(const struct api_call *call) { return call->usage.n_prompt_tokens; }

const int32_t *api_call_prompt(const struct api_call *call, int32_t part, int32_t *n)
{
  *n = (int32_t)call->parts[part].prompt.n;
  return call->parts[part].prompt.ids;
}

/* ---- delivery ---- */

static void merge_timing(struct api_call *call, struct api_part *part)
{
  struct sits_request_timing t, *all = &call->usage.timing;
  sits_request_timing(part->request, &t);
  /* Released early, when a stop string matched: it ends now. */
  if (!t.done_us) t.done_us = t.submitted_us + t.queue_us + t.prefill_us + t.decode_us + t.scheduling_us;
#define EARLIEST(f) if (t.f && (!all->f || t.f < all->f)) all->f = t.f
#define LONGEST(f) if (t.f > all->f) all->f = t.f
  EARLIEST(submitted_us);
  EARLIEST(first_scheduled_us);
  EARLIEST(first_token_us);
  LONGEST(done_us);
  LONGEST(queue_us);
  LONGEST(prefill_us);
  LONGEST(decode_us);
  LONGEST(scheduling_us);
#undef EARLIEST
#undef LONGEST
  all->n_cached_tokens += t.n_cached_tokens;
  all->n_preemptions += t.n_preemptions;
  call->usage.n_cached_tokens += t.n_cached_tokens;
}

static void release_part(struct api_part *part)
{
  struct sits_request *request = part->request;
  if (!request) return;
  merge_timing(part->call, part);
  pthread_mutex_lock(&part->call->api->mutex);
  api_handle_release_locked(part->call->api, part);
  part->request = NULL; /* from here on no transport cancels it */
  pthread_mutex_unlock(&part->call->api->mutex);
  sits_request_release(request);
}

/* The end of a call, whatever it was. */
static void finish_call(struct api_call *call, enum sits_status status, const char *text)
{
  struct api *api = call->api;
  for (int32_t p = 0; p < call->n_parts; p++) release_part(&call->parts[p]);
  pthread_mutex_lock(&api->mutex);
  call->state = API_CALL_DONE;
  if (call->previous) call->previous->next = call->next;
  else api->calls = call->next;
  if (call->next) call->next->previous = call->previous;
  pthread_mutex_unlock(&api->mutex);
  if (call->usage.timing.done_us) call->usage.delivered_us = clock_monotonic_us();
  struct api_result result = {.status = status, .text = text ? text : sits_status_info(status)->text, .usage = call->usage};
  access_end_call(call->request->grant, call->usage.n_prompt_tokens, call->usage.n_output_tokens, true);
  call->sink->done(call->context, &result);
  leave(api);
  api_call_unref(call);
}

static enum sits_status add_pending(struct api_choice *choice, const struct sits_event *event)
{
  if (choice->n_pending == choice->pending_capacity) {
    int32_t capacity = choice->pending_capacity ? choice->pending_capacity * 2 : 4;
    struct api_token *pending = mem_realloc(choice->pending, (size_t)capacity * sizeof *pending);
    if (!pending) return SITS_NOMEM;
    choice->pending = pending;
    choice->pending_capacity = capacity;
  }
  struct api_token *token = &choice->pending[choice->n_pending++];
  token->id = event->token;
  token->logprob = event->logprob;
  token->n_top = event->n_top;
  for (int32_t i = 0; i < event->n_top; i++) {
    token->top_ids[i] = event->top_token[i];
    token->top_logprobs[i] = event->top_logprob[i];
  }
  return SITS_OK;
}

/* Give a piece of text and the tokens it completes to the sink. */
static void emit(struct api_part *part, int32_t c, const struct detok_piece *piece, struct api_delta *delta)
{
  struct api_call *call = part->call;
  struct api_choice *choice = &part->choices[c];
  delta->choice = part->index * call->n_choices + c;
  delta->text = piece->text;
  delta->n_bytes = piece->n_bytes;
  delta->n_tokens = piece->n_tokens < choice->n_pending ? piece->n_tokens : choice->n_pending;
  delta->tokens = choice->pending;
  delta->n_output_tokens = choice->n_output;
  call->sink->delta(call->context, delta);
  if (!delta->n_tokens) return;
  choice->n_pending -= delta->n_tokens;
  memmove(choice->pending, choice->pending + delta->n_tokens, (size_t)choice->n_pending * sizeof *choice->pending);
}

static enum sits_status echo_prompt(struct api_part *part, int32_t c)
{
  const struct api_request *request = part->call->request;
  const struct api_prompt *prompt = &request->prompts[part->index];
  struct buf text;
  buf_init(&text, 64u << 20);
  enum sits_status status = SITS_OK;
  if (prompt->text) buf_append(&text, prompt->text, prompt->n_bytes);
  else
    status =
      tokenizer_decode(api_model(part->call->api)->tokenizer, part->prompt.ids, part->prompt.n, request->skip_special_tokens, &text);
  if (text.failed) status = SITS_NOMEM;
  if (!status) {
    struct api_delta delta = {.choice = part->index * part->call->n_choices + c, .text = text.data ? text.data : "", .n_bytes = text.size,
                              .tokens = part->prompt_tokens, .n_tokens = (int32_t)part->n_prompt_tokens, .is_echo = true, .stop_token = -1};
    part->call->sink->delta(part->call->context, &delta);
    part->choices[c].is_echoed = true;
  }
  buf_fini(&text);
  return status;
}

static void choice_finished(struct api_part *part, int32_t c, enum api_finish finish)
{
  if (finish == API_FINISH_STOP) part->call->usage.n_stopped++;
  if (finish == API_FINISH_LENGTH) part->call->usage.n_cut++;
  part->choices[c].is_finished = true;
  part->n_left--;
}

/* When the engine handed the event over: it stamps the end of the forward pass, and sampling comes after that. */
static int64_t emitted_us(const struct api_part *part, const struct sits_event *event)
{
  return part->told_us > event->emitted_us ? part->told_us : event->emitted_us;
}

static void count_output(struct api_call *call, struct api_choice *choice)
{
  choice->n_output++;
  call->usage.n_output_tokens++;
  if (choice->n_output > call->usage.n_longest_tokens) call->usage.n_longest_tokens = choice->n_output;
}

static enum sits_status take_token(struct api_part *part, const struct sits_event *event)
{
  struct api_call *call = part->call;
  int32_t c = event->choice;
  struct api_choice *choice = &part->choices[c];
  struct api_delta delta = {.stop_token = -1, .emitted_us = emitted_us(part, event)};
  struct detok_piece piece = {0};
  count_output(call, choice);
  enum sits_status status = add_pending(choice, event);
  if (!status) status = detok_push(choice->detok, event->token, &piece);
  if (status) return status;
  if (piece.stop_index >= 0) {
    delta.finish = API_FINISH_STOP;
    delta.stop_text = call->request->stops[piece.stop_index];
    sits_request_stop(part->request, c);
  } else if (!piece.n_bytes && !piece.n_tokens) {
    return SITS_OK; /* all of it is held back */
  }
  emit(part, c, &piece, &delta);
  if (delta.finish) choice_finished(part, c, delta.finish);
  return SITS_OK;
}

static bool is_end_token(const struct api_call *call, int32_t token)
{
  int32_t n = 0;
  const int32_t *ends = tokenizer_end_tokens(api_model(call->api)->tokenizer, &n);
  for (int32_t i = 0; i < n; i++)
    if (ends[i] == token) return true;
  return false;
}

static enum sits_status take_finish(struct api_part *part, const struct sits_event *event)
{
  struct api_call *call = part->call;
  int32_t c = event->choice;
  struct api_choice *choice = &part->choices[c];
  struct api_delta delta = {.stop_token = -1, .emitted_us = emitted_us(part, event)};
  switch (event->finish) {
  case SITS_FINISH_STOP:
    delta.finish = API_FINISH_STOP;
    delta.stop_token = event->token;
    delta.stop_token_is_end = is_end_token(call, event->token);
    count_output(call, choice); /* the end token was generated too, though it is no text */
    break;
  case SITS_FINISH_LENGTH: delta.finish = API_FINISH_LENGTH; break;
  case SITS_FINISH_DEADLINE: return SITS_DEADLINE;
  case SITS_FINISH_CANCELLED:
    if (atomic_load(&call->cancel_status)) return (enum sits_status)atomic_load(&call->cancel_status);
    return event->status ? event->status : SITS_CANCELLED;
  default: return event->status ? event->status : SITS_INTERNAL;
  }
  struct detok_piece piece = {0};
  enum sits_status status = detok_finish(choice->detok, &piece);
  if (status) return status;
  if (piece.stop_index >= 0) { /* held text that ends in a stop string after all */
    delta = (struct api_delta){.stop_token = -1, .emitted_us = delta.emitted_us, .finish = API_FINISH_STOP};
    delta.stop_text = call->request->stops[piece.stop_index];
  } else {
    piece.n_tokens = choice->n_pending;
  }
  emit(part, c, &piece, &delta);
  choice_finished(part, c, delta.finish);
  return SITS_OK;
}

static void take_prompt_token(struct api_part *part, const struct sits_event *event)
{
  if (!part->prompt_tokens || part->n_prompt_tokens >= part->n_prompt) return;
  struct api_choice one = {.pending = &part->prompt_tokens[part->n_prompt_tokens], .pending_capacity = 1};
  part->n_prompt_tokens += add_pending(&one, event) == SITS_OK;
}

static enum sits_status take_event(struct api_part *part, const struct sits_event *event)
{
  const struct api_request *request = part->call->request;
  if (event->kind == SITS_EVENT_PROMPT_LOGPROB) {
    take_prompt_token(part, event);
    return SITS_OK;
  }
  if (event->choice < 0 || event->choice >= part->call->n_choices) return SITS_INTERNAL;
  struct api_choice *choice = &part->choices[event->choice];
  if (choice->is_finished) return SITS_OK; /* what the engine made before it saw the cancellation */
  if (request->echo && !choice->is_echoed && (event->kind == SITS_EVENT_TOKEN || event->finish <= SITS_FINISH_LENGTH)) {
    enum sits_status status = echo_prompt(part, event->choice);
    if (status) return status;
  }
  return event->kind == SITS_EVENT_TOKEN ? take_token(part, event) : take_finish(part, event);
}

void api_call_deliver(struct api_part *part)
{
  struct api_call *call = part->call;
  enum sits_status status = (enum sits_status)atomic_load(&call->cancel_status);
  if (status) {
    finish_call(call, status, NULL);
    return;
  }
  if (!part->request) return; /* this part is over, others run on */
  bool has_news = false;
  struct sits_event event;
  while (!status && part->n_left > 0 && !call->sink->is_full(call->context) && sits_request_poll(part->request, &event) == SITS_OK) {
    status = take_event(part, &event);
    has_news = true;
  }
  if (status) {
    finish_call(call, status, NULL);
    return;
  }
  if (part->n_left == 0) {
    release_part(part);
    call->n_parts_left--;
  }
  if (call->n_parts_left == 0) finish_call(call, SITS_OK, NULL);
  else if (has_news) call->sink->flush(call->context);
}
