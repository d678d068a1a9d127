/* Keys and values of one long prompt, kept as f16 in all layers while its chunks are read, so that a chunk expands its own pages and not
 * all those before it. Entry points: cuda_kept_create, cuda_kept_choose, cuda_kept_written.
 *
 * What is kept belongs to the pages of a block table: a sequence goes on with it when its table begins with the same pages and its chunk
 * begins at or before the last kept token. Any other write to one of those pages (a new owner, a copy, a swap) drops it. Rules: 1. A page
 * of the kept prompt has is_kept set; nothing else has. 2. Memory is taken in kv_create, from what the geometry says is spare, or else from
 * what the pool leaves; where that is little, nothing is kept and every chunk expands all pages. */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/mem.h"

#define MOST_KEPT_TOKENS (64 * 1024)
#define SHARE 8                     /* of the pool's tokens, at most one in so many is kept: f16 takes 3.6 times what int4 does */
#define LEAST_KEPT_TOKENS 4096      /* shorter prompts are expanded in no time */

static void drop(struct cuda_kept *kept)
{
  for (int32_t i = 0; i < kept->n_pages; i++) kept->is_kept[kept->pages[i]] = false;
  kept->n_pages = kept->n_tokens = 0;
}

static int64_t bytes_of_token(const struct kv_geometry *g) { return 4LL * g->n_layers * g->n_kv_heads * g->head_dim; }

/* Tokens to keep in so many bytes at most. */
static int64_t capacity_of(const struct kv_geometry *g, uint64_t most_bytes)
{
  int64_t capacity = (int64_t)g->n_pages * KV_PAGE_TOKENS / SHARE;
  if (!k_attn_prefill_takes(g->head_dim) || g->codec == KV_FP4_SPARSE) return 0; /* whose pages do not stay whole */
  if (capacity > MOST_KEPT_TOKENS) capacity = MOST_KEPT_TOKENS;
  if ((uint64_t)(capacity * bytes_of_token(g)) > most_bytes) capacity = (int64_t)most_bytes / bytes_of_token(g);
  capacity = capacity / CUDA_GATHER_TOKENS * CUDA_GATHER_TOKENS;
  return capacity < LEAST_KEPT_TOKENS ? 0 : capacity;
}

uint64_t cuda_kept_bytes(const struct kv_geometry *g) { return (uint64_t)(capacity_of(g, INT64_MAX) * bytes_of_token(g)); }

bool cuda_kept_create(struct backend_kv *kv)
{
  const struct kv_geometry *g = &kv->geometry;
  struct cuda_kept *kept = &kv->kept;
  size_t free_bytes = 0, total = 0;
  if (g->spare_bytes == 0 && cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) return true;
  const int64_t capacity = capacity_of(g, g->spare_bytes > 0 ? g->spare_bytes : free_bytes / 2);
  if (capacity == 0) return true;
  kept->pages = mem_calloc((size_t)(capacity / KV_PAGE_TOKENS), sizeof *kept->pages);
  kept->is_kept = mem_calloc((size_t)g->n_pages, sizeof *kept->is_kept);
  if (kept->pages == NULL || kept->is_kept == NULL) return false;
  const size_t half = (size_t)(capacity * bytes_of_token(g) / 2);
  kept->k = cuda_memory_alloc(kv->backend, kv, 2 * half); /* one block: all of it, or none */
  if (kept->k == NULL) return true; /* nothing is kept, which costs time only */
  kept->v = (uint8_t *)kept->k + half;
  kept->capacity = capacity;
  return true;
}

void cuda_kept_fini(struct backend_kv *kv)
{
  mem_free(kv->kept.pages);
  mem_free(kv->kept.is_kept);
}

void cuda_kept_written(struct backend_kv *kv, int32_t page)
{
  if (kv->kept.capacity > 0 && kv->kept.is_kept[page]) drop(&kv->kept);
}

/* Does sequence s go on with what is kept? */
static bool goes_on(const struct cuda_kept *kept, const struct backend_batch *b, int32_t s)
{
  const int32_t from = b->positions[b->seq_start[s]], n_pages = (from + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  return from > 0 && from <= kept->n_tokens &&
         memcmp(b->block_table + (int64_t)s * b->table_stride, kept->pages, (size_t)n_pages * sizeof *kept->pages) == 0;
}

/* The sequence of the batch that goes on, else the longest chunk's that is worth keeping, else -1. */
static int32_t choose(const struct cuda_kept *kept, const struct backend_batch *b)
{
  int32_t best = -1;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    if (b->seq_start[s + 1] - b->seq_start[s] < 2 || b->kv_len[s] > kept->capacity) continue;
    if (goes_on(kept, b, s)) return s;
    if (b->kv_len[s] >= CUDA_KEEP_FROM && (best < 0 || b->kv_len[s] > b->kv_len[best])) best = s;
  }
  return best;
}

static void written_by_others(struct backend_kv *kv, const struct backend_batch *b, int32_t kept_seq)
{
  for (int32_t s = 0; s < b->n_seqs; s++) {
    if (s == kept_seq || b->seq_start[s + 1] == b->seq_start[s]) continue;
    const int32_t *table = b->block_table + (int64_t)s * b->table_stride, last = (b->kv_len[s] - 1) / KV_PAGE_TOKENS;
    for (int32_t i = b->positions[b->seq_start[s]] / KV_PAGE_TOKENS; i <= last; i++) cuda_kept_written(kv, table[i]);
  }
}

int32_t cuda_kept_choose(struct backend_kv *kv, const struct backend_batch *b, int32_t *first_page)
{
  struct cuda_kept *kept = &kv->kept;
  *first_page = 0;
  if (kept->capacity == 0) return -1;
  const int32_t s = kept->is_held ? -1 : choose(kept, b);
  written_by_others(kv, b, s);
  if (s < 0) return s;
  const int32_t n_pages = (b->kv_len[s] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, *table = b->block_table + (int64_t)s * b->table_stride;
  if (goes_on(kept, b, s)) *first_page = b->positions[b->seq_start[s]] / KV_PAGE_TOKENS;
  drop(kept);
  memcpy(kept->pages, table, (size_t)n_pages * sizeof *kept->pages);
  for (int32_t i = 0; i < n_pages; i++) kept->is_kept[table[i]] = true;
  kept->n_pages = n_pages;
  kept->n_tokens = b->kv_len[s];
  return s;
}

void cuda_kept_hold(struct backend_kv *kv) { kv->kept.is_held = true; }

void cuda_kept_release(struct backend_kv *kv, bool is_whole)
{
  if (kv->kept.is_held && !is_whole) drop(&kv->kept);
  kv->kept.is_held = false;
}
