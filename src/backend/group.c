/* See group.h. A meeting is a count of arrivals and a generation; waiting spins briefly (ranks on different cores meet within
 * microseconds), then sleeps in short naps, so that ranks that share a core let each other on. */
#include "backend/group.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"

enum { SPINS = 2000, NAP_NS = 20000, POINTER_SETS = 2 };

struct group {
  int32_t n_ranks;                   /* [init] */
  int64_t timeout_us;                /* [init] */
  _Atomic int32_t n_arrived;
  _Atomic uint32_t generation;       /* meetings held */
  _Atomic bool is_aborted;
  const void *_Atomic given[POINTER_SETS][BACKEND_MAX_RANKS]; /* in turns: one rank may be a meeting ahead */
  struct group_link link;            /* [init] exchange NULL: all ranks are here */
  pthread_mutex_t lock;              /* guards the rest */
  volatile int32_t *words[BACKEND_MAX_RANKS];
  struct { void (*fn)(void *user); void *user; } on_abort[BACKEND_MAX_RANKS];
};

enum sits_status group_create(int32_t n_ranks, int64_t timeout_us, struct group **out, struct sits_error *err)
{
  if (n_ranks < 1 || n_ranks > BACKEND_MAX_RANKS)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-size", "tensor-parallel-size %d is outside 1..%d", (int)n_ranks,
                           BACKEND_MAX_RANKS);
  struct group *group = mem_calloc(1, sizeof *group);
  if (group == NULL) return sits_fail(err, SITS_NOMEM, "ranks: out of memory");
  group->n_ranks = n_ranks;
  group->timeout_us = timeout_us;
  pthread_mutex_init(&group->lock, NULL);
  *out = group;
  return SITS_OK;
}

enum sits_status group_create_linked(int32_t n_ranks, int64_t timeout_us, const struct group_link *link, struct group **out,
                                     struct sits_error *err)
{
  const enum sits_status status = group_create(n_ranks, timeout_us, out, err);
  if (status == SITS_OK) (*out)->link = *link;
  return status;
}

bool group_is_linked(const struct group *group) { return group->link.exchange != NULL; }

void group_destroy(struct group *group)
{
  if (group == NULL) return;
  pthread_mutex_destroy(&group->lock);
  mem_free(group);
}

int32_t group_size(const struct group *group) { return group->n_ranks; }
int64_t group_timeout_us(const struct group *group) { return group->timeout_us; }
bool group_is_aborted(const struct group *group) { return atomic_load(&group->is_aborted); }

void group_abort(struct group *group)
{
  atomic_store(&group->is_aborted, true);
  pthread_mutex_lock(&group->lock);
  for (int32_t r = 0; r < group->n_ranks; r++) {
    if (group->words[r] != NULL) *group->words[r] = 1;
    if (group->on_abort[r].fn != NULL) group->on_abort[r].fn(group->on_abort[r].user);
    group->on_abort[r].fn = NULL;
  }
  pthread_mutex_unlock(&group->lock);
}

void group_watch(struct group *group, int32_t rank, volatile int32_t *word)
{
  pthread_mutex_lock(&group->lock);
  group->words[rank] = word;
  if (word != NULL && atomic_load(&group->is_aborted)) *word = 1;
  pthread_mutex_unlock(&group->lock);
}

void group_on_abort(struct group *group, int32_t rank, void (*fn)(void *user), void *user)
{
  pthread_mutex_lock(&group->lock);
  group->on_abort[rank].fn = fn;
  group->on_abort[rank].user = user;
  if (fn != NULL && atomic_load(&group->is_aborted)) {
    fn(user);
    group->on_abort[rank].fn = NULL;
  }
  pthread_mutex_unlock(&group->lock);
}

/* Until the generation is another than `seen`. */
static bool wait_for_others(struct group *group, uint32_t seen, bool is_patient)
{
  const int64_t start_us = clock_monotonic_us();
  for (int64_t i = 0; atomic_load_explicit(&group->generation, memory_order_acquire) == seen; i++) {
    if (group_is_aborted(group)) return false;
    if (i < SPINS) continue;
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    if (!is_patient && clock_monotonic_us() - start_us > group->timeout_us) {
      group_abort(group);
      return false;
    }
  }
  return true;
}

bool group_meet(struct group *group, int32_t rank, const void *mine, const void **all, bool is_patient)
{
  const uint32_t seen = atomic_load_explicit(&group->generation, memory_order_acquire);
  const void *_Atomic *given = group->given[seen % POINTER_SETS];
  atomic_store_explicit(&given[rank], mine, memory_order_relaxed);
  if (group_is_aborted(group)) return false;
  if (atomic_fetch_add_explicit(&group->n_arrived, 1, memory_order_acq_rel) + 1 == group->n_ranks) {
    atomic_store_explicit(&group->n_arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&group->generation, seen + 1, memory_order_release);
  } else if (!wait_for_others(group, seen, is_patient)) {
    return false;
  }
  for (int32_t r = 0; r < group->n_ranks && all != NULL; r++) all[r] = atomic_load_explicit(&given[r], memory_order_relaxed);
  return true;
}

bool group_exchange(struct group *group, int32_t rank, const void *mine, size_t n_bytes, void *all, bool is_patient)
{
  const void *given[BACKEND_MAX_RANKS];
  if (group->link.exchange != NULL) {
    if (group_is_aborted(group)) return false;
    if (group->link.exchange(group->link.user, mine, n_bytes, all, is_patient ? 0 : group->timeout_us)) return true;
    group_abort(group);
    return false;
  }
  if (!group_meet(group, rank, mine, given, is_patient)) return false;
  for (int32_t r = 0; r < group->n_ranks && n_bytes > 0; r++) memcpy((uint8_t *)all + (size_t)r * n_bytes, given[r], n_bytes);
  return n_bytes == 0 || group_meet(group, rank, NULL, NULL, is_patient); /* until all have read */
}
