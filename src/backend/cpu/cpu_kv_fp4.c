/* KV codec fp4 (e2m1 with block scales), 4.6 bits a number. Keys: rotated per head, the page's mean key removed per channel and kept in
 * f16, the rest in groups of 16 channels of a token; a query reads its own page in f16 (cpu_kv_open.h). Values: rotated, groups of 16
 * channels. Entry points: cpu_kv_fp4, and cpu_kv_fp4_sparse, the same bytes for sequences that may lose blocks.
 *
 * Block: K nibbles [D][P/2], V nibbles [P][n][8] with n = Dv / 16 groups, means of K [D] f16, scales of K [n][P], scales of V [P][n]. */
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_kv_code.h"
#include "tensor/dequant.h"

#define P KV_PAGE_TOKENS
#define GROUP 16

struct view { uint8_t *k, *v, *k_scales, *v_scales; uint16_t *means; };

static size_t n_groups(int32_t head_dim) { return (size_t)cpu_kv_padded(head_dim) / GROUP; }

static struct view view_of(const void *block, int32_t head_dim)
{
  const size_t D = (size_t)head_dim, n = n_groups(head_dim);
  struct view view = {.k = (uint8_t *)(uintptr_t)block}; /* views of const blocks are read only */
  view.v = view.k + D * (P / 2);
  view.means = (uint16_t *)(void *)(view.v + P * n * 8);
  view.k_scales = (uint8_t *)(view.means + D);
  view.v_scales = view.k_scales + n * P;
  return view;
}

static size_t block_bytes(int32_t head_dim)
{
  const size_t D = (size_t)head_dim, n = n_groups(head_dim);
  const size_t total = D * (P / 2) + P * n * 8 + D * 2 + 2 * n * P;
  return (total + 63) / 64 * 64;
}

/* The page's keys (n of its 64 tokens) from the open tile [D][P]; group is always 0. */
static void fold(const struct backend_kv *kv, void *block, int32_t group, const uint16_t *open, int32_t n)
{
  (void)group;
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  for (int32_t d0 = 0; d0 < D; d0 += GROUP) {
    const int32_t length = D - d0 < GROUP ? D - d0 : GROUP;
    float x[GROUP][P], mean[GROUP];
    uint8_t codes[P][GROUP];
    for (int32_t i = 0; i < length; i++) {
      double sum = 0; /* of f16 numbers: exact, so that the mean depends on no order */
      for (int32_t j = 0; j < n; j++) sum += (double)(x[i][j] = half_to_float(open[(d0 + i) * P + j]));
      view.means[d0 + i] = float_to_half((float)(sum / n));
      mean[i] = half_to_float(view.means[d0 + i]);
    }
    for (int32_t j = 0; j < P; j++) {
      float rest[GROUP];
      for (int32_t i = 0; i < length; i++) rest[i] = j < n ? x[i][j] - mean[i] : 0;
      kv->ops->quantize_fp4(rest, length, codes[j], &view.k_scales[d0 / GROUP * P + j]);
    }
    for (int32_t i = 0; i < length; i++)
      for (int32_t j = 0; j < P / 2; j++) view.k[(d0 + i) * (P / 2) + j] = (uint8_t)(codes[j][i] | codes[j + P / 2][i] << 4);
  }
}

static void expand_keys(const struct backend_kv *kv, const void *block, float *out)
{
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  float means[CPU_KV_MAX_HEAD_DIM];
  for (int32_t d = 0; d < D; d++) means[d] = half_to_float(view.means[d]);
  kv->ops->expand_fp4_columns(view.k, view.k_scales, means, D, out);
}

static void unfold(const struct backend_kv *kv, const void *block, int32_t group, uint16_t *open)
{
  (void)group;
  float expanded[CPU_KV_MAX_HEAD_DIM * P]; /* 64 KiB of stack on a cold path */
  expand_keys(kv, block, expanded);
  kv->ops->to_f16(expanded, kv->geometry.head_dim * P, open);
}

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  cpu_kv_open_append(kv, open, slot, k);
  if (slot == P - 1) fold(kv, block, 0, open, P);
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim;
  const size_t n = n_groups(D);
  const struct view view = view_of(block, D);
  for (size_t g = 0; g < n; g++) {
    const size_t at = (size_t)slot * n + g;
    const int32_t first = (int32_t)g * GROUP, length = D - first < GROUP ? D - first : GROUP;
    uint8_t codes[GROUP];
    kv->ops->quantize_fp4(v + first, length > 0 ? length : 0, codes, &view.v_scales[at]);
    for (int i = 0; i < 8; i++) view.v[at * 8 + (size_t)i] = (uint8_t)(codes[i] | codes[i + 8] << 4);
  }
}

static void attend_k(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                     int32_t lds, float *scratch, const void *next)
{
  (void)next; /* a block is small, and expanded at once */
  expand_keys(kv, block, scratch);
  kv->ops->qk_f32(q, ldq, rows, scratch, P, kv->geometry.head_dim, n, scores, lds, NULL);
}

static void attend_v(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                     float *scratch, const void *next)
{
  (void)next;
  const struct view view = view_of(block, kv->geometry.head_dim);
  kv->ops->expand_fp4_groups(view.v, view.v_scales, n * (kv->dv / GROUP), scratch);
  kv->ops->pv_f32(p, ldp, rows, scratch, kv->dv, n, acc, NULL);
}

#define FP4_FORMAT                                                                                                                 \
  .rotates_k = true, .rotates_v = true, .open_tokens = P, .block_bytes = block_bytes, .append_k = append_k, .append_v = append_v,     \
  .attend_k = attend_k, .attend_v = attend_v, .fold = fold, .unfold = unfold

const struct cpu_kv_codec cpu_kv_fp4 = {.codec = KV_FP4, FP4_FORMAT};
const struct cpu_kv_codec cpu_kv_fp4_sparse = {.codec = KV_FP4_SPARSE, .is_sparse = true, FP4_FORMAT};
