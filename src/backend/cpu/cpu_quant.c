/* Formats of the packed quantised weights (the table) and their scalar reading: cpu_quant_unpack. See cpu_quant.h for the layout. */
#include "backend/cpu/cpu_quant.h"

#include <string.h>

#include "tensor/dequant.h"

static const struct cpu_quant_format formats[SITS_DTYPE_COUNT] = {
#define ROW(name, ...) [SITS_DTYPE_##name] = {true, __VA_ARGS__},
    CPU_FORMAT_MAP(ROW)
#undef ROW
};

const struct cpu_quant_format *cpu_quant_format(enum sits_dtype dtype) { return formats[dtype].is_quantised ? &formats[dtype] : NULL; }

/* Bits `bits` wide of the four k of vector v, one a byte; lane: the row's bytes in the first vector of the planes, stride: of a vector. */
static uint32_t plane_word(const uint8_t *lane, int bits, size_t stride, int v)
{
  int at = bits == 4 ? v % 4 : bits == 8 ? v : bits == 2 ? v / 4 : 0, place = bits == 4 ? v / 4 : bits == 2 ? v % 4 : bits == 1 ? v : 0;
  uint32_t word;
  if (bits == 0) return 0;
  memcpy(&word, lane + (size_t)at * stride, sizeof word);
  return word >> (bits * place) & 0x01010101U * ((1U << bits) - 1);
}

static float half_at(const uint8_t *at)
{
  uint16_t h;
  memcpy(&h, at, sizeof h);
  return half_to_float(h);
}

/* Effective d and m: products of an f16 and an integer below 2^8 are exact in f32, so nothing depends on how they are computed. */
static void row_scales(const struct cpu_weight *w, const uint8_t *header, int64_t g, size_t r, struct cpu_quant_row *out)
{
  const struct cpu_quant_format *f = w->format;
  size_t n = (size_t)w->tile, mins = f->has_min ? 1 : 0;
  if (!f->is_super) {
    const uint8_t *at = header + (size_t)(g % w->chunk_groups) * 2 * n + 2 * r;
    out->d[0] = half_at(at);
    out->m[0] = mins ? half_at(at + 2 * n) : 0.0F;
    return;
  }
  size_t half_bytes = n * (mins && !f->is_nibble_scale ? 2 : 1);
  float d = half_at(header + 2 * r), dmin = mins ? half_at(header + 2 * n + 2 * r) : 0.0F;
  for (int h = 0; h < f->halves; h++) {
    const uint8_t *sc = header + 2 * n * (1 + mins) + ((size_t)(g % 8) * f->halves + (size_t)h) * half_bytes + r;
    int scale = f->is_nibble_scale ? *sc & 15 : (int8_t)*sc;
    int min = !mins ? 0 : f->is_nibble_scale ? *sc >> 4 : sc[n];
    out->d[h] = d * (float)scale;
    out->m[h] = -(dmin * (float)min);
  }
}

void cpu_quant_unpack(const struct cpu_weight *w, int64_t tile, int64_t g, int32_t row, struct cpu_quant_row *out)
{
  const struct cpu_quant_format *f = w->format;
  const size_t stride = (size_t)w->tile * 4, r = (size_t)row;
  const uint8_t *low = cpu_weight_planes(w, tile, g) + 4 * r, *high = low + stride * f->low_bits;
  row_scales(w, cpu_weight_header(w, tile, g), g, r, out);
  for (int v = 0; v < CPU_VECTORS; v++) {
    uint32_t word = plane_word(low, f->low_bits, stride, v) | plane_word(high, f->high_bits, stride, v) << f->low_bits;
    memcpy(out->u + 4 * v, &word, sizeof word);
  }
}
