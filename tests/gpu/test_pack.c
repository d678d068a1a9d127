/* Packing of weights for the CUDA kernels, on the host alone: a packed weight read back by its layout's definition (kernels.h) equals the
 * source tensor's own values, for every source type, for parts side by side and for gate and up rows in turns of eight; and each row's
 * channel scale times a factor that the kernels find again is its scales, or there are none. Needs no device. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cuda_weights.c"
#include "gpu_test.h"

static float packed_value(const struct cuda_weight *w, const uint8_t *packed, int32_t row, int32_t col)
{
  if (w->form == CUDA_F16) return half_value(((const uint16_t *)packed)[(size_t)row * (size_t)k_blocks(w->cols) * K_GROUP + (size_t)col]);
  const uint8_t *unit =
      packed + ((size_t)(row / 16) * (size_t)k_blocks(w->cols) + (size_t)(col / 128)) * (size_t)k_w4_unit_bytes(w->format);
  const int32_t r = row % 16, s = col % 128 / 32;
  int32_t word, rotate;
  uint32_t bits;
  k_w4_place(r, col % 128, &word, &rotate);
  memcpy(&bits, unit + word * 4, 4);
  const float q = (float)((rotate ? bits >> rotate | bits << (32 - rotate) : bits) & 15u);
  const uint8_t *scales = unit + K_W4_NIBBLE_BYTES;
  if (w->format == K_W4_G128) return load_half(scales + (r & 7) * 4 + (r >> 3) * 2) * (q - 8.f);
  const uint8_t *at = scales + s * 64 + (r & 7) * 8 + (r >> 3) * 4;
  return load_half(at) * q + load_half(at + 2);
}

/* Random bytes; the f16 fields of blocks get small numbers. */
static struct sits_utd random_tensor(enum sits_dtype dtype, int64_t rows, int64_t cols, int32_t group, bool has_min)
{
  struct sits_utd u = {.dtype = dtype, .n_dims = 2, .dims = {rows, cols}, .layout = SITS_LAYOUT_ROW_MAJOR};
  const struct sits_dtype_info *info = sits_dtype_info(dtype);
  snprintf(u.name, sizeof u.name, "%s", info->name);
  u.n_bytes = (size_t)(rows * cols / info->block_elements * info->block_bytes);
  uint8_t *data = host_alloc(u.n_bytes);
  for (size_t i = 0; i < u.n_bytes; i++) data[i] = (uint8_t)rand_u32();
  const bool is_plain = dtype == SITS_DTYPE_I4 || dtype == SITS_DTYPE_I8;
  for (size_t i = 0; !is_plain && i < u.n_bytes; i += (size_t)info->block_bytes)
    for (int k = 0; k < (dtype == SITS_DTYPE_Q4_1 || dtype == SITS_DTYPE_Q4_K ? 2 : 1); k++) {
      const uint16_t h = half_bits(dtype == SITS_DTYPE_F32 ? 0 : rand_unit() * 0.1f);
      memcpy(data + i + 2 * k, &h, 2);
    }
  if (dtype == SITS_DTYPE_F32)
    for (int64_t i = 0; i < rows * cols; i++) ((float *)(void *)data)[i] = rand_unit();
  u.data = data;
  if (!is_plain) return u;
  const int64_t n = rows * (group > 0 ? cols / group : 1);
  uint16_t *scales = host_alloc((size_t)n * 2), *minimums = host_alloc((size_t)n * 2);
  for (int64_t i = 0; i < n; i++) scales[i] = half_bits(0.01f * (2.f + rand_unit())), minimums[i] = half_bits(rand_unit() * 0.1f);
  u.quant = group > 0 ? SITS_QUANT_GROUP : SITS_QUANT_CHANNEL;
  u.group_size = group, u.group_axis = group > 0 ? 1 : 0, u.scale_dtype = SITS_DTYPE_F16;
  u.scales = scales, u.minimums = has_min ? minimums : NULL;
  return u;
}

