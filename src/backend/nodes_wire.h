/* The connections between the processes of a model (backend/nodes.h): making them, messages over them, noticing that one is gone. */
#ifndef SITS_BACKEND_NODES_WIRE_H
#define SITS_BACKEND_NODES_WIRE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/group.h"
#include "backend/nodes.h"

enum node_message {
  NODE_OPEN = 1,                   /* struct node_config */
  NODE_INFO, NODE_COMPILE,         /* -; u64 fingerprint of the program */
  NODE_DESTROY_PROGRAM,
  NODE_CREATE_KV, NODE_DESTROY_KV, /* struct kv_geometry; - */
  NODE_COPY_PAGES,                 /* struct kv_copy [n] */
  NODE_READ_PAGE, NODE_WRITE_PAGE, /* i32 page; i32 page and its bytes */
  NODE_STEP,                       /* struct node_step, then the batch's arrays */
  NODE_CLOSE,
  NODE_EXCHANGE,                   /* bytes of one rank to the leader, of all ranks from it */
  NODE_REPLY                       /* struct node_reply, then what was asked for */
};

struct node_config {
  int32_t max_batch_tokens, max_seqs, collective_timeout_ms, compress_reduce;
};
struct node_reply { int32_t status; char text[256]; };
struct node_step { int32_t n_tokens, n_seqs, n_rows, n_columns, has_sample, wants_logits; };

struct nodes {
  int32_t rank, n_ranks;
  int fd[BACKEND_MAX_RANKS];       /* leader: of each follower; follower: fd[0], the leader's. -1: none */
  struct group *group;             /* linked over these connections; owned */
  int64_t message_us;              /* the longest that one message may take; at least the collectives' timeout */
  pthread_t watcher;
  bool has_watcher;
  _Atomic bool is_lost, is_closing;
  struct node_reply early[BACKEND_MAX_RANKS]; /* leader: a follower that gave up where others exchange */
  bool has_early[BACKEND_MAX_RANKS];
};

/* Listen or connect, and wait for all. SITS_UNAVAILABLE: they did not come in time. */
enum sits_status nodes_connect(const struct nodes_options *options, struct nodes **out, struct sits_error *err) SITS_MUST_CHECK;
/* Make the group and start to watch. */
enum sits_status nodes_start(struct nodes *nodes, int32_t collective_timeout_ms, struct sits_error *err) SITS_MUST_CHECK;
void nodes_disconnect(struct nodes *nodes); /* NULL is fine */

/* A process is gone: for ever. Any thread. */
void nodes_lose(struct nodes *nodes, const char *why);

/* One message to `rank`; head and body are its parts, either may be empty. False: lost. */
bool nodes_send(struct nodes *nodes, int32_t rank, enum node_message kind, const void *head, size_t head_bytes, const void *body,
                size_t body_bytes);
/* The next message's kind and size; timeout_us 0: none. False: lost, or too long a wait, which loses it. */
bool nodes_next(struct nodes *nodes, int32_t rank, int64_t timeout_us, enum node_message *kind, size_t *n_bytes);
/* Bytes of the message. */
bool nodes_read(struct nodes *nodes, int32_t rank, void *to, size_t n_bytes);

#endif
