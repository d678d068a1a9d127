/* See bpe.h. Three roads for a pre-token, fastest first: a word of the vocabulary known to encode to itself is one look-up (most of
 * natural text); up to SHORT_SYMBOLS symbols are merged in arrays, searching the lowest rank each time; longer ones use a heap of
 * (rank, position) over a linked list, so that a megabyte without a space stays n log n. */
#include "text/bpe.h"

#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/utf8.h"

enum { SHORT_SYMBOLS = 48, MEMO_SELF = 1, MEMO_OTHER = 2 };
#define NO_RANK UINT32_MAX

bool bpe_strings_init(struct bpe_strings *strings, int32_t n, size_t n_bytes)
{
  *strings = (struct bpe_strings){.n = n};
  if (n_bytes > UINT32_MAX) return false;
  strings->bytes = mem_alloc(n_bytes);
  strings->start = mem_calloc((size_t)n + 1, sizeof *strings->start);
  return strings->bytes && strings->start;
}

void bpe_strings_fini(struct bpe_strings *strings)
{
  mem_free(strings->bytes);
  mem_free(strings->start);
  *strings = (struct bpe_strings){0};
}

/* Never reads beyond the end. */
static inline struct bpe_map_key key_of(const char *text, size_t n)
{
  struct bpe_map_key key = {.length = (uint32_t)n};
  uint32_t low, high;
  if (n > BPE_MAP_INLINE) return (struct bpe_map_key){hash_bytes(0, text, n), (uint32_t)n, BPE_MAP_LONG};
  if (n >= 8) {
    memcpy(&key.low, text, 8);
    memcpy(&key.high, text + n - 4, 4);
  } else if (n >= 4) {
    memcpy(&low, text, 4);
    memcpy(&high, text + n - 4, 4);
    key.low = low | (uint64_t)high << 32;
  } else if (n) {
    key.low = (unsigned char)text[0] | (unsigned)(unsigned char)text[n / 2] << 8 | (unsigned)(unsigned char)text[n - 1] << 16;
  }
  return key;
}

static inline uint32_t key_slot(struct bpe_map_key key)
{
  __extension__ typedef unsigned __int128 u128;
  u128 product = (u128)(key.low ^ 0x9E3779B97F4A7C15u) * (((uint64_t)key.length << 32 | key.high) ^ 0xC4CEB9FE1A85EC53u);
  uint64_t h = (uint64_t)product ^ (uint64_t)(product >> 64);
  return (uint32_t)(h ^ h >> 32);
}

static uint32_t table_mask(size_t n)
{
  uint32_t size = 16;
  while (size < n * 2) size *= 2;
  return size - 1;
}

bool bpe_map_init(struct bpe_map *map, const struct bpe_strings *strings, const bool *wants)
{
  *map = (struct bpe_map){.strings = strings, .mask = table_mask((size_t)strings->n)};
  if (strings->n >= BPE_MAP_MAX) return false;
  map->slots = mem_alloc(((size_t)map->mask + 1) * sizeof *map->slots);
  if (!map->slots) return false;
  memset(map->slots, 0xFF, ((size_t)map->mask + 1) * sizeof *map->slots);
  for (int32_t i = 0; i < strings->n; i++) {
    size_t n;
    const char *text = bpe_string(strings, i, &n);
    if (wants ? !wants[i] : n == 0) continue;
    if (bpe_map_get(map, text, n) >= 0) continue;
    struct bpe_map_key key = key_of(text, n);
    uint32_t at = key_slot(key) & map->mask;
    while (map->slots[at].length_index != UINT32_MAX) at = (at + 1) & map->mask;
    map->slots[at] = (struct bpe_map_slot){key.low, key.high, key.length << 24 | (uint32_t)i};
    if (n > map->longest) map->longest = (uint32_t)n;
  }
  return true;
}

void bpe_map_fini(struct bpe_map *map)
{
  mem_free(map->slots);
  *map = (struct bpe_map){0};
}