static void run(enum sits_dtype dtype, int64_t cols, int32_t group, bool has_min, bool is_interleaved, enum cuda_weight_form form,
                enum k_w4_format format)
{
  static const int64_t rows[2] = {44, 20};
  struct sits_utd u[2];
  struct program_part parts[2] = {{&u[0], NULL}, {&u[1], NULL}};
  struct cuda_weight w = {.parts = parts, .n_parts = 2, .is_interleaved = is_interleaved};
  struct sits_error err = {0};
  for (int i = 0; i < 2; i++) u[i] = random_tensor(dtype, is_interleaved ? 44 : rows[i], cols, group, has_min);
  if (cuda_weight_plan(&w, &err) != SITS_OK) {
    verdict(false, "%s group %d: %s", u[0].name, group, err.text);
    return;
  }
  uint8_t *packed = host_alloc((size_t)cuda_weight_bytes(&w) + (size_t)k_row_tiles(w.rows) * 16 * 512);
  float *want = host_alloc((size_t)cols * sizeof *want);
  /* in two pieces, as an upload does */
  const int32_t n_tiles = k_row_tiles(w.rows), middle = n_tiles / 3;
  struct channel_scan scan;
  bool ok = scan_init(&scan, &w) && pack(&w, 0, middle, packed, &scan) == SITS_OK &&
            pack(&w, middle, n_tiles, packed + middle * tile_bytes_of(&w), &scan) == SITS_OK;
  mem_free(scan.channel);
  ok = ok && w.form == form && (form == CUDA_F16 || w.format == format);
  double worst = 0;
  int32_t n_rows = 0;
  for (int32_t r = 0; ok && r < w.rows; r++) {
    const struct sits_utd *from;
    int32_t at;
    if (!source_row(&w, r, &from, &at)) continue;
    n_rows++;
    if (from->quant != SITS_QUANT_NONE)
      dequant_tensor_row(from, at, want);
    else
      dequant_row(from->dtype, (const uint8_t *)from->data + (size_t)at * (from->n_bytes / (size_t)from->dims[0]), cols, want);
    double largest = 0;
    for (int32_t c = 0; c < cols; c++) largest = fmax(largest, fabs((double)want[c]));
    for (int32_t c = 0; c < cols; c++) {
      const double size = dtype == SITS_DTYPE_Q4_K ? largest : fabs((double)want[c]) + 0.02;
      worst = fmax(worst, fabs((double)packed_value(&w, packed, r, c) - want[c]) / size);
    }
  }
  /* f16 rounds each value; Q4_K's scales and minimums are products rounded to f16, which large values of both cancel: of the row's
   * largest. */
  const double limit = form == CUDA_F16 ? 1e-3 : dtype == SITS_DTYPE_Q4_K ? 1e-3 : 1e-5;
  ok = ok && n_rows == (is_interleaved ? 88 : 64) && worst < limit;
  verdict(ok, "%s, %d columns, group %d%s%s: form %d, worst %.1e in %d rows", u[0].name, (int)cols, group, has_min ? ", minimum" : "",
          is_interleaved ? ", interleaved" : "", w.form, worst, n_rows);
  gpu_release_all();
}

/* What gemm_w4a8.cu makes of a scale: the factor, by adding 2^23. */
static uint32_t factor_of(float scale, float channel)
{
  const float sum = fmaf(fabsf(scale), 1.f / fabsf(channel), 8388608.f);
  uint32_t bits;
  memcpy(&bits, &sum, 4);
  return bits & 31;
}

/* Every f16 that can be a channel scale, every factor. */
static void run_factors(void)
{
  int32_t n = 0, n_bad = 0;
  for (uint32_t h = 1; h < 0x7C00; h++)
    for (uint32_t m = 0; m <= ROW_SCALE_MOST; m++) {
      const float channel = half_value((uint16_t)h), scale = channel * (float)m;
      if (scale > 65504.f || half_value(half_bits(scale)) != scale) continue;
      n++;
      n_bad += factor_of(scale, channel) != m;
    }
  verdict(n > 200000 && n_bad == 0, "factors come back: %d of %d do not", n_bad, n);
}

/* Scales of a row: channel times these, over and over. Rows whose number is a multiple of 7 are zero. */
struct scale_case { const char *name; int32_t cols, group; int factors[2][8]; bool is_spoilt; enum row_scale_kind want; };

static void set_scales(struct sits_utd *u, const struct scale_case *c, int part)
{
  uint16_t *scales = (uint16_t *)u->scales;
  const int64_t n = c->group > 0 ? (c->cols + c->group - 1) / c->group : 1;
  for (int64_t r = 0; r < u->dims[0]; r++) {
    const float channel = ldexpf((float)(64 + rand_u32() % 64), -14 - (int)(r % 3));
    for (int64_t g = 0; g < n; g++) scales[r * n + g] = half_bits(r % 7 == 6 ? 0.f : channel * (float)c->factors[part][(r + g) % 8]);
  }
  if (c->is_spoilt && part == 1) scales[(u->dims[0] - 1) * n] ^= 0x8000; /* the last row's first one is negative */
}

