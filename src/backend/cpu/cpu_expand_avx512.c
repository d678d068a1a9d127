/* A row tile of a packed weight as f32 for AVX-512. Entry point: cpu_expand_avx512. */
#include "backend/cpu/cpu_act.h"
#include "backend/cpu/cpu_quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>

bool cpu_expand_avx512(const struct cpu_weight *w, int64_t tile, float *out)
{
  const struct cpu_quant_format *f = w->format;
  if (w->tile != 16 || f->is_super || f->high_bits || (f->low_bits != 4 && f->low_bits != 8)) return false;
  const __m512i byte = _mm512_set1_epi32(255), nibbles = _mm512_set1_epi32(0x0f0f0f0f), offset = _mm512_set1_epi32(f->offset);
  for (int64_t g = 0; g < w->k / CPU_GROUP; g++) {
    const uint8_t *header = cpu_weight_header(w, tile, g) + (size_t)(g % w->chunk_groups) * 32, *plane = cpu_weight_planes(w, tile, g);
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)header));
    const __m512 m = f->has_min ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(header + 32))) : _mm512_setzero_ps();
    for (int v = 0; v < CPU_VECTORS; v++, out += 64) {
      __m512i u = _mm512_loadu_si512(plane + 64 * (f->low_bits == 4 ? v % 4 : v));
      if (f->low_bits == 4) u = _mm512_and_si512(v < 4 ? u : _mm512_srli_epi32(u, 4), nibbles);
      for (int b = 0; b < 4; b++, u = _mm512_srli_epi32(u, 8)) {
        const __m512 q = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(u, byte), offset)));
        _mm512_storeu_ps(out + 16 * b, f->has_min ? _mm512_add_ps(q, m) : q);
      }
    }
  }
  return true;
}
#else
bool cpu_expand_avx512(const struct cpu_weight *w, int64_t tile, float *out)
{
  (void)w, (void)tile, (void)out;
  return false;
}
#endif
