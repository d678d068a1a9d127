/* See api.h. The delivery queue: the engine's callback marks parts ready, the delivery thread serves them in that order.
 *
 * The engine knows a part by a handle (slot and generation), not by a pointer: a request that was released while the engine was about to
 * name it in its callback is then simply not found. */
#include "front/api/api.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/api/api_internal.h"

#define SLOT_BITS 32

static void *delivery_main(void *argument);

enum sits_status api_create(const struct api_limits *limits, struct api **out, struct sits_error *err)
{
  struct api *api = mem_calloc(1, sizeof *api);
  if (!api) return sits_fail(err, SITS_NOMEM, "no memory for the request service");
  api->limits = *limits;
  atomic_init(&api->model, NULL);
  atomic_init(&api->is_admitting, true);
  pthread_mutex_init(&api->mutex, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&api->wake, NULL);
  pthread_cond_init(&api->idle, &monotonic);
  pthread_condattr_destroy(&monotonic);
  int failed = pthread_create(&api->thread, NULL, delivery_main, api);
  if (failed) {
    pthread_cond_destroy(&api->wake);
    pthread_cond_destroy(&api->idle);
    pthread_mutex_destroy(&api->mutex);
    mem_free(api);
    return sits_fail(err, SITS_INTERNAL, "the delivery thread could not be started: %s", strerror(failed));
  }
  *out = api;
  return SITS_OK;
}

void api_destroy(struct api *api)
{
  if (!api) return;
  pthread_mutex_lock(&api->mutex);
  api->is_stopping = true;
  pthread_cond_signal(&api->wake);
  pthread_mutex_unlock(&api->mutex);
  pthread_join(api->thread, NULL);
  api_specials_destroy(api->specials);
  mem_free(api->handles);
  pthread_cond_destroy(&api->wake);
  pthread_cond_destroy(&api->idle);
  pthread_mutex_destroy(&api->mutex);
  mem_free(api);
}

enum sits_status api_model_set(struct api *api, const struct api_model *model, struct sits_error *err)
{
  enum sits_status status = api_specials_create(model->tokenizer, &api->specials);
  if (status) return sits_fail(err, status, "no memory for the table of special tokens");
  api->model_store = *model;
  atomic_store(&api->model, &api->model_store);
  return SITS_OK;
}

const struct api_model *api_model(const struct api *api) { return atomic_load(&api->model); }

bool api_model_is(const struct api_model *model, const char *name)
{
  if (!name) return true;
  for (int32_t i = 0; i < model->n_names; i++)
    if (!strcmp(name, model->names[i])) return true;
  return false;
}

enum sits_status api_model_check(const struct api_model *model, const char *name, const char *where, const struct access_grant *grant,
                                 struct sits_error *err)
{
  if (!model) return sits_fail(err, SITS_UNAVAILABLE, "the model is still loading");
  if (!api_model_is(model, name))
    return sits_fail_param(err, SITS_MODEL_NOT_FOUND, "model", "the model named in %s is not served here", where);
  if (!access_allows_model(grant, name ? name : model->names[0]))
    return sits_fail_param(err, SITS_PERMISSION_DENIED, "model", "this key may not use the model");
  return SITS_OK;
}

void api_set_timeout(struct api *api, int64_t timeout_us) { api->deadline_us = timeout_us; }
const struct api_limits *api_limits(const struct api *api) { return &api->limits; }

enum sits_status api_prompt_messages(struct api *api, const struct api_request *request, struct token_list *out, struct sits_error *err)
{
  return api_prompt_chat(api_model(api), api->specials, &api->limits, request, out, err);
}

void api_stop_admission(struct api *api) { atomic_store(&api->is_admitting, false); }
bool api_is_admitting(const struct api *api) { return atomic_load(&api->is_admitting); }

int64_t api_n_active(const struct api *api)
{
  struct api *a = (struct api *)api;
  pthread_mutex_lock(&a->mutex);
  int64_t n = a->n_active;
  pthread_mutex_unlock(&a->mutex);
  return n;
}

bool api_wait_idle(struct api *api, int64_t timeout_us)
{
  int64_t end_us = clock_monotonic_us() + timeout_us;
  struct timespec end = {.tv_sec = end_us / 1000000, .tv_nsec = end_us % 1000000 * 1000};
  pthread_mutex_lock(&api->mutex);
  int failed = 0;
  while (api->n_active > 0 && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&api->idle, &api->mutex, &end);
  bool is_idle = api->n_active == 0;
  pthread_mutex_unlock(&api->mutex);
  return is_idle;
}

