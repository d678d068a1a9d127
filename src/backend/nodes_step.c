/* See nodes_step.h. Arrays lie one after the other, in the order of `arrays`; all have elements of four bytes or of five words. */
#include "backend/nodes_step.h"

#include <string.h>

enum { MOST_BYTES = 1 << 30 };

/* Bytes of each array, in order: tokens, positions, seq_start, kv_len, block_table, row_token, sample. */
enum { N_ARRAYS = 7 };
static void sizes_of(const struct node_step *h, size_t out[N_ARRAYS])
{
  const size_t word = sizeof(int32_t), t = (size_t)h->n_tokens, s = (size_t)h->n_seqs, r = (size_t)h->n_rows;
  out[0] = out[1] = t * word;
  out[2] = (s + 1) * word;
  out[3] = s * word;
  out[4] = s * (size_t)h->n_columns * word;
  out[5] = r * word;
  out[6] = h->has_sample ? r * sizeof(struct backend_sample) : 0;
}

static size_t sum(const size_t sizes[N_ARRAYS])
{
  size_t all = 0;
  for (int i = 0; i < N_ARRAYS; i++) all += sizes[i];
  return all;
}

size_t node_step_bytes(int32_t max_tokens, int32_t max_seqs, int32_t max_columns)
{
  size_t sizes[N_ARRAYS];
  sizes_of(&(struct node_step){max_tokens, max_seqs, max_seqs, max_columns, 1, 0}, sizes);
  return sum(sizes) <= MOST_BYTES ? sum(sizes) : 0;
}

static bool is_within(const struct node_step *h, int32_t max_tokens, int32_t max_seqs, int32_t max_columns)
{
  return h->n_tokens >= 1 && h->n_tokens <= max_tokens && h->n_seqs >= 1 && h->n_seqs <= max_seqs && h->n_rows >= 0 &&
         h->n_rows <= max_seqs && h->n_columns >= 1 && h->n_columns <= max_columns;
}

bool node_step_write(const struct backend_batch *b, int32_t max_tokens, int32_t max_seqs, int32_t max_columns, struct node_step *head,
                     void *out, size_t *n_bytes)
{
  size_t sizes[N_ARRAYS];
  int32_t columns = 1;
  if (b->blocks != NULL) return false;
  *head = (struct node_step){b->n_tokens, b->n_seqs, b->n_rows, 1, b->sample != NULL, b->wants_logits};
  if (!is_within(head, max_tokens, max_seqs, max_columns)) return false;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    if (b->kv_len[s] < 0) return false;
    const int32_t n = (b->kv_len[s] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    if (n > columns) columns = n;
  }
  if (columns > max_columns || columns > b->table_stride) return false;
  head->n_columns = columns;
  sizes_of(head, sizes);
  const void *arrays[N_ARRAYS] = {b->tokens, b->positions, b->seq_start, b->kv_len, NULL, b->row_token, b->sample};
  uint8_t *at = out;
  for (int i = 0; i < N_ARRAYS; i++) {
    if (i != 4 && sizes[i] > 0) memcpy(at, arrays[i], sizes[i]);
    for (int32_t s = 0; i == 4 && s < b->n_seqs; s++)
      memcpy(at + (size_t)s * (size_t)columns * sizeof(int32_t), b->block_table + (int64_t)s * b->table_stride,
             (size_t)columns * sizeof(int32_t));
    at += sizes[i];
  }
  *n_bytes = sum(sizes);
  return true;
}

/* No position or length lies beyond the columns of the table. */
static bool fits_table(const struct backend_batch *b)
{
  const int64_t most = (int64_t)b->table_stride * KV_PAGE_TOKENS;
  for (int32_t t = 0; t < b->n_tokens; t++)
    if (b->positions[t] < 0 || b->positions[t] >= most) return false;
  for (int32_t s = 0; s < b->n_seqs; s++)
    if (b->kv_len[s] < 0 || b->kv_len[s] > most) return false;
  return true;
}

bool node_step_read(const struct node_step *h, const void *bytes, size_t n_bytes, int32_t max_tokens, int32_t max_seqs,
                    int32_t max_columns, struct backend_batch *out)
{
  size_t sizes[N_ARRAYS];
  const void *arrays[N_ARRAYS];
  if (!is_within(h, max_tokens, max_seqs, max_columns)) return false;
  sizes_of(h, sizes);
  if (sum(sizes) != n_bytes) return false;
  const uint8_t *at = bytes;
  for (int i = 0; i < N_ARRAYS; i++) {
    arrays[i] = at;
    at += sizes[i];
  }
  *out = (struct backend_batch){.n_tokens = h->n_tokens, .n_seqs = h->n_seqs, .n_rows = h->n_rows, .tokens = arrays[0],
                                .positions = arrays[1], .seq_start = arrays[2], .kv_len = arrays[3], .block_table = arrays[4],
                                .table_stride = h->n_columns, .row_token = arrays[5], .sample = h->has_sample ? arrays[6] : NULL,
                                .wants_logits = h->wants_logits != 0};
  return fits_table(out);
}
