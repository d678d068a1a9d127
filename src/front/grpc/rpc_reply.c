/* See rpc_reply.h. */
#include "front/api/api_timing.h"
#include "front/grpc/rpc_reply.h"

#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "sits2026/v1/inference.pb-c.h"

#define MAX_ANSWER_BYTES (256u << 20) /* of one choice */

typedef Sits2026__V1__GenerateChoice choice_message; /* also of chats, until the message is wrapped */

struct rpc_choice {
  bool has_started;                         /* its first message was made */
  enum api_finish finish;
  char *stop_text;                          /* owned, NULL when none */
  int32_t stop_token;                       /* -1 when none */
  struct buf text;                          /* whole answers only, as all below */
  struct buf ids;                           /* int32_t each */
  struct arena arena;                       /* what the log probabilities hang on */
  Sits2026__V1__TokenLogprob **logprobs;    /* [n_logprobs] */
  size_t n_logprobs, logprobs_capacity;
};

enum sits_status rpc_reply_init(struct rpc_reply *reply, const struct api_request *request, const struct tokenizer *tokenizer,
                                const char *model, const char *id, int64_t created, int32_t n_choices)
{
  *reply = (struct rpc_reply){.tokenizer = tokenizer, .kind = request->kind, .is_stream = request->stream,
                              .wants_token_ids = request->return_token_ids, .wants_timing = request->return_timing,
                              .logprobs = api_request_logprobs(request), .created = created};
  snprintf(reply->id, sizeof reply->id, "%s-%s", request->kind == API_CHAT ? "chatcmpl" : "cmpl", id);
  arena_init(&reply->arena, 2 * (size_t)MAX_ANSWER_BYTES);
  buf_init(&reply->scratch, 1u << 20);
  reply->model = mem_strdup(model);
  reply->choices = mem_calloc((size_t)n_choices, sizeof *reply->choices);
  if (!reply->model || !reply->choices) {
    rpc_reply_fini(reply);
    return SITS_NOMEM;
  }
  reply->n_choices = n_choices;
  for (int32_t c = 0; c < n_choices; c++) {
    struct rpc_choice *choice = &reply->choices[c];
    choice->stop_token = -1;
    buf_init(&choice->text, MAX_ANSWER_BYTES);
    buf_init(&choice->ids, MAX_ANSWER_BYTES);
    arena_init(&choice->arena, MAX_ANSWER_BYTES);
  }
  return SITS_OK;
}

void rpc_reply_fini(struct rpc_reply *reply)
{
  for (int32_t c = 0; c < reply->n_choices; c++) {
    struct rpc_choice *choice = &reply->choices[c];
    buf_fini(&choice->text);
    buf_fini(&choice->ids);
    arena_fini(&choice->arena);
    mem_free(choice->logprobs);
    mem_free(choice->stop_text);
  }
  mem_free(reply->choices);
  mem_free(reply->model);
  arena_fini(&reply->arena);
  buf_fini(&reply->scratch);
  *reply = (struct rpc_reply){0};
}

/* ---- pieces ---- */

char *rpc_reply_text(struct arena *arena, const char *text, size_t n_bytes)
{
  size_t n_nuls = 0;
  for (size_t i = 0; i < n_bytes; i++) n_nuls += text[i] == '\0';
  char *out = arena_alloc(arena, n_bytes + 2 * n_nuls + 1), *at = out;
  if (!out) return NULL;
  for (size_t i = 0; i < n_bytes; i++) {
    if (text[i]) *at++ = text[i];
    else at += utf8_encode(0xFFFD, at);
  }
  *at = '\0';
  return out;
}

/* The token's bytes, and its text with \xNN where the bytes are no text. */
static bool token_text(struct rpc_reply *reply, struct arena *arena, int32_t id, char **text, ProtobufCBinaryData *bytes)
{
  struct buf *raw = &reply->scratch;
  buf_clear(raw);
  tokenizer_token_bytes(reply->tokenizer, id, false, raw);
  size_t n = raw->size;
  bytes->len = n;
  bytes->data = arena_alloc(arena, n + 1);
  if (!bytes->data || raw->failed) return false;
  if (n) memcpy(bytes->data, raw->data, n);
  if (utf8_is_valid(raw->data ? raw->data : "", n) && (!n || !memchr(raw->data, 0, n))) {
    *text = arena_strndup(arena, raw->data ? raw->data : "", n);
    return *text != NULL;
  }
  *text = arena_alloc(arena, 4 * n + 1);
  if (!*text) return false;
  for (size_t i = 0; i < n; i++) snprintf(*text + 4 * i, 5, "\\x%02x", bytes->data[i]);
  return true;
}

