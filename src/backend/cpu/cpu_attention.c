/* Causal attention over the paged cache, softmax(q k / sqrt(D)) v, with grouped queries and a sliding window.
 * Entry points: cpu_attention_plan (before the run), cpu_attention_items and cpu_attention_item (each layer).
 *
 * Work split. A block is up to block_tokens consecutive tokens of one sequence; an item is a block and a kv head. Its rows are the block's
 * tokens times the H/G query heads that share the kv head, so K and V are read once for all of them. The context is walked in chunks of
 * CPU_CHUNK_TOKENS at absolute positions: scores of the chunk, exact softmax inside it, weighted values, then a merge into the row's
 * running (max, sum, output), chunks in ascending order. When there are too few items for the workers (long contexts, few sequences),
 * items are single chunks; their results wait in `partial`, and the worker that finishes a block's last chunk merges them in the same
 * ascending order.
 *
 * Sparse codecs. Of a page that is not whole any more (KV_NO_PAGE) the item's layer and head read their block where the batch says that it
 * lies; pages without one are left out of their chunk, whose other pages move together. The squares of what each row gives to a page's
 * tokens are kept chunk by chunk, weighed once the row's sum is known, rounded to whole units and added to the batch's `given`;
 * whole numbers, so the sums do not depend on order either.
 *
 * Numerics. f32 throughout. A row's bits depend on its query and its context alone: lanes are tokens (scores) or channels (values), masked
 * tokens add exact zeros, and chunk borders and merge order are fixed. So a token gives the same output alone, inside a prompt, or
 * beside other sequences, and however the work was split. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_program.h"

enum { READ_ROWS = 2, KEEP_TOKENS = 32 }; /* of an item's cost, see busiest */

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

/* What one worker needs to know about the item it works on. */
struct item {
  const struct backend_program *p;
  const struct backend_kv *kv;
  struct cpu_worker *w;
  const int32_t *table;              /* page ids of the sequence */
  int32_t layer, head, tile;         /* tile: of the block's own group (cpu_kv_open.h) */
  int32_t group, rows;               /* H/G; tokens of the block times group */
  int32_t first_position, n_tokens;  /* of the block; positions are consecutive */
  int32_t window;                    /* tokens seen; INT32_MAX when all */
  const struct backend_blocks *blocks; /* of the sequence; NULL: all its pages are whole, and nothing is measured */
};

/* The pages of a chunk that some row sees, ascending. Scores lie page after page: lane i * P + k is token k of page at[i]. */
struct chunk { int32_t index, n_pages, n_lanes, at[CPU_CHUNK_PAGES]; const unsigned char *block[CPU_CHUNK_PAGES]; };

static bool is_measured(const struct item *it) { return it->blocks != NULL && it->blocks->given != NULL; }

/* Blocks of the batch: a sequence's tokens in blocks of at most block_tokens, those of a draft in n_parts of about equal size. */
static void cut_blocks(struct backend_program *p, int32_t n_parts)
{
  struct cpu_batch *batch = &p->batch;
  const struct backend_batch *in = batch->in;
  const int32_t open_tokens = batch->kv->codec->open_tokens;
  batch->n_blocks = 0;
  for (int32_t s = 0; s < in->n_seqs; s++) {
    const int32_t n = least(in->seq_start[s + 1] - in->seq_start[s], p->block_tokens), size = (n + n_parts - 1) / n_parts;
    for (int32_t t = in->seq_start[s], t1; t < in->seq_start[s + 1]; t = t1) {
      t1 = least(t + size, in->seq_start[s + 1]);
      if (open_tokens > 0) t1 = least(t1, t + open_tokens - in->positions[t] % open_tokens); /* a block has one own group */
      batch->blocks[batch->n_blocks++] = (struct cpu_block){s, t, t1};
    }
  }
}

/* What the worker with most to do has in its share of the items: tokens times rows, reading a token counting as much as READ_ROWS rows and
 * keeping a chunk's results as much as KEEP_TOKENS tokens of it. */
