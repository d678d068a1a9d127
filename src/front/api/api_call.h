/* A generation call: one client request on its way through the engine, from tokens to text, for any transport.
 *
 * Words: a call has one part per prompt (one engine request each) and n choices per part. A choice's number is prompt * n + its number
 * within the prompt. A delta is a piece of one choice: text, the tokens whose text is now complete, and at last its finish reason.
 *
 * Rules
 *  1. api_call_submit decides admission before anything is sent: on failure nothing was started and the sink is never called.
 *  2. After success the sink is called on the delivery thread only, one call at a time, in order; `done` comes exactly once and last.
 *  3. Every choice gets exactly one delta with a finish reason, unless the call fails or is cancelled.
 *  4. Text deltas are whole characters and never hold any part of a stop string; text, ids and log probabilities stay together.
 *  5. When sink->is_full says so, the call's events stay in the engine's ring until api_call_resume; the engine then leaves its sequences
 *     out of steps. So a slow client costs memory that is bounded and no one else's time.
 *  6. Cancelling ends the call within one turn of the delivery thread and the engine's share of it within one step.
 *
 * States: STARTING --api_call_submit--> RUNNING --last choice finished, error, cancel--> DONE. */
#ifndef SITS_FRONT_API_API_CALL_H
#define SITS_FRONT_API_API_CALL_H

#include "front/api/api.h"

struct api_call;

enum api_finish { API_FINISH_NONE, API_FINISH_STOP, API_FINISH_LENGTH };

struct api_token {
  int32_t id;
  float logprob;                              /* valid when the request asked for log probabilities */
  int32_t n_top;
  int32_t top_ids[SITS_MAX_TOP_LOGPROBS];     /* [n_top] best first */
  float top_logprobs[SITS_MAX_TOP_LOGPROBS];  /* [n_top] */
};

struct api_delta {
  int32_t choice;
  const char *text; size_t n_bytes;           /* borrowed for the call of the sink */
  const struct api_token *tokens;             /* [n_tokens] whose text is complete with this delta; borrowed */
  int32_t n_tokens;
  bool is_echo;                               /* text and tokens are the prompt's; the first token has no log probability */
  enum api_finish finish;
  int32_t stop_token;                         /* the end token or stop id that ended it, -1 when none did */
  bool stop_token_is_end;                     /* it is one of the model's own end tokens */
  const char *stop_text;                      /* the stop string that ended it, NULL when none did */
  int32_t n_output_tokens;                    /* of this choice so far, an end token counted */
  int64_t emitted_us;                         /* when the engine handed over what made it; 0 when no event did */
};

struct api_usage {
  int64_t n_prompt_tokens, n_output_tokens, n_cached_tokens;
  int32_t n_stopped, n_cut;                   /* choices that ended with "stop", with "length" */
  int32_t n_longest_tokens;                   /* of the choice with the most output tokens */
  struct sits_request_timing timing;          /* over all parts: earliest start, latest end, longest durations */
  int64_t delivered_us;                       /* monotonic: when all was handed to the transport; 0 when it never came to the engine */
};

struct api_result {
  enum sits_status status;                    /* SITS_OK, or why it failed */
  const char *text;                           /* error text, borrowed */
  struct api_usage usage;
};

struct api_sink {
  void (*delta)(void *context, const struct api_delta *delta);
  void (*flush)(void *context);                            /* a batch of deltas is over: hand it to the writer */
  bool (*is_full)(void *context);
  void (*done)(void *context, const struct api_result *result);
};

/* Check the model, render and tokenize. The request is taken over on success (and only then). sink is static, context is the transport's.
 * *out holds one reference. May take milliseconds (template, tokenizer): not for an event loop's thread. */
enum sits_status api_call_create(struct api *api, struct api_request *request, const struct api_sink *sink, void *context,
                                 struct api_call **out, struct sits_error *err) SITS_MUST_CHECK;
/* Admission: give it to the engine. Once. On failure the call is over and its sink is never called. id is for the engine's log lines. */
enum sits_status api_call_submit(struct api_call *call, const char *id, struct sits_error *err) SITS_MUST_CHECK;

/* End the call with this status; idempotent, does nothing once it is done. */
void api_call_cancel(struct api_call *call, enum sits_status status);
/* The sink has room again. */
void api_call_resume(struct api_call *call);
void api_call_release(struct api_call *call); /* does not cancel */

/* Constant after start. */
const struct api_request *api_call_request(const struct api_call *call);
int32_t api_call_n_choices(const struct api_call *call);       /* over all prompts */
/* A prompt's tokens; kept only for requests with echo or return_token_ids. */
const int32_t *api_call_prompt(const struct api_call *call, int32_t part, int32_t *n);
int64_t api_call_n_prompt_tokens(const struct api_call *call); /* over all prompts */

#endif
