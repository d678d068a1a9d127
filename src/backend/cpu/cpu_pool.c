/* Spin-then-futex worker pool; see cpu_pool.h.
 *
 * Both the barrier and the start of a run are one word, a generation number, that waiters watch and a releaser increments. A waiter
 * that has spun in vain counts itself in `n_asleep` before it sleeps on the word, and the releaser makes the wake call only when that
 * count is not zero: sequentially consistent order on both words makes a lost wake-up impossible (either the releaser sees the sleeper,
 * or the sleeper's futex call sees the new generation and returns at once). */
#include "backend/cpu/cpu_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"

#define SPINS_BARRIER 2000   /* about 40 us: several times the longest wait when nobody else wants the cores */
#define SPINS_IDLE 10000     /* about 200 us: bridges the sampling between two decode steps */

/* A generation number with its sleepers, alone on a pair of cache lines (the prefetcher pulls neighbours). */
struct gate {
  _Alignas(128) _Atomic uint32_t generation;
  _Atomic uint32_t n_asleep;
};

struct cpu_pool {
  struct gate barrier, start;
  _Alignas(128) _Atomic int32_t n_arrived;
  int32_t n_threads;           /* [init] */
  int32_t n_started;           /* [init] threads to join */
  pthread_t *threads;          /* [init] [n_threads - 1] */
  cpu_pool_fn fn;              /* written before start is opened, read after */
  void *arg;
  bool is_stopping;
};

struct worker_start { struct cpu_pool *pool; int32_t worker; };

static void pause_cpu(void)
{
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

static void gate_wait(struct gate *gate, uint32_t seen, int32_t spins)
{
  for (int32_t i = 0; i < spins; i++) {
    if (atomic_load_explicit(&gate->generation, memory_order_acquire) != seen) return;
    pause_cpu();
  }
  atomic_fetch_add(&gate->n_asleep, 1);
  while (atomic_load(&gate->generation) == seen)
    syscall(SYS_futex, &gate->generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  atomic_fetch_sub(&gate->n_asleep, 1);
}

static void gate_open(struct gate *gate)
{
  atomic_fetch_add(&gate->generation, 1);
  if (atomic_load(&gate->n_asleep) != 0) syscall(SYS_futex, &gate->generation, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void cpu_pool_barrier(struct cpu_pool *pool)
{
  if (pool->n_threads == 1) return;
  const uint32_t seen = atomic_load_explicit(&pool->barrier.generation, memory_order_relaxed);
  if (atomic_fetch_add(&pool->n_arrived, 1) + 1 == pool->n_threads) {
    atomic_store_explicit(&pool->n_arrived, 0, memory_order_relaxed); /* nobody arrives again before the gate opens */
    gate_open(&pool->barrier);
  } else {
    gate_wait(&pool->barrier, seen, SPINS_BARRIER);
  }
}

static void *worker_main(void *arg)
{
  struct worker_start *start = arg;
  struct cpu_pool *pool = start->pool;
  const int32_t worker = start->worker;
  mem_free(start);
  for (uint32_t seen = 0;; seen++) {
    gate_wait(&pool->start, seen, SPINS_IDLE);
    if (pool->is_stopping) return NULL;
    pool->fn(pool->arg, worker);
    cpu_pool_barrier(pool);
  }
}

void cpu_pool_run(struct cpu_pool *pool, cpu_pool_fn fn, void *arg)
{
  pool->fn = fn;
  pool->arg = arg;
  if (pool->n_threads > 1) gate_open(&pool->start);
  fn(arg, 0);
  cpu_pool_barrier(pool);
}

int32_t cpu_pool_threads(const struct cpu_pool *pool) { return pool->n_threads; }

int32_t cpu_pool_default_threads(void)
{
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int32_t)n : 1;
}

static enum sits_status start_worker(struct cpu_pool *pool, int32_t worker, struct sits_error *err)
{
  struct worker_start *start = mem_alloc(sizeof *start);
  if (start == NULL) return sits_fail(err, SITS_NOMEM, "worker pool: out of memory");
  *start = (struct worker_start){pool, worker};
  const int rc = pthread_create(&pool->threads[worker - 1], NULL, worker_main, start);
  if (rc != 0) {
    mem_free(start);
    return sits_fail(err, SITS_UNAVAILABLE, "worker pool: thread %d: %s", (int)worker, strerror(rc));
  }
  char name[16] = "cpu-worker";
  pthread_setname_np(pool->threads[worker - 1], name);
  pool->n_started++;
  return SITS_OK;
}

enum sits_status cpu_pool_create(int32_t n_threads, struct cpu_pool **out, struct sits_error *err)
{
  if (n_threads < 1 || n_threads > 1024)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "threads", "%d threads: must be 1 to 1024", (int)n_threads);
  struct cpu_pool *pool = mem_aligned(128, sizeof *pool);
  if (pool == NULL) return sits_fail(err, SITS_NOMEM, "worker pool: out of memory");
  memset(pool, 0, sizeof *pool);
  pool->n_threads = n_threads;
  enum sits_status status = SITS_OK;
  pool->threads = mem_calloc((size_t)n_threads, sizeof *pool->threads);
  if (pool->threads == NULL) status = sits_fail(err, SITS_NOMEM, "worker pool: out of memory");
  for (int32_t worker = 1; worker < n_threads && status == SITS_OK; worker++) status = start_worker(pool, worker, err);
  if (status != SITS_OK) {
    cpu_pool_destroy(pool);
    return status;
  }
  *out = pool;
  return SITS_OK;
}

void cpu_pool_destroy(struct cpu_pool *pool)
{
  if (pool == NULL) return;
  if (pool->n_started > 0) {
    pool->is_stopping = true;
    gate_open(&pool->start);
    for (int32_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
  }
  mem_free(pool->threads);
  mem_free(pool);
}
