/* Slots and block tables: open, attach a known prefix, reserve, commit, fork, close. */
#include <assert.h>
#include <string.h>

#include "kv/kv_internal.h"

enum sits_status kv_open(struct kv *kv, struct kv_owner owner, int32_t *slot)
{
  if (kv->n_slots_free == 0) return SITS_AGAIN;
  int32_t s = kv->slot_stack[--kv->n_slots_free];
  kv->slots[s] = (struct kv_slot){.is_open = true, .owner = owner};
  *slot = s;
  return SITS_OK;
}

/* Walk the chain of entries that matches tokens[0..n); pages (may be NULL) receives them. */
static int32_t match(const struct kv *kv, struct kv_owner owner, const int32_t *tokens, int32_t n, int32_t *pages, uint64_t *last_serial)
{
  int32_t n_found = 0;
  uint64_t parent = 0;
  if (!kv->options.prefix_caching) return 0;
  while ((n_found + 1) * KV_TOKENS < n && n_found < kv->options.max_pages) {
    int32_t page = kv_index_find(kv, owner, parent, tokens + (int64_t)n_found * KV_TOKENS);
    if (page < 0) break;
    if (pages) pages[n_found] = page;
    parent = kv->pages[page].serial;
    n_found++;
  }
  *last_serial = parent;
  return n_found;
}

int32_t kv_match(const struct kv *kv, struct kv_owner owner, const int32_t *tokens, int32_t n)
{
  uint64_t serial;
  return match(kv, owner, tokens, n, NULL, &serial) * KV_TOKENS;
}

int32_t kv_attach_uncounted(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n)
{
  struct kv_slot *s = &kv->slots[slot];
  assert(s->is_open && s->n_pages == 0);
  int32_t *table = kv_table(kv, slot);
  uint64_t serial = 0;
  int32_t n_found = match(kv, s->owner, tokens, n, table, &serial);
  for (int32_t i = 0; i < n_found; i++) kv_page_ref(kv, table[i]);
  s->n_pages = s->n_indexed = n_found;
  s->n_tokens = n_found * KV_TOKENS;
  s->last_serial = serial;
  return s->n_tokens;
}

int32_t kv_attach(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n)
{
  int32_t n_found = kv_attach_uncounted(kv, slot, tokens, n);
  if (kv->options.prefix_caching) {
    kv->query_tokens += (uint64_t)n;
    kv->hit_tokens += (uint64_t)n_found;
  }
  return n_found;
}

static bool must_copy(const struct kv *kv, int32_t slot)
{
  const struct kv_slot *s = &kv->slots[slot];
  if (s->n_tokens % KV_TOKENS == 0) return false;
  return kv->pages[kv_table(kv, slot)[s->n_tokens / KV_TOKENS]].n_refs > 1;
}

int32_t kv_extra(const struct kv *kv, int32_t slot)
{
  if (must_copy(kv, slot)) return 1;
  return kv_budget_is_full(kv, slot) ? kv_budget_extra(kv, slot) : 0;
}

int32_t kv_need(const struct kv *kv, int32_t slot, int32_t n_tokens)
{
  const struct kv_slot *s = &kv->slots[slot];
  int32_t n_new = kv_pages_for(n_tokens) - s->n_pages;
  if (n_new < 0) n_new = 0;
  return n_new + (n_tokens > s->n_tokens ? kv_extra(kv, slot) : 0);
}

enum sits_status kv_reserve(struct kv *kv, int32_t slot, int32_t n_tokens, struct kv_move *move, int32_t *n_moves)
{
  struct kv_slot *s = &kv->slots[slot];
  assert(s->is_open);
  if (kv_pages_for(n_tokens) > kv->options.max_pages || kv_need(kv, slot, n_tokens) > kv_available(kv)) return SITS_AGAIN;
  int32_t *table = kv_table(kv, slot);
  s->n_copies = 0;
  if (n_tokens > s->n_tokens && kv_budget_is_full(kv, slot)) kv_budget_drop(kv, slot);
  if (n_tokens > s->n_tokens && must_copy(kv, slot)) {
    int32_t *last = &table[s->n_tokens / KV_TOKENS];
    int32_t copy = kv_page_take(kv);
    memcpy(kv_page_tokens(kv, copy), kv_page_tokens(kv, *last), KV_TOKENS * sizeof(int32_t));
    *move = (struct kv_move){.from_page = *last, .to_page = copy};
    ++*n_moves;
    kv_page_unref(kv, *last);
    *last = copy;
  }
  for (; s->n_pages < kv_pages_for(n_tokens); s->n_pages++) {
    table[s->n_pages] = kv_page_take(kv);
    if (kv->options.page_budget > 0) kv_budget_begin_page(kv, slot, s->n_pages);
  }
  return SITS_OK;
}

