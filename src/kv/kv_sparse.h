/* What of its pages a sequence gives up when it may hold no more.
 *
 * A block is what a page holds of one kv head in one layer. Few heads look far back, and those that do need every page, since nobody can
 * tell which one a later text repeats; most heads look at what is near and at the first page. So blocks go, not pages or tokens, over
 * all heads together: when a sequence has filled its last allowed page, the worth of one page in blocks is dropped, and the blocks that
 * stay close ranks, so that a page becomes free. A page thus remains one place in every layer; what lies in it may belong to several.
 *
 * A block's worth is the mean, over the query pages since it lay KV_NEWEST_KEPT back, of the squares of the attention that its tokens got.
 * Squares tell a head that looks at one token from one that looks at all a little, which sums do not; and attention from near by says
 * nothing of what lies far (bench/results/kv_ablation_smollm2.json). The first page (models park attention there) and the newest
 * KV_NEWEST_KEPT stay whole.
 * (Zhang et al. 2023, "H2O", for dropping by attention; Xiao et al. 2024, "DuoAttention", for heads that retrieve and heads that do not;
 * Xiao et al. 2023, "StreamingLLM", for the first tokens.)
 *
 * Rules: 1. Everything is whole numbers and follows from positions and attention alone: the same text loses the same blocks, whatever steps
 * it was read in. 2. Blocks are dropped once the sequence has filled its last allowed page, when it asks for the next. 3. So a step may
 * not run past the end of the page that it begins in, once the budget is reached (kv_sparse_limit).
 * Threads: none. Nothing allocates.
 */
#ifndef SITS_KV_KV_SPARSE_H
#define SITS_KV_KV_SPARSE_H

#include <stdatomic.h>
#include <stdint.h>

#include "sits2026/kv_page.h"

#define KV_NEWEST_KEPT 4     /* whole pages */
#define KV_LEAST_BUDGET 8    /* pages: the first, the newest, the one being filled, and some to choose from */

/* Drop the n_drop blocks that are worth least of entries 1..n_entries-1 of a sequence with n_pages whole pages, n_entries = n_pages -
 * KV_NEWEST_KEPT; of equals the older, then the lower column. given: [n_pages][n_columns] what blocks got; numbers: [n_pages][n_columns]
 * where they lie, KV_NO_PAGE where they are gone; scratch: as many elements as blocks are left. */
void kv_sparse_drop(const _Atomic uint64_t *given, int32_t *numbers, int32_t n_columns, int32_t n_pages, int32_t n_drop, uint32_t *scratch);

/* Most tokens that a sequence of n_tokens may have after its next step under a budget of pages of page_tokens each. */
int64_t kv_sparse_limit(int32_t page_budget, int32_t page_tokens, int64_t n_tokens);

#endif