static void run_channel(const struct scale_case *c, bool is_interleaved)
{
  static const int64_t rows[2] = {2044, 508}; /* many tiles for many packers, padding behind them */
  struct sits_utd u[2];
  struct program_part parts[2] = {{&u[0], NULL}, {&u[1], NULL}};
  struct cuda_weight w = {.parts = parts, .n_parts = 2, .is_interleaved = is_interleaved};
  struct sits_error err = {0};
  struct channel_scan scan;
  for (int i = 0; i < 2; i++) {
    u[i] = random_tensor(SITS_DTYPE_I4, is_interleaved ? 508 : rows[i], c->cols, c->group, false);
    set_scales(&u[i], c, i);
  }
  bool ok = cuda_weight_plan(&w, &err) == SITS_OK && w.format == K_W4_G128 && scan_init(&scan, &w);
  const int32_t n_tiles = k_row_tiles(w.rows), middle = n_tiles / 3;
  uint8_t *packed = host_alloc((size_t)cuda_weight_bytes(&w));
  ok = ok && pack(&w, 0, middle, packed, &scan) == SITS_OK;
  ok = ok && pack(&w, middle, n_tiles, packed + middle * tile_bytes_of(&w), &scan) == SITS_OK;
  ok = ok && atomic_load(&scan.kind) == (int)c->want;
  int32_t n_bad = 0, n_padding = 0;
  for (int32_t r = 0; ok && c->want != ROW_SCALE_FREE && r < n_tiles * 16; r++) {
    const struct sits_utd *from;
    int32_t at;
    if (r >= w.rows || !source_row(&w, r, &from, &at)) {
      n_padding++;
      n_bad += scan.channel[r] != 1.f;
      continue;
    }
    for (int32_t b = 0; b < k_blocks(c->cols); b++) {
      const uint8_t *unit = packed + ((size_t)(r / 16) * (size_t)k_blocks(c->cols) + (size_t)b) * K_W4_G128_UNIT;
      const float scale = load_half(unit + K_W4_NIBBLE_BYTES + (r % 16 & 7) * 4 + (r % 16 >> 3) * 2);
      const uint32_t m = factor_of(scale, scan.channel[r]);
      n_bad += (float)m * scan.channel[r] != scale || m > ROW_SCALE_MOST || (c->want == ROW_SCALE_POWERS && (m & (m - 1)) != 0);
    }
  }
  ok = ok && n_bad == 0 && (c->want == ROW_SCALE_FREE || n_padding == 8);
  verdict(ok, "channel scales, %s%s: kind %d, %d bad", c->name, is_interleaved ? ", interleaved" : "", (int)atomic_load(&scan.kind), n_bad);
  mem_free(scan.channel);
  gpu_release_all();
}

int main(void)
{
  static const struct scale_case cases[] = {
      {"powers", 1024, 128, {{1, 2, 4, 8, 16, 0, 2, 2}, {16, 8, 4, 1, 1, 2, 0, 4}}, false, ROW_SCALE_POWERS},
      {"groups of 256", 1024, 256, {{1, 2, 4, 8, 16, 0, 2, 2}, {16, 8, 4, 1, 1, 2, 0, 4}}, false, ROW_SCALE_POWERS},
      {"a scale a row", 1056, 0, {{1, 2, 4, 8, 16, 1, 2, 2}, {3, 5, 7, 9, 11, 13, 15, 1}}, false, ROW_SCALE_POWERS},
      {"multiples in one part", 1024, 128, {{1, 2, 4, 8, 16, 0, 2, 2}, {1, 2, 3, 5, 16, 0, 2, 2}}, false, ROW_SCALE_MULTIPLES},
      {"multiples", 1024, 128, {{1, 3, 5, 7, 9, 11, 13, 15}, {16, 15, 14, 12, 10, 6, 0, 1}}, false, ROW_SCALE_MULTIPLES},
      {"free", 1024, 128, {{1, 2, 4, 8, 16, 0, 2, 2}, {1, 2, 4, 17, 16, 0, 2, 2}}, false, ROW_SCALE_FREE},
      {"one negative", 1024, 128, {{1, 2, 4, 8, 16, 0, 2, 2}, {16, 8, 4, 1, 1, 2, 1, 4}}, true, ROW_SCALE_FREE},
  };
  for (int i = 0; i < 2; i++) {
    run(SITS_DTYPE_Q4_0, 576, 0, false, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_Q4_1, 160, 0, false, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_Q4_K, 512, 0, false, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_I4, 576, 32, true, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_I4, 256, 64, false, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_I4, 512, 128, false, i, CUDA_W4, K_W4_G128);
    run(SITS_DTYPE_I4, 384, 0, false, i, CUDA_W4, K_W4_G128);
    run(SITS_DTYPE_I4, 512, 128, true, i, CUDA_W4, K_W4_G32M);
    run(SITS_DTYPE_I8, 192, 32, true, i, CUDA_F16, K_W4_G32M);
    run(SITS_DTYPE_Q8_0, 96, 0, false, i, CUDA_F16, K_W4_G32M);
    run(SITS_DTYPE_F32, 72, 0, false, i, CUDA_F16, K_W4_G32M);
  }
  run_factors();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int k = 0; k < 2; k++) run_channel(&cases[i], k);
  return gpu_finish();
}