static int64_t busiest(const struct backend_program *p, bool splits)
{
  const struct cpu_batch *batch = &p->batch;
  const int32_t G = p->program->dims.n_kv_heads, group = p->program->dims.n_heads / G, n_workers = p->backend->n_threads;
  const int32_t n_chunks = splits ? batch->n_chunks : 1, n_items = batch->n_blocks * G * n_chunks;
  int64_t most_work = 0;
  for (int32_t w = 0; w < n_workers; w++) {
    int64_t work = 0;
    for (int32_t i = (int32_t)((int64_t)n_items * w / n_workers); i < (int32_t)((int64_t)n_items * (w + 1) / n_workers); i++) {
      const struct cpu_block *block = &batch->blocks[i / n_chunks % batch->n_blocks];
      const int32_t context = batch->in->positions[block->t1 - 1] + 1 - i % n_chunks * CPU_CHUNK_TOKENS;
      const int32_t n = splits ? most(0, least(context, CPU_CHUNK_TOKENS)) + KEEP_TOKENS : context;
      work += (int64_t)n * ((block->t1 - block->t0) * group + READ_ROWS);
    }
    most_work = work > most_work ? work : most_work;
  }
  return most_work;
}

/* Few items are split by chunks of their contexts. Those of drafts are dealt out so that the busiest worker has least to do: by chunks,
 * drafts in halves, both or neither. */
void cpu_attention_plan(struct backend_program *p)
{
  struct cpu_batch *batch = &p->batch;
  const struct backend_batch *in = batch->in;
  const int32_t n_rows = in->n_tokens * p->program->dims.n_heads, n_workers = p->backend->n_threads;
  const bool is_draft = in->n_tokens > in->n_seqs && in->n_tokens <= in->n_seqs * p->block_tokens;
  int32_t longest = 0, best_parts = 1;
  cut_blocks(p, 1);
  for (int32_t i = 0; i < batch->n_blocks; i++) longest = most(longest, in->positions[batch->blocks[i].t1 - 1] + 1);
  batch->n_chunks = (longest + CPU_CHUNK_TOKENS - 1) / CPU_CHUNK_TOKENS;
  const bool is_few = n_workers > 1 && batch->n_blocks * p->program->dims.n_kv_heads < 4 * n_workers;
  const bool may_split = is_few && batch->n_chunks > 1 && batch->n_chunks <= p->max_chunks && n_rows <= p->split_rows;
  batch->splits_context = may_split;
  if (!is_few || !is_draft) return;
  int64_t least_work = INT64_MAX;
  for (int32_t parts = 1; parts <= 2; parts++) {
    cut_blocks(p, parts);
    for (int splits = 0; splits <= may_split; splits++) {
      const int64_t work = busiest(p, splits);
      if (work >= least_work) continue;
      least_work = work;
      best_parts = parts;
      batch->splits_context = splits;
    }
  }
  cut_blocks(p, best_parts);
}

static struct item item_of(struct backend_program *p, const struct cpu_step *step, int32_t worker, const struct cpu_block *block,
                           int32_t head)
{
  const struct program_dims *dims = &p->program->dims;
  const struct backend_batch *in = p->batch.in;
  const int32_t group = dims->n_heads / dims->n_kv_heads;
  return (struct item){.p = p, .kv = p->batch.kv, .w = &p->workers[worker], .layer = step->op->layer, .head = head, .group = group,
                       .tile = p->batch.tile[block->t0],
                       .table = in->block_table + (int64_t)block->seq * in->table_stride, .rows = (block->t1 - block->t0) * group,
                       .first_position = in->positions[block->t0], .n_tokens = block->t1 - block->t0,
                       .window = dims->sliding_window > 0 ? dims->sliding_window : INT32_MAX,
                       .blocks = in->blocks != NULL ? &in->blocks[block->seq] : NULL};
}

/* Queries of the item, scaled (and rotated as the cached keys are): [rows][D]. */
static void pack_queries(const struct item *it, const struct cpu_step *step, const struct cpu_block *block)
{
  const int32_t D = it->p->program->dims.head_dim;
  const float scale = 1.0f / sqrtf((float)D);
  float *q = it->w->q;
  for (int32_t t = block->t0; t < block->t1; t++) {
    const float *from = step->in[0] + (int64_t)t * step->in_width + (int64_t)it->head * it->group * D;
    for (int32_t i = 0; i < it->group * D; i++) q[i] = from[i] * scale;
    for (int32_t h = 0; h < it->group && it->kv->codec->rotates_k; h++) cpu_rotate_head(it->kv->ops, q + (int64_t)h * D, D);
    q += (int64_t)it->group * D;
  }
}

/* Where an entry's element of the sequence's arrays of blocks lies, for the item's layer and head. */
static int64_t element_of(const struct item *it, int32_t entry)
{
  return (int64_t)entry * cpu_kv_columns(it->kv) + it->layer * it->kv->geometry.n_kv_heads + it->head;
}

