/* Blocks of fp4-sparse (backend.h: backend_blocks): where the sequences of a batch find them, what they are given, copies of them. Entry
 * points: cuda_sparse_begin, cuda_sparse_finish, cuda_sparse_take, cuda_kv_copy_blocks.
 *
 * A step needs all this once a sequence has lost blocks or is long enough to be measured; until then fp4-sparse is fp4 and the step goes
 * fp4's ways. In such a step the kernels read, for each sequence, rows of entries from row0 on: block numbers (of entries without a page)
 * and counts. Numbers of those entries go up with each step, counts start from zero and come back behind it, for the entries that the
 * step's tokens may measure; they are added to the caller's when the step has ended. Everything lies in fixed buffers, so that a captured
 * graph serves every step. There is one set of them: a second batch that is submitted meanwhile waits for the first. */
#include <string.h>

#include "backend/batch.h"
#include "backend/cuda/cuda_internal.h"
#include "backend/kv_open.h"
#include "base/mem.h"

#define UNKNOWN_ENTRIES 1024          /* of a sequence where the geometry does not say how long one may be */

struct cuda_measured { _Atomic uint64_t *given; int64_t row0; int32_t n_entries; };

/* Entries of a sequence that matter to a step: up to the last that has lost its page, and those that are measured. */
struct extent { int32_t n_broken, n_measured; };

static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

static struct extent extent_of(const struct backend_batch *b, int32_t s)
{
  struct extent e = {0};
  if (b->blocks == NULL || b->seq_start[s + 1] == b->seq_start[s]) return e;
  const struct backend_blocks *blocks = &b->blocks[s];
  const int32_t *table = b->block_table + (int64_t)s * b->table_stride;
  if (blocks->numbers != NULL)
    for (int32_t i = batch_pages(b, s); i > 0 && e.n_broken == 0; i--)
      if (table[i - 1] == KV_NO_PAGE) e.n_broken = i;
  if (blocks->given != NULL) e.n_measured = most(0, (b->kv_len[s] - 1) / KV_PAGE_TOKENS - blocks->nearest + 1);
  return e;
}

static int32_t rows_of(struct extent e) { return most(e.n_broken, e.n_measured); }

/* ---- memory ---- */

static int32_t entries_of(const struct kv_geometry *g)
{
  if (g->max_tokens > 0) return (g->max_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  return most(g->n_pages, UNKNOWN_ENTRIES);
}

struct sizes { size_t seqs, numbers, given, workspace; };

static struct sizes sizes_of(const struct backend *backend, const struct kv_geometry *g)
{
  const size_t n_seqs = (size_t)backend->options.max_seqs, n = n_seqs * (size_t)entries_of(g) * (size_t)(g->n_layers * g->n_kv_heads);
  return (struct sizes){.seqs = 2 * n_seqs * sizeof(int32_t), .numbers = n * sizeof(int32_t), .given = n * sizeof(uint64_t),
                        .workspace = k_attn_sparse_workspace_bytes(backend->n_sm, g->n_kv_heads, entries_of(g))};
}

uint64_t cuda_sparse_bytes(const struct backend *backend, const struct kv_geometry *g)
{
  const struct sizes s = sizes_of(backend, g);
  return g->codec == KV_FP4_SPARSE ? s.seqs + s.numbers + s.given + s.workspace : 0;
}

bool cuda_sparse_create(struct backend_kv *kv)
{
  struct backend *b = kv->backend;
  const struct kv_geometry *g = &kv->geometry;
  struct cuda_sparse *sparse = &kv->sparse;
  if (g->codec != KV_FP4_SPARSE) return true;
  const struct sizes s = sizes_of(b, g);
  sparse->measured = mem_calloc((size_t)b->options.max_seqs, sizeof *sparse->measured);
  bool ok = sparse->measured != NULL && (sparse->seqs = cuda_memory_alloc(b, kv, s.seqs)) != NULL;
  ok = ok && (sparse->host_seqs = cuda_pinned_alloc(b, kv, s.seqs)) != NULL;
  ok = ok && (sparse->numbers = cuda_memory_alloc(b, kv, s.numbers)) != NULL;
  ok = ok && (sparse->host_numbers = cuda_pinned_alloc(b, kv, s.numbers)) != NULL;
  ok = ok && (sparse->given = cuda_memory_alloc(b, kv, s.given)) != NULL;
  ok = ok && (sparse->host_given = cuda_pinned_alloc(b, kv, s.given)) != NULL;
  ok = ok && (sparse->workspace = cuda_memory_alloc(b, kv, s.workspace)) != NULL;
  if (!ok || CUDA_CALL(b, cudaEventCreateWithFlags(&sparse->brought, cudaEventDisableTiming)) != SITS_OK) return false;
  sparse->n_columns = g->n_layers * g->n_kv_heads;
  sparse->max_entries = entries_of(g);
  sparse->capacity = (int64_t)b->options.max_seqs * sparse->max_entries;
  return true;
}

void cuda_sparse_fini(struct backend_kv *kv)
{
  if (kv->sparse.brought) (void)cudaEventDestroy(kv->sparse.brought);
  mem_free(kv->sparse.measured);
}

/* ---- a step ---- */

bool cuda_sparse_takes(const struct backend_kv *kv, const struct backend_batch *b)
{
  int64_t n = 0;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const int32_t rows = rows_of(extent_of(b, s));
    if (rows > kv->sparse.max_entries) return false;
    n += rows;
  }
  return n <= kv->sparse.capacity;
}