static float shown_logprob(float logprob)
{
  if (!(logprob > SITS_LOGPROB_FLOOR)) return SITS_LOGPROB_FLOOR; /* also NaN */
  return logprob > 0 ? 0 : logprob;
}

static Sits2026__V1__TokenLogprob *make_logprob(struct rpc_reply *reply, struct arena *arena, const struct api_token *token, bool has_value)
{
  Sits2026__V1__TokenLogprob *out = arena_alloc(arena, sizeof *out);
  if (!out) return NULL;
  sits2026__v1__token_logprob__init(out);
  out->has_token_id = out->has_bytes = true;
  out->token_id = token->id;
  if (!token_text(reply, arena, token->id, &out->token, &out->bytes)) return NULL;
  if (!has_value) return out;
  out->has_logprob = true;
  out->logprob = shown_logprob(token->logprob);
  size_t n = (size_t)token->n_top;
  out->top_logprobs = arena_alloc(arena, (n + 1) * sizeof *out->top_logprobs);
  Sits2026__V1__TopLogprob *tops = arena_alloc(arena, (n + 1) * sizeof *tops);
  if (!out->top_logprobs || !tops) return NULL;
  for (size_t k = 0; k < n; k++) {
    sits2026__v1__top_logprob__init(&tops[k]);
    tops[k].has_token_id = tops[k].has_bytes = tops[k].has_logprob = true;
    tops[k].token_id = token->top_ids[k];
    tops[k].logprob = shown_logprob(token->top_logprobs[k]);
    if (!token_text(reply, arena, token->top_ids[k], &tops[k].token, &tops[k].bytes)) return NULL;
    out->top_logprobs[k] = &tops[k];
  }
  out->n_top_logprobs = n;
  return out;
}

/* Nothing comes before the first token of a prompt, so it has no probability. */
static bool has_logprob(const struct api_delta *delta, int32_t i) { return !(delta->is_echo && i == 0); }

static void note_finish(struct rpc_reply *reply, struct rpc_choice *choice, const struct api_delta *delta)
{
  if (!delta->finish) return;
  choice->finish = delta->finish;
  if (delta->stop_text) {
    choice->stop_text = mem_strdup(delta->stop_text);
    if (!choice->stop_text) reply->has_failed = true;
  } else if (delta->stop_token >= 0 && !delta->stop_token_is_end) {
    choice->stop_token = delta->stop_token;
  }
}

static void fill_finish(const struct rpc_choice *choice, choice_message *out)
{
  out->finish_reason = choice->finish == API_FINISH_LENGTH ? "length" : choice->finish ? "stop" : NULL;
  if (choice->stop_text) {
    out->stop_reason_case = SITS2026__V1__GENERATE_CHOICE__STOP_REASON_STOP_STRING;
    out->stop_string = choice->stop_text;
  } else if (choice->stop_token >= 0) {
    out->stop_reason_case = SITS2026__V1__GENERATE_CHOICE__STOP_REASON_STOP_TOKEN_ID;
    out->stop_token_id = choice->stop_token;
  }
}

static void fill_prompt_ids(const struct rpc_reply *reply, int32_t choice, choice_message *out)
{
  int32_t n;
  const int32_t *ids = api_call_prompt(reply->call, choice / (int32_t)api_call_request(reply->call)->n, &n);
  out->prompt_token_ids = (int32_t *)ids; /* packing only reads it */
  out->n_prompt_token_ids = (size_t)n;
}

/* ---- whole messages ---- */

static Sits2026__V1__ChatChoice *wrap_chat(struct rpc_reply *reply, const choice_message *from, bool is_first)
{
  Sits2026__V1__ChatChoice *out = arena_alloc(&reply->arena, sizeof *out);
  Sits2026__V1__ChatMessage *message = arena_alloc(&reply->arena, sizeof *message);
  if (!out || !message) return NULL;
  sits2026__v1__chat_choice__init(out);
  sits2026__v1__chat_message__init(message);
  if (is_first) message->role = "assistant";
  message->content = from->text;
  out->has_index = true;
  out->index = from->index;
  out->message = message;
  out->finish_reason = from->finish_reason;
  if (from->stop_reason_case == SITS2026__V1__GENERATE_CHOICE__STOP_REASON_STOP_STRING) {
    out->stop_reason_case = SITS2026__V1__CHAT_CHOICE__STOP_REASON_STOP_STRING;
    out->stop_string = from->stop_string;
  } else if (from->stop_reason_case == SITS2026__V1__GENERATE_CHOICE__STOP_REASON_STOP_TOKEN_ID) {
    out->stop_reason_case = SITS2026__V1__CHAT_CHOICE__STOP_REASON_STOP_TOKEN_ID;
    out->stop_token_id = from->stop_token_id;
  }
  out->token_ids = from->token_ids;
  out->n_token_ids = from->n_token_ids;
  out->prompt_token_ids = from->prompt_token_ids;
  out->n_prompt_token_ids = from->n_prompt_token_ids;
  out->logprobs = from->logprobs;
  out->n_logprobs = from->n_logprobs;
  return out;
}

