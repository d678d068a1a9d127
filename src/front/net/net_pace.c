/* See net_pace.h. The giver says that it waits before it looks, takers count before they look for a waiter: one of both sees the other. */
#include "front/net/net_pace.h"

#include <errno.h>

#include "base/cond.h"

void net_pace_init(struct net_pace *pace)
{
  *pace = (struct net_pace){.is_late = false};
  pthread_mutex_init(&pace->mutex, NULL);
  cond_init_monotonic(&pace->taken);
}

void net_pace_fini(struct net_pace *pace)
{
  pthread_cond_destroy(&pace->taken);
  pthread_mutex_destroy(&pace->mutex);
}

void net_pace_give(struct net_pace *pace) { atomic_fetch_add(&pace->n_given, 1); }

void net_pace_take(struct net_pace *pace)
{
  if (atomic_fetch_sub(&pace->n_given, 1) - 1 > NET_PACE_LOW || !atomic_load(&pace->is_waiting)) return;
  pthread_mutex_lock(&pace->mutex);
  pthread_cond_signal(&pace->taken);
  pthread_mutex_unlock(&pace->mutex);
}

bool net_pace_wait(struct net_pace *pace)
{
  int64_t n = atomic_load(&pace->n_given);
  if (n <= NET_PACE_LOW) pace->is_late = false;
  if (n < NET_PACE_HIGH || pace->is_late) return !pace->is_late;
  struct timespec end = cond_deadline(NET_PACE_US);
  int failed = 0;
  pthread_mutex_lock(&pace->mutex);
  atomic_store(&pace->is_waiting, true);
  while (atomic_load(&pace->n_given) > NET_PACE_LOW && failed != ETIMEDOUT)
    failed = pthread_cond_timedwait(&pace->taken, &pace->mutex, &end);
  atomic_store(&pace->is_waiting, false);
  pthread_mutex_unlock(&pace->mutex);
  pace->is_late = atomic_load(&pace->n_given) > NET_PACE_LOW;
  return !pace->is_late;
}
