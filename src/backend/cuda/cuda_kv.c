/* Page memory: one pool, page id -> pool + id * page_bytes; inside, a tile per (layer, KV head). Entry points: cuda_kv_create,
 * cuda_kv_copy_pages, cuda_kv_read_page, cuda_kv_write_page, cuda_kv_send (to another device, beside the batches).
 * The pool starts zeroed: unwritten slots of a page are multiplied by zero
 * probabilities and must hold finite numbers. */
#include "backend/cuda/cuda_internal.h"
#include "base/log.h"
#include "base/mem.h"

#define GATHER_TOKENS_MAX (256 * 1024)

static bool codec_of(enum kv_codec codec, enum k_kv_codec *out)
{
  switch (codec) {
  case KV_F16: *out = K_KV_F16; return true;
  case KV_INT8: *out = K_KV_INT8; return true;
  case KV_INT4: *out = K_KV_INT4; return true;
  case KV_FP4: *out = K_KV_FP4; return true;
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
  cuda_memory_free_owner(kv->backend, kv);
  mem_free(kv);
}

enum sits_status cuda_kv_create(struct backend *backend, const struct kv_geometry *geometry, struct backend_kv **out,
                                struct sits_error *err)
{
  enum k_kv_codec codec;
  const uint64_t page_bytes = cuda_kv_page_bytes(geometry);
  if (page_bytes == 0 || !codec_of(geometry->codec, &codec))
    return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-dtype", "cuda: page codec %s with head size %d is not supported",
                           kv_codec_name(geometry->codec), geometry->head_dim);
  struct backend_kv *kv = mem_calloc(1, sizeof *kv);
  if (kv == NULL) return sits_fail(err, SITS_NOMEM, "cuda: out of memory");
  *kv = (struct backend_kv){.backend = backend, .geometry = *geometry, .codec = codec, .page_bytes = (int64_t)page_bytes, .reached = -1};
  cuda_enter(backend);
  kv->pool = cuda_memory_alloc(backend, kv, (size_t)geometry->n_pages * page_bytes);
  bool ok = kv->pool != NULL;
  if (ok && k_attn_prefill_takes(geometry->head_dim)) {
    kv->gather_tokens = (int64_t)geometry->n_pages * KV_PAGE_TOKENS;
    kv->gather_tokens = (kv->gather_tokens + CUDA_GATHER_TOKENS - 1) / CUDA_GATHER_TOKENS * CUDA_GATHER_TOKENS;
    if (kv->gather_tokens > GATHER_TOKENS_MAX) kv->gather_tokens = GATHER_TOKENS_MAX;
    const size_t bytes = (size_t)kv->gather_tokens * (size_t)geometry->n_kv_heads * (size_t)geometry->head_dim * 2;
    kv->gather_k = cuda_memory_alloc(backend, kv, bytes);
    kv->gather_v = cuda_memory_alloc(backend, kv, bytes);
    ok = kv->gather_k != NULL && kv->gather_v != NULL;
  }
  if (ok) ok = CUDA_CALL(backend, cudaStreamCreateWithFlags(&kv->send_stream, cudaStreamNonBlocking)) == SITS_OK &&
               CUDA_CALL(backend, cudaEventCreateWithFlags(&kv->written, cudaEventDisableTiming)) == SITS_OK;
  if (ok) ok = cuda_kept_create(kv);
  if (ok) ok = CUDA_CALL(backend, cudaStreamSynchronize(backend->stream)) == SITS_OK;
  if (!ok) {
    cuda_kv_destroy(kv);
    return sits_fail(err, backend->is_failed ? SITS_DEVICE : SITS_NOMEM, "cuda: %d pages of %llu bytes do not fit the device",
                     geometry->n_pages, (unsigned long long)page_bytes);
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
    cuda_kept_written(kv, copies[i].to_page);
    const enum sits_status status = CUDA_CALL(
        kv->backend, cudaMemcpyAsync(kv->pool + copies[i].to_page * kv->page_bytes, kv->pool + copies[i].from_page * kv->page_bytes,
                                     (size_t)kv->page_bytes, cudaMemcpyDeviceToDevice, kv->backend->stream));
    if (status != SITS_OK) return status;
  }
  return SITS_OK;
}

enum sits_status cuda_kv_read_page(struct backend_kv *kv, int32_t page, void *host)
{
  cuda_enter(kv->backend);
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  const enum sits_status status = CUDA_CALL(kv->backend, cudaMemcpyAsync(host, kv->pool + page * kv->page_bytes, (size_t)kv->page_bytes,
                                                                         cudaMemcpyDeviceToHost, kv->backend->stream));
  return status != SITS_OK ? status : CUDA_CALL(kv->backend, cudaStreamSynchronize(kv->backend->stream));
}

enum sits_status cuda_kv_write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  cuda_enter(kv->backend);
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  cuda_kept_written(kv, page);
  const enum sits_status status = CUDA_CALL(kv->backend, cudaMemcpyAsync(kv->pool + page * kv->page_bytes, host, (size_t)kv->page_bytes,
                                                                         cudaMemcpyHostToDevice, kv->backend->stream));
  return status != SITS_OK ? status : CUDA_CALL(kv->backend, cudaStreamSynchronize(kv->backend->stream));
}

void cuda_kv_expect(struct backend_kv *kv, const int32_t *pages, int32_t n)
{
  for (int32_t i = 0; i < n; i++)
    if (is_page(kv, pages[i])) cuda_kept_written(kv, pages[i]);
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
