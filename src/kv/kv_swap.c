/* Host places for swapped sequences: chains through host_next. The bytes are moved by the engine. */
#include <assert.h>

#include "kv/kv_internal.h"

enum sits_status kv_swap_out(struct kv *kv, int32_t slot, struct kv_swapped *out)
{
  const struct kv_slot *s = &kv->slots[slot];
  assert(s->is_open);
  /* Whole pages only: one that is being filled may be kept more exactly than its bytes say, and the answer must not depend on a swap.
   * The few tokens behind them are computed again. */
  int32_t n_pages = s->n_tokens / KV_TOKENS;
  if (n_pages == 0 || n_pages > kv->n_host_free || kv->options.page_budget > 0) return SITS_AGAIN;
  int32_t head = kv->host_free, last = head;
  for (int32_t i = 1; i < n_pages; i++) last = kv->host_next[last];
  kv->host_free = kv->host_next[last];
  kv->host_next[last] = -1;
  kv->n_host_free -= n_pages;
  *out = (struct kv_swapped){.head = head, .n_pages = n_pages, .n_tokens = n_pages * KV_TOKENS};
  return SITS_OK;
}

void kv_give_back(struct kv *kv, int32_t slot, int32_t n_pages)
{
  struct kv_slot *s = &kv->slots[slot];
  assert(s->is_open && s->n_dropped == 0 && s->n_mixed == 0);
  while (s->n_pages > n_pages) kv_page_unref(kv, kv_table(kv, slot)[--s->n_pages]);
  if (s->n_tokens > s->n_pages * KV_TOKENS) s->n_tokens = s->n_pages * KV_TOKENS;
  if (s->n_indexed > s->n_pages) s->n_indexed = s->n_pages;
}

int32_t kv_swap_next(const struct kv *kv, int32_t place)
{
  return kv->host_next[place];
}

void kv_swap_free(struct kv *kv, struct kv_swapped *swapped)
{
  if (swapped->head < 0) return;
  int32_t last = swapped->head;
  while (kv->host_next[last] >= 0) last = kv->host_next[last];
  kv->host_next[last] = kv->host_free;
  kv->host_free = swapped->head;
  kv->n_host_free += swapped->n_pages;
  *swapped = (struct kv_swapped){.head = -1};
}
