/* Pages of some sequences -> f16 keys and values side by side, for the attention of steps that bring many tokens; with int4 and fp4 also
 * the keys of the groups that the step writes, as they were before quantisation (a query sees its own group so).
 *
 * Arguments: struct k_kv_gather (kernels.h).
 * Work split: a CTA takes 16 tokens of a page of one KV head; a thread a word of eight values at a time, or one value in other codecs and
 *   head sizes.
 * Numerics: rounded to f16. Rows behind the sequence's end are zeros.
 * Cost: bound by memory.
 * Links: twin the CPU's codecs, tests tests/gpu/test_attention.c, test_kv_pages.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {
/* Element index of (row, channel) of one KV head's gathered keys or values. */
SITS_DEV size_t gathered_at(bool is_tiled, int d, size_t row, int ch) {
  if (!is_tiled) return row * d + ch;
  const size_t tile = row >> 7;
  const int r = (int)row & 127;
  return ((tile * (d >> 6) + (ch >> 6)) * 128 + r) * 64 + (((ch >> 3 & 7) ^ (r & 7)) << 3) + (ch & 7);
}

SITS_DEV uint32_t word_at(const uint8_t *tile, int offset) { return *(const uint32_t *)(tile + offset); }
SITS_DEV uint32_t byte_of(uint32_t word, int i) { return word >> (i * 8) & 255u; }

/* Keys of the page's word i: four channels of two tokens. */
template <bool FP4> SITS_DEV void gather_keys(const k_kv_gather &p, const uint8_t *tile, __half *k, size_t row0, int i, int n) {
  const int d = p.kv.head_dim, block = i / (2 * d), r = i - block * 2 * d, lane = (r & 127) >> 2, step = (r >> 7) * 4 + (r & 3);
  const int g = lane >> 2, ch = step * 16 + (lane & 3) * 4;
  const uint32_t word = ((const uint32_t *)tile)[i];
  const int at = FP4 ? kv::fp4_k_scale(d, block * 16 + g, step & ~1) : kv::int4_k_scale(d, block * 16, ch);
  const uint32_t scales = word_at(tile, at), zeros = FP4 ? 0 : word_at(tile, at + kv::k_zero_distance(d));
  const uint2 mean = FP4 ? *(const uint2 *)(tile + kv::fp4_mean(d, ch)) : make_uint2(0, 0);
  const float2 m01 = half2_to_float2(mean.x), m23 = half2_to_float2(mean.y);
  const float means[4] = {m01.x, m01.y, m23.x, m23.y};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = block * 16 + g + 8 * h;
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const uint32_t q = kv::extract_code(FP4, word, kv::place_slot(c, h));
      const int byte = FP4 ? h * 2 + (step & 1) : (c & 1) * 2 + (c >> 1);
      const float scale = kv::scale_value(byte_of(scales, byte));
      x[c] = FP4 ? fmaf(kv::e2m1_value(q), scale, means[c]) : (float)((int)q - (int)byte_of(zeros, byte) + 128) * scale;
      if (token >= n) x[c] = 0.f;
    }
    *(uint2 *)(k + gathered_at(p.is_tiled, d, row0 + token, ch)) = make_uint2(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]));
  }
}

/* Values of word i: two channels of four tokens. */
template <bool FP4> SITS_DEV void gather_values(const k_kv_gather &p, const uint8_t *tile, __half *v, size_t row0, int i, int n) {
  const int d = p.kv.head_dim, block = i / (2 * d), r = i - block * 2 * d, lane = (r & 127) >> 2, step = (r >> 7) * 4 + (r & 3);
  const int g = lane >> 2, t = lane & 3;
  const uint32_t word = ((const uint32_t *)tile)[8 * d + i];
  const int at = kv::v_scale(FP4, d, block * 16 + 2 * t, FP4 ? step : step >> 1);
  const uint32_t scales = word_at(tile, at), zeros = FP4 ? 0 : word_at(tile, at + kv::v_zero_distance(d));
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int tk = 2 * t + (c & 1) + (c >> 1) * 8, token = block * 16 + tk, byte = kv::token_byte(tk);
    const float scale = kv::scale_value(byte_of(scales, byte));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t q = kv::extract_code(FP4, word, kv::place_slot(c, h));
      const float x = FP4 ? kv::e2m1_value(q) * scale : (float)((int)q - (int)byte_of(zeros, byte) + 128) * scale;
      v[gathered_at(p.is_tiled, d, row0 + token, step * 16 + g + 8 * h)] = __float2half_rn(token < n ? x : 0.f);
    }
  }
}

constexpr int PARTS = 4, PART_TOKENS = K_PAGE_TOKENS / PARTS; /* of a page, a CTA each */

