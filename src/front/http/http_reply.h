/* OpenAI's response shapes: deltas and results of a call as JSON, whole or as server-sent events.
 *
 * Streaming is the hot path: each event is a constant prefix made once per stream, the escaped delta and a constant tail; no JSON library.
 * Whole answers are gathered per choice in the same text form and put together at the end, so that the joined stream equals them byte for
 * byte. Shapes: OpenAI's API description, with vLLM's extensions (stop_reason, token_ids, prompt_token_ids, continuous usage).
 *
 * Not thread-safe: used by one thread at a time, under the HTTP request's lock. */
#ifndef SITS_FRONT_HTTP_HTTP_REPLY_H
#define SITS_FRONT_HTTP_HTTP_REPLY_H

#include "base/buf.h"
#include "front/api/api_call.h"

struct http_choice {
  struct buf text;              /* whole answers: escaped text so far */
  struct buf logprobs[4];       /* chat uses [0]; completions: tokens, token_logprobs, top_logprobs, text_offset */
  struct buf token_ids;         /* whole answers: "1,2,3" */
  int64_t n_chars;              /* characters before the next token, for text_offset */
  bool has_started;             /* streams: its first chunk is out */
  enum api_finish finish;
  struct buf stop_reason;       /* JSON value; empty: null */
  int32_t n_output_tokens;
};

struct http_reply {
  const struct tokenizer *tokenizer;     /* borrowed */
  enum api_kind kind;
  bool is_stream, include_usage, continuous_usage, wants_token_ids, wants_timing, skip_special;
  int32_t logprobs;                      /* as for the engine: -1 none, 0 chosen, k best */
  const struct api_call *call;           /* borrowed; set before the first delta */
  char id[64];
  struct buf head;                       /* up to "choices":[ ; of a stream with "data: " before it */
  struct buf scratch;
  struct http_choice *choices;         /* [n_choices] */
  int32_t n_choices;
  bool has_failed;                       /* out of memory or over a limit */
};

/* `model` is the name shown. created: Unix seconds. id gets the prefix of the kind. */
enum sits_status http_reply_init(struct http_reply *reply, const struct api_request *request, const struct tokenizer *tokenizer,
                                   const char *model, const char *id, int64_t created, int32_t n_choices) SITS_MUST_CHECK;
void http_reply_fini(struct http_reply *reply);

/* Streams: append the events of a delta to out. Whole answers: gather it (out is not touched). */
void http_reply_delta(struct http_reply *reply, const struct api_delta *delta, struct buf *out);
/* Streams: usage chunk if wanted, or an error event, then [DONE]. Whole answers: the body (of a success; failures: http_error_body). */
void http_reply_done(struct http_reply *reply, const struct api_result *result, struct buf *out);

/* {"error": {...}} with all four keys; text is cut to 4 KB and escaped. */
void http_error_body(enum sits_status status, const char *text, const char *param, struct buf *out);

#endif
