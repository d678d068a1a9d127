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

/* Bits `bits` wide of vector v, lane byte i (row * 4 + k % 4), from planes of 4W = lane_bytes bytes a vector. */
static unsigned plane_bits(const uint8_t *plane, int bits, size_t lane_bytes, int v, size_t i)
{
  switch (bits) {
  case 8: return plane[(size_t)v * lane_bytes + i];
  case 4: return plane[(size_t)(v % 4) * lane_bytes + i] >> (4 * (v / 4)) & 15U;
  case 2: return plane[(size_t)(v / 4) * lane_bytes + i] >> (2 * (v % 4)) & 3U;
  case 1: return plane[i] >> v & 1U;
  default: return 0;
  }
}

static float half_at(const uint8_t *at)
{
  uint16_t h;
  memcpy(&h, at, sizeof h);
  return half_to_float(h);
}

/* Effective d and m of the tile's rows: products of an f16 and an integer below 2^8 are exact in f32, so the order does not matter. */
static void unpack_scales(const struct cpu_weight *w, const uint8_t *header, int64_t g, struct cpu_quant_group *out)
{
  const struct cpu_quant_format *f = w->format;
  size_t n = (size_t)w->tile, mins = f->has_min ? 1 : 0;
  if (!f->is_super) {
    const uint8_t *at = header + (size_t)(g % w->chunk_groups) * 2 * n;
    for (size_t r = 0; r < n; r++) {
      out->d[0][r] = half_at(at + 2 * r);
      out->m[0][r] = mins ? half_at(at + 2 * n + 2 * r) : 0.0F;
    }
    return;
  }
  size_t bytes_a_half = n * (mins && !f->is_nibble_scale ? 2 : 1);
  for (int h = 0; h < f->halves; h++) {
    const uint8_t *sc = header + 2 * n * (1 + mins) + ((size_t)(g % 8) * f->halves + (size_t)h) * bytes_a_half;
    for (size_t r = 0; r < n; r++) {
      float d = half_at(header + 2 * r), dmin = mins ? half_at(header + 2 * n + 2 * r) : 0.0F;
      int scale = f->is_nibble_scale ? sc[r] & 15 : (int8_t)sc[r];
      int min = !mins ? 0 : f->is_nibble_scale ? sc[r] >> 4 : sc[n + r];
      out->d[h][r] = d * (float)scale;
      out->m[h][r] = -(dmin * (float)min);
    }
  }
}

void cpu_quant_unpack(const struct cpu_weight *w, int64_t tile, int64_t g, struct cpu_quant_group *out)
{
  const struct cpu_quant_format *f = w->format;
  const uint8_t *low = cpu_weight_planes(w, tile, g);
  size_t lane_bytes = (size_t)w->tile * 4;
  const uint8_t *high = low + lane_bytes * f->low_bits;
  unpack_scales(w, cpu_weight_header(w, tile, g), g, out);
  for (int v = 0; v < CPU_VECTORS; v++)
    for (size_t i = 0; i < lane_bytes; i++)
      out->u[i / 4][v * 4 + (int)(i % 4)] = (uint8_t)(plane_bits(low, f->low_bits, lane_bytes, v, i) |
                                                      plane_bits(high, f->high_bits, lane_bytes, v, i) << f->low_bits);
}
