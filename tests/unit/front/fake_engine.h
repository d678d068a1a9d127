/* A scripted engine behind include/sits2026/engine.h, for tests of what stands above it. Included by one test program, never linked with
 * the real engine. The test pushes events and calls fake_notify on its own thread, which plays the engine's. Thread-safe. */
#ifndef SITS_TESTS_FAKE_ENGINE_H
#define SITS_TESTS_FAKE_ENGINE_H

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/mem.h"
#include "sits2026/engine.h"

enum { FAKE_MAX_REQUESTS = 64, FAKE_RING = 256 };

struct sits_request {
  struct sits_request_params params;
  struct sits_event ring[FAKE_RING];
  int head, tail;
  uint64_t cancelled;            /* bit per choice; all ones for all */
  bool is_released;
};

struct sits_engine { int unused; };

static struct {
  pthread_mutex_t mutex;
  struct sits_request *requests[FAKE_MAX_REQUESTS]; /* in order of submission, kept until fake_reset */
  int n_requests;
  enum sits_status next_status;  /* of the submission number fail_at */
  int fail_at;                   /* -1: none */
  void (*on_submit)(void *context); /* called in the middle of a submission */
  void *on_submit_context;
} fake = {.mutex = PTHREAD_MUTEX_INITIALIZER, .fail_at = -1};

enum sits_status sits_engine_submit(struct sits_engine *engine, const struct sits_request_params *params, struct sits_request **out,
                                    struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  if (fake.on_submit) fake.on_submit(fake.on_submit_context);
  pthread_mutex_lock(&fake.mutex);
  struct sits_request *request = NULL;
  if (fake.fail_at == fake.n_requests) status = sits_fail(err, fake.next_status, "refused by the script");
  else request = mem_calloc(1, sizeof *request);
  if (!status && !request) status = sits_fail(err, SITS_NOMEM, "no memory");
  if (!status) {
    request->params = *params;
    fake.requests[fake.n_requests++] = request;
    *out = request;
  }
  pthread_mutex_unlock(&fake.mutex);
  return status;
}

enum sits_status sits_request_poll(struct sits_request *request, struct sits_event *event)
{
  pthread_mutex_lock(&fake.mutex);
  bool has_one = request->head < request->tail;
  if (has_one) *event = request->ring[request->head++];
  pthread_mutex_unlock(&fake.mutex);
  return has_one ? SITS_OK : SITS_AGAIN;
}

void sits_request_cancel(struct sits_request *request, int32_t choice)
{
  pthread_mutex_lock(&fake.mutex);
  request->cancelled |= choice < 0 ? UINT64_MAX : (uint64_t)1 << choice;
  pthread_mutex_unlock(&fake.mutex);
}

void sits_request_stop(struct sits_request *request, int32_t choice) { sits_request_cancel(request, choice); }

enum sits_status sits_engine_may_queue(const struct sits_engine *engine, int64_t n, int64_t n_choices, int64_t n_prompt_tokens,
                                       struct sits_error *err)
{
  (void)engine;
  (void)n_choices;
  (void)n_prompt_tokens;
  return n <= FAKE_MAX_REQUESTS ? SITS_OK : sits_fail_param(err, SITS_INVALID_ARGUMENT, "prompt", "more than can wait here");
}

void *sits_request_user(const struct sits_request *request) { return request->params.user; }

void sits_request_timing(const struct sits_request *request, struct sits_request_timing *out)
{
  *out = (struct sits_request_timing){.submitted_us = 100,
                                      .first_scheduled_us = 110,
                                      .first_token_us = 130,
                                      .queue_us = 10,
                                      .prefill_us = 20,
                                      .n_prompt_tokens = request->params.n_prompt,
                                      .n_cached_tokens = 1};
}

void sits_request_release(struct sits_request *request)
{
  sits_request_cancel(request, -1);
  pthread_mutex_lock(&fake.mutex);
  request->is_released = true;
  pthread_mutex_unlock(&fake.mutex);
}

static inline void fake_push(int request, struct sits_event event)
{
  pthread_mutex_lock(&fake.mutex);
  struct sits_request *r = fake.requests[request];
  if (r->tail < FAKE_RING) r->ring[r->tail++] = event;
  pthread_mutex_unlock(&fake.mutex);
}

static inline void fake_token(int request, int32_t choice, int32_t token)
{
  fake_push(request, (struct sits_event){.kind = SITS_EVENT_TOKEN, .choice = choice, .token = token, .logprob = -0.5f, .emitted_us = 1});
}

static inline void fake_finish(int request, int32_t choice, enum sits_finish finish, int32_t token, enum sits_status status)
{
  fake_push(request, (struct sits_event){.kind = SITS_EVENT_FINISH, .choice = choice, .finish = finish, .token = token, .status = status});
}

static inline struct sits_request fake_look(int request)
{
  pthread_mutex_lock(&fake.mutex);
  struct sits_request copy = *fake.requests[request];
  pthread_mutex_unlock(&fake.mutex);
  return copy;
}

static inline void fake_reset(void)
{
  pthread_mutex_lock(&fake.mutex);
  for (int i = 0; i < fake.n_requests; i++) mem_free(fake.requests[i]);
  fake.n_requests = 0;
  fake.fail_at = -1;
  pthread_mutex_unlock(&fake.mutex);
}

#endif