bool cuda_sparse_is_needed(const struct backend_kv *kv, const struct backend_batch *b)
{
  for (int32_t s = 0; s < b->n_seqs && kv->sparse.max_entries > 0; s++)
    if (rows_of(extent_of(b, s)) > 0) return true;
  return false;
}

struct k_kv_blocks cuda_sparse_blocks(const struct backend_kv *kv)
{
  const struct cuda_sparse *sparse = &kv->sparse;
  return (struct k_kv_blocks){.row0 = sparse->seqs, .nearest = sparse->seqs + kv->backend->options.max_seqs, .numbers = sparse->numbers,
                              .given = (unsigned long long *)sparse->given};
}

/* What came back is added to the caller's counts; nobody else does so meanwhile. */
static void add_up(struct cuda_sparse *sparse)
{
  for (int32_t i = 0; i < sparse->n_measured; i++) {
    const struct cuda_measured *m = &sparse->measured[i];
    const uint64_t *from = sparse->host_given + m->row0 * sparse->n_columns;
    const int64_t n = (int64_t)m->n_entries * sparse->n_columns;
    for (int64_t k = 0; k < n; k++)
      if (from[k] > 0)
        atomic_store_explicit(&m->given[k], atomic_load_explicit(&m->given[k], memory_order_relaxed) + from[k], memory_order_relaxed);
  }
  sparse->n_measured = 0;
}

static enum sits_status settle(struct backend_kv *kv)
{
  if (!kv->sparse.is_busy) return SITS_OK;
  TRY(CUDA_CALL(kv->backend, cudaEventSynchronize(kv->sparse.brought)));
  kv->sparse.is_busy = false;
  add_up(&kv->sparse);
  return SITS_OK;
}

/* The numbers of a sequence's entries without a page -> pinned memory. */
static void put_numbers(struct cuda_sparse *sparse, const struct backend_batch *b, int32_t s, int64_t row0, int32_t n_entries)
{
  const int32_t *table = b->block_table + (int64_t)s * b->table_stride;
  const size_t n = (size_t)sparse->n_columns;
  for (int32_t i = 0; i < n_entries; i++)
    if (table[i] == KV_NO_PAGE)
      memcpy(sparse->host_numbers + (size_t)(row0 + i) * n, b->blocks[s].numbers + (size_t)i * n, n * sizeof *sparse->host_numbers);
}

