/* A row tile of a packed weight as f32 for AVX2. Entry point: cpu_expand_avx2. */
#include "backend/cpu/cpu_act.h"
#include "backend/cpu/cpu_quant.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

bool cpu_expand_avx2(const struct cpu_weight *w, int64_t tile, float *out)
{
  const struct cpu_quant_format *f = w->format;
  if (w->tile != 8 || f->is_super || f->high_bits || (f->low_bits != 4 && f->low_bits != 8)) return false;
  const __m256i byte = _mm256_set1_epi32(255), nibbles = _mm256_set1_epi32(0x0f0f0f0f), offset = _mm256_set1_epi32(f->offset);
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++) {
    const uint8_t *header = cpu_weight_header(w, tile, g) + (size_t)(g % w->chunk_groups) * 16, *plane = cpu_weight_planes(w, tile, g);
    const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)header));
    const __m256 m = f->has_min ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(header + 16))) : _mm256_setzero_ps();
    for (int v = 0; v < CPU_VECTORS; v++, out += 32) {
      __m256i u = _mm256_loadu_si256((const __m256i *)(plane + 32 * (f->low_bits == 4 ? v % 4 : v)));
      if (f->low_bits == 4) u = _mm256_and_si256(v < 4 ? u : _mm256_srli_epi32(u, 4), nibbles);
      for (int b = 0; b < 4; b++, u = _mm256_srli_epi32(u, 8)) {
        const __m256 q = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(u, byte), offset)));
        _mm256_storeu_ps(out + 8 * b, f->has_min ? _mm256_add_ps(q, m) : q);
      }
    }
  }
  return true;
}
#else
bool cpu_expand_avx2(const struct cpu_weight *w, int64_t tile, float *out)
{
  (void)w, (void)tile, (void)out;
  return false;
}
#endif
