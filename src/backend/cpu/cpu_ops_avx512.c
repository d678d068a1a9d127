/* The vector primitives over 512-bit words: see cpu_ops_body.h. Runs only where cpu_isa_best() is CPU_AVX512. */
#include "backend/cpu/cpu_ops.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#include <string.h>

#include "backend/cpu/cpu_kv_code.h"

#define CPU_OPS cpu_ops_avx512
#define VEC __m512
#define VW 16
#define v_load(p) _mm512_loadu_ps(p)
#define v_load_h(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define v_store(p, v) _mm512_storeu_ps(p, v)
#define v_store_h(p, v) _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define v_set1(x) _mm512_set1_ps(x)
#define v_add(a, b) _mm512_add_ps(a, b)
#define v_sub(a, b) _mm512_sub_ps(a, b)
#define v_mul(a, b) _mm512_mul_ps(a, b)
#define v_div(a, b) _mm512_div_ps(a, b)
#define v_max(a, b) _mm512_max_ps(a, b)
#define v_min(a, b) _mm512_min_ps(a, b)
#define v_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define v_round(v) _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_exp2i(n) _mm512_scalef_ps(_mm512_set1_ps(1.0f), n)
#define v_sum(v) _mm512_reduce_add_ps(v)
#define v_top(v) _mm512_reduce_max_ps(v)
#define v_swap_pairs(v) _mm512_permute_ps(v, 0xB1)

/* lo and hi may lie outside 0..16. */
static inline __m512 v_keep(__m512 v, int lo, int hi, __m512 other)
{
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 kept = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(hi));
  return _mm512_mask_blend_ps(kept, other, v);
}

/* ---- 4-bit numbers: a table of 16 values is one register, and looking 16 of them up one instruction ---- */

#define CPU_OPS_OWN_4BIT

static inline __m512i nibbles_of(const uint8_t *x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)x)); }

static inline __m512 e2m1_values(void)
{
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

static void op_expand_u4(const uint8_t *x, const uint8_t *scales, const int8_t *zeros, int32_t n_groups, float *y)
{
  const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int32_t g = 0; g < n_groups; g++, x += 16, y += 32) {
    const __m512 values = _mm512_mul_ps(_mm512_sub_ps(count, _mm512_set1_ps((float)zeros[g])), _mm512_set1_ps(cpu_kv_scale(scales[g])));
    const __m512i codes = nibbles_of(x); /* the look-up takes the low four bits */
    _mm512_storeu_ps(y, _mm512_permutexvar_ps(codes, values));
    _mm512_storeu_ps(y + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values));
  }
}

static void op_expand_fp4_columns(const uint8_t *x, const uint8_t *scales, const float *means, int32_t rows, float *y)
{
  const __m512 values = e2m1_values();
  __m512 s[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int32_t r = 0; r < rows; r++, x += 32, y += 64) {
    for (int i = 0; i < 4 && r % 16 == 0; i++) s[i] = _mm512_i32gather_ps(nibbles_of(scales + r / 16 * 64 + 16 * i), cpu_kv_scale_table, 4);
    const __m512 mean = _mm512_set1_ps(means[r]);
    for (int i = 0; i < 2; i++) {
      const __m512i codes = nibbles_of(x + 16 * i);
      _mm512_storeu_ps(y + 16 * i, _mm512_fmadd_ps(_mm512_permutexvar_ps(codes, values), s[i], mean));
      _mm512_storeu_ps(y + 32 + 16 * i, _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values), s[2 + i], mean));
    }
  }
}

static void op_expand_fp4_groups(const uint8_t *x, const uint8_t *scales, int32_t n_groups, float *y)
{
  const __m512 values = e2m1_values();
  const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
  for (int32_t g = 0; g < n_groups; g++, x += 8, y += 16) {
    int64_t eight;
    memcpy(&eight, x, sizeof eight);
    const __m512i codes = _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(eight)), shifts);
    _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_permutexvar_ps(codes, values), _mm512_set1_ps(cpu_kv_scale(scales[g]))));
  }
}