/* What the item's layer and head have of a table entry's page; NULL: nothing any more. */
static const unsigned char *block_of(const struct item *it, int32_t entry)
{
  if (it->table[entry] != KV_NO_PAGE) return cpu_kv_block(it->kv, it->table[entry], it->layer, it->head);
  const int32_t number = it->blocks->numbers[element_of(it, entry)];
  return number == KV_NO_PAGE ? NULL : cpu_kv_numbered(it->kv, number);
}

/* Scores of the n tokens of the page that begins at `position`; the rows' own group, where the codec has such, comes from its tile. */
static void score_page(const struct item *it, const unsigned char *block, int32_t position, int32_t n, float *scores,
                       const unsigned char *next)
{
  const struct backend_kv *kv = it->kv;
  const int32_t D = it->p->program->dims.head_dim, group = kv->codec->open_tokens;
  const int32_t own = group > 0 ? it->first_position / group * group - position : n; /* tokens of the page before the own group */
  const int32_t n_folded = own < 0 ? 0 : least(own, n);
  if (n_folded > 0)
    kv->codec->attend_k(kv, block, it->w->q, D, it->rows, n_folded, scores, CPU_CHUNK_TOKENS, it->w->expanded, next);
  if (n_folded < n)
    kv->ops->qk_f16(it->w->q, D, it->rows, cpu_kv_open_tile(kv, it->tile, it->layer, it->head), group, D, n - n_folded,
                    scores + n_folded, CPU_CHUNK_TOKENS, NULL);
}

static struct chunk chunk_of(const struct item *it, int32_t index)
{
  const int32_t P = KV_PAGE_TOKENS, end = it->first_position + it->n_tokens; /* behind the position of the last row */
  const int32_t oldest = it->window == INT32_MAX ? 0 : most(0, it->first_position - it->window + 1); /* that the first row still sees */
  struct chunk c = {.index = index};
  for (int32_t page = index * CPU_CHUNK_PAGES; page < (index + 1) * CPU_CHUNK_PAGES && page * P < end; page++) {
    const unsigned char *block = (page + 1) * P > oldest ? block_of(it, page) : NULL;
    if (block == NULL) continue;
    c.block[c.n_pages] = block;
    c.at[c.n_pages++] = page;
  }
  if (c.n_pages > 0) c.n_lanes = (c.n_pages - 1) * P + least(P, end - c.at[c.n_pages - 1] * P);
  return c;
}

/* The first lane at or behind a position. */
static int32_t lane_at(const struct chunk *c, int32_t position)
{
  const int32_t page = position / KV_PAGE_TOKENS;
  int32_t i = 0;
  while (i < c->n_pages && c->at[i] < page) i++;
  return i * KV_PAGE_TOKENS + (i < c->n_pages && c->at[i] == page ? position % KV_PAGE_TOKENS : 0);
}

/* Record of a row and chunk: [pages of the chunk, max]; max is -INFINITY, and weighs nothing, for a row that sees nothing of the chunk. */
static float *page_sums_of(const struct item *it, int32_t r, int32_t chunk)
{
  return it->w->page_sums + ((int64_t)r * it->p->max_chunks + chunk) * CPU_CHUNK_RECORD;
}

/* The squares of what each row gave to the tokens of each page of the chunk. */
static void keep_page_sums(const struct item *it, const struct chunk *c)
{
  struct cpu_worker *w = it->w;
  for (int32_t r = 0; r < it->rows; r++) {
    const float *scores = w->scores + (int64_t)r * CPU_CHUNK_TOKENS;
    float *record = page_sums_of(it, r, c->index);
    memset(record, 0, CPU_CHUNK_RECORD * sizeof *record);
    record[CPU_CHUNK_PAGES] = w->sum[r] == 0 ? -INFINITY : w->max[r];
    if (w->sum[r] == 0) continue;
    for (int32_t i = 0; i < c->n_pages; i++)
      for (int32_t j = i * KV_PAGE_TOKENS, end = least(c->n_lanes, j + KV_PAGE_TOKENS); j < end; j++)
        record[c->at[i] % CPU_CHUNK_PAGES] += scores[j] * scores[j];
  }
}

/* One chunk for all rows of the item: leaves acc, max, sum in the worker; sum 0 marks a row that sees nothing of the chunk. after: the
 * block whose keys are read next, or NULL. */
