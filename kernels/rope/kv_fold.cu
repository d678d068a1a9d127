/* Groups of keys that int4 and fp4 quantise together (32 tokens per channel; the 64 of a page around their mean): from f16 keys into pages,
 * and back.
 *
 * Arguments: struct k_kv_view (kernels.h); keys of the step in `fresh`, those of earlier steps in the slots of `open`.
 * Work split: one CTA of 256 threads folds the group of one KV head in one layer; two lanes quantise a channel (int4), a thread 16 channels
 *   of a token (fp4), then all build the tile's words. sits_k_kv_fold: grid.x takes eight tokens and the groups that begin among them,
 *   grid.y heads. sits_k_kv_close: a few CTAs an SM walk over sequences that ended a group, layers and heads.
 * Shared memory: keys [tokens][D] f16 and codes [tokens][D], 48 KiB at most (fp4, D = 256).
 * Numerics: the CPU's quantisers (kv_tile.cuh), the same bits for the same f16 keys; the mean is summed in f64, which is exact.
 * Limits: int4, fp4; D <= 256, even.
 * Cost: about 2,000 instructions a channel and group.
 * Links: twin the CPU's codecs, test tests/gpu/test_kv_pages.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {
constexpr int THREADS = 256, TOKENS_PER_CTA = 8, MOST_SHARED = 50 * 1024; /* the means, beside it, are static */

struct room {
  __half *keys;  /* [tokens][D] */
  uint8_t *codes; /* [tokens][D] */
};

SITS_DEV room room_of(uint8_t *smem, int tokens, int d) { return {(__half *)smem, smem + (size_t)tokens * d * 2}; }

/* Channel by channel, two lanes each: scale and zero point into the tile, codes into shared memory. */
SITS_DEV void quantise_channels(uint8_t *tile, const room &at, int d, int group, int n) {
  const int lane = threadIdx.x & 31, odd = lane & 1;
  for (int base = 0; base < d; base += THREADS / 2) {
    const int ch = base + threadIdx.x / 2, from = min(ch, d - 1);
    float x[16];
    uint32_t code[16], scale;
    int zero;
#pragma unroll
    for (int k = 0; k < 16; k++) x[k] = odd + 2 * k < n ? __half2float(at.keys[(odd + 2 * k) * d + from]) : 0.f;
    if (n == 32)
      kv::quantise_u4<2, 16, true>(x, n, lane, code, &scale, &zero);
    else
      kv::quantise_u4<2>(x, n, lane, code, &scale, &zero);
    if (ch >= d) continue;
#pragma unroll
    for (int k = 0; k < 16; k++) at.codes[(odd + 2 * k) * d + ch] = (uint8_t)code[k];
    const int to = kv::int4_k_scale(d, group * 32, ch);
    if (odd)
      tile[to + kv::k_zero_distance(d)] = (uint8_t)(zero + 128);
    else
      tile[to] = (uint8_t)scale;
  }
}

/* The mean of each channel, then 16 channels of a token at a time. means: [D] floats. */
SITS_DEV void quantise_tokens(uint8_t *tile, const room &at, float *means, int d, int n) {
  for (int ch = threadIdx.x; ch < d; ch += THREADS) {
    double even = 0., odd = 0.; /* exact, so in any order */
    for (int j = 0; j < n; j += 2) {
      even += (double)__half2float(at.keys[j * d + ch]);
      if (j + 1 < n) odd += (double)__half2float(at.keys[(j + 1) * d + ch]);
    }
    const __half mean = __float2half_rn((float)((even + odd) / n));
    *(__half *)(tile + kv::fp4_mean(d, ch)) = mean;
    means[ch] = __half2float(mean);
  }
  __syncthreads();
  const int groups = kv::n_groups(true, d);
  for (int i = threadIdx.x; i < K_PAGE_TOKENS * groups; i += THREADS) {
    const int token = i / groups, group = i % groups, ch = group * 16;
    float x[16];
    uint32_t code[16], scale;
#pragma unroll
    for (int k = 0; k < 16; k++)
      x[k] = token < n && ch + k < d ? __half2float(at.keys[token * d + ch + k]) - means[ch + k] : 0.f;
    kv::quantise_fp4<1>(x, code, &scale);
#pragma unroll
    for (int k = 0; k < 16; k++)
      if (ch + k < d) at.codes[token * d + ch + k] = (uint8_t)code[k];
    tile[kv::fp4_k_scale(d, token, group)] = (uint8_t)scale;
  }
}