static inline __m512 round_ps(__m512 v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* Codes of 16 values, as floats; and their squared errors, lane by lane. */
static inline __m512 u4_codes(__m512 x, __m512 inverse, __m512 zero)
{
  const __m512 q = _mm512_add_ps(round_ps(_mm512_mul_ps(x, inverse)), zero);
  return _mm512_min_ps(_mm512_max_ps(q, _mm512_setzero_ps()), _mm512_set1_ps(15));
}

static inline __m512 u4_error(__m512 x, __m512 codes, __m512 scale, __m512 zero)
{
  const __m512 e = _mm512_fmsub_ps(_mm512_sub_ps(codes, zero), scale, x);
  return _mm512_mul_ps(e, e);
}

static void op_quantize_u4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale, int8_t *zero)
{
  const __mmask16 keep_a = (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1);
  const __mmask16 keep_b = (__mmask16)(n >= 32 ? 0xffff : n > 16 ? (1u << (n - 16)) - 1 : 0);
  const __m512 first_value = _mm512_set1_ps(x[0]);
  const __m512 a = _mm512_mask_loadu_ps(first_value, keep_a, x), b = _mm512_mask_loadu_ps(first_value, keep_b, x + 16);
  const float lo = _mm512_reduce_min_ps(_mm512_min_ps(a, b)), hi = _mm512_reduce_max_ps(_mm512_max_ps(a, b)), size = -lo > hi ? -lo : hi;
  const float span = (hi - lo) / 15, least = size / 120; /* the floor keeps the zero point in int8 */
  const int32_t first = cpu_kv_scale_code(span > least ? span : least);
  float best = __builtin_inff(), best_zero = 0;
  int32_t best_code = first;
  for (int32_t code = first; code < first + 3 && code < 256; code++) {
    const float s = cpu_kv_scale((uint8_t)code), inverse = s > 0 ? 1 / s : 0;
    const float middle = s > 0 ? __builtin_nearbyintf(-lo / s) : 0;
    for (int shift = -1; shift <= 1; shift++) {
      float z = middle + (float)shift;
      z = z < -128 ? -128 : z > 127 ? 127 : z;
      const __m512 vs = _mm512_set1_ps(s), vi = _mm512_set1_ps(inverse), vz = _mm512_set1_ps(z);
      const __m512 error_a = u4_error(a, u4_codes(a, vi, vz), vs, vz), error_b = u4_error(b, u4_codes(b, vi, vz), vs, vz);
      const float error = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_maskz_mov_ps(keep_a, error_a), _mm512_maskz_mov_ps(keep_b, error_b)));
      if (error < best) best = error, best_code = code, best_zero = z;
    }
  }
  const float s = cpu_kv_scale((uint8_t)best_code);
  const __m512 vi = _mm512_set1_ps(s > 0 ? 1 / s : 0), vz = _mm512_set1_ps(best_zero);
  *scale = (uint8_t)best_code;
  *zero = (int8_t)best_zero;
  _mm_storeu_si128((__m128i *)(void *)codes, _mm512_maskz_cvtepi32_epi8(keep_a, _mm512_cvtps_epi32(u4_codes(a, vi, vz))));
  _mm_storeu_si128((__m128i *)(void *)(codes + 16), _mm512_maskz_cvtepi32_epi8(keep_b, _mm512_cvtps_epi32(u4_codes(b, vi, vz))));
}

/* Nearest e2m1 sizes: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. */
static inline __m512 e2m1_nearest(__m512 a)
{
  const __m512 fine = _mm512_roundscale_ps(a, 0x10 | _MM_FROUND_NO_EXC), whole = round_ps(a);
  const __m512 coarse = _mm512_mul_ps(round_ps(_mm512_mul_ps(a, _mm512_set1_ps(0.5f))), _mm512_set1_ps(2));
  __m512 v = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(4), _CMP_LT_OQ), coarse, whole);
  v = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(2), _CMP_LT_OQ), v, fine);
  return _mm512_min_ps(v, _mm512_set1_ps(6));
}