static void attend_chunk(const struct item *it, int32_t index, const unsigned char *after)
{
  struct cpu_worker *w = it->w;
  const struct backend_kv *kv = it->kv;
  const int32_t P = KV_PAGE_TOKENS;
  const struct chunk c = chunk_of(it, index);
  const int32_t n_round = (c.n_lanes + CPU_V_ALIGN - 1) / CPU_V_ALIGN * CPU_V_ALIGN;
  const bool fetches = kv->values_at > 0;

  memset(w->acc, 0, (size_t)it->rows * (size_t)kv->dv * sizeof *w->acc);
  for (int32_t r = 0; r < it->rows; r++) w->sum[r] = 0;
  for (int32_t i = 0; i < c.n_pages; i++) {
    const unsigned char *next = !fetches ? NULL : i + 1 < c.n_pages ? c.block[i + 1] : c.block[0] + kv->values_at;
    score_page(it, c.block[i], c.at[i] * P, least(P, c.n_lanes - i * P), w->scores + i * P, next);
  }
  for (int32_t r = 0; r < it->rows; r++) {
    const int32_t position = it->first_position + r / it->group;
    const int32_t lo = it->window == INT32_MAX ? 0 : lane_at(&c, most(0, position - it->window + 1));
    const int32_t hi = least(c.n_lanes, lane_at(&c, position + 1));
    float *scores = w->scores + (int64_t)r * CPU_CHUNK_TOKENS;
    if (lo < hi) w->sum[r] = kv->ops->softmax(scores, n_round, lo, hi, &w->max[r]);
    else memset(scores, 0, (size_t)n_round * sizeof *scores);
  }
  for (int32_t i = 0; i < c.n_pages; i++) {
    const unsigned char *next = !fetches ? NULL : i + 1 < c.n_pages ? c.block[i + 1] + kv->values_at : after;
    kv->codec->attend_v(kv, c.block[i], w->scores + i * P, CPU_CHUNK_TOKENS, it->rows, least(P, c.n_lanes - i * P), w->acc, w->expanded,
                        next);
  }
  if (is_measured(it)) keep_page_sums(it, &c);
}

/* Merge one chunk's result of a row into the running one (online softmax). */
static void merge(const struct item *it, int32_t r, const float *acc, float max, float sum)
{
  struct cpu_worker *w = it->w;
  const int32_t dv = it->kv->dv;
  float *total = w->total + (int64_t)r * dv;
  if (sum == 0) return;
  if (w->total_sum[r] == 0) {
    memcpy(total, acc, (size_t)dv * sizeof *total);
    w->total_max[r] = max;
    w->total_sum[r] = sum;
    return;
  }
  const float top = max > w->total_max[r] ? max : w->total_max[r];
  const float a = cpu_exp_negative(max - top), b = cpu_exp_negative(w->total_max[r] - top);
  it->kv->ops->scale_add(total, b, acc, a, dv);
  w->total_sum[r] = w->total_sum[r] * b + sum * a;
  w->total_max[r] = top;
}

static void merge_begin(const struct item *it)
{
  for (int32_t r = 0; r < it->rows; r++) it->w->total_sum[r] = 0;
}

/* Add up what the rows gave to pages far enough before them, now that their sums are known. Chunks c0 to c1 have been attended. */
static void give(const struct item *it, int32_t c0, int32_t c1)
{
  const struct cpu_worker *w = it->w;
  if (!is_measured(it)) return;
  for (int32_t c = c0; c < c1; c++) {
    uint64_t units[CPU_CHUNK_PAGES] = {0};
    for (int32_t r = 0; r < it->rows; r++) {
      const float *record = page_sums_of(it, r, c);
      const int32_t newest = (it->first_position + r / it->group) / KV_PAGE_TOKENS - it->blocks->nearest - c * CPU_CHUNK_PAGES;
      if (w->total_sum[r] == 0) continue;
      const float share = cpu_exp_negative(record[CPU_CHUNK_PAGES] - w->total_max[r]) / w->total_sum[r];
      const float scale = KV_GIVEN_ONE * share * share;
      for (int32_t i = 0; i < CPU_CHUNK_PAGES && i <= newest; i++) units[i] += (uint64_t)(record[i] * scale + 0.5f);
    }
    for (int32_t i = 0; i < CPU_CHUNK_PAGES; i++)
      if (units[i] > 0)
        atomic_fetch_add_explicit(&it->blocks->given[element_of(it, c * CPU_CHUNK_PAGES + i)], units[i], memory_order_relaxed);
  }
}

