/* A bounded queue of byte strings from any number of threads to one consumer, for logs that must never hold their writers up: audit lines,
 * trace spans. Putting copies, takes one short mutex, and fails at once when the queue is full; the consumer takes everything at a time.
 *
 * Threads: blob_queue_put and blob_queue_close from any; blob_queue_take from one. */
#ifndef SITS_BASE_BLOB_QUEUE_H
#define SITS_BASE_BLOB_QUEUE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct blob { struct blob *next; size_t n_bytes; char bytes[]; };

struct blob_queue {
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  struct blob *head, *tail;   /* [mutex] oldest first */
  size_t n_bytes;             /* [mutex] held, headers counted */
  size_t max_bytes;           /* [init] */
  bool is_closed;             /* [mutex] */
};

void blob_queue_init(struct blob_queue *queue, size_t max_bytes);
void blob_queue_fini(struct blob_queue *queue); /* frees what is left */

/* False: full, closed or out of memory; nothing was kept then. */
bool blob_queue_put(struct blob_queue *queue, const void *bytes, size_t n_bytes);
/* Everything that is there, oldest first, as a list that the caller frees; waits at most timeout_us for the first one. NULL: none. */
struct blob *blob_queue_take(struct blob_queue *queue, int64_t timeout_us);
bool blob_queue_is_closed(struct blob_queue *queue);
/* Refuse further blobs and wake the consumer. */
void blob_queue_close(struct blob_queue *queue);
/* Sleep until the queue is closed or the time is up. */
void blob_queue_wait_close(struct blob_queue *queue, int64_t timeout_us);

/* Free the first blob of a list; returns the rest. */
struct blob *blob_free_first(struct blob *list);
void blob_free_list(struct blob *list);

#endif
