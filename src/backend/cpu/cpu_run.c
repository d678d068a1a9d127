/* The run of a batch: phases opened one after the other, their items claimed by whichever workers are there.
 * Entry points: cpu_run (calling thread), cpu_run_worker (every worker).
 *
 * Each worker has a share of the open phase's items, one 64-bit word: the phase's tag, the next claim and the end. Claiming is a
 * compare-and-swap that fails when the tag is not the one the worker saw, so a worker that slept through the end of a phase (or of the
 * run, or into the next run) takes nothing by mistake. A worker claims from its own share, then from the others', so that weights
 * stay with the core that read them last time while everybody keeps up. Finished claims are counted; who counts the last one
 * computes the next phase's items, deals the shares, and sets the gate to the new tag.
 *
 * A lane's run may stop between two items: worker 0, which asks go_on before each of its claims, takes what nobody has begun out of the
 * shares, waits until what was begun is done, and ends the run. cpu_run_on deals the rest out again under a new tag. */
#include <sched.h>

#include "backend/cpu/cpu_program.h"

#define SPINS_PHASE 1000     /* about 20 us: longer than most phases of a small model, shorter than a time slice by far */
#define MAX_CLAIMS 60000     /* of one phase: claims are counted in 16 bits */

static uint64_t share_word(uint32_t tag, int32_t next, int32_t end)
{
  return (uint64_t)tag << 32 | (uint64_t)(uint32_t)next << 16 | (uint64_t)(uint32_t)end;
}

/* Open the first phase from `index` on that has work; the run is over when there is none. */
static void open_phase(struct backend_program *p, uint32_t base, int32_t index)
{
  int32_t n = 0;
  while (index < p->n_phases && (n = cpu_phase_items(p, &p->phases[index])) == 0) index++;
  const uint32_t tag = base + (uint32_t)index;
  if (p->batch.in->progress) p->batch.in->progress(p->batch.in->progress_user);
  if (index < p->n_phases) {
    const int32_t n_workers = p->backend->n_threads;
    p->n_items = n;
    p->grain = (n + MAX_CLAIMS - 1) / MAX_CLAIMS;
    p->n_claims = (n + p->grain - 1) / p->grain;
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    for (int32_t w = 0; w < n_workers; w++) {
      const int32_t from = (int32_t)((int64_t)p->n_claims * w / n_workers), to = (int32_t)((int64_t)p->n_claims * (w + 1) / n_workers);
      atomic_store_explicit(&p->shares[w].word, share_word(tag, from, to), memory_order_release);
    }
  }
  cpu_gate_set(&p->gate, tag);
}

/* The next claim of a share, -1 when it is used up or belongs to another phase. */
static int32_t claim(struct cpu_share *share, uint32_t tag)
{
  uint64_t word = atomic_load_explicit(&share->word, memory_order_acquire);
  for (;;) {
    const int32_t next = (int32_t)(word >> 16 & 0xffff), end = (int32_t)(word & 0xffff);
    if ((uint32_t)(word >> 32) != tag || next >= end) return -1;
    if (atomic_compare_exchange_weak_explicit(&share->word, &word, share_word(tag, next + 1, end), memory_order_acq_rel,
                                              memory_order_acquire))
      return next;
  }
}

/* Take everything that nobody has begun; returns how much that is. A share that is already another phase's was empty in this one. */
static int32_t seize(struct backend_program *p, uint32_t tag)
{
  int32_t n_left = 0;
  for (int32_t w = 0; w < p->backend->n_threads; w++) {
    uint64_t word = atomic_load_explicit(&p->shares[w].word, memory_order_acquire);
    int32_t next = 0, end = 0;
    while ((uint32_t)(word >> 32) == tag) {
      next = (int32_t)(word >> 16 & 0xffff);
      end = (int32_t)(word & 0xffff);
      if (atomic_compare_exchange_weak_explicit(&p->shares[w].word, &word, share_word(tag, end, end), memory_order_acq_rel,
                                                memory_order_acquire))
        break;
      next = end = 0;
    }
    p->pause.rest[w].next = next;
    p->pause.rest[w].end = end;
    n_left += end - next;
  }
  return n_left;
}

