/* See kv_sparse.h. */
#include "kv/kv_sparse.h"

#include "kv/kv.h"

/* What a block of an entry is worth once query page n_pages - 1 has been read. */
static uint32_t worth(uint64_t given, int32_t entry, int32_t n_pages)
{
  const uint64_t mean = given / (uint64_t)(n_pages - entry - KV_NEWEST_KEPT);
  return mean < UINT32_MAX ? (uint32_t)mean : UINT32_MAX;
}

/* The number that the n-th smallest of x is, bit by bit; *n_below: how many are smaller. */
static uint32_t nth_smallest(const uint32_t *x, int32_t n_x, int32_t n, int32_t *n_below)
{
  uint32_t at = 0;
  *n_below = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    int32_t n_less = 0;
    for (int32_t i = 0; i < n_x; i++) n_less += x[i] < (at | bit);
    if (n_less >= n) continue;
    at |= bit;
    *n_below = n_less;
  }
  return at;
}

void kv_sparse_drop(const _Atomic uint64_t *given, int32_t *numbers, int32_t n_columns, int32_t n_pages, int32_t n_drop, uint32_t *scratch)
{
  const int64_t first = n_columns, end = (int64_t)(n_pages - KV_NEWEST_KEPT) * n_columns;
  int32_t n_left = 0, n_below;
  for (int64_t i = first; i < end; i++)
    if (numbers[i] != KV_NO_PAGE)
      scratch[n_left++] = worth(atomic_load_explicit(&given[i], memory_order_relaxed), (int32_t)(i / n_columns), n_pages);
  const uint32_t most = nth_smallest(scratch, n_left, n_drop, &n_below);
  int32_t n_equal = n_drop - n_below;
  for (int64_t i = first, k = 0; i < end; i++) {
    if (numbers[i] == KV_NO_PAGE) continue;
    const uint32_t x = scratch[k++];
    if (x < most || (x == most && n_equal-- > 0)) numbers[i] = KV_NO_PAGE;
  }
}

int64_t kv_sparse_limit(int32_t page_budget, int32_t page_tokens, int64_t n_tokens)
{
  const int64_t whole = (n_tokens / page_tokens + 1) * page_tokens, free_of_choice = (int64_t)page_budget * page_tokens;
  return whole > free_of_choice ? whole : free_of_choice;
}
