/* The engine's request interface: what front ends, tools and embedders use to get tokens out of a loaded model.
 *
 * Vocabulary: a request is one prompt with n choices; a choice is one generated sequence; an event is one thing the engine tells
 * about a choice (a token, a prompt token's logprob, the end).
 *
 * Rules
 *  1. The engine works in token ids only. Text, stop strings and chat templates belong to its callers.
 *  2. sits_engine_submit copies everything it is given; the caller may free its arrays at once.
 *  3. A request's events leave through one single-producer single-consumer ring. The engine never waits for a consumer: a choice
 *     whose ring is full is left out of the following steps until there is room.
 *  4. After each step the engine calls on_events once, on its own thread, with the requests that have news. It must not block
 *     and must not call back into the engine except for sits_request_poll, sits_request_user and sits_request_cancel.
 *  5. Every choice ends with exactly one event of kind SITS_EVENT_FINISH, whatever happened; after the last choice's finish event
 *     the request is done. Cancelling is idempotent and may be called from any thread until release.
 *  6. The same prompt, sampling parameters and seed give the same tokens, whatever else is in the batch: exactly on a CPU. On a GPU the
 *     batch decides which kernels run, so tokens may differ where probabilities are equal up to rounding.
 */
#ifndef SITS2026_ENGINE_H
#define SITS2026_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SITS_MAX_TOP_LOGPROBS 20
#define SITS_MAX_CHOICES 128
#define SITS_LOGPROB_FLOOR (-9999.0f) /* smallest log probability that is ever reported; never -inf or NaN */

struct sits_engine;
struct sits_request;

struct sits_logit_bias { int32_t token; float bias; };

enum sits_class { SITS_CLASS_HIGH, SITS_CLASS_NORMAL, SITS_CLASS_LOW, SITS_CLASS_COUNT };

struct sits_sampling {
  float temperature;          /* 0 = greedy, default 1 */
  float top_p;                /* (0, 1], 1 = off */
  float min_p;                /* [0, 1], 0 = off */
  int32_t top_k;              /* <= 0 = off */
  float repetition_penalty;   /* > 0, 1 = off; over prompt and output (as in vLLM and HF) */
  float presence_penalty;     /* [-2, 2], over output (OpenAI) */
  float frequency_penalty;    /* [-2, 2], over output (OpenAI) */
  uint64_t seed;              /* choice i draws from stream (seed, i) */
  int32_t max_tokens;         /* >= 0 generated tokens per choice; 0 only with prompt logprobs (echo) */
  int32_t min_tokens;         /* no stop token may be drawn before that many */
  bool ignore_eos;
  int32_t n_top_logprobs;     /* -1 none, 0 the chosen token's, k also the k best (of the model's own distribution) */
  int32_t n_prompt_logprobs;  /* -1 none; else as above, for every prompt token but the first */
  const int32_t *stop_ids;    /* [n_stop_ids] ends the choice, beside the model's end tokens */
  int32_t n_stop_ids;
  const struct sits_logit_bias *bias; /* [n_bias] */
  int32_t n_bias;
};

struct sits_request_params {
  const int32_t *prompt;      /* [n_prompt] */
  int32_t n_prompt;
  int32_t n_choices;          /* 1..SITS_MAX_CHOICES; the prompt is read once and forked */
  struct sits_sampling sampling;
  enum sits_class service_class;
  int32_t priority;           /* within the class; lower is served first (vLLM's meaning); default 0 */
  uint64_t tenant;            /* hash of the tenant's name, 0 = anonymous; unit of fairness and of cache isolation */
  uint64_t cache_salt;        /* mixed into prefix hashes; 0 = none */
  int64_t deadline_us;        /* monotonic clock, 0 = none; past it the request ends with SITS_FINISH_DEADLINE */
  void *user;                 /* given back by sits_request_user */
  char id[64];                /* for logs */
};

enum sits_event_kind { SITS_EVENT_TOKEN, SITS_EVENT_PROMPT_LOGPROB, SITS_EVENT_FINISH };

enum sits_finish {
  SITS_FINISH_NONE,
  SITS_FINISH_STOP,           /* an end token or stop id was drawn: event.token, not part of the answer; or sits_request_stop: -1 */
  SITS_FINISH_LENGTH,
  SITS_FINISH_CANCELLED,
  SITS_FINISH_DEADLINE,
  SITS_FINISH_ERROR,          /* event.status says which */
};

struct sits_event {
  enum sits_event_kind kind;
  int32_t choice;
  int32_t token;
  enum sits_finish finish;
  enum sits_status status;
  float logprob;                                   /* of token, floored at SITS_LOGPROB_FLOOR; valid when asked for */
  int32_t n_top;
  int32_t top_token[SITS_MAX_TOP_LOGPROBS];        /* [n_top] best first */
  float top_logprob[SITS_MAX_TOP_LOGPROBS];
  int64_t emitted_us;                              /* monotonic: when the step that made it ended */
};

/* Where one request's time went, in microseconds; up to now while it runs. The durations add up to the time since submission: waiting for
 * the first step, in steps that worked on it before and after its first token, and between those (other steps, planning, sampling, a
 * slow consumer, pre-emption). */
struct sits_request_timing {
  int64_t submitted_us, first_scheduled_us, first_token_us, done_us; /* monotonic points, 0 = not yet */
  int64_t queue_us, prefill_us, decode_us, scheduling_us;            /* durations */
  int32_t n_prompt_tokens, n_cached_tokens, n_output_tokens, n_preemptions;
};

/* Submit. SITS_QUEUE_FULL, SITS_UNAVAILABLE (draining, failed), SITS_CONTEXT_LENGTH, SITS_INVALID_ARGUMENT, SITS_NOMEM.
 * On success *out holds one reference, to be dropped with sits_request_release. */
enum sits_status sits_engine_submit(struct sits_engine *engine, const struct sits_request_params *params,
                                    struct sits_request **out, struct sits_error *err) SITS_MUST_CHECK;

/* Whether n requests of n_choices each with n_prompt_tokens in all could ever wait together: SITS_INVALID_ARGUMENT when the queue is too
 * small for them even when it is empty, so that trying again would be in vain. */
enum sits_status sits_engine_may_queue(const struct sits_engine *engine, int64_t n, int64_t n_choices, int64_t n_prompt_tokens,
                                       struct sits_error *err) SITS_MUST_CHECK;

/* Next event: SITS_OK and *event, or SITS_AGAIN when there is none now. One consumer thread at a time. */
enum sits_status sits_request_poll(struct sits_request *request, struct sits_event *event) SITS_MUST_CHECK;

/* Ask for the end of one choice, or of all (choice < 0). The finish events still come. Any thread, idempotent. */
void sits_request_cancel(struct sits_request *request, int32_t choice);

/* End one choice as complete: its consumer found a stop string in its text. As cancelling, but it ends with SITS_FINISH_STOP (token -1). */
void sits_request_stop(struct sits_request *request, int32_t choice);

void *sits_request_user(const struct sits_request *request);
void sits_request_timing(const struct sits_request *request, struct sits_request_timing *out);

/* Drop the caller's reference; cancels whatever still runs. */
void sits_request_release(struct sits_request *request);

#ifdef __cplusplus
}
#endif
#endif
