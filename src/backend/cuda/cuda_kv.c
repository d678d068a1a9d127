/* Page memory: one pool, page id -> pool + id * page_bytes; inside, a tile per (layer, KV head). Entry points: cuda_kv_create,
 * cuda_kv_begin, cuda_kv_copy_pages, cuda_kv_read_page, cuda_kv_write_page, cuda_kv_send (to another device, beside the batches).
 * The pool starts zeroed: unwritten slots of a page are multiplied by zero probabilities and must hold finite numbers.
 *
 * int4 and fp4 keep the keys of unfinished groups in slots (backend/kv_open.h), f16 for all layers and heads. What that file asks for is
 * launched on the stream before the batch it is asked for; a failure there is sticky, and shows at the next call. */
#include <stdatomic.h>

#include "backend/cuda/cuda_internal.h"
#include "backend/kv_open.h"
#include "base/log.h"
#include "base/mem.h"

#define GATHER_TOKENS (256 * 1024)  /* gathered together where the pages are more and the longest sequence is not */

static bool codec_of(enum kv_codec codec, enum k_kv_codec *out)
{
  switch (codec) {
  case KV_F16: *out = K_KV_F16; return true;
  case KV_INT8: *out = K_KV_INT8; return true;
  case KV_INT4: *out = K_KV_INT4; return true;
  case KV_FP4:
  case KV_FP4_SPARSE: *out = K_KV_FP4; return true; /* the same bytes */
  default: return false;
  }
}

uint64_t cuda_kv_page_bytes(const struct kv_geometry *g)
{
  enum k_kv_codec codec;
  if (!codec_of(g->codec, &codec) || g->head_dim < 1 || g->head_dim > 256) return 0;
  if (k_kv_has_nibbles(codec) && g->head_dim % 2) return 0;
  const uint64_t bytes = (uint64_t)g->n_layers * (uint64_t)g->n_kv_heads * (uint64_t)k_kv_tile_bytes(codec, g->head_dim);
  return (bytes + 15) / 16 * 16;
}

void cuda_kv_destroy(struct backend_kv *kv)
{
  if (kv == NULL) return;
  cuda_enter(kv->backend);
  (void)cudaStreamSynchronize(kv->backend->stream);
  if (kv->send_stream) (void)cudaStreamDestroy(kv->send_stream);
  if (kv->written) (void)cudaEventDestroy(kv->written);
  cuda_kept_fini(kv);
  cuda_sparse_fini(kv);
  kv_open_destroy(kv->open);
  mem_free(kv->tiles);
  cuda_memory_free_owner(kv->backend, kv);
  mem_free(kv);
}

static struct k_kv_view slot_view(const struct backend_kv *kv)
{
  return (struct k_kv_view){.pool = kv->pool,
                            .page_bytes = kv->page_bytes,
                            .codec = kv->codec,
                            .n_layers = kv->geometry.n_layers,
                            .n_kv_heads = kv->geometry.n_kv_heads,
                            .head_dim = kv->geometry.head_dim,
                            .open = kv->open_keys};
}

static int64_t slot_bytes(const struct backend_kv *kv)
{
  return k_kv_open_bytes(kv->codec, kv->geometry.n_layers, kv->geometry.n_kv_heads, kv->geometry.head_dim);
}

static struct k_stream plain_stream(const struct backend_kv *kv)
{
  return (struct k_stream){(struct CUstream_st *)kv->backend->stream, false};
}

/* A failure is sticky: the backend's next call reports it. */
static void launched(enum sits_status status) { (void)status; }

static void fold_slot(void *user, int32_t slot, int32_t page, int32_t group, int32_t n_tokens)
{
  const struct backend_kv *kv = user;
  const struct k_kv_view view = slot_view(kv);
  launched(CUDA_CALL(kv->backend, sits_k_kv_fold_slot(&view, slot, page, group, n_tokens, plain_stream(kv))));
}

static void unfold_slot(void *user, int32_t page, int32_t group, int32_t slot)
{
  const struct backend_kv *kv = user;
  const struct k_kv_view view = slot_view(kv);
  launched(CUDA_CALL(kv->backend, sits_k_kv_unfold_slot(&view, page, group, slot, plain_stream(kv))));
}

