/* What the pages of a sequence are worth, and which of them goes when it may hold no more.
 *
 * A page's worth is the attention that it lately got: what all later queries gave to it, in all layers and heads, faded by an eighth
 * each time the sequence begins a page. So a page that is read now and then outlives one that was read much long ago. The first page
 * (models park attention there) and the newest KV_NEWEST_KEPT whole ones never go.
 * (Zhang et al. 2023, "H2O", for sums of attention; Xiao et al. 2023, "StreamingLLM", for the first tokens.)
 *
 * Rules: 1. Everything is whole numbers and follows from positions alone: the same text loses the same pages, whatever steps it was
 * read in. 2. A page is dropped at the moment the sequence has filled its last allowed one, before the next is begun. 3. So a step may
 * not run past the end of the page that it begins in, once the budget is reached (kv_sparse_limit).
 * Threads: none. Nothing allocates.
 */
#ifndef SITS_KV_KV_SPARSE_H
#define SITS_KV_KV_SPARSE_H

#include <stdatomic.h>
#include <stdint.h>

#define KV_NEWEST_KEPT 4     /* whole pages */
#define KV_LEAST_BUDGET 8    /* pages: the first, the newest, the one being filled, and some to choose from */
#define KV_DROPPED (-1)      /* in a block table */

/* Add what the queries of page number query_page (position / KV_TOKENS) gave to the pages 0..query_page. worth, mass: [query_page + 1].
 * *query_page_seen: the newest query page so far, 0 at first; query pages come in ascending order, each in as many parts as it likes. */
void kv_sparse_add(uint64_t *worth, int32_t *query_page_seen, int32_t query_page, const _Atomic uint64_t *mass);

/* The entry of table[0..n_pages), all whole pages, that goes next; the oldest of those that are worth least. -1: none may go. */
int32_t kv_sparse_least(const uint64_t *worth, const int32_t *table, int32_t n_pages);

/* Most tokens that a sequence of n_tokens may have after its next step under a budget of pages of page_tokens each. */
int64_t kv_sparse_limit(int32_t page_budget, int32_t page_tokens, int64_t n_tokens);

#endif
