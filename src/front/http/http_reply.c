/* See http_reply.h. Log probabilities are in http_logprobs.c. */
#include "front/api/api_timing.h"
#include "front/http/http_reply.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "front/http/http_logprobs.h"

#define MAX_ANSWER_BYTES (256u << 20)   /* of one choice, escaped */
#define MAX_ERROR_TEXT_BYTES 4096

static const char *finish_text(enum api_finish finish) { return finish == API_FINISH_LENGTH ? "\"length\"" : "\"stop\""; }

enum sits_status http_reply_init(struct http_reply *reply, const struct api_request *request, const struct tokenizer *tokenizer,
                                   const char *model, const char *id, int64_t created, int32_t n_choices)
{
  bool is_chat = request->kind == API_CHAT;
  *reply = (struct http_reply){.tokenizer = tokenizer, .kind = request->kind, .is_stream = request->stream,
                                 .include_usage = request->include_usage, .continuous_usage = request->continuous_usage,
                                 .wants_token_ids = request->return_token_ids, .wants_timing = request->return_timing,
                                 .skip_special = request->skip_special_tokens, .logprobs = api_request_logprobs(request)};
  buf_init(&reply->head, 8192);
  buf_init(&reply->scratch, 1u << 20);
  snprintf(reply->id, sizeof reply->id, "%s-%s", is_chat ? "chatcmpl" : "cmpl", id);
  reply->choices = mem_calloc((size_t)n_choices, sizeof *reply->choices);
  if (!reply->choices) return SITS_NOMEM;
  reply->n_choices = n_choices;
  for (int32_t c = 0; c < n_choices; c++) {
    struct http_choice *choice = &reply->choices[c];
    buf_init(&choice->text, MAX_ANSWER_BYTES);
    for (int i = 0; i < 4; i++) buf_init(&choice->logprobs[i], MAX_ANSWER_BYTES);
    buf_init(&choice->token_ids, MAX_ANSWER_BYTES);
    buf_init(&choice->stop_reason, 16384);
  }
  const char *object = !is_chat ? "text_completion" : request->stream ? "chat.completion.chunk" : "chat.completion";
  if (request->stream) buf_append_text(&reply->head, "data: ");
  buf_printf(&reply->head, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":\"", reply->id, object, (long long)created);
  buf_append_json_escaped(&reply->head, model, strlen(model));
  buf_append_text(&reply->head, "\",\"system_fingerprint\":\"sits2026-" SITS_VERSION "\",\"choices\":[");
  if (!reply->head.failed) return SITS_OK;
  http_reply_fini(reply);
  return SITS_NOMEM;
}

void http_reply_fini(struct http_reply *reply)
{
  for (int32_t c = 0; c < reply->n_choices; c++) {
    struct http_choice *choice = &reply->choices[c];
    buf_fini(&choice->text);
    for (int i = 0; i < 4; i++) buf_fini(&choice->logprobs[i]);
    buf_fini(&choice->token_ids);
    buf_fini(&choice->stop_reason);
  }
  mem_free(reply->choices);
  buf_fini(&reply->head);
  buf_fini(&reply->scratch);
  reply->choices = NULL;
  reply->n_choices = 0;
}

/* ---- pieces ---- */

static void append_buf(struct buf *out, const struct buf *from)
{
  if (from->size) buf_append(out, from->data, from->size);
}

static void append_id(struct buf *out, int32_t id)
{
  char digits[16];
  bool is_first = !out->size || out->data[out->size - 1] == '[';
  int n = snprintf(digits, sizeof digits, is_first ? "%d" : ",%d", id);
  buf_append(out, digits, (size_t)n);
}

static void append_delta_ids(const struct api_delta *delta, struct buf *out)
{
  if (delta->is_echo) return; /* those are prompt_token_ids */
  for (int32_t i = 0; i < delta->n_tokens; i++) append_id(out, delta->tokens[i].id);
  if (delta->stop_token >= 0) append_id(out, delta->stop_token);
}

static void append_prompt_ids(struct http_reply *reply, int32_t choice, struct buf *out)
{
  int32_t n;
  const int32_t *ids = api_call_prompt(reply->call, choice / (int32_t)api_call_request(reply->call)->n, &n);
  buf_append_text(out, "\"prompt_token_ids\":[");
  for (int32_t i = 0; i < n; i++) append_id(out, ids[i]);
  buf_append_char(out, ']');
}

/* The value of stop_reason: the stop string, the id of a stop token that is not the model's own end token, or null. */
static void set_stop_reason(struct http_choice *choice, const struct api_delta *delta)
{
  if (delta->stop_text) {
    buf_append_char(&choice->stop_reason, '"');
    buf_append_json_escaped(&choice->stop_reason, delta->stop_text, strlen(delta->stop_text));
    buf_append_char(&choice->stop_reason, '"');
  } else if (delta->stop_token >= 0 && !delta->stop_token_is_end) {
    buf_printf(&choice->stop_reason, "%d", delta->stop_token);
  }
}