/* The response around n choices; NULL without memory. */
static const ProtobufCMessage *make_response(struct rpc_reply *reply, choice_message *choices, size_t n, bool is_first,
                                             Sits2026__V1__Usage *usage)
{
  void **list = arena_alloc(&reply->arena, (n + 1) * sizeof *list);
  if (!list) return NULL;
  if (reply->kind == API_CHAT) {
    Sits2026__V1__ChatResponse *out = arena_alloc(&reply->arena, sizeof *out);
    if (!out) return NULL;
    sits2026__v1__chat_response__init(out);
    for (size_t i = 0; i < n; i++)
      if (!(list[i] = wrap_chat(reply, &choices[i], is_first))) return NULL;
    out->id = reply->id;
    out->has_created = true;
    out->created = reply->created;
    out->model = reply->model;
    out->choices = (Sits2026__V1__ChatChoice **)list;
    out->n_choices = n;
    out->usage = usage;
    return &out->base;
  }
  Sits2026__V1__GenerateResponse *out = arena_alloc(&reply->arena, sizeof *out);
  if (!out) return NULL;
  sits2026__v1__generate_response__init(out);
  for (size_t i = 0; i < n; i++) list[i] = &choices[i];
  out->id = reply->id;
  out->has_created = true;
  out->created = reply->created;
  out->model = reply->model;
  out->choices = (Sits2026__V1__GenerateChoice **)list;
  out->n_choices = n;
  out->usage = usage;
  return &out->base;
}

static void renew_arena(struct rpc_reply *reply)
{
  arena_fini(&reply->arena);
  arena_init(&reply->arena, 2 * (size_t)MAX_ANSWER_BYTES);
}

static const ProtobufCMessage *fail(struct rpc_reply *reply)
{
  reply->has_failed = true;
  return NULL;
}

/* ---- streams ---- */

static bool fill_stream_ids(struct rpc_reply *reply, const struct api_delta *delta, choice_message *out)
{
  if (!reply->wants_token_ids || delta->is_echo) return true; /* those of an echo are the prompt's */
  out->token_ids = arena_alloc(&reply->arena, ((size_t)delta->n_tokens + 1) * sizeof *out->token_ids);
  if (!out->token_ids) return false;
  for (int32_t i = 0; i < delta->n_tokens; i++) out->token_ids[out->n_token_ids++] = delta->tokens[i].id;
  if (delta->stop_token >= 0) out->token_ids[out->n_token_ids++] = delta->stop_token;
  return true;
}

static const ProtobufCMessage *stream_delta(struct rpc_reply *reply, struct rpc_choice *choice, const struct api_delta *delta)
{
  if (!delta->n_bytes && !delta->finish && !delta->is_echo && reply->logprobs < 0 && !reply->wants_token_ids) return NULL;
  renew_arena(reply);
  choice_message *out = arena_alloc(&reply->arena, sizeof *out);
  if (!out) return fail(reply);
  sits2026__v1__generate_choice__init(out);
  out->has_index = true;
  out->index = delta->choice;
  if (delta->n_bytes && !(out->text = rpc_reply_text(&reply->arena, delta->text, delta->n_bytes))) return fail(reply);
  fill_finish(choice, out);
  if (reply->logprobs >= 0 && delta->n_tokens) {
    out->logprobs = arena_alloc(&reply->arena, (size_t)delta->n_tokens * sizeof *out->logprobs);
    if (!out->logprobs) return fail(reply);
    for (int32_t i = 0; i < delta->n_tokens; i++)
      if (!(out->logprobs[i] = make_logprob(reply, &reply->arena, &delta->tokens[i], has_logprob(delta, i)))) return fail(reply);
    out->n_logprobs = (size_t)delta->n_tokens;
  }
  if (!fill_stream_ids(reply, delta, out)) return fail(reply);
  bool is_first = !choice->has_started;
  if (is_first && reply->wants_token_ids) fill_prompt_ids(reply, delta->choice, out);
  choice->has_started = true;
  const ProtobufCMessage *message = make_response(reply, out, 1, is_first, NULL);
  return message ? message : fail(reply);
}

/* ---- whole answers ---- */

