/* What every backend checks of a batch before it follows any of its indices (backend.h: a caller's mistake is refused). */
#ifndef SITS_BACKEND_BATCH_H
#define SITS_BACKEND_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/program.h"

/* Do the arrays agree with each other, with the program and with the page memory's shape? At most max_tokens tokens, max_rows sequences and
 * rows; positions of a sequence ascend by one up to kv_len - 1; its pages fit its row of the block table. Ids -1 .. -n_drawn stand for
 * tokens that the batch in flight draws. Of page ids nothing is said. */
bool batch_is_well_formed(const struct backend_batch *batch, const struct program_dims *dims, const struct kv_geometry *geometry,
                          int32_t max_tokens, int32_t max_rows, int32_t n_drawn);

/* Do the tables of a well-formed batch name pages and blocks of the memory only? is_sparse: pages may be missing, blocks be measured. */
bool batch_names_pages(const struct backend_batch *batch, const struct kv_geometry *geometry, bool is_sparse);

/* Pages of sequence s; 0 where the batch has no token of it. */
static inline int32_t batch_pages(const struct backend_batch *batch, int32_t s)
{
  const bool has_token = batch->seq_start[s + 1] > batch->seq_start[s];
  return has_token ? (batch->kv_len[s] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS : 0;
}

#endif
