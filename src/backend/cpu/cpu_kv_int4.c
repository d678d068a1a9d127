/* KV codec int4, 4.5 bits a number. Keys: per channel over groups of 32 tokens, so that a channel's constant offset goes into the zero
 * point; a query reads its own group in f16 (cpu_kv_open.h). Values: rotated per head (Hadamard), per token over groups of 32 channels.
 * Both asymmetric: (q - zero) * scale. Entry point: cpu_kv_int4.
 *
 * Block: K nibbles [D][2][16], V nibbles [P][n][16] with n = Dv / 32 groups, scales of K [D][2], zeros of K, scales of V [P][n], zeros of
 * V. Measured on SmolLM2 (WikiText-2, 2,048 tokens) per-token groups of keys cost 3 to 5 % of perplexity where these cost 1. */
#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_kv_code.h"
#include "tensor/dequant.h"

#define P KV_PAGE_TOKENS
#define GROUP 32
#define GROUPS (P / GROUP)

struct view { uint8_t *k, *v, *k_scales, *v_scales; int8_t *k_zeros, *v_zeros; };

static size_t n_value_groups(int32_t head_dim) { return (size_t)cpu_kv_padded(head_dim) / GROUP; }

static struct view view_of(const void *block, int32_t head_dim)
{
  const size_t D = (size_t)head_dim, n = n_value_groups(head_dim);
  struct view view = {.k = (uint8_t *)(uintptr_t)block}; /* views of const blocks are read only */
  view.v = view.k + D * GROUPS * 16;
  view.k_scales = view.v + P * n * 16;
  view.k_zeros = (int8_t *)view.k_scales + D * GROUPS;
  view.v_scales = (uint8_t *)view.k_zeros + D * GROUPS;
  view.v_zeros = (int8_t *)view.v_scales + P * n;
  return view;
}

static size_t block_bytes(int32_t head_dim)
{
  const size_t n = ((size_t)head_dim * GROUPS + P * n_value_groups(head_dim)) * 18;
  return (n + 63) / 64 * 64;
}

static void pack(const uint8_t *codes, uint8_t *out)
{
  for (int i = 0; i < 16; i++) out[i] = (uint8_t)(codes[i] | codes[i + 16] << 4);
}

/* Keys of a group (n of its 32 tokens) from the open tile [D][32] into the block. */
static void fold(const struct backend_kv *kv, void *block, int32_t group, const uint16_t *open, int32_t n)
{
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  for (int32_t d = 0; d < D; d++) {
    const size_t at = (size_t)d * GROUPS + (size_t)group;
    float x[GROUP];
    uint8_t codes[GROUP];
    for (int32_t j = 0; j < n; j++) x[j] = half_to_float(open[d * GROUP + j]);
    kv->ops->quantize_u4(x, n, codes, &view.k_scales[at], &view.k_zeros[at]);
    pack(codes, view.k + at * 16);
  }
}

static void unfold(const struct backend_kv *kv, const void *block, int32_t group, uint16_t *open)
{
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  for (int32_t d = 0; d < D; d++) {
    const size_t at = (size_t)d * GROUPS + (size_t)group;
    float x[GROUP];
    kv->ops->expand_u4(view.k + at * 16, &view.k_scales[at], &view.k_zeros[at], 1, x);
    kv->ops->to_f16(x, GROUP, open + d * GROUP);
  }
}

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  cpu_kv_open_append(kv, open, slot % GROUP, k);
  if (slot % GROUP == GROUP - 1) fold(kv, block, slot / GROUP, open, GROUP);
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim;
  const size_t n = n_value_groups(D);
  const struct view view = view_of(block, D);
  for (size_t g = 0; g < n; g++) {
    const size_t at = (size_t)slot * n + g;
    const int32_t first = (int32_t)g * GROUP, length = D - first < GROUP ? D - first : GROUP;
    uint8_t codes[GROUP];
    kv->ops->quantize_u4(v + first, length, codes, &view.v_scales[at], &view.v_zeros[at]);
    pack(codes, view.v + at * 16);
  }
}

static void attend_k(const struct backend_kv *kv, const void *block, const float *q, int32_t ldq, int32_t rows, int32_t n, float *scores,
                     int32_t lds, float *scratch, const void *next)
{
  (void)next; /* a block is small, and expanded at once */
  const int32_t D = kv->geometry.head_dim;
  const struct view view = view_of(block, D);
  kv->ops->expand_u4(view.k, view.k_scales, view.k_zeros, D * GROUPS, scratch);
  kv->ops->qk_f32(q, ldq, rows, scratch, P, D, n, scores, lds, NULL);
}

static void attend_v(const struct backend_kv *kv, const void *block, const float *p, int32_t ldp, int32_t rows, int32_t n, float *acc,
                     float *scratch, const void *next)
{
  (void)next;
  const struct view view = view_of(block, kv->geometry.head_dim);
  kv->ops->expand_u4(view.v, view.v_scales, view.v_zeros, n * (kv->dv / GROUP), scratch);
  kv->ops->pv_f32(p, ldp, rows, scratch, kv->dv, n, acc, NULL);
}

const struct cpu_kv_codec cpu_kv_int4 = {
    .codec = KV_INT4, .rotates_v = true, .open_tokens = GROUP, .block_bytes = block_bytes, .append_k = append_k, .append_v = append_v,
    .attend_k = attend_k, .attend_v = attend_v, .fold = fold, .unfold = unfold};
