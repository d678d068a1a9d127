/* Spin-then-futex gates and the worker pool; see cpu_pool.h.
 *
 * A waiter that has spun in vain counts itself in n_asleep before it sleeps on the value, and the setter makes the wake call only when
 * that count is not zero. Sequentially consistent order on both words makes a lost wake-up impossible: either the setter sees the
 * sleeper, or the sleeper's futex call sees the new value and returns at once. A worker marks itself inside before it looks for the
 * job, so that cpu_pool_quiesce, which takes the job away before it looks at the marks, cannot miss it. */
#include "backend/cpu/cpu_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"

#define SPINS_IDLE 10000     /* about 200 us: bridges the sampling between two decode steps */

struct worker { struct cpu_pool *pool; int32_t index; pthread_t thread; };

struct cpu_pool {
  struct cpu_gate start;       /* grows by one with each job */
  _Alignas(128) _Atomic int32_t n_inside; /* workers that may touch the job */
  _Atomic(const struct cpu_job *) job;    /* NULL: none */
  atomic_bool is_stopping;
  int32_t n_threads;           /* [init] */
  int32_t n_started;           /* [init] threads to join */
  struct worker *workers;      /* [init] [n_threads - 1], index 1 first */
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint32_t cpu_gate_wait(struct cpu_gate *gate, uint32_t seen, int32_t spins)
{
  uint32_t value;
  for (int32_t i = 0; i < spins; i++) {
    if ((value = atomic_load_explicit(&gate->value, memory_order_acquire)) != seen) return value;
    pause_cpu();
  }
  atomic_fetch_add(&gate->n_asleep, 1);
  while ((value = atomic_load(&gate->value)) == seen) syscall(SYS_futex, &gate->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  atomic_fetch_sub(&gate->n_asleep, 1);
  return value;
}

void cpu_gate_set(struct cpu_gate *gate, uint32_t value)
{
  atomic_store(&gate->value, value);
  if (atomic_load(&gate->n_asleep) != 0) syscall(SYS_futex, &gate->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *worker_main(void *arg)
{
  const struct worker *worker = arg;
  struct cpu_pool *pool = worker->pool;
  for (uint32_t seen = 0;;) {
    seen = cpu_gate_wait(&pool->start, seen, SPINS_IDLE);
    if (atomic_load(&pool->is_stopping)) return NULL;
    atomic_fetch_add(&pool->n_inside, 1);
    const struct cpu_job *job = atomic_load(&pool->job);
    if (job != NULL) job->fn(job->arg, worker->index);
    atomic_fetch_sub(&pool->n_inside, 1);
  }
}

void cpu_pool_help(struct cpu_pool *pool, const struct cpu_job *job)
{
  if (pool->n_threads > 1) {
    atomic_store(&pool->job, job);
    cpu_gate_set(&pool->start, atomic_load_explicit(&pool->start.value, memory_order_relaxed) + 1);
  }
  job->fn(job->arg, 0);
}

void cpu_pool_quiesce(struct cpu_pool *pool)
{
  atomic_store(&pool->job, NULL);
  while (atomic_load(&pool->n_inside) != 0) sched_yield(); /* only when weights were packed or a program ends */
}

static enum sits_status start_worker(struct cpu_pool *pool, int32_t index, struct sits_error *err)
{
  struct worker *worker = &pool->workers[index - 1];
  worker->pool = pool;
  worker->index = index;
  const int rc = pthread_create(&worker->thread, NULL, worker_main, worker);
  if (rc != 0) return sits_fail(err, SITS_UNAVAILABLE, "worker pool: thread %d: %s", (int)index, strerror(rc));
  char name[16] = "cpu-worker";
  pthread_setname_np(worker->thread, name);
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
  pool->workers = mem_calloc((size_t)n_threads, sizeof *pool->workers);
  if (pool->workers == NULL) status = sits_fail(err, SITS_NOMEM, "worker pool: out of memory");
  for (int32_t i = 1; i < n_threads && status == SITS_OK; i++) status = start_worker(pool, i, err);
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
    atomic_store(&pool->is_stopping, true);
    cpu_gate_set(&pool->start, atomic_load(&pool->start.value) + 1);
    for (int32_t i = 0; i < pool->n_started; i++) pthread_join(pool->workers[i].thread, NULL);
  }
  mem_free(pool->workers);
  mem_free(pool);
}
