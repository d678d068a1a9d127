/* Shared by api.c (delivery queue, lifetime of the service) and api_call.c (one call). */
#ifndef SITS_FRONT_API_API_INTERNAL_H
#define SITS_FRONT_API_API_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "front/api/api_call.h"
#include "base/buf.h"
#include "front/api/api_prompt.h"
#include "front/api/api_record.h"
#include "text/detok.h"

struct api_choice {
  struct detok *detok;
  struct api_token *pending;      /* [n_pending] tokens whose text is not complete yet, oldest first */
  int32_t n_pending, pending_capacity;
  int32_t n_output;
  bool is_finished;               /* its finish delta was given to the sink */
  bool is_echoed;
};

enum api_call_state { API_CALL_STARTING, API_CALL_RUNNING, API_CALL_DONE };

struct api_part {
  struct api_call *call;          /* [init] */
  int32_t index;                  /* [init] which prompt */
  uint64_t handle;                /* [init] the engine request's user value; an entry of the handle table while registered */
  struct token_list prompt;       /* [init] kept while it is needed (echo, return_token_ids), else empty after submission */
  int64_t n_prompt;               /* [init] */
  struct sits_request *request;   /* [delivery] after start, others under api.mutex; NULL once released, which takes the mutex */
  struct api_choice *choices;     /* [delivery] [n] */
  int32_t n_left;                 /* [delivery] choices not finished */
  struct api_token *prompt_tokens;/* [delivery] [n_prompt] for echo with log probabilities, NULL otherwise */
  int64_t n_prompt_tokens;        /* [delivery] of them filled */
  struct api_part *next_ready;    /* [mutex api.mutex] */
  bool is_queued;                 /* [mutex api.mutex] */
  int64_t news_us;                /* [mutex api.mutex] when the engine last told of news */
  int64_t told_us;                /* [delivery] news_us when it was taken from the queue */
};

struct api_call {
  struct api *api;                /* [init] */
  atomic_int n_refs;              /* [atomic] transport, delivery, one per queued part */
  struct api_request *request;    /* [init] owned */
  const struct api_sink *sink;    /* [init] */
  void *context;                  /* [init] */
  struct api_part *parts;         /* [init] [n_parts] */
  int32_t n_parts;                /* [init] */
  int32_t n_choices;              /* [init] per part */
  int32_t n_parts_left;           /* [delivery] */
  bool is_submitted;              /* [transport] and counted in api.n_owed */
  enum api_call_state state;      /* [mutex api.mutex] to change, [delivery] to read */
  atomic_int cancel_status;       /* [atomic] SITS_OK: not cancelled */
  struct api_usage usage;         /* [delivery]; constant once the call is done */
  struct buf prompt;              /* [init] as JSON, when the api keeps prompts; failed: it was too large */
  struct api_call *next, *previous; /* [mutex api.mutex] list of active calls */
};

struct api_handle { struct api_part *part; uint32_t generation; uint32_t next_free; };

struct api {
  struct api_limits limits;             /* [init] */
  int64_t deadline_us;                  /* [init] a request's time from submission, 0 = none */
  _Atomic(const struct api_model *) model; /* [atomic] NULL while loading; points at model_store */
  struct api_model model_store;         /* [init] written before model */
  struct api_specials *specials;        /* [init] likewise */
  api_observer *observer;               /* [init] NULL: no one looks */
  void *observer_context;               /* [init] */
  size_t prompt_bytes;                  /* [init] of prompts kept for records, 0: none are */
  atomic_bool is_admitting;             /* [atomic] */
  _Atomic int64_t n_owed;               /* [atomic] calls submitted and not released: what they said may still be on its way out */
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t wake;                  /* parts are ready, or is_stopping */
  pthread_cond_t idle;                  /* n_active fell to 0 */
  bool is_stopping;                     /* [mutex] */
  struct api_part *ready_head, *ready_tail; /* [mutex] FIFO */
  struct api_handle *handles;           /* [mutex] [n_handles] */
  uint32_t n_handles, free_handle;      /* [mutex] free_handle: index + 1, 0 when none */
  struct api_call *calls;               /* [mutex] active ones */
  int64_t n_active;                     /* [mutex] calls being submitted or running */
  enum sits_status abort_status;        /* [mutex] what api_abort_all gave; calls published later end with it too */
};

/* api.c */
enum sits_status api_handle_acquire(struct api *api, struct api_part *part) SITS_MUST_CHECK; /* sets part->handle */
void api_handle_release_locked(struct api *api, struct api_part *part);
void api_queue_locked(struct api *api, struct api_part *part);
void api_call_unref(struct api_call *call);

/* api_call.c */
void api_tell_engine_locked(struct api_call *call); /* cancel its engine requests now, whenever its delivery comes */
/* on the delivery thread */
void api_call_deliver(struct api_part *part);
void api_call_free(struct api_call *call);

#endif