int32_t bpe_map_get(const struct bpe_map *map, const char *text, size_t n_bytes)
{
  if (!map->slots || n_bytes > UINT32_MAX) return -1;
  struct bpe_map_key key = key_of(text, n_bytes);
  for (uint32_t at = key_slot(key) & map->mask;; at = (at + 1) & map->mask) {
    const struct bpe_map_slot *slot = &map->slots[at];
    if (slot->length_index == UINT32_MAX) return -1;
    if (slot->low != key.low || slot->high != key.high || slot->length_index >> 24 != key.length) continue;
    int32_t index = (int32_t)(slot->length_index & 0xFFFFFF);
    size_t n;
    if (key.length != BPE_MAP_LONG || memcmp(bpe_string(map->strings, index, &n), text, n_bytes) == 0) return index;
  }
}

static inline uint32_t merge_slot(const struct bpe *bpe, int32_t left, int32_t right)
{
  uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  key *= 0x9E3779B97F4A7C15u;
  return (uint32_t)(key >> 32 ^ key >> 11) & bpe->merge_mask;
}

static inline const struct bpe_merge *merge_find(const struct bpe *bpe, int32_t left, int32_t right)
{
  for (uint32_t at = merge_slot(bpe, left, right);; at = (at + 1) & bpe->merge_mask) {
    const struct bpe_merge *merge = &bpe->merges[at];
    if (merge->left == left && merge->right == right) return merge;
    if (merge->left < 0) return NULL;
  }
}

/* The merges of two one-byte words, by byte: the first look at every pre-token that is not one token, in a table that stays in cache. */
static bool fill_byte_pairs(struct bpe *bpe)
{
  bpe->byte_pairs = mem_alloc(65536 * sizeof *bpe->byte_pairs);
  if (!bpe->byte_pairs) return false;
  for (int a = 0; a < 256; a++) {
    for (int b = 0; b < 256; b++) {
      const struct bpe_merge *merge = NULL;
      if (bpe->byte_id[a] >= 0 && bpe->byte_id[b] >= 0) merge = merge_find(bpe, bpe->byte_id[a], bpe->byte_id[b]);
      bpe->byte_pairs[a * 256 + b] = merge ? (uint64_t)merge->rank << 32 | (uint32_t)merge->id : UINT64_MAX;
    }
  }
  return true;
}

bool bpe_set_merges(struct bpe *bpe, const struct bpe_merge *list, size_t n)
{
  bpe->merge_mask = table_mask(n);
  bpe->merges = mem_alloc(((size_t)bpe->merge_mask + 1) * sizeof *bpe->merges);
  if (!bpe->merges) return false;
  for (uint32_t i = 0; i <= bpe->merge_mask; i++) bpe->merges[i].left = -1;
  for (size_t i = 0; i < n; i++) {
    uint32_t at = merge_slot(bpe, list[i].left, list[i].right);
    while (bpe->merges[at].left >= 0 && !(bpe->merges[at].left == list[i].left && bpe->merges[at].right == list[i].right))
      at = (at + 1) & bpe->merge_mask;
    bpe->merges[at] = list[i];
  }
  return !bpe->is_byte_level || fill_byte_pairs(bpe);
}

void bpe_fini(struct bpe *bpe)
{
  bpe_map_fini(&bpe->words);
  mem_free(bpe->merges);
  mem_free(bpe->byte_pairs);
  mem_free(bpe->memo);
  bpe_map_fini(&bpe->extra_map);
  bpe_strings_fini(&bpe->extra);
  *bpe = (struct bpe){0};
}

void bpe_scratch_fini(struct bpe_scratch *scratch)
{
  mem_free(scratch->block);
  *scratch = (struct bpe_scratch){0};
}

static void *scratch_get(struct bpe_scratch *scratch, size_t n_bytes)
{
  if (n_bytes <= scratch->n_bytes) return scratch->block;
  void *grown = mem_alloc(n_bytes + n_bytes / 2);
  if (!grown) return NULL;
  mem_free(scratch->block);
  scratch->block = grown;
  scratch->n_bytes = n_bytes + n_bytes / 2;
  return grown;
}

