/* Worker pool of the CPU backend: n threads that run one function together, with cheap barriers inside it.
 *
 * The calling thread is worker 0; the others wait between runs. All waiting spins for some microseconds first (a step has a few barriers
 * a layer, each far shorter than a futex call) and then sleeps, so that an idle or crowded machine is not burnt.
 *
 * Rules: 1. One thread at a time calls cpu_pool_run. 2. Inside a run every worker makes the same sequence of cpu_pool_barrier calls.
 * 3. What a worker wrote before a barrier, or before the end of the run, is seen by all after it.
 */
#ifndef SITS_BACKEND_CPU_CPU_POOL_H
#define SITS_BACKEND_CPU_CPU_POOL_H

#include <stdint.h>

#include "sits2026/status.h"

struct cpu_pool;
typedef void (*cpu_pool_fn)(void *arg, int32_t worker);

/* n_threads >= 1; starts n_threads - 1 threads. */
enum sits_status cpu_pool_create(int32_t n_threads, struct cpu_pool **out, struct sits_error *err) SITS_MUST_CHECK;
int32_t cpu_pool_threads(const struct cpu_pool *pool);

/* Run fn(arg, worker) on every worker, this thread being worker 0; returns when all have returned. */
void cpu_pool_run(struct cpu_pool *pool, cpu_pool_fn fn, void *arg);

/* Wait until every worker of the run is here. Only inside a run. */
void cpu_pool_barrier(struct cpu_pool *pool);

void cpu_pool_destroy(struct cpu_pool *pool); /* no run in progress; NULL is fine */

/* Cores this process may run on. */
int32_t cpu_pool_default_threads(void);

#endif
