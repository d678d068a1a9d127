/* Page bookkeeping of the KV cache: who holds which page, what may be shared, what may be thrown out. It knows page ids and
 * token ids; the bytes behind an id belong to a backend.
 *
 * Words
 *   page    KV_TOKENS consecutive positions of one sequence, in all layers. free | cached | referenced.
 *   slot    a place for one running sequence: its block table and its counts.
 *   index   finds full pages again by content: an entry's key is (tenant, salt, parent entry, the page's tokens), compared in full,
 *           so a hit is exact and never crosses tenants. Cached pages are indexed pages that no table names, in LRU order.
 *   host    page-sized places in host memory that swapped sequences rest in.
 *   budget  most pages that a sequence may hold; the least worthy of its whole ones is dropped when it would need more (kv_sparse.h).
 *
 * Rules (checked by kv_check)
 *   1. free + cached + referenced = total.
 *   2. A page's reference count = the number of block tables naming it.
 *   3. Only the last page of a sequence is partial; full pages are never written again.
 *   4. A shared page is never written: kv_reserve gives the writer its own copy first (copy-on-write).
 *   5. An entry of the index names a full page; no two entries have the same key.
 *   6. Reserve before commit: kv_reserve either gets all pages that a step needs or changes nothing.
 *   7. With a budget no sequence holds more pages than that. What it computed after a drop differs from what others would compute, and what
 *      its pages are worth is not known to others, so nothing is indexed or swapped then.
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
};

/* A page whose bytes must be copied before the next batch runs. */
struct kv_move { int32_t from_page, to_page; };

/* Who a sequence's pages may be shared with. */
struct kv_owner { uint64_t tenant, salt; };

/* A sequence resting in host pages. head < 0: none. */
struct kv_swapped { int32_t head, n_pages, n_tokens; };

struct kv_counts {
  int32_t n_total, n_free, n_cached, n_referenced;
  int32_t n_host_total, n_host_free;
  uint64_t query_tokens, hit_tokens;  /* prefix look-ups, in tokens, since creation */
  uint64_t n_evicted;
  uint64_t n_dropped;                 /* pages that sequences gave up for their budget */
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
/* Whether the next write will need a page of its own for a shared last page (copy-on-write). */
bool kv_must_copy(const struct kv *kv, int32_t slot);
/* Make positions [committed, n_tokens) writable. At most one move is added at *move (and *n_moves raised). SITS_AGAIN: nothing changed. */
enum sits_status kv_reserve(struct kv *kv, int32_t slot, int32_t n_tokens, struct kv_move *move, int32_t *n_moves) SITS_MUST_CHECK;
/* The next n positions now hold these tokens. Pages that fill up are indexed; reserved pages beyond the last token are given back. With a
 * budget, once its last allowed page is full, the slot drops the one that is worth least. */
void kv_commit(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n);
/* With a budget, before kv_commit: what the slot's queries in page number query_page gave to its pages, mass[0..query_page]. */
void kv_credit(struct kv *kv, int32_t slot, int32_t query_page, const _Atomic uint64_t *mass);
/* A second sequence with the same content: pages are shared, the partial one until either writes. SITS_AGAIN when no slot is left. */
enum sits_status kv_fork(struct kv *kv, int32_t slot, int32_t *out) SITS_MUST_CHECK;
/* Give the slot back. Its indexed pages stay cached until they are needed. */
void kv_close(struct kv *kv, int32_t slot);

/* Swap out: places for the slot's whole pages (out->n_tokens tokens); the caller copies page i to the i-th place, then closes the slot.
 * SITS_AGAIN when no page is whole or the places are full. */
enum sits_status kv_swap_out(struct kv *kv, int32_t slot, struct kv_swapped *out) SITS_MUST_CHECK;
int32_t kv_swap_next(const struct kv *kv, int32_t place);   /* the place after this one, -1 at the end */
void kv_swap_free(struct kv *kv, struct kv_swapped *swapped); /* after copying back, or when the sequence died; head becomes -1 */

int32_t kv_tokens(const struct kv *kv, int32_t slot);        /* committed */
/* Length of the slot's table; *pages borrowed until the next call that changes it. With a budget some entries may be KV_DROPPED. */
int32_t kv_pages(const struct kv *kv, int32_t slot, const int32_t **pages);
int32_t kv_held(const struct kv *kv, int32_t slot);          /* entries of the table that are not dropped */
int32_t kv_available(const struct kv *kv);                   /* free + cached pages */
void kv_counts(const struct kv *kv, struct kv_counts *out);
/* Forget all cached pages (they become free). */
void kv_drop_cache(struct kv *kv);
/* Abort the process with a message when a rule is broken. Cost: all pages and tables. */
void kv_check(const struct kv *kv);

#endif
