/* See blob_queue.h. */
#include "base/blob_queue.h"

#include <errno.h>
#include <string.h>

#include "base/cond.h"
#include "base/mem.h"

void blob_queue_init(struct blob_queue *queue, size_t max_bytes)
{
  *queue = (struct blob_queue){.max_bytes = max_bytes};
  pthread_mutex_init(&queue->mutex, NULL);
  cond_init_monotonic(&queue->wake);
}

void blob_queue_fini(struct blob_queue *queue)
{
  blob_free_list(queue->head);
  pthread_cond_destroy(&queue->wake);
  pthread_mutex_destroy(&queue->mutex);
}

bool blob_queue_put(struct blob_queue *queue, const void *bytes, size_t n_bytes)
{
  struct blob *blob = mem_alloc(sizeof *blob + n_bytes);
  if (!blob) return false;
  blob->next = NULL;
  blob->n_bytes = n_bytes;
  memcpy(blob->bytes, bytes, n_bytes);
  pthread_mutex_lock(&queue->mutex);
  size_t n_held = queue->n_bytes + sizeof *blob + n_bytes;
  bool has_room = !queue->is_closed && n_held <= queue->max_bytes;
  if (has_room) {
    if (queue->tail) queue->tail->next = blob;
    else queue->head = blob;
    queue->tail = blob;
    queue->n_bytes = n_held;
    pthread_cond_signal(&queue->wake);
  }
  pthread_mutex_unlock(&queue->mutex);
  if (!has_room) mem_free(blob);
  return has_room;
}

struct blob *blob_queue_take(struct blob_queue *queue, int64_t timeout_us)
{
  struct timespec end = cond_deadline(timeout_us);
  pthread_mutex_lock(&queue->mutex);
  int failed = 0;
  while (!queue->head && !queue->is_closed && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&queue->wake, &queue->mutex, &end);
  struct blob *list = queue->head;
  queue->head = queue->tail = NULL;
  queue->n_bytes = 0;
  pthread_mutex_unlock(&queue->mutex);
  return list;
}

bool blob_queue_is_closed(struct blob_queue *queue)
{
  pthread_mutex_lock(&queue->mutex);
  bool is_closed = queue->is_closed;
  pthread_mutex_unlock(&queue->mutex);
  return is_closed;
}

void blob_queue_close(struct blob_queue *queue)
{
  pthread_mutex_lock(&queue->mutex);
  queue->is_closed = true;
  pthread_cond_broadcast(&queue->wake);
  pthread_mutex_unlock(&queue->mutex);
}

void blob_queue_wait_close(struct blob_queue *queue, int64_t timeout_us)
{
  struct timespec end = cond_deadline(timeout_us);
  pthread_mutex_lock(&queue->mutex);
  int failed = 0;
  while (!queue->is_closed && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&queue->wake, &queue->mutex, &end);
  pthread_mutex_unlock(&queue->mutex);
}

struct blob *blob_free_first(struct blob *list)
{
  struct blob *rest = list->next;
  mem_free(list);
  return rest;
}

void blob_free_list(struct blob *list)
{
  while (list) list = blob_free_first(list);
}