/* First symbols of a pre-token. symbols: room for n_bytes. */
static size_t start_symbols(const struct bpe *bpe, const char *text, size_t n_bytes, int32_t *symbols)
{
  size_t n = 0, length;
  bool after_unk = false;
  for (size_t i = 0; i < n_bytes; i += length) {
    length = 1;
    int32_t id;
    if (bpe->is_byte_level) {
      id = bpe->byte_id[(unsigned char)text[i]];
    } else {
      if ((unsigned char)text[i] >= 0x80) utf8_sequence(text + i, n_bytes - i, &length);
      id = bpe_map_get(&bpe->words, text + i, length);
      int32_t extra = id < 0 ? bpe_map_get(&bpe->extra_map, text + i, length) : -1;
      if (extra >= 0) id = bpe->n_vocab + extra;
      if (id < 0 && bpe->byte_fallback && bpe->has_all_bytes) {
        for (size_t j = 0; j < length; j++) symbols[n++] = bpe->byte_id[(unsigned char)text[i + j]];
        after_unk = false;
        continue;
      }
    }
    if (id < 0 && (bpe->unk < 0 || (after_unk && bpe->fuse_unk))) continue;
    after_unk = id < 0;
    symbols[n++] = id < 0 ? bpe->unk : id;
  }
  return n;
}

/* Merge in place by repeated search; returns the number of symbols left. n <= SHORT_SYMBOLS. */
static size_t merge_short(const struct bpe *bpe, const char *text, int32_t *symbols, size_t n, bool is_bytes)
{
  uint32_t rank[SHORT_SYMBOLS];
  int32_t made[SHORT_SYMBOLS];
  for (size_t i = 0; i + 1 < n; i++) {
    if (is_bytes) {
      uint64_t pair = bpe->byte_pairs[(unsigned char)text[i] * 256 + (unsigned char)text[i + 1]];
      rank[i] = (uint32_t)(pair >> 32);
      made[i] = (int32_t)pair;
    } else {
      const struct bpe_merge *merge = merge_find(bpe, symbols[i], symbols[i + 1]);
      rank[i] = merge ? merge->rank : NO_RANK;
      made[i] = merge ? merge->id : -1;
    }
  }
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; i++)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == NO_RANK) break;
    symbols[best] = made[best];
    n--;
    memmove(symbols + best + 1, symbols + best + 2, (n - best - 1) * sizeof *symbols);
    if (best + 1 < n) { /* pair (best, best + 1) is new; the ones after it move down */
      memmove(rank + best + 1, rank + best + 2, (n - best - 2) * sizeof *rank);
      memmove(made + best + 1, made + best + 2, (n - best - 2) * sizeof *made);
    }
    for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
      const struct bpe_merge *merge = merge_find(bpe, symbols[i], symbols[i + 1]);
      rank[i] = merge ? merge->rank : NO_RANK;
      made[i] = merge ? merge->id : -1;
    }
  }
  return n;
}

/* A binary heap of rank << 32 | position over symbols in a doubly linked list. An entry is stale when the pair at its position no
 * longer has its rank; stale entries are dropped when they come up. */
struct long_merge {
  const struct bpe *bpe;
  int32_t *symbols, *previous, *next; /* [n] */
  uint32_t *rank;                     /* [n] of the pair (i, next[i]) */
  int32_t *made;                      /* [n] */
  uint64_t *heap;                     /* [2 n] */
  size_t n_heap;
};

