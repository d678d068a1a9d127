/* Between the page bookkeeping and a backend: what a page budget (kv/kv_sparse.h) asks for, in the backend's words. For whoever builds
 * batches: the engine and the evaluator. */
#ifndef SITS_ENGINE_PAGE_BUDGET_H
#define SITS_ENGINE_PAGE_BUDGET_H

#include "backend/backend.h"
#include "kv/kv.h"

/* For a batch over positions that are reserved; borrowed until the slot's next kv_reserve. */
static inline struct backend_blocks page_budget_blocks(const struct kv *kv, int32_t slot)
{
  struct kv_blocks blocks;
  kv_blocks(kv, slot, &blocks);
  return (struct backend_blocks){.numbers = blocks.numbers, .given = blocks.given, .nearest = blocks.nearest};
}

/* What the slot's newest kv_reserve asked for, in its turn. */
static inline enum sits_status page_budget_copy(const struct kv *kv, int32_t slot, const struct backend_vtable *vtable,
                                                struct backend_kv *memory)
{
  const int32_t(*copies)[2];
  const int32_t n = kv_block_copies(kv, slot, &copies);
  return n > 0 ? vtable->kv_copy_blocks(memory, copies, n) : SITS_OK;
}

#endif
