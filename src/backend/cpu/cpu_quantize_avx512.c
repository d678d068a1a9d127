/* Activations to 8 bits for AVX-512: 16 groups at a time, so that ranges, steps and zero points are vector arithmetic as well. Gives the
 * same bits as quantize_group in cpu_matmul.c. */
#include "backend/cpu/cpu_matmul_avx512.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BATCH 16                     /* groups */

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

/* Of 16 groups: step, inverse step, zero point. Lanes of groups past n are zero. */
struct batch { __m512 s, inv; __m512i z; };

INLINE struct batch plan_batch(const float *x, int n)
{
  __m512 lows[BATCH], highs[BATCH], zero = _mm512_setzero_ps(), full = _mm512_set1_ps(254.0F);
  __mmask16 bad = 0;
#pragma GCC unroll 16
  for (int g = 0; g < BATCH; g++) {
    lows[g] = highs[g] = zero;
    if (g >= n) continue;
    __m512 a = _mm512_loadu_ps(x + 32 * g), b = _mm512_loadu_ps(x + 32 * g + 16);
    lows[g] = _mm512_min_ps(_mm512_min_ps(a, b), zero);
    highs[g] = _mm512_max_ps(_mm512_max_ps(a, b), zero);
    bad |= (__mmask16)((unsigned)(_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0) << g);
  }
  __m512 lo = reduce16(0, lows), hi = reduce16(1, highs), range = _mm512_sub_ps(hi, lo);
  /* Not finite: NaN was seen, or the range is infinite or NaN. */
  bad |= _mm512_cmp_ps_mask(range, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
  __mmask16 used = (__mmask16)(_mm512_cmp_ps_mask(range, _mm512_set1_ps(CPU_MIN_RANGE), _CMP_GE_OQ) & ~bad);
  struct batch out = {.s = _mm512_maskz_div_ps(used, range, full), .inv = _mm512_maskz_div_ps(used, full, range)};
  __m512 middle = _mm512_mul_ps(_mm512_mul_ps(_mm512_add_ps(hi, lo), _mm512_set1_ps(0.5F)), out.inv);
  out.z = _mm512_maskz_cvtps_epi32(used, middle);
  out.z = _mm512_max_epi32(_mm512_min_epi32(out.z, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
  out.s = _mm512_mask_mov_ps(out.s, bad, _mm512_set1_ps(NAN));
  return out;
}

/* x * inv - z rounded and clamped; inv 0 gives zeros whatever x is. */
INLINE __m128i quantize16(const float *x, __mmask16 used, __m512 inv, __m512i z)
{
  __m512i q = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(_mm512_loadu_ps(x), inv));
  return _mm_max_epi8(_mm512_cvtsepi32_epi8(_mm512_maskz_sub_epi32(used, q, z)), _mm_set1_epi8(-127));
}

/* What each of 16 groups stores beside its integers, arrays by field. */
struct fields { int32_t s[BATCH], pair[BATCH], x[BATCH], pair_half[2][BATCH], x_half[2][BATCH]; };

INLINE __m512i make_pair(__m512i z, __m512i b)
{
  __m512i minus = _mm512_sub_epi32(_mm512_setzero_si512(), b);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, z, _mm512_slli_epi32(minus, 16));
}

/* half: sums of a + 128 over the 16 elements of each half. */
INLINE void make_fields(struct batch b, __m512i half[2], struct fields *out)
{
  for (int h = 0; h < 2; h++) {
    half[h] = _mm512_add_epi32(_mm512_sub_epi32(half[h], _mm512_set1_epi32(16 * 128)), _mm512_slli_epi32(b.z, 4)); /* of a + z */
    _mm512_storeu_si512(out->pair_half[h], make_pair(b.z, half[h]));
    _mm512_storeu_ps(out->x_half[h], _mm512_mul_ps(b.s, _mm512_cvtepi32_ps(half[h])));
  }
  __m512i both = _mm512_add_epi32(half[0], half[1]);
  _mm512_storeu_ps(out->s, b.s);
  _mm512_storeu_si512(out->pair, make_pair(b.z, both));
  _mm512_storeu_ps(out->x, _mm512_mul_ps(b.s, _mm512_cvtepi32_ps(both)));
}

/* Four 256-bit vectors of 4 x 4 16-bit sums (64-bit lane: a quarter of the 32 elements; within it, a group) to 16 sums of each half. */
INLINE void gather_sums(const __m256i quads[4], __m512i half[2])
{
  __m128i low[4], high[4];
  for (int i = 0; i < 4; i++) {
    __m256i sum = _mm256_add_epi16(quads[i], _mm256_shuffle_epi32(quads[i], 0x4e));
    low[i] = _mm256_castsi256_si128(sum);
    high[i] = _mm256_extracti128_si256(sum, 1);
  }
  for (int h = 0; h < 2; h++) {
    const __m128i *v = h ? high : low;
    __m256i words = _mm256_setr_m128i(_mm_unpacklo_epi64(v[0], v[1]), _mm_unpacklo_epi64(v[2], v[3]));
    half[h] = _mm512_cvtepu16_epi32(words);
  }
}

/* n <= 16 groups of one token; tile: tokens of an act tile; a: the token's integers in the first group; rec, second: the first records,
 * moved to the token's place in their arrays of 32 bits. Sums stay in registers: reading back narrow stores as a vector would stall. */
INLINE void quantize_batch(const float *x, int n, size_t tile, uint8_t *a, uint8_t *rec, uint8_t *second)
{
  const struct batch b = plan_batch(x, n);
  __m256i quads[4];
  __m512i half[2];
  struct fields f;
  for (int i = 0; i < 4; i++) {
    quads[i] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      int g = 4 * i + j;
      if (g >= n) break;
      __m512i lane = _mm512_set1_epi32(g), z = _mm512_permutexvar_epi32(lane, b.z);
      __m512 inv = _mm512_permutexvar_ps(lane, b.inv);
      __mmask16 used = _mm512_cmp_ps_mask(inv, _mm512_setzero_ps(), _CMP_GT_OQ);
      __m256i q = _mm256_setr_m128i(quantize16(x + 32 * g, used, inv, z), quantize16(x + 32 * g + 16, used, inv, z));
      __m256i sad = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
      quads[i] = _mm256_or_si256(quads[i], _mm256_slli_epi64(sad, 16 * j));
      _mm256_storeu_si256((__m256i *)(a + (size_t)g * CPU_RECORD_BYTES * tile), q);
    }
  }
  gather_sums(quads, half);
  make_fields(b, half, &f);
  for (int g = 0; g < n; g++, rec += CPU_RECORD_BYTES * tile, second += CPU_SECOND_BYTES * tile) {
    memcpy(rec + 32 * tile, &f.s[g], 4);
    memcpy(rec + 36 * tile, &f.pair[g], 4);
    memcpy(rec + 40 * tile, &f.x[g], 4);
    memcpy(second, &f.pair_half[0][g], 4);
    memcpy(second + 4 * tile, &f.pair_half[1][g], 4);
    memcpy(second + 8 * tile, &f.x_half[0][g], 4);
    memcpy(second + 12 * tile, &f.x_half[1][g], 4);
  }
}

