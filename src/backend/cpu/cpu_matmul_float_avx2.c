/* Matrix multiply with float weights for AVX2: 8 rows to a vector, k in order, one FMA chain for each row and token.
 *
 * With one or two tokens several row tiles run side by side, so that the FMA latency of a chain does not bound the speed; with more, the
 * tokens are the independent chains. F16 and BF16 are widened on load. Up to 12 tokens share a loaded weight. */
#include "backend/cpu/cpu_matmul_avx2.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define W 8

INLINE __m256 load_weights(enum sits_dtype dtype, const uint8_t *tile, int64_t k)
{
  if (dtype == SITS_DTYPE_F32) return _mm256_loadu_ps((const float *)(tile + k * W * 4));
  __m128i h = _mm_loadu_si128((const __m128i *)(tile + k * W * 2));
  return dtype == SITS_DTYPE_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* nr row tiles times nt tokens from act tile `first` on (n tokens to a tile, at `act_tile` bytes); n_rows and n_tokens are real. */
INLINE void block(enum sits_dtype dtype, int nr, int nt, int n, const struct cpu_weight *w, const uint8_t *tile, const uint8_t *first,
                  size_t act_tile, int32_t n_tokens, int64_t n_rows, float *y, int64_t ldy)
{
  __m256 sum[4][12];
  for (int i = 0; i < nr; i++)
    for (int t = 0; t < nt; t++) sum[i][t] = _mm256_setzero_ps();
  for (int64_t k = 0; k < w->k; k++) {
    __m256 row[4];
    for (int i = 0; i < nr; i++) row[i] = load_weights(dtype, tile + (size_t)i * w->tile_bytes, k);
    for (int t = 0; t < nt; t++) {
      __m256 x = _mm256_set1_ps(((const float *)(first + act_tile * (size_t)(t / n)))[k * n + t % n]);
      for (int i = 0; i < nr; i++) sum[i][t] = _mm256_fmadd_ps(row[i], x, sum[i][t]);
    }
  }
  for (int i = 0; i < nr; i++)
    for (int t = 0; t < nt; t++) {
      int left = n_rows - i * W > W ? W : (int)(n_rows - i * W);
      __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      if (t < n_tokens) _mm256_maskstore_ps(y + t * ldy + i * W, mask, sum[i][t]);
    }
}

INLINE void rows_of(enum sits_dtype dtype, const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1,
                    float *y, int64_t ldy)
{
  const int n = cpu_act_tile(n_tokens);
  const size_t act_tile = cpu_act_tile_bytes_f32(w->k, n);
  const uint8_t *tile = w->data + (size_t)(r0 / W) * w->tile_bytes;
  int64_t r = r0;
  if (n_tokens <= 2)
    for (; r1 - r > 3 * W; r += 4 * W, tile += 4 * w->tile_bytes) {
      if (n_tokens == 1) block(dtype, 4, 1, 1, w, tile, act, act_tile, n_tokens, r1 - r, y + r, ldy);
      else block(dtype, 4, 2, 2, w, tile, act, act_tile, n_tokens, r1 - r, y + r, ldy);
    }
  for (; r < r1; r += W, tile += w->tile_bytes) {
    if (n_tokens == 1) block(dtype, 1, 1, 1, w, tile, act, act_tile, n_tokens, r1 - r, y + r, ldy);
    else if (n_tokens == 2) block(dtype, 1, 2, 2, w, tile, act, act_tile, n_tokens, r1 - r, y + r, ldy);
    for (int32_t t = 0; n_tokens > 2 && t < n_tokens; t += 12) {
      const uint8_t *first = act + act_tile * (size_t)(t / 4);
      int32_t left = n_tokens - t;
      if (left > 8) block(dtype, 1, 12, 4, w, tile, first, act_tile, left, r1 - r, y + t * ldy + r, ldy);
      else if (left > 4) block(dtype, 1, 8, 4, w, tile, first, act_tile, left, r1 - r, y + t * ldy + r, ldy);
      else block(dtype, 1, 4, 4, w, tile, first, act_tile, left, r1 - r, y + t * ldy + r, ldy);
    }
  }
}

void cpu_matmul_float_avx2(const struct cpu_weight *w, const uint8_t *act, int32_t n_tokens, int64_t r0, int64_t r1, float *y,
                             int64_t ldy)
{
  switch (w->dtype) {
  case SITS_DTYPE_F32: rows_of(SITS_DTYPE_F32, w, act, n_tokens, r0, r1, y, ldy); break;
  case SITS_DTYPE_F16: rows_of(SITS_DTYPE_F16, w, act, n_tokens, r0, r1, y, ldy); break;
  default: rows_of(SITS_DTYPE_BF16, w, act, n_tokens, r0, r1, y, ldy); break;
  }
}
#endif
