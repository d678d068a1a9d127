/* Pacing of hand-overs: a thread that has much to hand over (a step's tokens, for a thousand streams) stays a bounded number ahead of the
 * threads that take it. Without it all of a step lies before those threads at once, and what comes meanwhile (a probe, a scrape, a new
 * connection) waits until the last stream has been written.
 *
 * The bound is never worth a stall: a wait ends after NET_PACE_US, and there is no further one until the takers have caught up.
 * Threads: net_pace_wait: one giver; the rest: any. */
#ifndef SITS_FRONT_NET_NET_PACE_H
#define SITS_FRONT_NET_NET_PACE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define NET_PACE_HIGH 64       /* handed over and not taken: the giver waits */
#define NET_PACE_LOW 32        /* until so many are left */
#define NET_PACE_US 10000

struct net_pace {
  pthread_mutex_t mutex;
  pthread_cond_t taken;
  _Atomic int64_t n_given;     /* [atomic] and not taken */
  atomic_bool is_waiting;      /* [atomic] */
  bool is_late;                /* [giver] the last wait was given up and the takers have not caught up since */
};

void net_pace_init(struct net_pace *pace);
void net_pace_fini(struct net_pace *pace);
void net_pace_give(struct net_pace *pace);
void net_pace_take(struct net_pace *pace);
/* Wait while too much is handed over and not taken. False: given up. */
bool net_pace_wait(struct net_pace *pace);

#endif
