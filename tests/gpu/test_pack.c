/* Packing of weights for the CUDA kernels, on the host alone: a packed weight read back by its layout's definition (kernels.h) equals the
 * source
 * tensor's own values, for every source type, for parts side by side and for gate and up rows in turns of eight. Needs no device. */
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
  bool ok = pack(&w, 0, middle, packed) == SITS_OK && pack(&w, middle, n_tiles, packed + middle * tile_bytes_of(&w)) == SITS_OK;
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

int main(void)
{
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
  return gpu_finish();
}