/* Keys of part `part` of page `index` in f16, where the page lies in a tile of the groups that the step writes. */
SITS_DEV void gather_exact(const k_kv_gather &p, int s, int head, int index, int part, int len) {
  const k_kv_view &kv = p.kv;
  const int d = kv.head_dim, tokens = k_kv_open_tokens(kv.codec), begin = kv.seq_start[s], first_new = len - (kv.seq_start[s + 1] - begin);
  const int own = first_new / tokens * tokens, tile0 = own / 128 * 128;
  if (index * K_PAGE_TOKENS < tile0) return;
  __half *to = (__half *)p.exact + (size_t)head * p.exact_capacity * d;
  const size_t row0 = k_kv_exact_row0(kv.seq_start, p.seq0, s) - tile0;
  const __half *open = first_new > own ? kv::open_tile(kv, kv.open_slot[2 * s], kv.layer, head) : NULL;
  for (int i = threadIdx.x; i < PART_TOKENS * d / 8; i += blockDim.x) {
    const int position = index * K_PAGE_TOKENS + part * PART_TOKENS + i / (d / 8), ch = i % (d / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (position >= first_new && position < len)
      x = *(const uint4 *)((const __half *)kv.fresh + ((size_t)(begin + position - first_new) * kv.n_kv_heads + head) * d + ch);
    else if (position >= own && position < first_new) {
      const int j = position - own; /* channels in pairs, two words apart */
      x.x = *(const uint32_t *)(open + kv::open_at(d, j, ch)), x.y = *(const uint32_t *)(open + kv::open_at(d, j, ch + 2));
      x.z = *(const uint32_t *)(open + kv::open_at(d, j, ch + 4)), x.w = *(const uint32_t *)(open + kv::open_at(d, j, ch + 6));
    }
    *(uint4 *)(to + gathered_at(p.is_tiled, d, row0 + position, ch)) = x;
  }
}

__global__ void __launch_bounds__(256) kv_gather_kernel(const __grid_constant__ k_kv_gather p) {
  grid_trigger();
  grid_wait();
  const k_kv_view &kv = p.kv;
  const int s = p.seq0 + blockIdx.z, head = blockIdx.y, len = kv.kv_len[s], d = kv.head_dim;
  const int index = p.first_page + (int)blockIdx.x / PARTS, part = (int)blockIdx.x % PARTS;
  const int n = len - index * K_PAGE_TOKENS, n_pages = (len + K_PAGE_TOKENS - 1) / K_PAGE_TOKENS;
  if (index >= (p.is_tiled ? (n_pages + 1) & ~1 : n_pages)) return;
  const int n_new = kv.seq_start[s + 1] - kv.seq_start[s];
  if (n_new == 0 || (p.skip_single && n_new == 1)) return;
  const size_t base = (size_t)head * p.capacity * d, row0 = (p.offset ? p.offset[s] : 0) + index * K_PAGE_TOKENS;
  __half *k = (__half *)p.k + base, *v = (__half *)p.v + base;
  if (k_kv_has_nibbles(kv.codec)) gather_exact(p, s, head, index, part, len);
  if (n <= 0) { /* the second half of the last tile */
    for (int i = part * PART_TOKENS * d + threadIdx.x; i < (part + 1) * PART_TOKENS * d; i += blockDim.x) {
      const size_t at = gathered_at(true, d, row0 + i / d, i % d);
      k[at] = v[at] = __float2half_rn(0.f);
    }
    return;
  }
  const int page = kv.block_table[(size_t)s * kv.table_stride + index];
  const uint8_t *tile = kv::page_tile(kv, page, kv.layer, head);
  if (k_kv_has_nibbles(kv.codec) && k_kv_has_fragments(d)) {
    for (int i = part * 2 * d + threadIdx.x; i < (part + 1) * 2 * d; i += blockDim.x) { /* a block of 16 tokens */
      if (kv.codec == K_KV_FP4)
        gather_keys<true>(p, tile, k, row0, i, n), gather_values<true>(p, tile, v, row0, i, n);
      else
        gather_keys<false>(p, tile, k, row0, i, n), gather_values<false>(p, tile, v, row0, i, n);
    }
    return;
  }
  for (int i = part * PART_TOKENS * d + threadIdx.x; i < (part + 1) * PART_TOKENS * d; i += blockDim.x) {
    const int token = i / d, e = i % d;
    const size_t at = gathered_at(p.is_tiled, d, row0 + token, e);
    k[at] = __float2half_rn(token < n ? kv::load(tile, kv.codec, d, false, token, e) : 0.f);
    v[at] = __float2half_rn(token < n ? kv::load(tile, kv.codec, d, true, token, e) : 0.f);
  }
}
} // namespace

extern "C" int sits_k_kv_gather(const struct k_kv_gather *a, struct k_stream at) {
  if (k_kv_has_nibbles(a->kv.codec) && a->exact == NULL) return cudaErrorInvalidValue;
  if (k_kv_has_nibbles(a->kv.codec) && a->kv.head_dim % 8) return cudaErrorInvalidValue;
  return launch_kernel(kv_gather_kernel, dim3(PARTS * (a->is_tiled ? a->max_pages + 1 : a->max_pages), a->kv.n_kv_heads, a->n_seqs),
                       dim3(256), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
