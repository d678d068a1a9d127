/* Activations to 8 bits for AVX2, a group at a time. Gives the same bits as quantize_group in cpu_matmul.c. */
#include "backend/cpu/cpu_matmul_avx2.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float reduce(int is_max, __m256 v)
{
  __m128 a = _mm256_castps256_ps128(v), b = _mm256_extractf128_ps(v, 1);
  a = is_max ? _mm_max_ps(a, b) : _mm_min_ps(a, b);
  b = _mm_movehl_ps(a, a);
  a = is_max ? _mm_max_ps(a, b) : _mm_min_ps(a, b);
  b = _mm_shuffle_ps(a, a, 1);
  return _mm_cvtss_f32(is_max ? _mm_max_ss(a, b) : _mm_min_ss(a, b));
}

/* Sums of the 16 elements of each half. */
INLINE void half_sums(__m256i q, int32_t sum[2])
{
  __m256i sad = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  sad = _mm256_add_epi64(sad, _mm256_shuffle_epi32(sad, 0x4e));
  sum[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sad)) - 16 * 128;
  sum[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sad, 1)) - 16 * 128;
}

INLINE void quantize_group(const float *x, struct cpu_act_ref at)
{
  __m256 v[4], lo = _mm256_setzero_ps(), hi = lo, unordered = lo;
  float s = 0.0F, inv = 0.0F;
  int32_t z = 0, sum[2] = {0};
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    lo = _mm256_min_ps(v[i], lo);
    hi = _mm256_max_ps(v[i], hi);
    unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q));
  }
  float low = reduce(0, lo), high = reduce(1, hi), range = high - low;
  if (_mm256_movemask_ps(unordered) || !isfinite(range)) {
    s = NAN;
  } else if (range >= CPU_MIN_RANGE) {
    s = range / 254.0F;
    inv = 254.0F / range;
    z = _mm_cvtss_si32(_mm_set_ss((high + low) * 0.5F * inv));
    z = z < -127 ? -127 : z > 127 ? 127 : z;
  }
  __m256i q = _mm256_setzero_si256();
  if (inv > 0.0F) {
    __m256i a[4], zero_point = _mm256_set1_epi32(z);
    for (int i = 0; i < 4; i++) a[i] = _mm256_sub_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inv))), zero_point);
    q = _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
    q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* packs work within 128 bits */
    q = _mm256_max_epi8(q, _mm256_set1_epi8(-127));
  }
  half_sums(q, sum);
  _mm256_storeu_si256((__m256i *)at.a, q);
  int32_t b[2] = {sum[0] + 16 * z, sum[1] + 16 * z};
  *at.s = s;
  at.pair[0] = (int16_t)z;
  at.pair[1] = (int16_t)-(b[0] + b[1]);
  *at.x = s * (float)(b[0] + b[1]);
  for (int h = 0; h < 2; h++) {
    at.pair_half[h][0] = (int16_t)z;
    at.pair_half[h][1] = (int16_t)-b[h];
    *at.x_half[h] = s * (float)b[h];
  }
}

void cpu_quantize_avx2(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act)
{
  static const float zeros[CPU_GROUP];
  for (int64_t g = 0; g < k / CPU_GROUP; g++) quantize_group(x ? x + g * CPU_GROUP : zeros, cpu_act_at(act, k, n_tokens, token, g));
}
#endif
