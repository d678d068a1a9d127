/* See kv_sparse.h. */
#include "kv/kv_sparse.h"

#include "kv/kv.h"

enum { FADE_SHIFT = 3 };

void kv_sparse_add(uint64_t *worth, int32_t *query_page_seen, int32_t query_page, const _Atomic uint64_t *mass)
{
  for (; *query_page_seen < query_page; ++*query_page_seen)
    for (int32_t i = 0; i <= *query_page_seen; i++) worth[i] -= worth[i] >> FADE_SHIFT;
  for (int32_t i = 0; i <= query_page; i++) worth[i] += atomic_load_explicit(&mass[i], memory_order_relaxed);
}

int32_t kv_sparse_least(const uint64_t *worth, const int32_t *table, int32_t n_pages)
{
  int32_t least = -1;
  for (int32_t i = 1; i < n_pages - KV_NEWEST_KEPT; i++)
    if (table[i] != KV_DROPPED && (least < 0 || worth[i] < worth[least])) least = i;
  return least;
}

int64_t kv_sparse_limit(int32_t page_budget, int32_t page_tokens, int64_t n_tokens)
{
  const int64_t whole = (n_tokens / page_tokens + 1) * page_tokens, free_of_choice = (int64_t)page_budget * page_tokens;
  return whole > free_of_choice ? whole : free_of_choice;
}
