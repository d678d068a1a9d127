/* KV codec f32, the reference that the others are measured against: K transposed [D][P], then V [P][Dv]. Entry point: cpu_kv_f32. */
#include <string.h>

#include "backend/cpu/cpu_kv.h"

#define P KV_PAGE_TOKENS

/* Rounded up to whole cache lines. */
static size_t block_bytes(int32_t head_dim)
{
  const size_t n = (size_t)P * (size_t)(head_dim + cpu_kv_padded(head_dim)) * sizeof(float);
  return (n + 63) / 64 * 64;
}

static size_t values_at(int32_t head_dim) { return (size_t)head_dim * P * sizeof(float); }

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  (void)open;
  const int32_t D = kv->geometry.head_dim;
  float *column = (float *)block + slot;
  for (int32_t d = 0; d < D; d++) column[(size_t)d * P] = k[d];
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim;
  memcpy((float *)block + (size_t)D * P + (size_t)slot * (size_t)kv->dv, v, (size_t)D * sizeof *v);
}

static void attend_k(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                     int32_t lds, float *scratch, const void *next)
{
  (void)scratch;
  kv->ops->qk_f32(q, ldq, rows, block, P, kv->geometry.head_dim, n, scores, lds, next);
}

static void attend_v(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                     float *scratch, const void *next)
{
  (void)scratch;
  const float *v = (const float *)block + (size_t)kv->geometry.head_dim * P;
  kv->ops->pv_f32(p, ldp, rows, v, kv->dv, n, acc, next);
}

const struct cpu_kv_codec cpu_kv_f32 = {
    .codec = KV_F32, .block_bytes = block_bytes, .values_at = values_at, .append_k = append_k, .append_v = append_v,
    .attend_k = attend_k, .attend_v = attend_v};
