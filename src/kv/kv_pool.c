/* Pages: creation, the three states and the counts. kv_page_take, kv_page_ref, kv_page_unref are the only moves between states.
 *
 *   free --take--> referenced --unref, not indexed--> free
 *                  referenced --unref, indexed------> cached (newest end of the LRU list)
 *                  cached     --ref (kv_attach)-----> referenced
 *                  cached     --take (no free page)-> referenced, its index entry is dropped
 */
#include <assert.h>
#include <string.h>

#include "base/mem.h"
#include "kv/kv_internal.h"

static void link_all_free(struct kv *kv)
{
  const struct kv_options *o = &kv->options;
  for (int32_t i = 0; i < o->n_pages; i++) {
    kv->pages[i] = (struct kv_page){.lru_prev = -1, .lru_next = -1, .chain_next = -1};
    kv->free_stack[i] = o->n_pages - 1 - i;
  }
  kv->n_free = o->n_pages;
  for (uint32_t i = 0; i < kv->n_buckets; i++) kv->buckets[i] = -1;
  for (int32_t i = 0; i < o->n_slots; i++) kv->slot_stack[i] = o->n_slots - 1 - i;
  kv->n_slots_free = o->n_slots;
  for (int32_t i = 0; i < o->n_host_pages; i++) kv->host_next[i] = i + 1 < o->n_host_pages ? i + 1 : -1;
  kv->host_free = o->n_host_pages > 0 ? 0 : -1;
  kv->n_host_free = o->n_host_pages;
}

enum sits_status kv_create(const struct kv_options *options, struct kv **out)
{
  if (options->n_pages <= 0 || options->n_slots <= 0 || options->max_pages <= 0 || options->n_host_pages < 0 ||
      (options->page_budget != 0 && (options->page_budget < KV_LEAST_BUDGET || options->n_columns < 1)))
    return SITS_INVALID_ARGUMENT;
  struct kv *kv = mem_calloc(1, sizeof *kv);
  if (!kv) return SITS_NOMEM;
  kv->options = *options;
  if (options->page_budget > 0) kv->options.prefix_caching = false;
  const int32_t most = options->max_pages > KV_LEAST_BUDGET ? options->max_pages : KV_LEAST_BUDGET;
  if (options->page_budget > most) kv->options.page_budget = most; /* no table is longer: nothing is ever dropped */
  kv->n_buckets = 16;
  while (kv->n_buckets < (uint32_t)options->n_pages) kv->n_buckets *= 2;
  kv->lru_oldest = kv->lru_newest = -1;
  kv->next_serial = 1;
  kv->pages = mem_calloc((size_t)options->n_pages, sizeof *kv->pages);
  kv->page_tokens = mem_calloc((size_t)options->n_pages * KV_TOKENS, sizeof(int32_t));
  kv->free_stack = mem_calloc((size_t)options->n_pages, sizeof(int32_t));
  kv->buckets = mem_calloc(kv->n_buckets, sizeof(int32_t));
  kv->slots = mem_calloc((size_t)options->n_slots, sizeof *kv->slots);
  kv->slot_stack = mem_calloc((size_t)options->n_slots, sizeof(int32_t));
  kv->tables = mem_calloc((size_t)options->n_slots * (size_t)options->max_pages, sizeof(int32_t));
  kv->host_next = mem_calloc((size_t)options->n_host_pages + 1, sizeof(int32_t));
  if (!kv->pages || !kv->page_tokens || !kv->free_stack || !kv->buckets || !kv->slots || !kv->slot_stack || !kv->tables || !kv->host_next ||
      !kv_budget_create(kv)) {
    kv_destroy(kv);
    return SITS_NOMEM;
  }
  link_all_free(kv);
  *out = kv;
  return SITS_OK;
}

void kv_destroy(struct kv *kv)
{
  if (!kv) return;
  mem_free(kv->pages);
  mem_free(kv->page_tokens);
  mem_free(kv->free_stack);
  mem_free(kv->buckets);
  mem_free(kv->slots);
  mem_free(kv->slot_stack);
  mem_free(kv->tables);
  kv_budget_destroy(kv);
  mem_free(kv->host_next);
  mem_free(kv);
}

void kv_lru_remove(struct kv *kv, int32_t page)
{
  struct kv_page *p = &kv->pages[page];
  if (p->lru_prev >= 0) kv->pages[p->lru_prev].lru_next = p->lru_next;
  else kv->lru_oldest = p->lru_next;
  if (p->lru_next >= 0) kv->pages[p->lru_next].lru_prev = p->lru_prev;
  else kv->lru_newest = p->lru_prev;
  p->lru_prev = p->lru_next = -1;
  kv->n_cached--;
}

static void lru_add_newest(struct kv *kv, int32_t page)
{
  struct kv_page *p = &kv->pages[page];
  p->lru_prev = kv->lru_newest;
  p->lru_next = -1;
  if (kv->lru_newest >= 0) kv->pages[kv->lru_newest].lru_next = page;
  else kv->lru_oldest = page;
  kv->lru_newest = page;
  kv->n_cached++;
}

int32_t kv_page_take(struct kv *kv)
{
  assert(kv->n_free + kv->n_cached > 0);
  int32_t page;
  if (kv->n_free > 0) {
    page = kv->free_stack[--kv->n_free];
  } else {
    page = kv->lru_oldest;
    kv_lru_remove(kv, page);
    kv_index_remove(kv, page);
    kv->n_evicted++;
  }
  kv->pages[page].n_refs = 1;
  return page;
}

void kv_page_ref(struct kv *kv, int32_t page)
{
  if (kv->pages[page].n_refs == 0) kv_lru_remove(kv, page);
  kv->pages[page].n_refs++;
}

void kv_page_unref(struct kv *kv, int32_t page)
{
  struct kv_page *p = &kv->pages[page];
  assert(p->n_refs > 0);
  if (--p->n_refs > 0) return;
  if (p->serial) lru_add_newest(kv, page);
  else kv->free_stack[kv->n_free++] = page;
}

int32_t kv_available(const struct kv *kv)
{
  return kv->n_free + kv->n_cached;
}

void kv_drop_cache(struct kv *kv)
{
  while (kv->lru_oldest >= 0) {
    int32_t page = kv->lru_oldest;
    kv_lru_remove(kv, page);
    kv_index_remove(kv, page);
    kv->free_stack[kv->n_free++] = page;
  }
}

void kv_counts(const struct kv *kv, struct kv_counts *out)
{
  *out = (struct kv_counts){
      .n_total = kv->options.n_pages, .n_free = kv->n_free, .n_cached = kv->n_cached,
      .n_referenced = kv->options.n_pages - kv->n_free - kv->n_cached,
      .n_host_total = kv->options.n_host_pages, .n_host_free = kv->n_host_free,
      .query_tokens = kv->query_tokens, .hit_tokens = kv->hit_tokens, .n_evicted = kv->n_evicted, .n_dropped = kv->n_dropped,
  };
}