/* A token past the last: all is zero. */
static void clear_token(size_t groups, size_t tile, uint8_t *a, uint8_t *rec, uint8_t *second)
{
  for (size_t g = 0; g < groups; g++, a += CPU_RECORD_BYTES * tile, rec += CPU_RECORD_BYTES * tile, second += CPU_SECOND_BYTES * tile) {
    memset(a, 0, CPU_GROUP);
    for (size_t i = 32; i <= 40; i += 4) memset(rec + i * tile, 0, 4);
    for (size_t i = 0; i <= 12; i += 4) memset(second + i * tile, 0, 4);
  }
}

void cpu_quantize_avx512(const float *x, int64_t k, int32_t token, int32_t n_tokens, uint8_t *act)
{
  const size_t tile = (size_t)cpu_act_tile(n_tokens), groups = (size_t)k / CPU_GROUP, lane = (size_t)token % tile;
  uint8_t *rec = act + cpu_act_tile_bytes_q8(k, (int32_t)tile) * ((size_t)token / tile), *second = rec + groups * CPU_RECORD_BYTES * tile;
  if (!x) {
    clear_token(groups, tile, rec + CPU_GROUP * lane, rec + 4 * lane, second + 4 * lane);
    return;
  }
  for (size_t g = 0; g < groups; g += BATCH) {
    int n = groups - g < BATCH ? (int)(groups - g) : BATCH;
    uint8_t *r = rec + g * CPU_RECORD_BYTES * tile, *s = second + g * CPU_SECOND_BYTES * tile + 4 * lane;
    quantize_batch(x + g * CPU_GROUP, n, tile, r + CPU_GROUP * lane, r + 4 * lane, s);
  }
}
#endif