/* Codes of `tokens` tokens from token `first` of the page on. */
SITS_DEV void store_keys(bool is_fp4, uint8_t *tile, const uint8_t *codes, int d, int first, int tokens) {
  if (!k_kv_has_fragments(d)) {
    for (int i = threadIdx.x; i < tokens * d / 2; i += THREADS)
      tile[first * (d >> 1) + i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    return;
  }
  for (int i = threadIdx.x; i < tokens * d / 8; i += THREADS) {
    const int block = i / (2 * d), r = i - block * 2 * d, lane = (r & 127) >> 2, step = (r >> 7) * 4 + (r & 3);
    const uint8_t *from = codes + (block * 16 + (lane >> 2)) * d + step * 16 + (lane & 3) * 4;
    const uint32_t rows[2] = {*(const uint32_t *)from, *(const uint32_t *)(from + 8 * d)};
    uint32_t word = 0;
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
      for (int h = 0; h < 2; h++) word = kv::insert_code(is_fp4, word, kv::place_slot(c, h), rows[h] >> (8 * c) & 15u);
    ((uint32_t *)tile)[(first >> 4) * 2 * d + i] = word;
  }
}

/* The CTA: n keys in at.keys -> group `group` of the tile. */
SITS_DEV void fold_group(bool is_fp4, uint8_t *tile, const room &at, int d, int group, int n) {
  __shared__ float means[256];
  __syncthreads();
  if (is_fp4)
    quantise_tokens(tile, at, means, d, n);
  else
    quantise_channels(tile, at, d, group, n);
  __syncthreads();
  store_keys(is_fp4, tile, at.codes, d, is_fp4 ? 0 : group * 32, is_fp4 ? K_PAGE_TOKENS : 32);
  __syncthreads();
}

/* The first n keys of an open tile. Eight halves lie together where the tile has fragments: pairs of channels of two tokens. */
SITS_DEV void fetch_open(const room &at, const __half *open, int d, int n) {
  if (k_kv_has_fragments(d)) {
    const int blocks = (n + 15) >> 4;
    for (int i = threadIdx.x; i < blocks * 2 * d; i += THREADS) {
      const uint4 x = __ldcg((const uint4 *)open + i);
      const int block = i / (2 * d), r = i - block * 2 * d, lane = r & 31, token = block * 16 + (lane >> 2);
      __half *to = at.keys + token * d + (r >> 5) * 16 + (lane & 3) * 4;
      *(uint2 *)to = make_uint2(x.x, x.z), *(uint2 *)(to + 8 * d) = make_uint2(x.y, x.w);
    }
    return;
  }
  for (int i = threadIdx.x; i < n * d; i += THREADS) at.keys[i] = __ldcg(open + i);
}

/* n rows of fresh keys -> shared memory from token `first` on, and to the open tile (or NULL). */
SITS_DEV void fetch_fresh(const room &at, __half *open, const __half *fresh, size_t row, int d, int first, int n) {
  const int pairs = d >> 1;
  for (int i = threadIdx.x; i < n * pairs; i += THREADS) {
    const int j = i / pairs, ch = (i - j * pairs) * 2;
    const uint32_t x = __ldcg((const uint32_t *)(fresh + (size_t)j * row + ch));
    *(uint32_t *)(at.keys + (first + j) * d + ch) = x;
    if (open) *(uint32_t *)(open + kv::open_at(d, first + j, ch)) = x;
  }
}

/* The same of a group of 32 or 64 tokens that has no slot and whole rows of 16 bytes: all loads in flight together. */
template <int D> SITS_DEV void fetch_group(const room &at, const __half *fresh, size_t row, int tokens) {
  constexpr int CHUNKS = D / 8, MOST = K_PAGE_TOKENS * CHUNKS / THREADS;
  uint4 x[MOST];
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    const int i = threadIdx.x + k * THREADS;
    if (i < tokens * CHUNKS) x[k] = __ldcg((const uint4 *)(fresh + (size_t)(i / CHUNKS) * row) + i % CHUNKS);
  }
#pragma unroll
  for (int k = 0; k < MOST; k++)
    if ((int)threadIdx.x + k * THREADS < tokens * CHUNKS) ((uint4 *)at.keys)[threadIdx.x + k * THREADS] = x[k];
}