static void heap_push(struct long_merge *m, uint64_t key)
{
  size_t at = m->n_heap++;
  while (at > 0 && m->heap[(at - 1) / 2] > key) {
    m->heap[at] = m->heap[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  m->heap[at] = key;
}

static uint64_t heap_pop(struct long_merge *m)
{
  uint64_t top = m->heap[0], last = m->heap[--m->n_heap];
  size_t at = 0;
  for (size_t child; (child = 2 * at + 1) < m->n_heap; at = child) {
    if (child + 1 < m->n_heap && m->heap[child + 1] < m->heap[child]) child++;
    if (m->heap[child] >= last) break;
    m->heap[at] = m->heap[child];
  }
  m->heap[at] = last;
  return top;
}

static void look_at_pair(struct long_merge *m, int32_t at)
{
  int32_t next = m->next[at];
  const struct bpe_merge *merge = next < 0 ? NULL : merge_find(m->bpe, m->symbols[at], m->symbols[next]);
  m->rank[at] = merge ? merge->rank : NO_RANK;
  m->made[at] = merge ? merge->id : -1;
  if (merge) heap_push(m, (uint64_t)merge->rank << 32 | (uint32_t)at);
}

static enum sits_status merge_long(const struct bpe *bpe, int32_t *symbols, size_t *n_symbols, struct bpe_scratch *scratch)
{
  size_t n = *n_symbols;
  char *block = scratch_get(scratch, n * (2 * sizeof(uint64_t) + 4 * sizeof(int32_t)));
  if (!block) return SITS_NOMEM;
  struct long_merge m = {.bpe = bpe, .symbols = symbols, .heap = (uint64_t *)block};
  m.previous = (int32_t *)(m.heap + 2 * n);
  m.next = m.previous + n;
  m.rank = (uint32_t *)(m.next + n);
  m.made = (int32_t *)(m.rank + n);
  for (size_t i = 0; i < n; i++) {
    m.previous[i] = (int32_t)i - 1;
    m.next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
  }
  for (size_t i = 0; i < n; i++) look_at_pair(&m, (int32_t)i);
  while (m.n_heap) {
    uint64_t key = heap_pop(&m);
    int32_t at = (int32_t)(uint32_t)key;
    if (m.rank[at] != key >> 32) continue;
    int32_t gone = m.next[at];
    symbols[at] = m.made[at];
    m.next[at] = m.next[gone];
    if (m.next[at] >= 0) m.previous[m.next[at]] = at;
    m.rank[gone] = NO_RANK;
    look_at_pair(&m, at);
    if (m.previous[at] >= 0) look_at_pair(&m, m.previous[at]);
  }
  size_t kept = 0;
  for (int32_t at = 0; at >= 0; at = m.next[at]) symbols[kept++] = symbols[at]; /* kept never passes at */
  *n_symbols = kept;
  return SITS_OK;
}

/* A stand-in for a character that is no token goes out as its bytes. */
static bool push_extra(const struct bpe *bpe, int32_t symbol, struct token_list *out)
{
  size_t n;
  if (bpe->is_byte_level) return true;
  const char *bytes = bpe_string(&bpe->extra, symbol - bpe->n_vocab, &n);
  for (size_t i = 0; i < n; i++) {
    int32_t id = bpe->byte_id[(unsigned char)bytes[i]];
    if (id < 0) id = bpe->unk;
    if (id >= 0 && !token_list_push(out, id)) return false;
  }
  return true;
}

static bool push_symbols(const struct bpe *bpe, const int32_t *symbols, size_t n, struct token_list *out)
{
  for (size_t i = 0; i < n; i++)
    if (symbols[i] >= bpe->n_vocab ? !push_extra(bpe, symbols[i], out) : !token_list_push(out, symbols[i])) return false;
  return true;
}

enum sits_status bpe_encode(const struct bpe *bpe, const char *text, size_t n_bytes, struct bpe_scratch *scratch, struct token_list *out)
{
  if (n_bytes == 0) return SITS_OK;
  if (n_bytes > INT32_MAX / 2) return SITS_TOO_LARGE;
  int32_t word = n_bytes <= bpe->words.longest ? bpe_map_get(&bpe->words, text, n_bytes) : -1;
  unsigned char known = 0;
  if (word >= 0) {
    known = bpe->ignore_merges ? MEMO_SELF : __atomic_load_n(&bpe->memo[word], __ATOMIC_RELAXED);
    if (known == MEMO_SELF) return token_list_push(out, word) ? SITS_OK : SITS_NOMEM;
  }
  int32_t local[SHORT_SYMBOLS], *symbols = local;
  if (n_bytes > SHORT_SYMBOLS && !(symbols = mem_alloc(n_bytes * sizeof *symbols))) return SITS_NOMEM;
  size_t n = start_symbols(bpe, text, n_bytes, symbols);
  enum sits_status status = SITS_OK;
  bool is_bytes = bpe->is_byte_level && n == n_bytes && (bpe->unk < 0 || bpe->has_all_bytes);
  if (n <= SHORT_SYMBOLS) n = merge_short(bpe, text, symbols, n, is_bytes);
  else status = merge_long(bpe, symbols, &n, scratch);
  if (!status && word >= 0 && !known) /* racing threads store the same value */
    __atomic_store_n(&bpe->memo[word], n == 1 && symbols[0] == word ? MEMO_SELF : MEMO_OTHER, __ATOMIC_RELAXED);
  if (!status && !push_symbols(bpe, symbols, n, out)) status = SITS_NOMEM;
  if (symbols != local) mem_free(symbols);
  return status;
}
