/* The front ends' common service: it joins one loaded model (engine, tokenizer, chat template) with the transports.
 *
 * Life: api_create -> transports start and answer "loading" -> api_model_set publishes the model -> calls -> api_stop_admission (drain) ->
 * api_wait_idle -> api_abort_all -> api_destroy. One delivery thread turns engine events into text for every call (api_call.h).
 *
 * Threads: everything here may be called from any thread unless it says otherwise. The model's objects are borrowed and must outlive the
 * api. api_on_events is the engine's on_events callback; it takes one short lock and never blocks on a client. */
#ifndef SITS_FRONT_API_API_H
#define SITS_FRONT_API_API_H

#include <stdbool.h>
#include <stdint.h>

#include "front/api/api_request.h"
#include "sits2026/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

struct api;

#define API_MAX_MODEL_NAMES 8

struct api_model {
  struct sits_engine *engine;
  const struct tokenizer *tokenizer;
  const struct chat_template *chat_template;   /* NULL: chat completions are refused */
  bool knows_developer_role;                   /* the template mentions it; otherwise developer messages become system ones */
  const char *names[API_MAX_MODEL_NAMES];      /* [n_names] names it answers to; the first is shown */
  int32_t n_names;
  int32_t max_model_len;                       /* tokens of prompt and answer together */
  uint64_t loaded_bytes;
  int64_t loaded_unix_s;
};

/* Starts the delivery thread. */
enum sits_status api_create(const struct api_limits *limits, struct api **out, struct sits_error *err) SITS_MUST_CHECK;
/* Joins the delivery thread. No call may be active, no transport running, the engine closed. */
void api_destroy(struct api *api);

/* Publish the model (copied struct, borrowed members). Once. */
enum sits_status api_model_set(struct api *api, const struct api_model *model, struct sits_error *err) SITS_MUST_CHECK;
const struct api_model *api_model(const struct api *api);   /* NULL while loading */
/* Whether a request's model name is the served one; NULL is. */
bool api_model_is(const struct api_model *model, const char *name);
/* Whether a model that is named (NULL: the served one) may be used by a key. SITS_UNAVAILABLE while loading, SITS_MODEL_NOT_FOUND,
 * SITS_PERMISSION_DENIED. where: "model" or another place that the name came from, for the text. */
enum sits_status api_model_check(const struct api_model *model, const char *name, const char *where, const struct access_grant *grant,
                                 struct sits_error *err) SITS_MUST_CHECK;

/* Before traffic: time that a request may take from its submission, 0 = none. */
void api_set_timeout(struct api *api, int64_t timeout_us);
const struct api_limits *api_limits(const struct api *api);

/* From now on api_call_submit answers SITS_UNAVAILABLE. */
void api_stop_admission(struct api *api);
bool api_is_admitting(const struct api *api);
int64_t api_n_active(const struct api *api);                /* calls started and not done */
/* Wait until no call is active or the time is up; true: idle. */
bool api_wait_idle(struct api *api, int64_t timeout_us);
/* Wait until no call that was submitted is held by a front end any more (api_call_release), its answer being with the client, or the time
 * is up; true: none is. */
bool api_wait_delivered(const struct api *api, int64_t timeout_us);
/* End every active call with an error of this status. */
void api_abort_all(struct api *api, enum sits_status status);

/* The engine's callback (sits2026/engine.h rule 4); context is the api. */
void api_on_events(void *context, struct sits_request *const *requests, int32_t n_requests);

#endif