/* Is token t the first of its group in this step? */
SITS_DEV bool begins_group(const k_kv_view &kv, int t) {
  const int s = t < kv.n_tokens ? kv.token_seq[t] : -1;
  return s >= 0 && (kv.positions[t] % k_kv_open_tokens(kv.codec) == 0 || t == kv.seq_start[s]);
}

__global__ void __launch_bounds__(THREADS, 2) kv_fold_kernel(const __grid_constant__ k_kv_view kv) {
  extern __shared__ __align__(16) uint8_t smem[];
  grid_trigger();
  const int tokens = k_kv_open_tokens(kv.codec), d = kv.head_dim, head = blockIdx.y, lane = threadIdx.x & 31;
  const room at = room_of(smem, tokens, d);
  uint32_t starts = __ballot_sync(~0u, lane < TOKENS_PER_CTA && begins_group(kv, blockIdx.x * TOKENS_PER_CTA + lane));
  grid_wait();
  for (; starts; starts &= starts - 1) {
    const int t0 = blockIdx.x * TOKENS_PER_CTA + __ffs(starts) - 1, s = kv.token_seq[t0], position = kv.positions[t0];
    const int before = position % tokens, n = min(kv.seq_start[s + 1] - t0, tokens - before);
    const bool is_complete = before + n == tokens, is_first = t0 == kv.seq_start[s];
    const __half *fresh = (const __half *)kv.fresh + ((size_t)t0 * kv.n_kv_heads + head) * d;
    const size_t row = (size_t)kv.n_kv_heads * d;
    if (n < tokens) { /* else the group begins and ends here */
      __half *open = kv::open_tile(kv, kv.open_slot[2 * s + !is_first], kv.layer, head);
      if (is_complete) fetch_open(at, open, d, before);
      __syncthreads(); /* whole blocks are fetched, those keys that come now among them */
      fetch_fresh(at, open, fresh, row, d, before, n);
      if (!is_complete) {
        __syncthreads();
        continue;
      }
    } else if (d == 128)
      fetch_group<128>(at, fresh, row, tokens);
    else if (d == 64)
      fetch_group<64>(at, fresh, row, tokens);
    else
      fetch_fresh(at, NULL, fresh, row, d, 0, n);
    const int page = kv.block_table[(size_t)s * kv.table_stride + position / K_PAGE_TOKENS];
    fold_group(kv.codec == K_KV_FP4, kv::page_tile(kv, page, kv.layer, head), at, d, position % K_PAGE_TOKENS / tokens, tokens);
  }
}

__global__ void __launch_bounds__(THREADS, 2) kv_close_kernel(const __grid_constant__ k_kv_view kv) {
  extern __shared__ __align__(16) uint8_t smem[];
  grid_trigger();
  const int tokens = k_kv_open_tokens(kv.codec), d = kv.head_dim, lane = threadIdx.x & 31, each = kv.n_layers * kv.n_kv_heads;
  const room at = room_of(smem, tokens, d);
  int first = 0; /* work items of the sequences before `base` */
  grid_wait();
  for (int base = 0; base < kv.n_seqs; base += 32) {
    const int s = base + lane, len = s < kv.n_seqs && kv.seq_start[s + 1] - kv.seq_start[s] == 1 ? kv.kv_len[s] : 0;
    const uint32_t closing = __ballot_sync(~0u, len > 0 && len % tokens == 0);
    const int n = __popc(closing) * each;
    for (int i = (int)((blockIdx.x + gridDim.x - first % gridDim.x) % gridDim.x); i < n; i += gridDim.x) {
      const int seq = base + __fns(closing, 0, i / each + 1), layer = i % each / kv.n_kv_heads, head = i % kv.n_kv_heads;
      const int position = kv.kv_len[seq] - 1;
      const int page = kv.block_table[(size_t)seq * kv.table_stride + position / K_PAGE_TOKENS];
      fetch_open(at, kv::open_tile(kv, kv.open_slot[2 * seq + 1], layer, head), d, tokens);
      fold_group(kv.codec == K_KV_FP4, kv::page_tile(kv, page, layer, head), at, d, position % K_PAGE_TOKENS / tokens, tokens);
    }
    first += n;
  }
}