static bool gather_logprobs(struct rpc_reply *reply, struct rpc_choice *choice, const struct api_delta *delta)
{
  for (int32_t i = 0; i < delta->n_tokens; i++) {
    if (choice->n_logprobs == choice->logprobs_capacity) {
      size_t capacity = choice->logprobs_capacity ? choice->logprobs_capacity * 2 : 16;
      void *logprobs = mem_realloc(choice->logprobs, capacity * sizeof *choice->logprobs);
      if (!logprobs) return false;
      choice->logprobs = logprobs;
      choice->logprobs_capacity = capacity;
    }
    Sits2026__V1__TokenLogprob *one = make_logprob(reply, &choice->arena, &delta->tokens[i], has_logprob(delta, i));
    if (!one) return false;
    choice->logprobs[choice->n_logprobs++] = one;
  }
  return true;
}

static void gather_delta(struct rpc_reply *reply, struct rpc_choice *choice, const struct api_delta *delta)
{
  if (delta->n_bytes) buf_append(&choice->text, delta->text, delta->n_bytes);
  if (reply->logprobs >= 0 && !gather_logprobs(reply, choice, delta)) reply->has_failed = true;
  if (reply->wants_token_ids && !delta->is_echo) {
    for (int32_t i = 0; i < delta->n_tokens; i++) buf_append(&choice->ids, &delta->tokens[i].id, sizeof(int32_t));
    if (delta->stop_token >= 0) buf_append(&choice->ids, &delta->stop_token, sizeof(int32_t));
  }
  if (choice->text.failed || choice->ids.failed) reply->has_failed = true;
}

static bool fill_whole(struct rpc_reply *reply, int32_t index, choice_message *out)
{
  struct rpc_choice *choice = &reply->choices[index];
  sits2026__v1__generate_choice__init(out);
  out->has_index = true;
  out->index = index;
  out->text = rpc_reply_text(&reply->arena, choice->text.data ? choice->text.data : "", choice->text.size);
  fill_finish(choice, out);
  out->token_ids = (int32_t *)(void *)choice->ids.data;
  out->n_token_ids = choice->ids.size / sizeof(int32_t);
  out->logprobs = choice->logprobs;
  out->n_logprobs = choice->n_logprobs;
  if (reply->wants_token_ids) fill_prompt_ids(reply, index, out);
  return out->text != NULL;
}

/* ---- entry points ---- */

const ProtobufCMessage *rpc_reply_delta(struct rpc_reply *reply, const struct api_delta *delta)
{
  struct rpc_choice *choice = &reply->choices[delta->choice];
  note_finish(reply, choice, delta);
  if (reply->is_stream) return stream_delta(reply, choice, delta);
  gather_delta(reply, choice, delta);
  return NULL;
}

static void fill_usage(const struct api_usage *usage, bool with_timing, Sits2026__V1__Usage *out, Sits2026__V1__Timing *timing)
{
  const struct api_timing t = api_timing_of(usage, usage->delivered_us);
  sits2026__v1__usage__init(out);
#define SET(to, field, value) (to->has_##field = true, to->field = (value))
  SET(out, prompt_tokens, usage->n_prompt_tokens);
  SET(out, completion_tokens, usage->n_output_tokens);
  SET(out, total_tokens, usage->n_prompt_tokens + usage->n_output_tokens);
  SET(out, cached_tokens, usage->n_cached_tokens);
  if (!with_timing) return;
  sits2026__v1__timing__init(timing);
  SET(timing, queue_ms, t.queue_ms);
  SET(timing, prefill_ms, t.prefill_ms);
  SET(timing, decode_ms, t.decode_ms);
  SET(timing, scheduling_ms, t.scheduling_ms);
  SET(timing, delivery_ms, t.delivery_ms);
  SET(timing, time_to_first_token_ms, t.time_to_first_token_ms);
  SET(timing, total_ms, t.total_ms);
  SET(timing, preemptions, t.n_preemptions);
#undef SET
  out->timing = timing;
}

const ProtobufCMessage *rpc_reply_done(struct rpc_reply *reply, const struct api_result *result)
{
  renew_arena(reply);
  size_t n = reply->is_stream ? 0 : (size_t)reply->n_choices;
  Sits2026__V1__Usage *usage = arena_alloc(&reply->arena, sizeof *usage);
  Sits2026__V1__Timing *timing = arena_alloc(&reply->arena, sizeof *timing);
  choice_message *choices = arena_alloc(&reply->arena, (n + 1) * sizeof *choices);
  if (!usage || !timing || !choices) return fail(reply);
  fill_usage(&result->usage, reply->wants_timing, usage, timing);
  for (size_t i = 0; i < n; i++)
    if (!fill_whole(reply, (int32_t)i, &choices[i])) return fail(reply);
  const ProtobufCMessage *message = make_response(reply, choices, n, true, usage);
  return message ? message : fail(reply);
}
