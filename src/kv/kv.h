/* Page bookkeeping of the KV cache: who holds which page, what may be shared, what may be thrown out. It knows page ids and
 * token ids; the bytes behind an id belong to a backend.
 *
 * Words
 *   page    KV_TOKENS consecutive positions of one sequence, in all layers. free | cached | referenced.
 *   slot    a place for one running sequence: its block table and its counts.
 *   index   finds full pages again by content: an entry's key is (tenant, salt, parent entry, the page's tokens), compared in full,
 *           so a hit is exact and never crosses tenants. Cached pages are indexed pages that no table names, in LRU order.
 *   host    page-sized places in host memory that swapped sequences rest in.
 *   block   what a page holds of one kv head in one layer; its number is page * n_columns + layer * heads + head (a column).
 *   budget  most pages that a sequence may hold; a page's worth of its blocks is dropped when it would need more (kv_sparse.h).
 *   mixed   page of a sequence under a budget that holds what is left of several: its blocks lie anywhere, its entries are KV_NO_PAGE.
 *
 * Rules (checked by kv_check)
 *   1. free + cached + referenced = total.
 *   2. A page's reference count = the number of block tables, and of sequences' mixed pages, naming it.
 *   3. Only the last page of a sequence is partial; full pages are never written again.
 *   4. A shared page is never written: kv_reserve gives the writer its own copy first (copy-on-write).
 *   5. An entry of the index names a full page; no two entries have the same key.
 *   6. Reserve before commit: kv_reserve either gets all pages that a step needs or changes nothing.
 *   7. With a budget no sequence holds more pages than that. What it computed after a drop differs from what others would compute, and what
 *      its blocks are worth is not known to others, so nothing is indexed or swapped then.
 *   8. Each block of a sequence's mixed pages is the block of one dropped entry and column.
 * Threads: none of its own; one thread (the engine's) calls. Nothing allocates after kv_create.
 */
#ifndef SITS_KV_KV_H
#define SITS_KV_KV_H

#include <stdbool.h>
#include <stdint.h>

#include "kv/kv_sparse.h"
#include "sits2026/status.h"

#define KV_TOKENS 64 /* P, positions in a page */

struct kv;

struct kv_options {
  int32_t n_pages;          /* N, > 0 */
  int32_t n_slots;          /* sequences that can hold pages at once */
  int32_t max_pages;        /* of one sequence */
  int32_t n_host_pages;     /* places for swapped pages, 0 = no swapping */
  bool prefix_caching;      /* ignored with a page budget */
  int32_t page_budget;      /* pages of a sequence, at least KV_LEAST_BUDGET; 0 = no limit */
  int32_t n_columns;        /* with a page budget: blocks of a page, layers * kv heads */
};

/* A page whose bytes must be copied before the next batch runs. */
struct kv_move { int32_t from_page, to_page; };

/* What a backend needs to know about a sequence under a budget. Rows are entries of the block table. */
struct kv_blocks {
  const int32_t *numbers;   /* [table][n_columns] of dropped entries: where the block lies, KV_NO_PAGE: it is gone; NULL: none is dropped */
  _Atomic uint64_t *given;  /* [table][n_columns] squares of attention that blocks get, to be added to before kv_commit ... */
  int32_t nearest;          /* ... by queries so many pages behind the block's, or more */
};

/* Who a sequence's pages may be shared with. */
struct kv_owner { uint64_t tenant, salt; };

/* A sequence resting in host pages. head < 0: none. */
struct kv_swapped { int32_t head, n_pages, n_tokens; };

struct kv_counts {
  int32_t n_total, n_free, n_cached, n_referenced;
  int32_t n_host_total, n_host_free;
  uint64_t query_tokens, hit_tokens;  /* prefix look-ups, in tokens, since creation */
  uint64_t n_evicted;
  uint64_t n_dropped;                 /* pages that sequences gave up for their budget, in blocks of several */
};

enum sits_status kv_create(const struct kv_options *options, struct kv **out) SITS_MUST_CHECK;
void kv_destroy(struct kv *kv);

/* Take an empty slot for a sequence. SITS_AGAIN when all are taken. */
enum sits_status kv_open(struct kv *kv, struct kv_owner owner, int32_t *slot) SITS_MUST_CHECK;
/* Find the longest run of indexed full pages that begins tokens[0..n) and reference them. Returns the tokens covered, a multiple of
 * KV_TOKENS and < n, so that at least one token is left to compute. The slot must be empty. Counts one query. */
