/* The vector primitives over 512-bit words: see cpu_ops_body.h. Runs only where cpu_isa_best() is CPU_AVX512. */
#include "backend/cpu/cpu_ops.h"

#if defined(__AVX512F__)
#include <immintrin.h>

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

#include "backend/cpu/cpu_ops_body.h"
#endif