__global__ void __launch_bounds__(THREADS, 2) kv_fold_slot_kernel(const __grid_constant__ k_kv_view kv, int slot, int page, int group,
                                                                  int n) {
  extern __shared__ __align__(16) uint8_t smem[];
  const int layer = blockIdx.x, head = blockIdx.y, d = kv.head_dim;
  const room at = room_of(smem, k_kv_open_tokens(kv.codec), d);
  grid_trigger();
  grid_wait();
  fetch_open(at, kv::open_tile(kv, slot, layer, head), d, n);
  fold_group(kv.codec == K_KV_FP4, kv::page_tile(kv, page, layer, head), at, d, group, n);
}

__global__ void __launch_bounds__(THREADS, 2) kv_unfold_slot_kernel(const __grid_constant__ k_kv_view kv, int page, int group, int slot) {
  const int layer = blockIdx.x, head = blockIdx.y, d = kv.head_dim, tokens = k_kv_open_tokens(kv.codec);
  grid_trigger();
  grid_wait();
  const uint8_t *tile = kv::page_tile(kv, page, layer, head);
  __half *open = kv::open_tile(kv, slot, layer, head);
  for (int i = threadIdx.x; i < tokens * d; i += THREADS) {
    const float x = kv::load(tile, kv.codec, d, false, group * tokens + i / d, i % d);
    open[kv::open_at(d, i / d, i % d)] = __float2half_rn(fminf(fmaxf(x, -65504.f), 65504.f));
  }
}

size_t smem_bytes(const k_kv_view &kv) { return (size_t)k_kv_open_tokens(kv.codec) * kv.head_dim * 3; }
bool takes(const k_kv_view &kv) { return k_kv_has_nibbles(kv.codec) && kv.head_dim <= 256 && kv.head_dim % 2 == 0; }
} // namespace

extern "C" int sits_k_kv_fold_init(void) {
  int e = prepare_kernel(kv_fold_kernel, MOST_SHARED);
  if (!e) e = prepare_kernel(kv_close_kernel, MOST_SHARED);
  return e ? e : prepare_kernel(kv_fold_slot_kernel, MOST_SHARED);
}

extern "C" int sits_k_kv_fold(const struct k_kv_view *kv, struct k_stream at) {
  if (!takes(*kv)) return cudaErrorInvalidValue;
  return launch_kernel(kv_fold_kernel, dim3((kv->n_tokens + TOKENS_PER_CTA - 1) / TOKENS_PER_CTA, kv->n_kv_heads), dim3(THREADS),
                       smem_bytes(*kv), (cudaStream_t)at.stream, at.pdl, *kv);
}

extern "C" int sits_k_kv_close(const struct k_kv_view *kv, int32_t n_sm, struct k_stream at) {
  if (!takes(*kv)) return cudaErrorInvalidValue;
  return launch_kernel(kv_close_kernel, dim3(n_sm * 2), dim3(THREADS), smem_bytes(*kv), (cudaStream_t)at.stream, at.pdl, *kv);
}

extern "C" int sits_k_kv_fold_slot(const struct k_kv_view *kv, int32_t slot, int32_t page, int32_t group, int32_t n, struct k_stream at) {
  if (!takes(*kv) || n < 1) return cudaErrorInvalidValue;
  return launch_kernel(kv_fold_slot_kernel, dim3(kv->n_layers, kv->n_kv_heads), dim3(THREADS), smem_bytes(*kv), (cudaStream_t)at.stream,
                       at.pdl, *kv, slot, page, group, n);
}

extern "C" int sits_k_kv_unfold_slot(const struct k_kv_view *kv, int32_t page, int32_t group, int32_t slot, struct k_stream at) {
  if (!takes(*kv)) return cudaErrorInvalidValue;
  return launch_kernel(kv_unfold_slot_kernel, dim3(kv->n_layers, kv->n_kv_heads), dim3(THREADS), 0, (cudaStream_t)at.stream, at.pdl, *kv,
                       page, group, slot);
}
