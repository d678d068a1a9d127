/* The content index: chained hash table over full pages. An entry's key is (owner, serial of the parent entry, the page's tokens) and is
 * compared in full on every look-up, so two prompts share pages only when every token and the owner agree; the hash only finds the
 * bucket. Naming the parent by its serial (never reused) instead of by a hash of all that went before makes the chain exact as well:
 * a child whose parent was evicted can no longer be reached and ages out by LRU. */
#include <assert.h>
#include <string.h>

#include "base/hash.h"
#include "kv/kv_internal.h"

static uint64_t key_hash(struct kv_owner owner, uint64_t parent, const int32_t *tokens)
{
  uint64_t seed = hash_mix(hash_mix(owner.tenant, owner.salt), parent);
  return hash_bytes(seed, tokens, KV_TOKENS * sizeof *tokens);
}

static int32_t find_in_bucket(const struct kv *kv, uint32_t bucket, struct kv_owner owner, uint64_t parent, const int32_t *tokens)
{
  for (int32_t page = kv->buckets[bucket]; page >= 0; page = kv->pages[page].chain_next) {
    const struct kv_page *p = &kv->pages[page];
    if (p->parent == parent && p->owner.tenant == owner.tenant && p->owner.salt == owner.salt &&
        memcmp(kv_page_tokens(kv, page), tokens, KV_TOKENS * sizeof *tokens) == 0) {
      return page;
    }
  }
  return -1;
}

int32_t kv_index_find(const struct kv *kv, struct kv_owner owner, uint64_t parent, const int32_t *tokens)
{
  uint32_t bucket = (uint32_t)(key_hash(owner, parent, tokens) & (kv->n_buckets - 1));
  return find_in_bucket(kv, bucket, owner, parent, tokens);
}

uint64_t kv_index_add(struct kv *kv, int32_t page, struct kv_owner owner, uint64_t parent)
{
  struct kv_page *p = &kv->pages[page];
  assert(p->serial == 0);
  const int32_t *tokens = kv_page_tokens(kv, page);
  uint32_t bucket = (uint32_t)(key_hash(owner, parent, tokens) & (kv->n_buckets - 1));
  int32_t twin = find_in_bucket(kv, bucket, owner, parent, tokens);
  if (twin >= 0) return kv->pages[twin].serial;
  p->serial = kv->next_serial++;
  p->parent = parent;
  p->owner = owner;
  p->bucket = bucket;
  p->chain_next = kv->buckets[bucket];
  kv->buckets[bucket] = page;
  return p->serial;
}

void kv_index_remove(struct kv *kv, int32_t page)
{
  struct kv_page *p = &kv->pages[page];
  int32_t *link = &kv->buckets[p->bucket];
  while (*link != page) link = &kv->pages[*link].chain_next;
  *link = p->chain_next;
  p->chain_next = -1;
  p->serial = 0;
}
