/* Activations to 8 bits for AVX-512: 16 groups at a time, so that ranges, steps and zero points are vector arithmetic as well. Gives the
 * same bits as quantize_group in cpu_matmul.c. */
#include "backend/cpu/cpu_matmul_avx512.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#define BATCH 16                     /* groups */
#define MIN_RANGE 1e-30F             /* as in cpu_matmul.c */

INLINE __m512 larger(int is_max, __m512 a, __m512 b) { return is_max ? _mm512_max_ps(a, b) : _mm512_min_ps(a, b); }

/* Reduce 16 vectors each to one value, result lane i for vector i. */
INLINE __m512 reduce16(int is_max, const __m512 *in)
{
  __m512 q[4];
  for (int i = 0; i < 4; i++) {
    const __m512 *v = in + 4 * i;
    __m512 ab = larger(is_max, _mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
    __m512 cd = larger(is_max, _mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
    q[i] = larger(is_max, _mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); /* 128-bit lane j: vector 4i + j */
  }
  __m512 p01 = larger(is_max, _mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
  __m512 p23 = larger(is_max, _mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
  __m512d p = _mm512_castps_pd(p01), r = _mm512_castps_pd(p23);
  __m512 mixed = larger(is_max, _mm512_castpd_ps(_mm512_unpacklo_pd(p, r)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, r)));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed);
}

struct batch { float s[BATCH], inv[BATCH]; int32_t z[BATCH]; };

/* Step, its inverse and zero point of n <= 16 groups. */
INLINE void plan_batch(const float *x, int n, struct batch *out)
{
  __m512 lows[BATCH], highs[BATCH], zero = _mm512_setzero_ps();
  __mmask16 bad = 0;
  for (int g = 0; g < BATCH; g++) {
    if (g >= n) {
      lows[g] = highs[g] = zero;
      continue;
    }
    __m512 a = _mm512_loadu_ps(x + 32 * g), b = _mm512_loadu_ps(x + 32 * g + 16);
    lows[g] = _mm512_min_ps(_mm512_min_ps(a, b), zero);
    highs[g] = _mm512_max_ps(_mm512_max_ps(a, b), zero);
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) bad |= (__mmask16)(1U << g);
  }
  __m512 lo = reduce16(0, lows), hi = reduce16(1, highs), range = _mm512_sub_ps(hi, lo), full = _mm512_set1_ps(254.0F);
  /* Not finite: NaN was seen, or the range is infinite or NaN. */
  bad |= _mm512_cmp_ps_mask(range, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
  __mmask16 used = (__mmask16)(_mm512_cmp_ps_mask(range, _mm512_set1_ps(MIN_RANGE), _CMP_GE_OQ) & ~bad);
  __m512 inv = _mm512_maskz_div_ps(used, full, range), s = _mm512_maskz_div_ps(used, range, full);
  __m512 middle = _mm512_mul_ps(_mm512_mul_ps(_mm512_add_ps(hi, lo), _mm512_set1_ps(0.5F)), inv);
  __m512i z = _mm512_maskz_cvtps_epi32(used, middle);
  z = _mm512_max_epi32(_mm512_min_epi32(z, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
  _mm512_storeu_ps(out->s, _mm512_mask_mov_ps(s, bad, _mm512_set1_ps(NAN)));
  _mm512_storeu_ps(out->inv, inv);
  _mm512_storeu_si512(out->z, z);
}

/* x * inv - z rounded and clamped; inv 0 gives zeros whatever x is. */
INLINE __m128i quantize16(const float *x, float inv, int32_t z)
{
  __mmask16 used = inv > 0.0F ? 0xffff : 0;
  __m512i q = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inv)));
  q = _mm512_maskz_sub_epi32(used, q, _mm512_set1_epi32(z));
  return _mm_max_epi8(_mm512_cvtsepi32_epi8(q), _mm_set1_epi8(-127));
}

INLINE int32_t sum16(__m128i a)
{
  __m128i sad = _mm_sad_epu8(_mm_xor_si128(a, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sad) + _mm_extract_epi16(sad, 4) - 16 * 128;
}

void cpu_quantize_avx512(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act)
{
  const int64_t groups = k / CPU_GROUP;
  for (int64_t g0 = 0; g0 < groups; g0 += BATCH) {
    int n = groups - g0 < BATCH ? (int)(groups - g0) : BATCH;
    struct batch b = {{0}};
    if (x) plan_batch(x + g0 * CPU_GROUP, n, &b);
    for (int g = 0; g < n; g++) {
      struct cpu_act_ref at = cpu_act_at(act, k, n_tokens, token, g0 + g);
      __m128i half[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
      int32_t sum[2] = {0};
      for (int h = 0; x && h < 2; h++) {
        half[h] = quantize16(x + (g0 + g) * CPU_GROUP + 16 * h, b.inv[g], b.z[g]);
        sum[h] = sum16(half[h]) + 16 * b.z[g];
      }
      _mm_storeu_si128((__m128i *)at.a, half[0]);
      _mm_storeu_si128((__m128i *)(at.a + 16), half[1]);
      *at.s = b.s[g];
      at.pair[0] = (int16_t)b.z[g];
      at.pair[1] = (int16_t)-(sum[0] + sum[1]);
      *at.x = b.s[g] * (float)(sum[0] + sum[1]);
      for (int h = 0; h < 2; h++) {
        at.pair_half[h][0] = (int16_t)b.z[g];
        at.pair_half[h][1] = (int16_t)-sum[h];
        *at.x_half[h] = b.s[g] * (float)sum[h];
      }
    }
  }
}
#endif