int32_t kv_held(const struct kv *kv, int32_t slot)
{
  return kv->slots[slot].n_pages - kv->slots[slot].n_dropped + kv->slots[slot].n_mixed;
}

void kv_commit(struct kv *kv, int32_t slot, const int32_t *tokens, int32_t n)
{
  struct kv_slot *s = &kv->slots[slot];
  int32_t *table = kv_table(kv, slot);
  assert(s->is_open && n >= 0 && (int64_t)s->n_tokens + n <= (int64_t)s->n_pages * KV_TOKENS);
  for (int32_t done = 0; done < n;) {
    int32_t at = s->n_tokens % KV_TOKENS;
    int32_t page = table[s->n_tokens / KV_TOKENS];
    int32_t n_here = KV_TOKENS - at < n - done ? KV_TOKENS - at : n - done;
    assert(kv->pages[page].n_refs == 1);
    memcpy(kv_page_tokens(kv, page) + at, tokens + done, (size_t)n_here * sizeof *tokens);
    s->n_tokens += n_here;
    done += n_here;
  }
  if (kv->options.prefix_caching) {
    for (; s->n_indexed < s->n_tokens / KV_TOKENS; s->n_indexed++) {
      s->last_serial = kv_index_add(kv, table[s->n_indexed], s->owner, s->last_serial);
    }
  }
  while (s->n_pages > kv_pages_for(s->n_tokens)) kv_page_unref(kv, table[--s->n_pages]);
}

enum sits_status kv_fork(struct kv *kv, int32_t slot, int32_t *out)
{
  const struct kv_slot *from = &kv->slots[slot];
  assert(from->is_open && from->n_pages == kv_pages_for(from->n_tokens));
  int32_t twin;
  enum sits_status status = kv_open(kv, from->owner, &twin);
  if (status != SITS_OK) return status;
  kv->slots[twin] = *from;
  memcpy(kv_table(kv, twin), kv_table(kv, slot), (size_t)from->n_pages * sizeof(int32_t));
  for (int32_t i = 0; i < from->n_pages; i++)
    if (kv_table(kv, twin)[i] != KV_NO_PAGE) kv_page_ref(kv, kv_table(kv, twin)[i]);
  if (kv->options.page_budget > 0) kv_budget_fork(kv, slot, twin);
  *out = twin;
  return SITS_OK;
}

void kv_close(struct kv *kv, int32_t slot)
{
  struct kv_slot *s = &kv->slots[slot];
  assert(s->is_open);
  /* From the tail, so that a prefix outlives what was built on it. */
  while (s->n_pages > 0) {
    int32_t page = kv_table(kv, slot)[--s->n_pages];
    if (page != KV_NO_PAGE) kv_page_unref(kv, page);
  }
  if (kv->options.page_budget > 0) kv_budget_close(kv, slot);
  s->is_open = false;
  kv->slot_stack[kv->n_slots_free++] = slot;
}

/* Count one reference more or less for each page of the slot. Returns how many pages have none then. */
static int32_t suppose(struct kv *kv, int32_t slot, int32_t by)
{
  const struct kv_slot *s = &kv->slots[slot];
  int32_t n = 0;
  assert(s->is_open);
  for (int32_t i = 0; i < s->n_pages; i++) {
    const int32_t page = kv_table(kv, slot)[i];
    if (page != KV_NO_PAGE) n += (kv->pages[page].n_refs += by) == 0;
  }
  for (int32_t i = 0; i < s->n_mixed; i++) n += (kv->pages[kv_mixed(kv, slot)[i]].n_refs += by) == 0;
  return n;
}

int32_t kv_suppose_closed(struct kv *kv, int32_t slot)
{
  return suppose(kv, slot, -1);
}

void kv_suppose_open(struct kv *kv, int32_t slot)
{
  suppose(kv, slot, 1);
}

int32_t kv_tokens(const struct kv *kv, int32_t slot)
{
  return kv->slots[slot].n_tokens;
}

int32_t kv_pages(const struct kv *kv, int32_t slot, const int32_t **pages)
{
  *pages = kv_table(kv, slot);
  return kv->slots[slot].n_pages;
}