int32_t kv_attach(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n);
/* The same, but counts nothing. */
int32_t kv_attach_uncounted(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n);
/* How many tokens kv_attach would find now; counts nothing. */
int32_t kv_match(const struct kv *kv, struct kv_owner owner, const int32_t *tokens, int32_t n);
/* Pages that kv_reserve(slot, n_tokens) would take from free and cached ones. */
int32_t kv_need(const struct kv *kv, int32_t slot, int32_t n_tokens);
/* Pages that the next write takes beyond those of its new positions: one for a shared last page (copy-on-write); when blocks will be
 * dropped, one for each shared page that others close ranks in, less the one that becomes free. */
int32_t kv_extra(const struct kv *kv, int32_t slot);
/* Make positions [committed, n_tokens) writable; with a budget, drop blocks first when all allowed pages are full. At most one move is
 * added at *move (and *n_moves raised). SITS_AGAIN: nothing changed. */
enum sits_status kv_reserve(struct kv *kv, int32_t slot, int32_t n_tokens, struct kv_move *move, int32_t *n_moves) SITS_MUST_CHECK;
/* With a budget: the blocks, {from, to}, that must be copied since the slot's newest kv_reserve: before the moves, before what later
 * kv_reserve calls ask for, one after the other. *copies borrowed until the slot's next kv_reserve. Returns how many. */
int32_t kv_block_copies(const struct kv *kv, int32_t slot, const int32_t (**copies)[2]);
/* With a budget, for a batch over reserved positions; *out borrowed until the slot's next kv_reserve. */
void kv_blocks(const struct kv *kv, int32_t slot, struct kv_blocks *out);
/* The next n positions now hold these tokens. Pages that fill up are indexed; reserved pages beyond the last token are given back. */
void kv_commit(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n);
/* A second sequence with the same content: pages are shared, the partial one until either writes. SITS_AGAIN when no slot is left. */
enum sits_status kv_fork(struct kv *kv, int32_t slot, int32_t *out) SITS_MUST_CHECK;
/* Give the slot back. Its indexed pages stay cached until they are needed. */
void kv_close(struct kv *kv, int32_t slot);
/* How many pages closing the slot would make available, after those supposed closed before it: pages that several share come with the last
 * of them. Each is to be undone by kv_suppose_open, in any order, before any other call. */
int32_t kv_suppose_closed(struct kv *kv, int32_t slot);
void kv_suppose_open(struct kv *kv, int32_t slot);

/* Swap out: places for the slot's whole pages (out->n_tokens tokens), the first one for the last page. The caller gives back the partial
 * page (kv_give_back), copies the others, gives each back or not, and closes the slot. SITS_AGAIN when no page is whole or the places are
 * full. */
enum sits_status kv_swap_out(struct kv *kv, int32_t slot, struct kv_swapped *out) SITS_MUST_CHECK;
/* The slot's table keeps its first n_pages pages. Only kv_pages, this and kv_close may be called for it then. */
void kv_give_back(struct kv *kv, int32_t slot, int32_t n_pages);
int32_t kv_swap_next(const struct kv *kv, int32_t place);   /* the place after this one, -1 at the end */
void kv_swap_free(struct kv *kv, struct kv_swapped *swapped); /* after copying back, or when the sequence died; head becomes -1 */

int32_t kv_tokens(const struct kv *kv, int32_t slot);        /* committed */
/* Length of the slot's table; *pages borrowed until the next call that changes it. With a budget some entries may be KV_NO_PAGE. */
int32_t kv_pages(const struct kv *kv, int32_t slot, const int32_t **pages);
int32_t kv_held(const struct kv *kv, int32_t slot);          /* pages: entries of the table that are not dropped, and mixed ones */
int32_t kv_available(const struct kv *kv);                   /* free + cached pages */
void kv_counts(const struct kv *kv, struct kv_counts *out);
/* Forget all cached pages (they become free). */
void kv_drop_cache(struct kv *kv);
/* Abort the process with a message when a rule is broken. Cost: all pages and tables. */
void kv_check(const struct kv *kv);

#endif
