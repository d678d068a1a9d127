/* KV codec f16: K transposed [D][P], then V [P][Dv], both half precision. Entry point: cpu_kv_f16. */
#include "backend/cpu/cpu_kv.h"

#define P KV_PAGE_TOKENS

/* Rounded up to whole cache lines. */
static size_t block_bytes(int32_t head_dim)
{
  const size_t n = (size_t)P * (size_t)(head_dim + cpu_kv_padded(head_dim)) * sizeof(uint16_t);
  return (n + 63) / 64 * 64;
}

static size_t values_at(int32_t head_dim) { return (size_t)head_dim * P * sizeof(uint16_t); }

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  (void)open;
  const int32_t D = kv->geometry.head_dim;
  uint16_t *column = (uint16_t *)block + slot, half[64];
  for (int32_t d = 0; d < D; d += 64) {
    const int32_t n = D - d < 64 ? D - d : 64;
    kv->ops->to_f16(k + d, n, half);
    for (int32_t i = 0; i < n; i++) column[(size_t)(d + i) * P] = half[i];
  }
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim;
  kv->ops->to_f16(v, D, (uint16_t *)block + (size_t)D * P + (size_t)slot * (size_t)kv->dv);
}

static void attend_k(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                     int32_t lds, float *scratch, const void *next)
{
  (void)scratch;
  kv->ops->qk_f16(q, ldq, rows, block, P, kv->geometry.head_dim, n, scores, lds, next);
}

static void attend_v(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                     float *scratch, const void *next)
{
  (void)scratch;
  const uint16_t *v = (const uint16_t *)block + (size_t)kv->geometry.head_dim * P;
  kv->ops->pv_f16(p, ldp, rows, v, kv->dv, n, acc, next);
}

const struct cpu_kv_codec cpu_kv_f16 = {
    .codec = KV_F16, .block_bytes = block_bytes, .values_at = values_at, .append_k = append_k, .append_v = append_v,
    .attend_k = attend_k, .attend_v = attend_v};
