/* See batch.h. */
#include "backend/batch.h"

static bool is_token(int32_t token, int32_t n_vocab, int32_t n_drawn) { return token >= 0 ? token < n_vocab : -1 - token < n_drawn; }

bool batch_is_well_formed(const struct backend_batch *b, const struct program_dims *d, const struct kv_geometry *g, int32_t max_tokens,
                          int32_t max_rows, int32_t n_drawn)
{
  if (g->n_layers != d->n_layers || g->n_kv_heads != d->n_kv_heads || g->head_dim != d->head_dim) return false;
  if (b->n_tokens < 1 || b->n_tokens > max_tokens || b->n_seqs < 1 || b->n_seqs > max_rows || b->n_rows < 0 || b->n_rows > max_rows ||
      b->seq_start[0] != 0 || b->seq_start[b->n_seqs] != b->n_tokens)
    return false;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const int32_t t0 = b->seq_start[s], t1 = b->seq_start[s + 1];
    if (t1 < t0 || t1 > b->n_tokens) return false;
    if (t1 == t0) continue;
    for (int32_t t = t0; t < t1; t++)
      if (b->positions[t] < 0 || b->positions[t] != b->positions[t0] + (t - t0) || !is_token(b->tokens[t], d->n_vocab, n_drawn))
        return false;
    if (b->kv_len[s] != b->positions[t1 - 1] + 1 || batch_pages(b, s) > b->table_stride) return false;
  }
  for (int32_t r = 0; r < b->n_rows; r++)
    if (b->row_token[r] < 0 || b->row_token[r] >= b->n_tokens) return false;
  return true;
}

/* The blocks of an entry without a page lie in the page memory. There are many, and which are gone nothing foretells: no branches. */
static bool has_blocks(const struct kv_geometry *g, const struct backend_blocks *blocks, int32_t entry)
{
  const int32_t n = g->n_layers * g->n_kv_heads;
  const uint32_t n_blocks = (uint32_t)g->n_pages * (uint32_t)n;
  uint32_t n_bad = 0;
  if (blocks == NULL || blocks->numbers == NULL) return false;
  for (const int32_t *number = blocks->numbers + (int64_t)entry * n, *end = number + n; number < end; number++)
    n_bad += (uint32_t)*number - (uint32_t)KV_NO_PAGE > n_blocks; /* 0: gone; i + 1: block i */
  return n_bad == 0;
}

bool batch_names_pages(const struct backend_batch *b, const struct kv_geometry *g, bool is_sparse)
{
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const struct backend_blocks *blocks = b->blocks != NULL ? &b->blocks[s] : NULL;
    const int32_t n_pages = batch_pages(b, s);
    if (n_pages == 0) continue;
    const int32_t first_written = b->positions[b->seq_start[s]] / KV_PAGE_TOKENS;
    if (blocks != NULL && (!is_sparse || blocks->nearest < 1)) return false;
    for (int32_t i = 0; i < n_pages; i++) {
      const int32_t page = b->block_table[(int64_t)s * b->table_stride + i];
      if (page == KV_NO_PAGE && i < first_written && has_blocks(g, blocks, i)) continue;
      if (page < 0 || page >= g->n_pages) return false;
    }
  }
  return true;
}