static void op_quantize_fp4(const float *x, int32_t n, uint8_t *codes, uint8_t *scale)
{
  static const float tops[5] = {6, 5.5f, 5, 4.5f, 4};
  const __m512 v = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x), size = _mm512_abs_ps(v);
  const float top = _mm512_reduce_max_ps(size);
  float best = __builtin_inff();
  uint8_t best_code = 0;
  for (int k = 0; k < 5; k++) {
    const uint8_t code = cpu_kv_scale_code(top / tops[k]);
    const float s = cpu_kv_scale(code);
    const __m512 q = e2m1_nearest(_mm512_mul_ps(size, _mm512_set1_ps(s > 0 ? 1 / s : 0)));
    const __m512 e = _mm512_fmsub_ps(q, _mm512_set1_ps(s), size);
    const float error = _mm512_reduce_add_ps(_mm512_mul_ps(e, e));
    if (error < best) best = error, best_code = code;
  }
  const float s = cpu_kv_scale(best_code);
  const __m512 q = e2m1_nearest(_mm512_mul_ps(size, _mm512_set1_ps(s > 0 ? 1 / s : 0)));
  const __m512i doubled = _mm512_cvtps_epi32(_mm512_mul_ps(q, _mm512_set1_ps(2)));
  const __m512i code_of = _mm512_setr_epi32(0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7, 0, 0, 0); /* by twice the size */
  const __mmask16 negative = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ);
  __m512i code = _mm512_permutexvar_epi32(doubled, code_of);
  code = _mm512_mask_or_epi32(code, negative, code, _mm512_set1_epi32(8));
  *scale = best_code;
  _mm_storeu_si128((__m128i *)(void *)codes, _mm512_cvtepi32_epi8(code));
}

/* ---- rotation: x[i] becomes x[partner] + x[i] where i has the stage's bit clear, x[partner] - x[i] where it is set ---- */

#define CPU_OPS_OWN_HADAMARD

static inline __m512 butterflies(__m512 v)
{
  const __m512 sign1 = _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
  const __m512 sign2 = _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
  const __m512 sign4 = _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
  const __m512 sign8 = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
  v = _mm512_fmadd_ps(v, sign1, _mm512_permute_ps(v, 0xB1));
  v = _mm512_fmadd_ps(v, sign2, _mm512_permute_ps(v, 0x4E));
  v = _mm512_fmadd_ps(v, sign4, _mm512_shuffle_f32x4(v, v, 0xB1));
  return _mm512_fmadd_ps(v, sign8, _mm512_shuffle_f32x4(v, v, 0x4E));
}

static void op_hadamard(float *x, int32_t n)
{
  float small[16] = {0};
  if (n < 16) { /* the stages beyond n only mix with zeros, and add nothing to the first n lanes */
    memcpy(small, x, (size_t)n * sizeof *x);
    _mm512_storeu_ps(small, _mm512_mul_ps(butterflies(_mm512_loadu_ps(small)), _mm512_set1_ps(1.0f / __builtin_sqrtf((float)n))));
    memcpy(x, small, (size_t)n * sizeof *x);
    return;
  }
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf((float)n));
  for (int32_t i = 0; i < n; i += 16) _mm512_storeu_ps(x + i, _mm512_mul_ps(butterflies(_mm512_loadu_ps(x + i)), scale));
  for (int32_t half = 16; half < n; half *= 2)
    for (int32_t i = 0; i < n; i += 2 * half)
      for (int32_t k = i; k < i + half; k += 16) {
        const __m512 a = _mm512_loadu_ps(x + k), b = _mm512_loadu_ps(x + k + half);
        _mm512_storeu_ps(x + k, _mm512_add_ps(a, b));
        _mm512_storeu_ps(x + k + half, _mm512_sub_ps(a, b));
      }
}

#include "backend/cpu/cpu_ops_body.h"
#endif
