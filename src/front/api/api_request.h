/* One client request, whatever transport brought it: its fields, their defaults, their limits and their validation.
 *
 * Entry points: api_request_create (defaults), api_request_parse (JSON body -> fields, OpenAI's and vLLM's names), api_request_check
 * (ranges and combinations). A transport with its own encoding fills the fields itself and calls api_request_check: the limits and the
 * error texts are then the same for all.
 *
 * Rules
 *  1. A field that would change the answer and is not supported is refused with SITS_UNSUPPORTED_PARAMETER, which names it.
 *  2. Fields known to be harmless (user, metadata, store, ...) are accepted and do nothing; unknown fields are ignored and logged at debug.
 *  3. JSON null means absent, for every field.
 *  4. Everything a client can make large has a row in struct api_limits.
 *  5. Errors never repeat the client's values, only names of fields.
 * Not thread-safe; one owner. Everything hangs on the request's arena and on its reference to the JSON body. */
#ifndef SITS_FRONT_API_REQUEST_H
#define SITS_FRONT_API_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "front/access/access.h"
#include "sits2026/engine.h"
#include "sits2026/status.h"

enum api_kind { API_CHAT = 1, API_COMPLETION = 2, API_TOKENIZE = 4, API_DETOKENIZE = 8 }; /* one bit each: the field table holds sets */
#define API_GENERATE (API_CHAT | API_COMPLETION)

/* Hard caps on what a client controls. One table for all transports. */
struct api_limits {
  int64_t max_body_bytes;       /* of one request */
  int64_t max_choices;          /* n */
  int64_t max_prompts;          /* prompts in one completions call */
  int64_t max_sequences;        /* prompts times n */
  int64_t max_messages;
  int64_t max_parts;            /* content parts of one message */
  int64_t max_tokens;           /* max_tokens, min_tokens */
  int64_t max_stops;            /* stop strings */
  int64_t max_stop_chars;       /* of one stop string */
  int64_t max_stop_ids;
  int64_t max_logit_bias;       /* entries */
  int64_t max_top_logprobs;
  int64_t max_template_kwargs;  /* entries */
  int64_t max_name_chars;       /* model, role, name, cache_salt */
};
extern const struct api_limits api_limits_default;

struct api_prompt {
  const char *text; size_t n_bytes;  /* NULL when given as ids */
  const int32_t *ids; int64_t n_ids; /* [n_ids] when text is NULL */
};

struct api_request {
  enum api_kind kind;
  struct arena arena;
  json_t *body;                 /* owned reference (NULL without JSON): strings below may point into it */
  const char *model;            /* NULL: the model that is served */
  struct access_grant *grant;   /* what the client's key allows; one reference, NULL without keys */

  json_t *messages;             /* borrowed from body or owned through it; array of objects; NULL unless chat */
  json_t *template_kwargs;      /* extra template variables, NULL when none */
  bool add_generation_prompt;   /* default true */
  struct api_prompt *prompts;   /* [n_prompts] completions and tokenize */
  int64_t n_prompts;
  bool has_prompt;
  bool parse_special;           /* special tokens written out in a prompt (not in messages) are recognised; default true */
  bool add_special_tokens;      /* BOS and the like: default true for prompts, false for messages (the template writes them) */
  bool has_add_special_tokens;
  const int32_t *tokens;        /* detokenize */
  int64_t n_tokens;
  bool has_tokens;

  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int64_t top_k;
  int64_t seed;
  bool has_seed;
  int64_t n;
  int64_t max_tokens;            /* -1 absent */
  int64_t max_completion_tokens; /* -1 absent; the newer name, wins over max_tokens */
  int64_t min_tokens;
  bool ignore_eos;
  const char *const *stops;      /* [n_stops] */
  int64_t n_stops;
  const int32_t *stop_ids;       /* [n_stop_ids] */
  int64_t n_stop_ids;
  const struct sits_logit_bias *bias; /* [n_bias] */
  int64_t n_bias;
  int64_t priority;
  enum sits_class service_class; /* from the transport's metadata; default normal */
  const char *cache_salt;        /* NULL when none */

  bool stream, include_usage, continuous_usage;
  bool has_stream_options;
  bool echo;
  bool wants_logprobs;           /* chat: logprobs = true */
  int64_t top_logprobs;          /* chat: beside logprobs, default 0; completions: `logprobs`, -1 absent */
  bool has_top_logprobs;
  bool skip_special_tokens;      /* default true */
  bool include_stop_str_in_output;
  bool return_token_ids;
  bool return_token_strs;        /* tokenize */
  bool return_timing;            /* extension: usage.timing */
};

/* A request with every default set. NULL when out of memory. */
struct api_request *api_request_create(enum api_kind kind);
void api_request_destroy(struct api_request *request); /* NULL is fine */

/* Parse a JSON body and check it. On success *out is owned by the caller. */
enum sits_status api_request_parse(enum api_kind kind, const char *body, size_t n_bytes, const struct api_limits *limits,
                                   struct api_request **out, struct sits_error *err) SITS_MUST_CHECK;

/* The same from a JSON value, for transports that make one from their own encoding. root's reference is taken over in every case. */
enum sits_status api_request_parse_json(enum api_kind kind, json_t *root, const struct api_limits *limits, struct api_request **out,
                                        struct sits_error *err) SITS_MUST_CHECK;

/* Ranges and combinations of a filled request. Called by api_request_parse; transports that fill fields themselves call it. */
enum sits_status api_request_check(const struct api_request *request, const struct api_limits *limits, struct sits_error *err)
    SITS_MUST_CHECK;

/* "high", "normal" or "low" (any case); NULL is normal, or the best below it that the grant allows. SITS_INVALID_ARGUMENT and
 * SITS_PERMISSION_DENIED name the header X-QoS-Level. */
enum sits_status api_request_set_class(struct api_request *request, const char *name, struct sits_error *err) SITS_MUST_CHECK;

/* Most tokens a choice may have as the request says it, -1 when it does not. */
int64_t api_request_max_tokens(const struct api_request *request);

/* The n_top_logprobs for the engine: -1 none, 0 chosen only, k also the k best. */
int32_t api_request_logprobs(const struct api_request *request);

#endif