static void copy_slot(void *user, int32_t from_slot, int32_t to_slot)
{
  const struct backend_kv *kv = user;
  const int64_t bytes = slot_bytes(kv);
  uint8_t *keys = kv->open_keys;
  launched(CUDA_CALL(kv->backend, cudaMemcpyAsync(keys + to_slot * bytes, keys + from_slot * bytes, (size_t)bytes,
                                                  cudaMemcpyDeviceToDevice, kv->backend->stream)));
}

/* Room for the longest sequence, and for some shorter ones together. */
static int64_t gather_tokens_of(const struct kv_geometry *g)
{
  const int64_t all = (int64_t)g->n_pages * KV_PAGE_TOKENS, wanted = g->max_tokens > GATHER_TOKENS ? g->max_tokens : GATHER_TOKENS;
  if (!k_attn_prefill_takes(g->head_dim)) return 0;
  return ((all < wanted ? all : wanted) + CUDA_GATHER_TOKENS - 1) / CUDA_GATHER_TOKENS * CUDA_GATHER_TOKENS;
}

/* What lies beside the pages. Bytes; gather: of keys, and as many of values. */
struct sizes { int64_t exact_rows, gather_tokens; size_t open_keys, fresh, exact, gather; };

static struct sizes sizes_of(const struct backend_options *options, const struct kv_geometry *g, enum k_kv_codec codec)
{
  const size_t width = (size_t)g->n_kv_heads * (size_t)g->head_dim * 2;
  struct sizes s = {.gather_tokens = gather_tokens_of(g)};
  s.gather = (size_t)s.gather_tokens * width;
  if (k_kv_open_tokens(codec) == 0) return s;
  s.open_keys = (size_t)kv_open_slots(options->max_seqs) * (size_t)k_kv_open_bytes(codec, g->n_layers, g->n_kv_heads, g->head_dim);
  s.fresh = (size_t)options->max_batch_tokens * width;
  if (k_attn_prefill_takes(g->head_dim)) s.exact_rows = k_kv_exact_rows(options->max_batch_tokens, options->max_seqs);
  s.exact = (size_t)s.exact_rows * width;
  return s;
}

void cuda_kv_beside(const struct backend_program *program, const struct kv_geometry *geometry, struct kv_beside *out)
{
  enum k_kv_codec codec;
  *out = (struct kv_beside){0};
  if (!codec_of(geometry->codec, &codec)) return;
  const struct sizes s = sizes_of(&program->backend->options, geometry, codec);
  out->fixed_bytes = s.open_keys + s.fresh + s.exact + 2 * s.gather + cuda_sparse_bytes(program->backend, geometry);
  if (geometry->codec != KV_FP4_SPARSE) out->fixed_bytes += cuda_lane_bytes(program);
  out->spare_bytes = cuda_kept_bytes(geometry);
}

/* Slots, and memory for steps of many tokens. */
static bool create_open(struct backend_kv *kv, const struct sizes *sizes)
{
  const struct kv_geometry *g = &kv->geometry;
  const struct backend_options *options = &kv->backend->options;
  const int32_t tokens = k_kv_open_tokens(kv->codec), n_slots = kv_open_slots(options->max_seqs);
  if (tokens == 0) return true;
  kv->open = kv_open_create(tokens, g->n_pages, n_slots, (struct kv_open_ops){fold_slot, unfold_slot, copy_slot}, kv);
  kv->tiles = mem_calloc((size_t)options->max_batch_tokens, sizeof *kv->tiles);
  kv->open_keys = cuda_memory_alloc(kv->backend, kv, sizes->open_keys);
  kv->fresh = cuda_memory_alloc(kv->backend, kv, sizes->fresh);
  if (kv->open == NULL || kv->tiles == NULL || kv->open_keys == NULL || kv->fresh == NULL) return false;
  kv->exact_capacity = sizes->exact_rows;
  return kv->exact_capacity == 0 || (kv->exact = cuda_memory_alloc(kv->backend, kv, sizes->exact)) != NULL;
}

void cuda_kv_begin(struct backend_kv *kv, const struct backend_batch *b, int32_t *open_slot)
{
  if (kv->open != NULL) kv_open_begin(kv->open, b, kv->tiles);
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const bool has_any = kv->open != NULL && b->seq_start[s + 1] > b->seq_start[s];
    open_slot[2 * s] = has_any ? kv->tiles[b->seq_start[s]] : -1;
    open_slot[2 * s + 1] = has_any ? kv->tiles[b->seq_start[s + 1] - 1] : -1;
  }
}

