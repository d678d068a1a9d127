/* out[t][h] = softmax(q . K / sqrt(D)) V over the pages, for every codec and every head size up to 256: the path for models whose shapes
 * the tensor-core kernels do not take. Also over what is left of pages, and measuring what blocks get (sparse_fp4.cu does it fast).
 *
 * Arguments: struct k_attn_any (kernels.h); pages written by sits_k_rope_append and sits_k_kv_fold. A query's own group comes from `fresh`
 *   and, where it began in an earlier step, from its slot.
 * Work split: one warp per (token, query head); lanes stride over the head's values; keys one after the other. Blocks that are measured
 *   are read a second time, when the sum is known.
 * Numerics: f32; one pass with a running maximum. Tolerance 2e-3 of the norm (f16 out).
 * Cost: latency-bound, about 1 us per 4 keys: for tiny models and for checking the others only.
 * Links: twin ref_attention (tests/gpu/gpu_ref.c), test tests/gpu/test_attention.c.
 */
#include "common/kv_blocks.cuh"
#include "common/launch.cuh"

namespace {
constexpr int MOST_D = 256;

/* Where a query's own group lies: keys from position `own` on in the slot (before first_new) and in fresh. */
struct own_group {
  const __half *open, *fresh;
  int own, first_new;
};

SITS_DEV own_group own_of(const k_kv_view &kv, int seq, int position, int head) {
  const int tokens = k_kv_open_tokens(kv.codec), begin = kv.seq_start[seq], first_new = kv.kv_len[seq] - (kv.seq_start[seq + 1] - begin);
  own_group g = {NULL, NULL, INT_MAX, first_new};
  if (tokens == 0) return g;
  g.own = position / tokens * tokens;
  if (g.own < first_new) g.open = kv::open_tile(kv, kv.open_slot[2 * seq], kv.layer, head);
  g.fresh = (const __half *)kv.fresh + ((size_t)begin * kv.n_kv_heads + head) * kv.head_dim;
  return g;
}

SITS_DEV float load_key(const k_kv_view &kv, const own_group &g, const uint8_t *tile, int key, int e) {
  const int d = kv.head_dim;
  if (key < g.own) return kv::load(tile, kv.codec, d, false, key % K_PAGE_TOKENS, e);
  if (key < g.first_new) return __half2float(g.open[kv::open_at(d, key - g.own, e)]);
  return __half2float(g.fresh[(size_t)(key - g.first_new) * kv.n_kv_heads * d + e]);
}

/* A warp's query: value lane + 32 j of its head in x[j]. */
struct query {
  int seq, row0, position, head; /* head: the KV head */
  float x[8], scale;
  own_group own;
};

SITS_DEV float score(const k_kv_view &kv, const query &q, const uint8_t *tile, int key, int lane) {
  float s = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (lane + j * 32 < kv.head_dim) s += q.x[j] * load_key(kv, q.own, tile, key, lane + j * 32);
  return warp_sum(s) * q.scale;
}

/* The squares of attention to the blocks that are measured; m, l: largest score, sum beside it. */
SITS_DEV void give(const k_attn_any &p, const query &q, int first, float m, float l, int lane) {
  const k_kv_view &kv = p.kv;
  const int end = kv::measured_end(p.blocks, q.row0, q.seq, q.position);
  for (int entry = first / K_PAGE_TOKENS; entry < end; entry++) {
    const uint8_t *tile = kv::entry_tile(kv, p.blocks, q.row0, q.seq, entry, q.head);
    if (!tile) continue;
    float sum = 0.f;
    for (int key = max(first, entry * K_PAGE_TOKENS); key < (entry + 1) * K_PAGE_TOKENS; key++) {
      const float a = expf(score(kv, q, tile, key, lane) - m) / l;
      sum += a * a;
    }
    const unsigned long long units = (unsigned long long)fmaf(sum, K_GIVEN_ONE, 0.5f);
    if (lane == 0 && units > 0) atomicAdd(&p.blocks.given[kv::block_at(kv, q.row0, entry, q.head)], units);
  }
}

__global__ void __launch_bounds__(128, 4) attn_any_kernel(const __grid_constant__ k_attn_any p) {
  grid_trigger();
  grid_wait();
  const k_kv_view &kv = p.kv;
  const int d = kv.head_dim, lane = threadIdx.x & 31, t = blockIdx.x * 4 + (threadIdx.x >> 5), head = blockIdx.y;
  if (t >= kv.n_tokens) return;
  if (kv.token_seq[t] < 0) return;
  query q;
  q.seq = kv.token_seq[t], q.position = kv.positions[t], q.head = head / (kv.n_heads / kv.n_kv_heads), q.scale = rsqrtf((float)d);
  q.row0 = p.blocks.row0 ? p.blocks.row0[q.seq] : -1;
  q.own = own_of(kv, q.seq, q.position, q.head);
  const __half *from = (const __half *)p.q + ((size_t)t * kv.n_heads + head) * d;
  const int first = kv.window > 0 ? max(0, q.position - kv.window + 1) : 0;
  float o[8], m = -1e30f, l = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++) q.x[j] = lane + j * 32 < d ? __half2float(from[lane + j * 32]) : 0.f, o[j] = 0.f;
  for (int entry = first / K_PAGE_TOKENS; entry <= q.position / K_PAGE_TOKENS; entry++) {
    const uint8_t *tile = kv::entry_tile(kv, p.blocks, q.row0, q.seq, entry, q.head);
    if (!tile) continue;
    const int end = min(q.position + 1, (entry + 1) * K_PAGE_TOKENS);
    for (int key = max(first, entry * K_PAGE_TOKENS); key < end; key++) {
      const float s = score(kv, q, tile, key, lane), top = fmaxf(m, s), f = expf(m - top), e = expf(s - top);
      m = top, l = l * f + e;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (lane + j * 32 < d) o[j] = o[j] * f + e * kv::load(tile, kv.codec, d, true, key % K_PAGE_TOKENS, lane + j * 32);
    }
  }
  if (q.row0 >= 0) give(p, q, first, m, l, lane);
  __shared__ float rows[4][MOST_D];
  float *row = rows[threadIdx.x >> 5];
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (lane + j * 32 < d) row[lane + j * 32] = o[j] / l;
  __syncwarp();
  if (k_kv_rotates_values(kv.codec)) kv::hadamard_any(row, d, lane);
  for (int e = lane; e < d; e += 32) ((__half *)p.out)[((size_t)t * kv.n_heads + head) * d + e] = __float2half_rn(row[e]);
}
} // namespace

extern "C" int sits_k_attn_any(const struct k_attn_any *a, struct k_stream at) {
  if (a->kv.head_dim > MOST_D) return cudaErrorInvalidValue;
  return launch_kernel(attn_any_kernel, dim3((a->kv.n_tokens + 3) / 4, a->kv.n_heads), dim3(128), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