/* Worker 0, which has done n claims of the phase, was told to stop. False: all was begun already, so the phase ends by itself. */
static bool stop(struct backend_program *p, uint32_t base, uint32_t tag, int32_t n)
{
  p->pause.n_left = seize(p, tag);
  if (p->pause.n_left == 0) return false;
  p->pause.index = (int32_t)(tag - base);
  atomic_fetch_add_explicit(&p->n_done, n, memory_order_acq_rel);
  for (int32_t i = 0; atomic_load_explicit(&p->n_done, memory_order_acquire) < p->n_claims - p->pause.n_left; i++)
    if (i > SPINS_PHASE) sched_yield();
  cpu_gate_set(&p->gate, base + (uint32_t)p->n_phases);
  return true;
}

/* Do what can be claimed of a phase; returns the number of claims. *wants_stop: worker 0 was told to leave the rest. */
static int32_t work(struct backend_program *p, const struct cpu_phase *phase, uint32_t tag, int32_t worker, bool *wants_stop)
{
  const int32_t n_workers = p->backend->n_threads;
  const bool asks = worker == 0 && p->go_on != NULL;
  int32_t n = 0;
  for (int32_t i = 0; i < n_workers; i++) {
    struct cpu_share *share = &p->shares[(worker + i) % n_workers];
    for (int32_t c;; n++) {
      if (asks && !p->go_on(p->go_on_user, 0)) {
        *wants_stop = true;
        return n;
      }
      if ((c = claim(share, tag)) < 0) break;
      const int32_t first = c * p->grain, end = first + p->grain < p->n_items ? first + p->grain : p->n_items;
      for (int32_t item = first; item < end; item++) cpu_phase_item(p, phase, item, worker, tag);
    }
  }
  return n;
}

void cpu_run_worker(void *arg, int32_t worker)
{
  struct backend_program *p = arg;
  uint32_t tag = atomic_load_explicit(&p->gate.value, memory_order_acquire);
  const uint32_t base = atomic_load_explicit(&p->run_base, memory_order_acquire);
  for (;;) {
    const uint32_t index = tag - base; /* huge when the two are of different runs: then this worker is late, and leaves */
    if (index >= (uint32_t)p->n_phases) return;
    bool wants_stop = false;
    const int32_t n = work(p, &p->phases[index], tag, worker, &wants_stop);
    if (wants_stop && stop(p, base, tag, n)) return;
    if (n > 0) {
      const int32_t n_claims = p->n_claims; /* read while our claims keep the phase open: after counting them it may be the next one's */
      if (atomic_fetch_add_explicit(&p->n_done, n, memory_order_acq_rel) + n == n_claims) open_phase(p, base, (int32_t)index + 1);
    }
    tag = cpu_gate_wait(&p->gate, tag, SPINS_PHASE);
  }
}

static uint32_t begin_run(struct backend_program *p)
{
  const uint32_t base = atomic_load_explicit(&p->gate.value, memory_order_acquire) + 1;
  atomic_store_explicit(&p->run_base, base, memory_order_release);
  p->pause.index = -1;
  return base;
}

bool cpu_run(struct backend_program *p)
{
  open_phase(p, begin_run(p), 0);
  cpu_pool_help(p->backend->pool, &p->job);
  return p->pause.index < 0;
}

bool cpu_run_on(struct backend_program *p)
{
  const int32_t index = p->pause.index;
  const uint32_t tag = begin_run(p) + (uint32_t)index;
  atomic_store_explicit(&p->n_done, p->n_claims - p->pause.n_left, memory_order_relaxed);
  for (int32_t w = 0; w < p->backend->n_threads; w++)
    atomic_store_explicit(&p->shares[w].word, share_word(tag, p->pause.rest[w].next, p->pause.rest[w].end), memory_order_release);
  cpu_gate_set(&p->gate, tag);
  cpu_pool_help(p->backend->pool, &p->job);
  return p->pause.index < 0;
}