void cuda_kv_hold(struct backend_kv *kv)
{
  if (kv->open != NULL) kv_open_hold(kv->open);
}

void cuda_kv_release(struct backend_kv *kv, bool is_whole)
{
  if (kv->open != NULL) kv_open_release(kv->open, is_whole);
}

enum sits_status cuda_kv_create(struct backend *backend, const struct kv_geometry *geometry, struct backend_kv **out,
                                struct sits_error *err)
{
  enum k_kv_codec codec;
  static _Atomic uint64_t n_created;
  const uint64_t page_bytes = cuda_kv_page_bytes(geometry);
  if (page_bytes == 0 || !codec_of(geometry->codec, &codec))
    return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-dtype", "cuda: page codec %s with head size %d is not supported",
                           kv_codec_name(geometry->codec), geometry->head_dim);
  if (k_kv_has_nibbles(codec) && k_kv_has_fragments(geometry->head_dim) && backend->compute_major == 9 &&
      backend->options.max_seqs > K_MAX_DECODE_SEQS)
    return sits_fail_param(err, SITS_UNSUPPORTED, "max-num-seqs", "cuda: max-num-seqs %d: with %s pages at most %d",
                           backend->options.max_seqs, kv_codec_name(geometry->codec), K_MAX_DECODE_SEQS);
  struct backend_kv *kv = mem_calloc(1, sizeof *kv);
  if (kv == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  *kv = (struct backend_kv){.backend = backend,
                            .serial = atomic_fetch_add(&n_created, 1) + 1,
                            .geometry = *geometry,
                            .codec = codec,
                            .page_bytes = (int64_t)page_bytes,
                            .reached = -1};
  cuda_enter(backend);
  const struct sizes sizes = sizes_of(&backend->options, geometry, codec);
  kv->pool = cuda_memory_alloc(backend, kv, (size_t)geometry->n_pages * page_bytes);
  bool ok = kv->pool != NULL && create_open(kv, &sizes) && cuda_sparse_create(kv);
  if (ok && sizes.gather_tokens > 0) {
    kv->gather_tokens = sizes.gather_tokens;
    kv->gather_k = cuda_memory_alloc(backend, kv, sizes.gather);
    kv->gather_v = cuda_memory_alloc(backend, kv, sizes.gather);
    ok = kv->gather_k != NULL && kv->gather_v != NULL;
  }
  if (ok) ok = CUDA_CALL(backend, cudaStreamCreateWithFlags(&kv->send_stream, cudaStreamNonBlocking)) == SITS_OK &&
               CUDA_CALL(backend, cudaEventCreateWithFlags(&kv->written, cudaEventDisableTiming)) == SITS_OK;
  if (ok) ok = cuda_kept_create(kv);
  if (ok) ok = CUDA_CALL(backend, cudaStreamSynchronize(backend->stream)) == SITS_OK;
  if (!ok) {
    cuda_kv_destroy(kv);
    if (backend->is_failed) return sits_fail(err, SITS_DEVICE, "cuda: the device has failed");
    return sits_fail_param(err, SITS_NOMEM, "gpu-memory-utilization",
                           "cuda: %d pages of %llu bytes and %llu bytes beside them do not fit the device; lower gpu-memory-utilization, "
                           "or kv-cache-memory where it is given",
                           geometry->n_pages, (unsigned long long)page_bytes,
                           (unsigned long long)(sizes.open_keys + sizes.fresh + sizes.exact + 2 * sizes.gather +
                                                cuda_sparse_bytes(backend, geometry)));
  }
  *out = kv;
  return SITS_OK;
}

static bool is_page(const struct backend_kv *kv, int32_t page) { return page >= 0 && page < kv->geometry.n_pages; }

enum sits_status cuda_kv_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n)
{
  cuda_enter(kv->backend);
  for (int32_t i = 0; i < n; i++) {
    if (!is_page(kv, copies[i].from_page) || !is_page(kv, copies[i].to_page)) return SITS_INVALID_ARGUMENT;
    if (copies[i].from_page == copies[i].to_page) continue;
    cuda_kept_written(kv, copies[i].to_page);
    const enum sits_status status = CUDA_CALL(
        kv->backend, cudaMemcpyAsync(kv->pool + copies[i].to_page * kv->page_bytes, kv->pool + copies[i].from_page * kv->page_bytes,
                                     (size_t)kv->page_bytes, cudaMemcpyDeviceToDevice, kv->backend->stream));
    if (status != SITS_OK) return status;
    if (kv->open != NULL) kv_open_copied(kv->open, copies[i].from_page, copies[i].to_page);
  }
  return kv->backend->is_failed ? SITS_DEVICE : SITS_OK;
}

