/* Worker pool of the CPU backend: threads that help the calling thread with a job, and the gate that they wait at.
 *
 * A job is a function that every worker may run, the caller being worker 0. The pool makes no promise that the others come: a worker
 * whose core was taken away arrives late or after the end, so a job must be written such that whoever is there can do all of it.
 * Waiting spins for some microseconds first (steps hand over to each other far faster than a futex call) and then sleeps, so that a
 * crowded machine can use the core for the thread that is waited for.
 *
 * Rules: 1. One thread at a time calls cpu_pool_help and cpu_pool_quiesce. 2. After cpu_pool_help a worker may still be inside the job, or
 * enter it late, until cpu_pool_quiesce returns: the job and all it points at stay valid until then.
 */
#ifndef SITS_BACKEND_CPU_CPU_POOL_H
#define SITS_BACKEND_CPU_CPU_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#include "sits2026/status.h"

/* A number that only grows (modulo 2^32) with its sleepers, alone on a pair of cache lines (prefetchers pull neighbours). */
struct cpu_gate {
  _Alignas(128) _Atomic uint32_t value;
  _Atomic uint32_t n_asleep;
};

/* Wait until the value differs from `seen`; returns the new value. What was written before it was set is visible. */
uint32_t cpu_gate_wait(struct cpu_gate *gate, uint32_t seen, int32_t spins);
void cpu_gate_set(struct cpu_gate *gate, uint32_t value);

struct cpu_pool;
struct cpu_job {
  void (*fn)(void *arg, int32_t worker);
  void *arg;
};

/* n_threads >= 1, the caller counted; starts n_threads - 1 threads. */
enum sits_status cpu_pool_create(int32_t n_threads, struct cpu_pool **out, struct sits_error *err) SITS_MUST_CHECK;

/* Offer the job to the workers and run it here as worker 0; returns when this thread's part has returned. */
void cpu_pool_help(struct cpu_pool *pool, const struct cpu_job *job);

/* Withdraw the job and wait until no worker is inside. */
void cpu_pool_quiesce(struct cpu_pool *pool);

void cpu_pool_destroy(struct cpu_pool *pool); /* NULL is fine */

#endif