/* Divide by the sums and write the heads' outputs. */
static void write_outputs(const struct item *it, const struct cpu_step *step, const struct cpu_block *block)
{
  const int32_t D = it->p->program->dims.head_dim;
  for (int32_t r = 0; r < it->rows; r++) {
    const int32_t t = block->t0 + r / it->group, h = it->head * it->group + r % it->group;
    float *out = step->out[0] + (int64_t)t * step->out_width + (int64_t)h * D;
    const float *total = it->w->total + (int64_t)r * it->kv->dv;
    const float scale = it->w->total_sum[r] > 0 ? 1.0f / it->w->total_sum[r] : 0;
    for (int32_t d = 0; d < D; d++) out[d] = total[d] * scale;
    if (it->kv->codec->rotates_v) cpu_rotate_head(it->kv->ops, out, D);
  }
}

/* First chunk that the item's rows can see. */
static int32_t first_chunk(const struct item *it)
{
  return it->window == INT32_MAX ? 0 : most(0, it->first_position - it->window + 1) / CPU_CHUNK_TOKENS;
}

static int32_t end_chunk(const struct item *it)
{
  return (it->first_position + it->n_tokens - 1) / CPU_CHUNK_TOKENS + 1;
}

static void whole_item(struct backend_program *p, const struct cpu_step *step, int32_t worker, int32_t index)
{
  const struct cpu_block *block = &p->batch.blocks[index % p->batch.n_blocks];
  const struct item it = item_of(p, step, worker, block, index / p->batch.n_blocks);
  pack_queries(&it, step, block);
  merge_begin(&it);
  for (int32_t chunk = first_chunk(&it); chunk < end_chunk(&it); chunk++) {
    attend_chunk(&it, chunk, chunk + 1 < end_chunk(&it) ? block_of(&it, (chunk + 1) * CPU_CHUNK_PAGES) : NULL);
    for (int32_t r = 0; r < it.rows; r++) merge(&it, r, it.w->acc + (int64_t)r * it.kv->dv, it.w->max[r], it.w->sum[r]);
  }
  give(&it, first_chunk(&it), end_chunk(&it));
  write_outputs(&it, step, block);
}

/* Where row r of an item keeps its partial results of a chunk: acc [Dv], max, sum, and the page sums of sparse codecs. */
static float *partial_of(const struct backend_program *p, int32_t first_row, int32_t r, int32_t chunk, int32_t dv)
{
  return p->partial + ((int64_t)(first_row + r) * p->max_chunks + chunk) * (dv + 2 + CPU_CHUNK_RECORD);
}

/* One chunk of a block and head; the last one to finish merges. */
static void chunk_item(struct backend_program *p, const struct cpu_step *step, int32_t worker, int32_t index, int32_t chunk)
{
  const int32_t G = p->program->dims.n_kv_heads;
  const struct cpu_block *block = &p->batch.blocks[index % p->batch.n_blocks];
  const struct item it = item_of(p, step, worker, block, index / p->batch.n_blocks);
  const int32_t c0 = first_chunk(&it), c1 = end_chunk(&it), dv = it.kv->dv;
  const int32_t first_row = block->t0 * it.group * G + it.head * it.rows;
  if (chunk < c0 || chunk >= c1) return;
  pack_queries(&it, step, block);
  attend_chunk(&it, chunk, NULL);
  for (int32_t r = 0; r < it.rows; r++) {
    float *partial = partial_of(p, first_row, r, chunk, dv);
    memcpy(partial, it.w->acc + (int64_t)r * dv, (size_t)dv * sizeof *partial);
    partial[dv] = it.w->max[r];
    partial[dv + 1] = it.w->sum[r];
    if (is_measured(&it)) memcpy(partial + dv + 2, page_sums_of(&it, r, chunk), CPU_CHUNK_RECORD * sizeof *partial);
  }
  if (atomic_fetch_add(&p->finished[index], 1) + 1 < c1 - c0) return;
  atomic_store(&p->finished[index], 0);
  merge_begin(&it);
  for (int32_t c = c0; c < c1; c++)
    for (int32_t r = 0; r < it.rows; r++) {
      const float *partial = partial_of(p, first_row, r, c, dv);
      merge(&it, r, partial, partial[dv], partial[dv + 1]);
      if (is_measured(&it)) memcpy(page_sums_of(&it, r, c), partial + dv + 2, CPU_CHUNK_RECORD * sizeof *partial);
    }
  give(&it, c0, c1);
  write_outputs(&it, step, block);
}

int32_t cpu_attention_items(const struct backend_program *p)
{
  return p->batch.n_blocks * p->program->dims.n_kv_heads * (p->batch.splits_context ? p->batch.n_chunks : 1);
}

void cpu_attention_item(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker)
{
  if (p->batch.splits_context) chunk_item(p, step, worker, item / p->batch.n_chunks, item % p->batch.n_chunks);
  else whole_item(p, step, worker, item);
}