/* One incomplete group of the page that `user` points to: folded where it lies, which nobody reads before its sequence goes on. */
struct folding { struct backend_kv *kv; int32_t page; };

static void fold_in_place(void *user, int32_t slot, int32_t group, int32_t n_tokens)
{
  const struct folding *to = user;
  fold_slot(to->kv, slot, to->page, group, n_tokens);
}

enum sits_status cuda_kv_read_page(struct backend_kv *kv, int32_t page, void *host)
{
  cuda_enter(kv->backend);
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  struct folding to = {kv, page};
  if (kv->open != NULL) kv_open_visit(kv->open, page, fold_in_place, &to);
  const enum sits_status status = CUDA_CALL(kv->backend, cudaMemcpyAsync(host, kv->pool + page * kv->page_bytes, (size_t)kv->page_bytes,
                                                                         cudaMemcpyDeviceToHost, kv->backend->stream));
  return status != SITS_OK ? status : CUDA_CALL(kv->backend, cudaStreamSynchronize(kv->backend->stream));
}

enum sits_status cuda_kv_write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  cuda_enter(kv->backend);
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  cuda_kept_written(kv, page);
  if (kv->open != NULL) kv_open_written(kv->open, page);
  const enum sits_status status = CUDA_CALL(kv->backend, cudaMemcpyAsync(kv->pool + page * kv->page_bytes, host, (size_t)kv->page_bytes,
                                                                         cudaMemcpyHostToDevice, kv->backend->stream));
  return status != SITS_OK ? status : CUDA_CALL(kv->backend, cudaStreamSynchronize(kv->backend->stream));
}

void cuda_kv_expect(struct backend_kv *kv, const int32_t *pages, int32_t n)
{
  cuda_enter(kv->backend); /* a lane's last piece may still write to pages that were another's */
  if (CUDA_CALL(kv->backend, cudaStreamSynchronize(kv->backend->stream)) != SITS_OK) return;
  for (int32_t i = 0; i < n; i++) {
    if (!is_page(kv, pages[i])) continue;
    cuda_kept_written(kv, pages[i]);
    if (kv->open != NULL) kv_open_written(kv->open, pages[i]);
  }
}

/* Direct copies over the link where the devices allow it, else the driver takes them through the host. */
static void reach(struct backend_kv *from, int32_t device)
{
  int can = 0;
  if (from->reached == device || from->backend->device == device) return;
  from->reached = device;
  cudaError_t e = cudaDeviceCanAccessPeer(&can, from->backend->device, device);
  if (e == cudaSuccess && can) e = cudaDeviceEnablePeerAccess(device, 0);
  if (e != cudaSuccess) (void)cudaGetLastError(); /* enabled before, or not at all: the copies run either way */
  if (!can) log_warn("cuda", "device %d does not reach device %d: pages go through the host", from->backend->device, device);
}

enum sits_status cuda_kv_send(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n)
{
  struct backend *b = from->backend;
  if (from->page_bytes != to->page_bytes || from->codec != to->codec) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++)
    if (!is_page(from, copies[i].from_page) || !is_page(to, copies[i].to_page)) return SITS_INVALID_ARGUMENT;
  cuda_enter(b);
  reach(from, to->backend->device);
  enum sits_status status = CUDA_CALL(b, cudaEventRecord(from->written, b->stream));
  if (status == SITS_OK) status = CUDA_CALL(b, cudaStreamWaitEvent(from->send_stream, from->written, 0));
  for (int32_t i = 0; i < n && status == SITS_OK; i++)
    status = CUDA_CALL(b, cudaMemcpyPeerAsync(to->pool + copies[i].to_page * to->page_bytes, to->backend->device,
                                              from->pool + copies[i].from_page * from->page_bytes, b->device, (size_t)from->page_bytes,
                                              from->send_stream));
  return status;
}

enum sits_status cuda_kv_sent(struct backend_kv *from)
{
  cuda_enter(from->backend);
  return CUDA_CALL(from->backend, cudaStreamSynchronize(from->send_stream));
}