static void append_stop_reason(const struct http_choice *choice, struct buf *out)
{
  if (choice->stop_reason.size) append_buf(out, &choice->stop_reason);
  else buf_append_text(out, "null");
}

static void append_usage(const struct api_usage *usage, bool with_timing, struct buf *out)
{
  buf_printf(out,
             "{\"prompt_tokens\":%lld,\"completion_tokens\":%lld,\"total_tokens\":%lld,\"prompt_tokens_details\":{\"cached_tokens\":%lld}",
             (long long)usage->n_prompt_tokens, (long long)usage->n_output_tokens,
             (long long)(usage->n_prompt_tokens + usage->n_output_tokens), (long long)usage->n_cached_tokens);
  if (with_timing) {
    const struct api_timing t = api_timing_of(usage, usage->delivered_us);
    buf_printf(out, ",\"timing\":{\"queue_ms\":%.3f,\"prefill_ms\":%.3f,\"decode_ms\":%.3f,\"scheduling_ms\":%.3f,\"delivery_ms\":%.3f,"
               "\"time_to_first_token_ms\":%.3f,\"total_ms\":%.3f,\"preemptions\":%d}",
               t.queue_ms, t.prefill_ms, t.decode_ms, t.scheduling_ms, t.delivery_ms, t.time_to_first_token_ms, t.total_ms,
               t.n_preemptions);
  }
  buf_append_char(out, '}');
}

/* ---- streams ---- */

/* Close the choice's object and the list, the usage so far or null where the client opted in, and the event. */
static void append_tail(struct http_reply *reply, struct buf *out)
{
  buf_append_text(out, "}]");
  if (reply->continuous_usage) {
    struct api_usage usage = {.n_prompt_tokens = api_call_n_prompt_tokens(reply->call)};
    for (int32_t c = 0; c < reply->n_choices; c++) usage.n_output_tokens += reply->choices[c].n_output_tokens;
    buf_append_text(out, ",\"usage\":");
    append_usage(&usage, false, out);
  } else if (reply->include_usage) {
    buf_append_text(out, ",\"usage\":null");
  }
  buf_append_text(out, "}\n\n");
}

static void append_index(struct http_reply *reply, int32_t index, struct buf *out)
{
  char text[32];
  append_buf(out, &reply->head);
  int n = snprintf(text, sizeof text, "{\"index\":%d", index);
  buf_append(out, text, (size_t)n);
}

static void append_stream_logprobs(struct http_reply *reply, struct http_choice *choice, const struct api_delta *delta, struct buf *out)
{
  buf_append_text(out, ",\"logprobs\":");
  if (reply->logprobs < 0 || (delta->n_tokens == 0 && delta->finish)) {
    buf_append_text(out, "null");
  } else if (reply->kind == API_CHAT) {
    buf_clear(&choice->logprobs[0]);
    http_logprobs_append_chat(reply, delta->tokens, delta->n_tokens, &choice->logprobs[0]);
    http_logprobs_append_chat_object(&choice->logprobs[0], out);
  } else {
    for (int l = 0; l < 4; l++) buf_clear(&choice->logprobs[l]);
    http_logprobs_append_legacy(reply, choice, delta);
    http_logprobs_append_legacy_object(choice->logprobs, out);
  }
}

