/* KV codec int8: keys and values rotated per head (Hadamard), symmetric, one scale for each token and head.
 * Block: K [D][P] s8, V [P][Dv] s8, scales of K [P] f32, of V [P] f32. Entry point: cpu_kv_int8. */
#include "backend/cpu/cpu_kv.h"

#define P KV_PAGE_TOKENS

struct view { int8_t *k, *v; float *k_scales, *v_scales; };

static struct view view_of(const void *block, int32_t head_dim)
{
  unsigned char *at = (unsigned char *)(uintptr_t)block; /* views of const blocks are read only */
  struct view view = {.k_scales = (float *)(void *)at, .v_scales = (float *)(void *)(at + P * sizeof(float))};
  at += 2 * P * sizeof(float);
  view.k = (int8_t *)at;
  view.v = view.k + (size_t)head_dim * P;
  return view;
}

static size_t block_bytes(int32_t head_dim)
{
  const size_t n = 2 * P * sizeof(float) + (size_t)P * (size_t)(head_dim + cpu_kv_padded(head_dim));
  return (n + 63) / 64 * 64;
}

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  (void)open;
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  int8_t codes[CPU_KV_MAX_HEAD_DIM];
  view.k_scales[slot] = kv->ops->quantize_i8(k, D, codes);
  for (int32_t d = 0; d < D; d++) view.k[(size_t)d * P + (size_t)slot] = codes[d];
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  view.v_scales[slot] = kv->ops->quantize_i8(v, D, view.v + (size_t)slot * (size_t)kv->dv);
}

static void attend_k(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                     int32_t lds, float *scratch, const void *next)
{
  (void)next; /* a block is small, and expanded at once */
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  kv->ops->expand_i8_columns(view.k, view.k_scales, D, scratch);
  kv->ops->qk_f32(q, ldq, rows, scratch, P, D, n, scores, lds, NULL);
}

static void attend_v(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                     float *scratch, const void *next)
{
  (void)next;
  const struct view view = view_of(block, kv->geometry.head_dim);
  for (int32_t j = 0; j < n; j++)
    kv->ops->expand_i8_row(view.v + (size_t)j * (size_t)kv->dv, view.v_scales[j], kv->dv, scratch + (size_t)j * (size_t)kv->dv);
  kv->ops->pv_f32(p, ldp, rows, scratch, kv->dv, n, acc, NULL);
}

const struct cpu_kv_codec cpu_kv_int8 = {
    .codec = KV_INT8, .rotates_k = true, .rotates_v = true, .block_bytes = block_bytes, .append_k = append_k, .append_v = append_v,
    .attend_k = attend_k, .attend_v = attend_v};
