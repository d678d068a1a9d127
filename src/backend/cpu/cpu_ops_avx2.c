/* The vector primitives over 256-bit words: see cpu_ops_body.h. Runs only where cpu_isa_best() is at least CPU_AVX2. */
#include "backend/cpu/cpu_ops.h"

#if defined(__AVX2__)
#include <immintrin.h>

#define CPU_OPS cpu_ops_avx2
#define VEC __m256
#define VW 8
#define v_load(p) _mm256_loadu_ps(p)
#define v_load_h(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define v_store(p, v) _mm256_storeu_ps(p, v)
#define v_store_h(p, v) _mm_storeu_si128((__m128i *)(void *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define v_set1(x) _mm256_set1_ps(x)
#define v_add(a, b) _mm256_add_ps(a, b)
#define v_sub(a, b) _mm256_sub_ps(a, b)
#define v_mul(a, b) _mm256_mul_ps(a, b)
#define v_div(a, b) _mm256_div_ps(a, b)
#define v_max(a, b) _mm256_max_ps(a, b)
#define v_min(a, b) _mm256_min_ps(a, b)
#define v_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define v_round(v) _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define v_swap_pairs(v) _mm256_permute_ps(v, 0xB1)

static inline __m256 v_exp2i(__m256 n)
{
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

static inline float v_sum(__m256 v)
{
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float v_top(__m256 v)
{
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* lo and hi may lie outside 0..8. */
static inline __m256 v_keep(__m256 v, int lo, int hi, __m256 other)
{
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane), before = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane);
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_andnot_si256(below, before)));
}

#include "backend/cpu/cpu_ops_body.h"
#endif
