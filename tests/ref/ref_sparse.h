/* Which blocks a sequence under a page budget drops (kv/kv_sparse.h), the slow way: one after the other, the least of all that are left. */
#ifndef TESTS_REF_REF_SPARSE_H
#define TESTS_REF_REF_SPARSE_H

#include <stdbool.h>
#include <stdint.h>

/* A page's worth of blocks, n_columns, of entries that lie behind the first and before the newest four of n_pages whole ones.
 * given, is_gone: [n_pages][n_columns]. */
static inline void ref_drop_blocks(const uint64_t *given, bool *is_gone, int32_t n_columns, int32_t n_pages)
{
  for (int32_t n = 0; n < n_columns; n++) {
    int32_t least = -1;
    uint64_t least_worth = 0;
    for (int32_t i = n_columns; i < (n_pages - 4) * n_columns; i++) {
      uint64_t worth = given[i] / (uint64_t)(n_pages - 4 - i / n_columns); /* a query page */
      if (worth > UINT32_MAX) worth = UINT32_MAX;
      if (is_gone[i] || (least >= 0 && worth >= least_worth)) continue;
      least = i;
      least_worth = worth;
    }
    is_gone[least] = true;
  }
}

#endif
