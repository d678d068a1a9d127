/* out[t][h] = softmax(q . K / sqrt(D)) V over the pages, for every codec and every head size up to 256: the path for models whose shapes
 * the
 * tensor-core kernels do not take.
 *
 * Arguments: struct k_attn_any (kernels.h); pages written by sits_k_rope_append.
 * Work split: one warp per (token, query head); lanes stride over the head's values; keys one after the other.
 * Numerics: f32; one pass with a running maximum. Tolerance 2e-3 of the norm (f16 out).
 * Cost: latency-bound, about 1 us per 4 keys: for tiny models and for checking the others only.
 * Links: twin ref_attention (tests/gpu/gpu_ref.c), test tests/gpu/test_attention.c.
 */
#include "common/kv_tile.cuh"
#include "common/launch.cuh"

namespace {
__global__ void __launch_bounds__(128) attn_any_kernel(const __grid_constant__ k_attn_any p) {
  grid_trigger();
  grid_wait();
  const k_kv_view &kv = p.kv;
  const int d = kv.head_dim, lane = threadIdx.x & 31, t = blockIdx.x * 4 + (threadIdx.x >> 5), head = blockIdx.y;
  if (t >= kv.n_tokens) return;
  if (kv.token_seq[t] < 0) return;
  const int seq = kv.token_seq[t], position = kv.positions[t], group = head / (kv.n_heads / kv.n_kv_heads);
  const __half *q = (const __half *)p.q + ((size_t)t * kv.n_heads + head) * d;
  const int tile_bytes = k_kv_tile_bytes(kv.codec, d);
  const float scale = rsqrtf((float)d);
  float x[8], o[8], m = -1e30f, l = 0.f;
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] = lane + j * 32 < d ? __half2float(q[lane + j * 32]) : 0.f, o[j] = 0.f;
  for (int key = kv.window > 0 ? max(0, position - kv.window + 1) : 0; key <= position; key++) {
    const int page = kv.block_table[(size_t)seq * kv.table_stride + key / K_PAGE_TOKENS], slot = key % K_PAGE_TOKENS;
    const uint8_t *tile = kv.pool + (size_t)page * kv.page_bytes + (size_t)(kv.layer * kv.n_kv_heads + group) * tile_bytes;
    float s = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (lane + j * 32 < d) s += x[j] * kv::load(tile, kv.codec, d, false, slot, lane + j * 32);
    s = warp_sum(s) * scale;
    const float top = fmaxf(m, s), f = expf(m - top), e = expf(s - top);
    m = top, l = l * f + e;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (lane + j * 32 < d) o[j] = o[j] * f + e * kv::load(tile, kv.codec, d, true, slot, lane + j * 32);
  }
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (lane + j * 32 < d) ((__half *)p.out)[((size_t)t * kv.n_heads + head) * d + lane + j * 32] = __float2half_rn(o[j] / l);
}
} // namespace

extern "C" int sits_k_attn_any(const struct k_attn_any *a, struct k_stream at) {
  if (a->kv.head_dim > 256) return cudaErrorInvalidValue;
  return launch_kernel(attn_any_kernel, dim3((a->kv.n_tokens + 3) / 4, a->kv.n_heads), dim3(128), 0, (cudaStream_t)at.stream, at.pdl, *a);
}
