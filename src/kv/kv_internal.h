/* Inside of the KV bookkeeping; only files in src/kv include it. kv_pool.c: pages and their three states. kv_index.c: content index.
 * kv_seq.c: slots and block tables. kv_budget.c: what a sequence keeps under a budget. kv_sparse.c: which blocks go. kv_swap.c: host
 * places. kv_check.c: the rules. */
#ifndef SITS_KV_KV_INTERNAL_H
#define SITS_KV_KV_INTERNAL_H

#include "kv/kv.h"

struct kv_page {
  int32_t n_refs;            /* tables, and slots' mixed pages, naming it */
  int32_t lru_prev, lru_next;/* while cached; -1 ends */
  int32_t chain_next;        /* next page in its hash bucket, -1 ends */
  uint64_t serial;           /* the index entry's own number, 0 = not indexed; never used twice */
  uint64_t parent;           /* serial of the entry before it, 0 = first page */
  struct kv_owner owner;
  uint32_t bucket;
};

struct kv_slot {
  bool is_open;
  int32_t n_pages;           /* in its table */
  int32_t n_tokens;          /* committed */
  int32_t n_indexed;         /* leading pages that are in the index, or whose twin is */
  uint64_t last_serial;      /* of the entry that stands for page n_indexed - 1 */
  struct kv_owner owner;
  int32_t n_dropped;         /* entries of its table that are KV_NO_PAGE */
  int32_t n_mixed;           /* pages that hold what is left of them */
  int32_t n_copies;          /* of blocks, by the newest kv_reserve */
};

/* What only a budget needs. */
struct kv_budget {
  int32_t *numbers;          /* [n_slots][max_pages][n_columns] of dropped entries: where their blocks lie */
  _Atomic uint64_t *given;   /* [n_slots][max_pages][n_columns] */
  int32_t *mixed;            /* [n_slots][page_budget] pages */
  int32_t (*copies)[2];      /* [n_slots][page_budget * n_columns] */
  uint32_t *worths;          /* [page_budget * n_columns] scratch */
  uint8_t *is_used;          /* [N][n_columns] scratch, zero between calls */
  int32_t *own_of;           /* [N] scratch, -1 between calls */
};

struct kv {
  struct kv_options options;
  struct kv_page *pages;     /* [N] */
  int32_t *page_tokens;      /* [N][KV_TOKENS] */
  int32_t *free_stack;       /* [N] */
  int32_t n_free;
  int32_t lru_oldest, lru_newest, n_cached;
  int32_t *buckets;          /* [n_buckets] first page, -1 none */
  uint32_t n_buckets;        /* a power of two */
  uint64_t next_serial;
  struct kv_slot *slots;     /* [n_slots] */
  int32_t *tables;           /* [n_slots][max_pages] */
  struct kv_budget budget;   /* NULLs without one */
  int32_t *slot_stack;       /* free slots */
  int32_t n_slots_free;
  int32_t *host_next;        /* [n_host_pages] chains of places; free ones are chained too */
  int32_t host_free, n_host_free;
  uint64_t query_tokens, hit_tokens, n_evicted, n_dropped;
};

static inline int32_t *kv_table(const struct kv *kv, int32_t slot)
{
  return kv->tables + (int64_t)slot * kv->options.max_pages;
}

static inline int32_t *kv_numbers(const struct kv *kv, int32_t slot)
{
  return kv->budget.numbers + (int64_t)slot * kv->options.max_pages * kv->options.n_columns;
}

static inline _Atomic uint64_t *kv_given(const struct kv *kv, int32_t slot)
{
  return kv->budget.given + (int64_t)slot * kv->options.max_pages * kv->options.n_columns;
}

static inline int32_t *kv_mixed(const struct kv *kv, int32_t slot)
{
  return kv->budget.mixed + (int64_t)slot * kv->options.page_budget;
}

static inline int32_t *kv_page_tokens(const struct kv *kv, int32_t page)
{
  return kv->page_tokens + (int64_t)page * KV_TOKENS;
}

static inline int32_t kv_pages_for(int32_t n_tokens)
{
  return (int32_t)(((int64_t)n_tokens + KV_TOKENS - 1) / KV_TOKENS);
}

int32_t kv_page_take(struct kv *kv);               /* a free page, or the oldest cached one; n_refs = 1. There must be one. */
void kv_page_ref(struct kv *kv, int32_t page);
void kv_page_unref(struct kv *kv, int32_t page);   /* at 0: cached when indexed, else free */
void kv_lru_remove(struct kv *kv, int32_t page);

bool kv_budget_create(struct kv *kv);              /* false: no memory */
void kv_budget_destroy(struct kv *kv);
bool kv_budget_is_full(const struct kv *kv, int32_t slot); /* all allowed pages are full: the next write drops blocks first */
int32_t kv_budget_extra(const struct kv *kv, int32_t slot); /* kv_extra of a slot that is full */
void kv_budget_drop(struct kv *kv, int32_t slot);  /* of a slot that is full, with kv_budget_extra pages there: a page's worth of blocks */
void kv_budget_begin_page(struct kv *kv, int32_t slot, int32_t entry);
void kv_budget_fork(struct kv *kv, int32_t from, int32_t to); /* references too */
void kv_budget_close(struct kv *kv, int32_t slot);

int32_t kv_index_find(const struct kv *kv, struct kv_owner owner, uint64_t parent, const int32_t *tokens); /* -1 none */
uint64_t kv_index_add(struct kv *kv, int32_t page, struct kv_owner owner, uint64_t parent); /* its serial, or that of its twin */
void kv_index_remove(struct kv *kv, int32_t page);

#endif