/* The chunk that opens a chat choice. */
static void append_chat_start(struct http_reply *reply, int32_t index, struct buf *out)
{
  append_index(reply, index, out);
  buf_append_text(out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null");
  if (reply->wants_token_ids) {
    buf_append_char(out, ',');
    append_prompt_ids(reply, index, out);
  }
  append_tail(reply, out);
}

static void append_stream_text(const struct http_reply *reply, const struct api_delta *delta, struct buf *out)
{
  bool is_chat = reply->kind == API_CHAT;
  if (is_chat && !delta->n_bytes && delta->finish) {
    buf_append_text(out, ",\"delta\":{}");
    return;
  }
  buf_append_text(out, is_chat ? ",\"delta\":{\"content\":\"" : ",\"text\":\"");
  buf_append_json_escaped(out, delta->text ? delta->text : "", delta->n_bytes);
  buf_append_text(out, is_chat ? "\"}" : "\"");
}

static void stream_delta(struct http_reply *reply, struct http_choice *choice, const struct api_delta *delta, struct buf *out)
{
  bool is_chat = reply->kind == API_CHAT, is_first = !choice->has_started;
  if (is_chat && is_first) append_chat_start(reply, delta->choice, out);
  choice->has_started = true;
  if (!delta->n_bytes && !delta->finish && !delta->is_echo && reply->logprobs < 0 && !reply->wants_token_ids) return;
  append_index(reply, delta->choice, out);
  append_stream_text(reply, delta, out);
  append_stream_logprobs(reply, choice, delta, out);
  buf_append_text(out, ",\"finish_reason\":");
  buf_append_text(out, delta->finish ? finish_text(delta->finish) : "null");
  if (delta->finish) {
    buf_append_text(out, ",\"stop_reason\":");
    append_stop_reason(choice, out);
  }
  if (reply->wants_token_ids) {
    if (!is_chat && is_first) {
      buf_append_char(out, ',');
      append_prompt_ids(reply, delta->choice, out);
    }
    buf_append_text(out, ",\"token_ids\":[");
    append_delta_ids(delta, out);
    buf_append_char(out, ']');
  }
  append_tail(reply, out);
}

/* ---- whole answers ---- */

static void gather_delta(struct http_reply *reply, struct http_choice *choice, const struct api_delta *delta)
{
  buf_append_json_escaped(&choice->text, delta->text ? delta->text : "", delta->n_bytes);
  if (reply->logprobs >= 0) {
    if (reply->kind == API_CHAT) http_logprobs_append_chat(reply, delta->tokens, delta->n_tokens, &choice->logprobs[0]);
    else http_logprobs_append_legacy(reply, choice, delta);
  }
  if (reply->wants_token_ids) append_delta_ids(delta, &choice->token_ids);
  bool has_failed = choice->text.failed || choice->token_ids.failed;
  for (int l = 0; l < 4; l++) has_failed |= choice->logprobs[l].failed;
  reply->has_failed |= has_failed;
}

static void whole_choice(struct http_reply *reply, int32_t index, struct buf *out)
{
  struct http_choice *choice = &reply->choices[index];
  bool is_chat = reply->kind == API_CHAT;
  buf_printf(out, "%s{\"index\":%d,", index ? "," : "", index);
  buf_append_text(out, is_chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
  append_buf(out, &choice->text);
  buf_append_text(out, is_chat ? "\",\"refusal\":null}" : "\"");
  buf_append_text(out, ",\"logprobs\":");
  if (reply->logprobs < 0) buf_append_text(out, "null");
  else if (is_chat) http_logprobs_append_chat_object(&choice->logprobs[0], out);
  else http_logprobs_append_legacy_object(choice->logprobs, out);
  buf_append_text(out, ",\"finish_reason\":");
  buf_append_text(out, finish_text(choice->finish));
  buf_append_text(out, ",\"stop_reason\":");
  append_stop_reason(choice, out);
  if (reply->wants_token_ids) {
    buf_append_text(out, ",\"token_ids\":[");
    append_buf(out, &choice->token_ids);
    buf_append_char(out, ']');
    if (!is_chat) {
      buf_append_char(out, ',');
      append_prompt_ids(reply, index, out);
    }
  }
  buf_append_char(out, '}');
}

static void whole_answer(struct http_reply *reply, const struct api_result *result, struct buf *out)
{
  append_buf(out, &reply->head);
  for (int32_t c = 0; c < reply->n_choices; c++) whole_choice(reply, c, out);
  buf_append_text(out, "],\"usage\":");
  append_usage(&result->usage, reply->wants_timing, out);
  if (reply->wants_token_ids && reply->kind == API_CHAT) {
    buf_append_char(out, ',');
    append_prompt_ids(reply, 0, out);
  }
  buf_append_char(out, '}');
}

/* ---- entry points ---- */

void http_reply_delta(struct http_reply *reply, const struct api_delta *delta, struct buf *out)
{
  struct http_choice *choice = &reply->choices[delta->choice];
  if (!delta->is_echo) choice->n_output_tokens = delta->n_output_tokens;
  if (delta->finish) {
    choice->finish = delta->finish;
    set_stop_reason(choice, delta);
  }
  if (reply->is_stream) stream_delta(reply, choice, delta, out);
  else gather_delta(reply, choice, delta);
}

void http_reply_done(struct http_reply *reply, const struct api_result *result, struct buf *out)
{
  if (!reply->is_stream) {
    whole_answer(reply, result, out);
    return;
  }
  if (result->status) {
    buf_append_text(out, "data: ");
    http_error_body(result->status, result->text, "", out);
    buf_append_text(out, "\n\n");
  } else if (reply->include_usage) {
    append_buf(out, &reply->head);
    buf_append_text(out, "],\"usage\":");
    append_usage(&result->usage, reply->wants_timing, out);
    buf_append_text(out, "}\n\n");
  }
  buf_append_text(out, "data: [DONE]\n\n");
}

void http_error_body(enum sits_status status, const char *text, const char *param, struct buf *out)
{
  const struct sits_status_info *info = sits_status_info(status);
  const char *shown = text && text[0] ? text : info->text;
  size_t n = strlen(shown);
  if (n > MAX_ERROR_TEXT_BYTES) n = MAX_ERROR_TEXT_BYTES - utf8_incomplete_tail(shown, MAX_ERROR_TEXT_BYTES);
  buf_append_text(out, "{\"error\":{\"message\":\"");
  buf_append_json_escaped(out, shown, n);
  buf_printf(out, "\",\"type\":\"%s\",\"param\":", info->type);
  if (param && param[0]) {
    buf_append_char(out, '"');
    buf_append_json_escaped(out, param, strlen(param));
    buf_append_char(out, '"');
  } else {
    buf_append_text(out, "null");
  }
  if (info->code) buf_printf(out, ",\"code\":\"%s\"}}", info->code);
  else buf_append_text(out, ",\"code\":null}}");
}
