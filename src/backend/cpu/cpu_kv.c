/* Page memory of the CPU backend; see cpu_kv.h. */
#include "backend/cpu/cpu_kv.h"

#include <string.h>

#include "backend/cpu/cpu_kv_code.h"
#include "base/mem.h"

const struct cpu_kv_codec *cpu_kv_codec_for(enum kv_codec codec)
{
  switch (codec) {
  case KV_F16: return &cpu_kv_f16;
  case KV_F32: return &cpu_kv_f32;
  case KV_INT8: return &cpu_kv_int8;
  case KV_INT4: return &cpu_kv_int4;
  case KV_FP4: return &cpu_kv_fp4;
  case KV_FP4_SPARSE: return &cpu_kv_fp4_sparse;
  default: return NULL;
  }
}

static bool is_sane(const struct kv_geometry *g)
{
  return g->n_layers > 0 && g->n_layers <= 4096 && g->n_kv_heads > 0 && g->n_kv_heads <= 4096 && g->head_dim > 0 &&
         g->head_dim <= CPU_KV_MAX_HEAD_DIM;
}

uint64_t cpu_kv_page_bytes(const struct kv_geometry *g)
{
  const struct cpu_kv_codec *codec = cpu_kv_codec_for(g->codec);
  if (codec == NULL || !is_sane(g)) return 0;
  return (uint64_t)codec->block_bytes(g->head_dim) * (uint64_t)g->n_kv_heads * (uint64_t)g->n_layers;
}

enum sits_status cpu_kv_create(const struct kv_geometry *geometry, const struct cpu_ops *ops, int32_t max_tokens, int32_t max_seqs,
                               struct backend_kv **out, struct sits_error *err)
{
  const struct cpu_kv_codec *codec = cpu_kv_codec_for(geometry->codec);
  if (!is_sane(geometry) || geometry->n_pages < 1) return sits_fail(err, SITS_INVALID_ARGUMENT, "kv: bad geometry");
  if (codec == NULL)
    return sits_fail(err, SITS_UNSUPPORTED, "kv: the CPU backend has no codec %s", kv_codec_name(geometry->codec));
  struct backend_kv *kv = mem_calloc(1, sizeof *kv);
  if (kv == NULL) return sits_fail(err, SITS_NOMEM, "kv: out of memory");
  kv->geometry = *geometry;
  kv->codec = codec;
  kv->ops = ops;
  kv->dv = cpu_kv_padded(geometry->head_dim);
  kv->block_bytes = codec->block_bytes(geometry->head_dim);
  kv->layer_bytes = kv->block_bytes * (size_t)geometry->n_kv_heads;
  kv->values_at = codec->values_at && cpu_isa_prefetches() ? codec->values_at(geometry->head_dim) : 0;
  kv->page_bytes = kv->layer_bytes * (size_t)geometry->n_layers;
  size_t n_bytes;
  /* Zeroed, and from the kernel: pages cost no memory before their first use. */
  if (!__builtin_mul_overflow(kv->page_bytes, (size_t)geometry->n_pages, &n_bytes)) kv->pages = mem_calloc(1, n_bytes + 64);
  if (kv->pages != NULL) cpu_advise_huge(kv->pages, n_bytes);
  cpu_kv_code_init();
  if (kv->pages == NULL || (codec->open_tokens > 0 && cpu_kv_open_create(kv, max_tokens, max_seqs, &kv->open) != SITS_OK)) {
    (void)sits_fail(err, SITS_NOMEM, "kv: no memory for %d pages of %zu bytes", (int)geometry->n_pages, kv->page_bytes);
    cpu_kv_destroy(kv);
    return SITS_NOMEM;
  }
  *out = kv;
  return SITS_OK;
}

void cpu_kv_destroy(struct backend_kv *kv)
{
  if (kv == NULL) return;
  cpu_kv_open_destroy(kv->open);
  mem_free(kv->pages);
  mem_free(kv);
}

static bool is_page(const struct backend_kv *kv, int32_t page) { return page >= 0 && page < kv->geometry.n_pages; }

enum sits_status cpu_kv_copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n)
{
  for (int32_t i = 0; i < n; i++)
    if (!is_page(kv, copies[i].from_page) || !is_page(kv, copies[i].to_page)) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++) {
    const int32_t from = copies[i].from_page, to = copies[i].to_page;
    if (from == to) continue;
    memcpy(cpu_kv_block(kv, to, 0, 0), cpu_kv_block(kv, from, 0, 0), kv->page_bytes);
    if (kv->open != NULL) cpu_kv_open_copied(kv, from, to);
  }
  return SITS_OK;
}

enum sits_status cpu_kv_copy_blocks(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n)
{
  const int64_t n_blocks = (int64_t)kv->geometry.n_pages * cpu_kv_columns(kv);
  for (int32_t i = 0; i < n; i++)
    if (copies[i][0] < 0 || copies[i][0] >= n_blocks || copies[i][1] < 0 || copies[i][1] >= n_blocks) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++)
    if (copies[i][0] != copies[i][1]) memcpy(cpu_kv_numbered(kv, copies[i][1]), cpu_kv_numbered(kv, copies[i][0]), kv->block_bytes);
  for (int32_t i = 0; i < n && kv->open != NULL; i++) /* an open group of the page's last owner must not be folded over them */
    cpu_kv_open_written(kv, copies[i][1] / cpu_kv_columns(kv));
  return SITS_OK;
}

enum sits_status cpu_kv_read_page(struct backend_kv *kv, int32_t page, void *host)
{
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  memcpy(host, cpu_kv_block(kv, page, 0, 0), kv->page_bytes);
  if (kv->open != NULL) cpu_kv_open_fold_into(kv, page, host);
  return SITS_OK;
}

enum sits_status cpu_kv_write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  if (!is_page(kv, page)) return SITS_INVALID_ARGUMENT;
  memcpy(cpu_kv_block(kv, page, 0, 0), host, kv->page_bytes);
  if (kv->open != NULL) cpu_kv_open_written(kv, page);
  return SITS_OK;
}

void cpu_kv_expect(struct backend_kv *kv, const int32_t *pages, int32_t n)
{
  for (int32_t i = 0; i < n && kv->open != NULL; i++)
    if (is_page(kv, pages[i])) cpu_kv_open_written(kv, pages[i]);
}

/* At once, by the calling thread: a whole page has no open group any more. */
enum sits_status cpu_kv_send(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n)
{
  if (from->page_bytes != to->page_bytes || from->codec != to->codec) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++)
    if (!is_page(from, copies[i].from_page) || !is_page(to, copies[i].to_page)) return SITS_INVALID_ARGUMENT;
  for (int32_t i = 0; i < n; i++)
    memcpy(cpu_kv_block(to, copies[i].to_page, 0, 0), cpu_kv_block(from, copies[i].from_page, 0, 0), from->page_bytes);
  return SITS_OK;
}

enum sits_status cpu_kv_sent(struct backend_kv *from)
{
  (void)from;
  return SITS_OK;
}
