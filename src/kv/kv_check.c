/* The rules of kv.h, checked by counting from scratch. A broken rule means memory of one sequence could be read by another, so the
 * process stops at once, with the rule and the page in the log. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "kv/kv_internal.h"

static void require(bool holds, const char *rule, int32_t page)
{
  if (holds) return;
  log_error("kv", "invariant broken rule=\"%s\" page_or_slot=%d", rule, page);
  abort();
}

/* Each block of the slot's mixed pages belongs to one dropped entry and column. is_used: [N][n_columns], zero before and after. */
static void check_blocks(const struct kv *kv, int32_t slot, int32_t *n_named, uint8_t *is_used)
{
  const struct kv_slot *s = &kv->slots[slot];
  const int32_t n_columns = kv->options.n_columns, *mixed = kv_mixed(kv, slot), *number = kv_numbers(kv, slot);
  int64_t n_blocks = 0;
  for (int32_t k = 0; k < s->n_mixed; k++) n_named[mixed[k]]++;
  for (int32_t i = 0; i < s->n_pages; i++)
    for (int32_t c = 0; c < n_columns; c++, number++) {
      if (kv_table(kv, slot)[i] != KV_NO_PAGE || *number == KV_NO_PAGE) continue;
      int32_t k = 0;
      while (k < s->n_mixed && mixed[k] != *number / n_columns) k++;
      require(*number >= 0 && k < s->n_mixed, "a block that is left lies in a mixed page", slot);
      require(!is_used[*number], "a block has one entry and column", slot);
      is_used[*number] = 1;
      n_blocks++;
    }
  require(n_blocks == (int64_t)s->n_mixed * n_columns, "mixed pages are full", slot);
  for (int32_t k = 0; k < s->n_mixed; k++) memset(is_used + (int64_t)mixed[k] * n_columns, 0, (size_t)n_columns);
}

static void check_tables(const struct kv *kv, int32_t *n_named)
{
  int32_t n_open = 0;
  for (int32_t slot = 0; slot < kv->options.n_slots; slot++) {
    const struct kv_slot *s = &kv->slots[slot];
    if (!s->is_open) continue;
    n_open++;
    int32_t n_dropped = 0;
    require(s->n_pages <= kv->options.max_pages && s->n_pages >= kv_pages_for(s->n_tokens), "a table covers its tokens", slot);
    require(s->n_indexed <= s->n_tokens / KV_TOKENS, "only full pages are indexed", slot);
    for (int32_t i = 0; i < s->n_pages; i++) {
      int32_t page = kv_table(kv, slot)[i];
      if (page == KV_NO_PAGE) {
        require(i > 0 && i < s->n_tokens / KV_TOKENS, "only whole pages behind the first are dropped", slot);
        n_dropped++;
        continue;
      }
      require(page >= 0 && page < kv->options.n_pages, "a table names real pages", slot);
      n_named[page]++;
      if (i >= s->n_tokens / KV_TOKENS) require(!kv->pages[page].serial, "an indexed page is full", page);
      if (i > 0 && i >= kv_pages_for(s->n_tokens)) require(kv->pages[page].n_refs == 1, "a reserved page is private", page);
    }
    require(n_dropped == s->n_dropped, "a slot's count of dropped pages is right", slot);
    if (kv->options.page_budget == 0) continue;
    require(kv_held(kv, slot) <= kv->options.page_budget, "a sequence keeps to its budget", slot);
    check_blocks(kv, slot, n_named, kv->budget.is_used);
  }
  require(n_open + kv->n_slots_free == kv->options.n_slots, "open + free slots = all", n_open);
}

static void check_index(const struct kv *kv)
{
  int32_t n_entries = 0, n_serials = 0;
  for (uint32_t b = 0; b < kv->n_buckets; b++) {
    for (int32_t page = kv->buckets[b]; page >= 0; page = kv->pages[page].chain_next) {
      const struct kv_page *p = &kv->pages[page];
      require(p->serial != 0 && p->bucket == b, "an entry lies in its bucket", page);
      require(kv_index_find(kv, p->owner, p->parent, kv_page_tokens(kv, page)) == page, "no two entries have the same key", page);
      require(++n_entries <= kv->options.n_pages, "a bucket's chain ends", page);
    }
  }
  for (int32_t i = 0; i < kv->options.n_pages; i++) n_serials += kv->pages[i].serial != 0;
  require(n_entries == n_serials, "every indexed page is in the table", n_entries);
}

static void check_free_and_cached(const struct kv *kv, const int32_t *n_named)
{
  int32_t n_cached = 0, n_referenced = 0;
  for (int32_t page = kv->lru_oldest; page >= 0; page = kv->pages[page].lru_next) {
    require(kv->pages[page].n_refs == 0 && kv->pages[page].serial != 0, "a cached page is indexed and unreferenced", page);
    require(++n_cached <= kv->options.n_pages, "the LRU list ends", page);
  }
  require(n_cached == kv->n_cached, "the LRU list holds the cached pages", n_cached);
  for (int32_t i = 0; i < kv->n_free; i++) {
    const struct kv_page *p = &kv->pages[kv->free_stack[i]];
    require(p->n_refs == 0 && p->serial == 0, "a free page is unreferenced and not indexed", kv->free_stack[i]);
  }
  for (int32_t page = 0; page < kv->options.n_pages; page++) {
    require(kv->pages[page].n_refs == n_named[page], "references = tables naming the page", page);
    n_referenced += n_named[page] > 0;
  }
  require(kv->n_free + n_cached + n_referenced == kv->options.n_pages, "free + cached + referenced = total", n_referenced);
}

void kv_check(const struct kv *kv)
{
  int32_t *n_named = mem_calloc((size_t)kv->options.n_pages, sizeof *n_named);
  if (!n_named) return; /* nothing can be said without memory; the next step checks again */
  check_tables(kv, n_named);
  check_index(kv);
  check_free_and_cached(kv, n_named);
  mem_free(n_named);
}
