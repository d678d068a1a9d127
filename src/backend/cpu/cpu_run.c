/* The run of a batch: phases opened one after the other, their items claimed by whichever workers are there.
 * Entry points: cpu_run (calling thread), cpu_run_worker (every worker).
 *
 * Each worker has a share of the open phase's items, one 64-bit word: the phase's tag, the next claim and the end. Claiming is a
 * compare-and-swap that fails when the tag is not the one the worker saw, so a worker that slept through the end of a phase (or of the
 * run, or into the next run) takes nothing by mistake. A worker claims from its own share, then from the others', so that weights
 * stay with the core that read them last time while everybody keeps up. Finished claims are counted; who counts the last one
 * computes the next phase's items, deals the shares, and sets the gate to the new tag. */
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

/* Do what can be claimed of a phase; returns the number of claims. */
static int32_t work(struct backend_program *p, const struct cpu_phase *phase, uint32_t tag, int32_t worker)
{
  const int32_t n_workers = p->backend->n_threads;
  int32_t n = 0;
  for (int32_t i = 0; i < n_workers; i++) {
    struct cpu_share *share = &p->shares[(worker + i) % n_workers];
    for (int32_t c; (c = claim(share, tag)) >= 0; n++) {
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
    const int32_t n = work(p, &p->phases[index], tag, worker);
    if (n > 0) {
      const int32_t n_claims = p->n_claims; /* read while our claims keep the phase open: after counting them it may be the next one's */
      if (atomic_fetch_add_explicit(&p->n_done, n, memory_order_acq_rel) + n == n_claims) open_phase(p, base, (int32_t)index + 1);
    }
    tag = cpu_gate_wait(&p->gate, tag, SPINS_PHASE);
  }
}

void cpu_run(struct backend_program *p)
{
  const uint32_t base = atomic_load_explicit(&p->gate.value, memory_order_acquire) + 1;
  atomic_store_explicit(&p->run_base, base, memory_order_release);
  open_phase(p, base, 0);
  cpu_pool_help(p->backend->pool, &p->job);
}
