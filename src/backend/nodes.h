/* A model cut over several processes, one rank each, on one machine or many: rank 0 leads, the others follow.
 *
 * The leader is a device to its engine: backend_nodes gives the same contract as backend_ranks (backend/ranks.c). Each call on it goes to
 * the followers as a message over TCP and is made on every process's own inner device. Collectives inside a step are the inner device's:
 * the CPU's go over the same connections (struct group_link), CUDA's over NCCL, whose id is passed on here.
 *
 * Life of the leader: backend_nodes(inner)->open with options.nodes set, and on as with any device. Of a follower: nodes_follow, which
 * returns when the leader has closed (SITS_OK) or a process is lost.
 *
 * Rules: 1. All processes run the same build (version and commit) on the same model file; what differs is refused by name. 2. A connection
 * is made once, with a proof from both sides that they know the secret; what follows is neither encrypted nor authenticated: the network
 * between the processes must be the operator's own. 3. A process that dies, or whose machine falls silent, is noticed within 10 s at any
 * time, idle or in a step: the group is aborted, the leader answers SITS_DEVICE from then on, the followers return. Nothing reconnects:
 * whoever launched the processes starts them all again.
 * Before that a follower calls until the leader listens, for connect_timeout_us; one that is turned away returns at once; and one that ends
 * while the leader waits for others may be started again and come back. 4. Every message has a size that its kind and the options bound.
 */
#ifndef SITS_BACKEND_NODES_H
#define SITS_BACKEND_NODES_H

#include <stdint.h>

#include "backend/backend.h"

#define NODES_SECRET_BYTES 256

struct nodes_options {
  int32_t rank, n_ranks;
  const char *address;             /* leader: to listen on, NULL = everywhere; follower: the leader's */
  int32_t port;
  const char *secret;              /* 16..NODES_SECRET_BYTES bytes, the same everywhere */
  int64_t connect_timeout_us;      /* for all to have come */
  void (*joined)(void);            /* follower: called once it is connected; NULL: nothing */
};

/* NULL: this backend has no such form. */
const struct backend_vtable *backend_nodes(const struct backend_vtable *one);

/* Makes this rank's program; called once. */
typedef enum sits_status (*nodes_program_fn)(void *user, int32_t rank, int32_t n_ranks, struct program **out, struct sits_error *err);

/* Connect to the leader and do what it says on a device of the kind `inner`. own: what is this process's alone (n_threads, device, isa,
 * recipe, no_graphs); the rest comes from the leader. One thread. SITS_DEVICE: a process was lost. */
enum sits_status nodes_follow(const struct nodes_options *options, const struct backend_vtable *inner, const struct backend_options *own,
                              nodes_program_fn make_program, void *user, struct sits_error *err) SITS_MUST_CHECK;

#endif