enum sits_status cuda_sparse_begin(struct backend_kv *kv, const struct backend_batch *b, int32_t n_seqs)
{
  struct cuda_sparse *sparse = &kv->sparse;
  struct backend *backend = kv->backend;
  const int32_t max_seqs = backend->options.max_seqs;
  int64_t n_rows = 0, n_broken = 0;
  TRY(settle(kv));
  for (int32_t s = 0; s < n_seqs; s++) {
    const struct extent e = s < b->n_seqs ? extent_of(b, s) : (struct extent){0};
    sparse->host_seqs[s] = rows_of(e) > 0 ? (int32_t)n_rows : -1;
    sparse->host_seqs[max_seqs + s] = e.n_measured > 0 ? b->blocks[s].nearest : INT32_MAX;
    if (e.n_broken > 0) {
      put_numbers(sparse, b, s, n_rows, e.n_broken);
      n_broken = n_rows + e.n_broken;
    }
    if (e.n_measured > 0) sparse->measured[sparse->n_measured++] = (struct cuda_measured){b->blocks[s].given, n_rows, e.n_measured};
    n_rows += rows_of(e);
  }
  sparse->is_busy = true;
  const size_t width = (size_t)sparse->n_columns;
  TRY(CUDA_CALL(backend, cudaMemcpyAsync(sparse->seqs, sparse->host_seqs, 2 * (size_t)max_seqs * sizeof(int32_t), cudaMemcpyHostToDevice,
                                         backend->stream)));
  if (n_broken > 0)
    TRY(CUDA_CALL(backend, cudaMemcpyAsync(sparse->numbers, sparse->host_numbers, (size_t)n_broken * width * sizeof(int32_t),
                                           cudaMemcpyHostToDevice, backend->stream)));
  return CUDA_CALL(backend, cudaMemsetAsync(sparse->given, 0, (size_t)n_rows * width * sizeof(uint64_t), backend->stream));
}

enum sits_status cuda_sparse_finish(struct backend_kv *kv, struct cuda_slot *slot)
{
  struct cuda_sparse *sparse = &kv->sparse;
  struct backend *backend = kv->backend;
  if (sparse->n_measured > 0) {
    const struct cuda_measured *last = &sparse->measured[sparse->n_measured - 1];
    const size_t n = (size_t)(last->row0 + last->n_entries) * (size_t)sparse->n_columns;
    TRY(CUDA_CALL(backend, cudaMemcpyAsync(sparse->host_given, sparse->given, n * sizeof(uint64_t), cudaMemcpyDeviceToHost,
                                           backend->stream)));
  }
  slot->measured = kv;
  slot->measure = ++sparse->serial;
  return CUDA_CALL(backend, cudaEventRecord(sparse->brought, backend->stream));
}

enum sits_status cuda_sparse_take(struct cuda_slot *slot)
{
  struct backend_kv *kv = slot->measured;
  slot->measured = NULL;
  return kv != NULL && kv->sparse.serial == slot->measure ? settle(kv) : SITS_OK;
}

/* ---- copies ---- */

/* May this copy run beside the first n, which run beside each other? */
static bool is_apart(const int32_t (*copies)[2], int32_t n, const int32_t *copy)
{
  bool meets = false;
  for (int32_t i = 0; i < n; i++) meets |= copies[i][1] == copy[0] || copies[i][1] == copy[1] || copies[i][0] == copy[1];
  return !meets;
}

enum sits_status cuda_kv_copy_blocks(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n)
{
  const int32_t n_columns = kv->geometry.n_layers * kv->geometry.n_kv_heads;
  const int64_t n_blocks = (int64_t)kv->geometry.n_pages * n_columns;
  struct k_kv_copy_blocks a = {.kv = {.pool = kv->pool, .page_bytes = kv->page_bytes, .codec = kv->codec,
                                      .n_layers = kv->geometry.n_layers, .n_kv_heads = kv->geometry.n_kv_heads,
                                      .head_dim = kv->geometry.head_dim}};
  cuda_enter(kv->backend);
  for (int32_t i = 0; i < n; i++)
    if (copies[i][0] < 0 || copies[i][0] >= n_blocks || copies[i][1] < 0 || copies[i][1] >= n_blocks) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++) {
    const int32_t page = copies[i][1] / n_columns;
    if (copies[i][0] != copies[i][1]) memcpy(a.copies[a.n++], copies[i], sizeof copies[i]);
    if (a.n > 0 && (i + 1 == n || a.n == K_COPY_BLOCKS || !is_apart((const int32_t(*)[2])a.copies, a.n, copies[i + 1]))) {
      TRY(CUDA_CALL(kv->backend, sits_k_kv_copy_blocks(&a, (struct k_stream){(struct CUstream_st *)kv->backend->stream, false})));
      a.n = 0;
    }
    cuda_kept_written(kv, page);
    if (kv->open != NULL) kv_open_written(kv->open, page); /* an open group of the page's last owner is not folded over them */
  }
  return kv->backend->is_failed ? SITS_DEVICE : SITS_OK;
}