bool api_wait_delivered(const struct api *api, int64_t timeout_us)
{
  const int64_t end_us = clock_monotonic_us() + timeout_us;
  const struct timespec nap = {.tv_nsec = 2000000};
  while (atomic_load(&api->n_owed) > 0) {
    if (clock_monotonic_us() >= end_us) return false;
    nanosleep(&nap, NULL);
  }
  return true;
}

void api_abort_all(struct api *api, enum sits_status status)
{
  pthread_mutex_lock(&api->mutex);
  api->abort_status = status;
  for (struct api_call *call = api->calls; call; call = call->next) {
    int none = SITS_OK;
    atomic_compare_exchange_strong(&call->cancel_status, &none, (int)status);
    api_tell_engine_locked(call);
    api_queue_locked(api, &call->parts[0]);
  }
  pthread_cond_signal(&api->wake);
  pthread_mutex_unlock(&api->mutex);
}

/* ---- handles ---- */

enum sits_status api_handle_acquire(struct api *api, struct api_part *part)
{
  enum sits_status status = SITS_OK;
  pthread_mutex_lock(&api->mutex);
  if (!api->free_handle) {
    uint32_t n = api->n_handles ? api->n_handles * 2 : 64;
    struct api_handle *handles = n < 1u << 24 ? mem_realloc(api->handles, n * sizeof *handles) : NULL;
    if (!handles) {
      status = SITS_NOMEM;
      goto done;
    }
    for (uint32_t i = api->n_handles; i < n; i++) handles[i] = (struct api_handle){.generation = 1, .next_free = i + 1 < n ? i + 2 : 0};
    api->free_handle = api->n_handles + 1;
    api->handles = handles;
    api->n_handles = n;
  }
  uint32_t slot = api->free_handle - 1;
  api->free_handle = api->handles[slot].next_free;
  api->handles[slot].part = part;
  part->handle = (uint64_t)api->handles[slot].generation << SLOT_BITS | slot;
done:
  pthread_mutex_unlock(&api->mutex);
  return status;
}

static struct api_part *find_locked(struct api *api, uint64_t handle)
{
  uint32_t slot = (uint32_t)handle;
  if (slot >= api->n_handles || api->handles[slot].generation != handle >> SLOT_BITS) return NULL;
  return api->handles[slot].part;
}

void api_handle_release_locked(struct api *api, struct api_part *part)
{
  if (!part->handle || find_locked(api, part->handle) != part) return;
  struct api_handle *handle = &api->handles[(uint32_t)part->handle];
  handle->part = NULL;
  handle->generation++;
  if (!handle->generation) handle->generation = 1; /* a handle is never 0 */
  handle->next_free = api->free_handle;
  api->free_handle = (uint32_t)part->handle + 1;
  part->handle = 0;
}

/* ---- delivery ---- */

void api_queue_locked(struct api *api, struct api_part *part)
{
  if (part->is_queued) return;
  part->is_queued = true;
  part->next_ready = NULL;
  atomic_fetch_add(&part->call->n_refs, 1);
  if (api->ready_tail) api->ready_tail->next_ready = part;
  else api->ready_head = part;
  api->ready_tail = part;
}

void api_on_events(void *context, struct sits_request *const *requests, int32_t n_requests)
{
  struct api *api = context;
  int64_t now_us = clock_monotonic_us();
  pthread_mutex_lock(&api->mutex);
  for (int32_t i = 0; i < n_requests; i++) {
    struct api_part *part = find_locked(api, (uint64_t)(uintptr_t)sits_request_user(requests[i]));
    if (!part) continue;
    part->news_us = now_us;
    api_queue_locked(api, part);
  }
  if (api->ready_head) pthread_cond_signal(&api->wake);
  pthread_mutex_unlock(&api->mutex);
}

void api_call_unref(struct api_call *call)
{
  if (atomic_fetch_sub(&call->n_refs, 1) == 1) api_call_free(call);
}

static void *delivery_main(void *argument)
{
  struct api *api = argument;
  pthread_mutex_lock(&api->mutex);
  for (;;) {
    while (!api->ready_head && !api->is_stopping) pthread_cond_wait(&api->wake, &api->mutex);
    if (!api->ready_head) break; /* stopping, and nothing is left */
    struct api_part *part = api->ready_head;
    api->ready_head = part->next_ready;
    if (!api->ready_head) api->ready_tail = NULL;
    part->told_us = part->news_us;
    part->is_queued = false; /* news that come while it is served queue it again */
    struct api_call *call = part->call;
    bool is_running = call->state == API_CALL_RUNNING;
    pthread_mutex_unlock(&api->mutex);
    if (is_running) api_call_deliver(part);
    api_call_unref(call);
    pthread_mutex_lock(&api->mutex);
  }
  pthread_mutex_unlock(&api->mutex);
  return NULL;
}
