/* The 4-bit GEMMs and expansions against f64 sums over the real weight values: few tokens (f16 activations), many tokens (s8), e4m3 and
 * f16. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu_test.h"

static int32_t n_sm;

/* want[n][r] = sum_k w[r][k] x[n][k], f64. */
static void ref_w4_gemm(const struct test_weight *w, const float *x, int32_t n_tokens, float *want) {
  for (int32_t n = 0; n < n_tokens; n++)
    for (int32_t r = 0; r < w->rows; r++) {
      double sum = 0;
      for (int32_t k = 0; k < w->cols; k++) sum += (double)w->values[(size_t)r * w->cols + k] * x[(size_t)n * w->cols + k];
      want[(size_t)n * w->rows + r] = (float)sum;
    }
}

static float *random_x(int32_t n_tokens, int32_t cols) {
  float *x = host_alloc((size_t)n_tokens * cols * sizeof(float));
  for (int64_t i = 0; i < (int64_t)n_tokens * cols; i++) x[i] = round_half(rand_unit() + 0.2f);
  return x;
}

static void *frag_of(const float *x, int32_t n_tokens, int32_t cols, int32_t m) {
  size_t bytes = (size_t)k_blocks(cols) * 128 * m * 2;
  uint16_t *f = host_alloc(bytes);
  for (int32_t n = 0; n < n_tokens; n++)
    for (int32_t k = 0; k < cols; k++) f[k_frag_index(m, k, n)] = half_bits(x[(size_t)n * cols + k]);
  return gpu_copy(f, bytes);
}

struct decode_case {
  int32_t rows, cols, n_tokens;
  enum k_w4_format format;
  enum k_w4_output output;
  bool normed;
};

static void expect_decode(const struct decode_case *c, const float *sum, const float *bias, const float *h0, const float *gain,
                          float *want_y, float *want_next) {
  for (int32_t n = 0; n < c->n_tokens; n++)
    for (int32_t r = 0; r < c->rows; r++) {
      size_t i = (size_t)n * c->rows + r;
      float v = sum[i];
      if (c->output == K_OUT_SWIGLU) {
        if (r % 16 >= 8) continue;
        float up = sum[i + 8];
        want_next[(size_t)n * (c->rows / 2) + r / 16 * 8 + r % 8] = v / (1.f + expf(-v)) * up;
        continue;
      }
      v += bias[r];
      if (c->output == K_OUT_RESIDUAL) v += h0[i], want_next[i] = v * gain[r];
      want_y[i] = v;
    }
}

/* Worst error of everything that the kernel wrote: y, the next GEMM's input, sums of squares. */
static double decode_error(const struct decode_case *c, const struct k_w4a16 *a, int32_t m, const float *want_y, const float *want_next)
{
  const int32_t next_cols = c->output == K_OUT_SWIGLU ? c->rows / 2 : c->rows, parts = k_w4a16_ssq_parts(c->rows);
  const size_t n_y = (size_t)c->n_tokens * c->rows, n_next = (size_t)c->n_tokens * next_cols,
               next_bytes = (size_t)k_blocks(next_cols) * 128 * m * 2;
  float *got = host_alloc(n_y * 4);
  double error = 0;
  if (c->output != K_OUT_SWIGLU) {
    if (c->output == K_OUT_F16) {
      uint16_t *h = host_alloc(n_y * 2);
      gpu_read(h, a->y, n_y * 2);
      for (size_t i = 0; i < n_y; i++) got[i] = half_value(h[i]);
    } else
      gpu_read(got, a->y, n_y * 4);
    error = relative_error(got, want_y, n_y);
  }
  if (c->output >= K_OUT_RESIDUAL) {
    uint16_t *f = host_alloc(next_bytes);
    gpu_read(f, a->next, next_bytes);
    for (int32_t n = 0; n < c->n_tokens; n++)
      for (int32_t k = 0; k < next_cols; k++) got[(size_t)n * next_cols + k] = half_value(f[k_frag_index(m, k, n)]);
    error = fmax(error, relative_error(got, want_next, n_next));
  }
  if (c->output == K_OUT_RESIDUAL) {
    float *s = host_alloc((size_t)parts * m * 4);
    gpu_read(s, a->ssq, (size_t)parts * m * 4);
    for (int32_t n = 0; n < c->n_tokens; n++) {
      double have = 0, want = 0;
      for (int32_t p = 0; p < parts; p++) have += s[p * m + n];
      for (int32_t r = 0; r < c->rows; r++) want += (double)want_y[(size_t)n * c->rows + r] * want_y[(size_t)n * c->rows + r];
      error = fmax(error, fabs(have - want) / want);
    }
  }
  return error;
}

static void run_decode(struct decode_case c) {
  const int32_t m = k_w4a16_tokens(c.n_tokens), parts = k_w4a16_ssq_parts(c.rows), x_parts = 3;
  struct test_weight w = random_weight(c.rows, c.cols, c.format, false);
  float *x = random_x(c.n_tokens, c.cols), *sum = host_alloc((size_t)c.n_tokens * c.rows * 4),
        *x_ssq = host_alloc((size_t)x_parts * m * 4);
  float *bias = host_alloc((size_t)c.rows * 4), *gain = host_alloc((size_t)c.rows * 4), *h0 = host_alloc((size_t)c.n_tokens * c.rows * 4);
  ref_w4_gemm(&w, x, c.n_tokens, sum);
  for (int32_t r = 0; r < c.rows; r++) bias[r] = rand_unit(), gain[r] = 1.f + 0.5f * rand_unit();
  for (int64_t i = 0; i < (int64_t)c.n_tokens * c.rows; i++) h0[i] = rand_unit() * 3;
  for (int32_t i = 0; i < x_parts * m; i++) x_ssq[i] = 1.f + (float)(i % 7);
  if (c.normed)
    for (int32_t n = 0; n < c.n_tokens; n++) {
      double s = 0;
      for (int32_t p = 0; p < x_parts; p++) s += x_ssq[p * m + n];
      for (int32_t r = 0; r < c.rows; r++) sum[(size_t)n * c.rows + r] *= (float)(1.0 / sqrt(s / 11.0 + 1e-5));
    }
  const size_t n_y = (size_t)c.n_tokens * c.rows;
  float *want_y = host_alloc(n_y * 4), *want_next = host_alloc(n_y * 4);
  expect_decode(&c, sum, bias, h0, gain, want_y, want_next);
  const int32_t next_cols = c.output == K_OUT_SWIGLU ? c.rows / 2 : c.rows;
  const size_t next_bytes = (size_t)k_blocks(next_cols) * 128 * m * 2;
  struct k_w4a16 a = {.weight = gpu_copy(w.packed, w.packed_bytes),
                      .format = c.format,
                      .rows = c.rows,
                      .cols = c.cols,
                      .n_tokens = c.n_tokens,
                      .x = frag_of(x, c.n_tokens, c.cols, m),
                      .x_ssq = c.normed ? gpu_copy(x_ssq, (size_t)x_parts * m * 4) : NULL,
                      .x_n_ssq = x_parts,
                      .x_width = 11.f,
                      .eps = 1e-5f,
                      .output = c.output,
                      .ld = c.rows,
                      .bias = c.output == K_OUT_SWIGLU ? NULL : gpu_copy(bias, (size_t)c.rows * 4),
                      .next = gpu_alloc(next_bytes),
                      .gain = gpu_copy(gain, (size_t)c.rows * 4),
                      .ssq = gpu_alloc((size_t)parts * m * 4)};
  a.y = c.output == K_OUT_RESIDUAL ? gpu_copy(h0, n_y * 4) : gpu_alloc(n_y * 4);
  gpu_check_call(sits_k_w4a16(&a, n_sm, gpu_stream()), "sits_k_w4a16");
  const double error = decode_error(&c, &a, m, want_y, want_next);
  const double limit = c.output == K_OUT_F32 ? 5e-5 : 1e-3; /* f32: offsets of 24 and 264 times the sum of x cancel */
  static const char *names[] = {"f16", "f32", "residual", "swiglu"};
  verdict(error < limit, "w4a16 %s %dx%d T=%d %s%s: %.2e", c.format == K_W4_G128 ? "g128" : "g32m", c.rows, c.cols, c.n_tokens,
          names[c.output], c.normed ? " normed" : "", error);
  gpu_release_all();
}

/* x [T][cols] through the conversion kernel to 8 bits and back; x becomes what the codes mean. Returns the largest error in steps. */
static double quantise_x(float *x, int32_t n_tokens, int32_t cols, struct k_act *out)
{
  const int32_t blocks = k_blocks(cols), tiles = (n_tokens + out->tile - 1) / out->tile;
  const bool is_grouped = out->form == K_ACT_GROUP_S8;
  const size_t bytes = (size_t)tiles * out->tile * blocks * 128, n_scales = (size_t)tiles * out->tile * (is_grouped ? blocks : 1);
  uint16_t *xh = host_alloc((size_t)n_tokens * cols * 2);
  for (int64_t i = 0; i < (int64_t)n_tokens * cols; i++) xh[i] = half_bits(x[i]);
  out->data = gpu_zeros(bytes), out->scale = gpu_zeros(n_scales * 4), out->sum = gpu_zeros((size_t)tiles * out->tile * 4);
  const struct k_convert convert = {K_SRC_F16, gpu_copy(xh, (size_t)n_tokens * cols * 2), cols, n_tokens, cols, *out};
  gpu_check_call(sits_k_convert(&convert, gpu_stream()), "sits_k_convert");
  int8_t *q = host_alloc(bytes);
  float *scale = host_alloc(n_scales * 4);
  gpu_read(q, out->data, bytes);
  gpu_read(scale, out->scale, n_scales * 4);
  double worst = 0;
  for (int32_t n = 0; n < n_tokens; n++)
    for (int32_t k = 0; k < cols; k++) {
      const int32_t row = n % out->tile, chunk = ((k & 127) >> 4) ^ (row & 7);
      const size_t block = (size_t)(n / out->tile) * blocks + k / 128;
      const float step = is_grouped ? scale[block * out->tile + row] : scale[n],
                  v = step * q[(block * out->tile + row) * 128 + chunk * 16 + (k & 15)];
      worst = fmax(worst, fabs(v - x[(size_t)n * cols + k]) / step);
      x[(size_t)n * cols + k] = v;
    }
  return worst;
}

/* What a launch left behind as [T][out_cols] values: slabs added, f16 or f32 read, s8 codes times their scales. */
static float *read_w4a8(const struct k_w4a8 *a, int32_t tile, int32_t token_tiles, int32_t n_split, int32_t out_cols)
{
  const size_t n_out = (size_t)a->n_tokens * out_cols;
  float *got = host_alloc(n_out * 4), *slab = host_alloc(n_out * 4);
  if (a->output == K_W4A8_SLAB_F32 || a->output == K_W4A8_F32)
    for (int32_t s = 0; s < n_split; s++) {
      gpu_read(slab, (float *)a->y + s * n_out, n_out * 4);
      for (size_t i = 0; i < n_out; i++) got[i] += slab[i];
    }
  else if (a->output == K_W4A8_SWIGLU_S8) {
    const int32_t blocks = k_blocks(out_cols), rows = token_tiles * tile;
    int8_t *q = host_alloc((size_t)rows * blocks * 128);
    float *scale = host_alloc((size_t)rows * blocks * 4);
    gpu_read(q, a->y, (size_t)rows * blocks * 128);
    gpu_read(scale, a->y_scale, (size_t)rows * blocks * 4);
    for (int32_t n = 0; n < a->n_tokens; n++)
      for (int32_t k = 0; k < blocks * 128; k++) {
        const size_t row = ((size_t)(n / tile) * blocks + k / 128) * tile + n % tile;
        const float v = scale[row] * q[row * 128 + (((k & 127) >> 4) ^ (n % tile & 7)) * 16 + (k & 15)];
        if (k < out_cols)
          got[(size_t)n * out_cols + k] = v;
        else if (v != 0)
          got[0] = NAN; /* padding columns are zeros */
      }
  } else {
    uint16_t *h = host_alloc(n_out * 2);
    gpu_read(h, a->y, n_out * 2);
    for (size_t i = 0; i < n_out; i++) got[i] = half_value(h[i]);
  }
  return got;
}

static float *swiglu_of(const float *sums, int32_t n_tokens, int32_t rows)
{
  const int32_t cols = rows / 2;
  float *out = host_alloc((size_t)n_tokens * cols * 4);
  for (int32_t n = 0; n < n_tokens; n++)
    for (int32_t c = 0; c < cols; c++) {
      const float g = sums[(size_t)n * rows + c / 8 * 16 + c % 8], u = sums[(size_t)n * rows + c / 8 * 16 + c % 8 + 8];
      out[(size_t)n * cols + c] = g / (1.f + expf(-g)) * u;
    }
  return out;
}

static void run_w4a8(int32_t rows, int32_t cols, int32_t n_tokens, enum k_w4a8_output output, bool is_grouped)
{
  struct test_weight w = random_weight(rows, cols, K_W4_G128, !is_grouped);
  float *x = random_x(n_tokens, cols), *sums = host_alloc((size_t)n_tokens * rows * 4);
  const int32_t out_cols = output == K_W4A8_SWIGLU || output == K_W4A8_SWIGLU_S8 ? rows / 2 : rows;
  const size_t n_out = (size_t)n_tokens * out_cols;
  struct k_w4a8 a = {.weight = gpu_copy(w.packed, w.packed_bytes),
                     .is_grouped = is_grouped,
                     .channel = is_grouped ? NULL : gpu_copy(w.channel, (size_t)k_row_tiles(rows) * 64),
                     .rows = rows,
                     .cols = cols,
                     .n_tokens = n_tokens,
                     .output = output,
                     .ld = out_cols,
                     .slab_stride = (int64_t)n_out};
  struct k_act act = {.form = is_grouped ? K_ACT_GROUP_S8 : K_ACT_TILE_S8,
                      .tile = is_grouped ? k_w4a8_group_tile(n_tokens) : k_w4a8_tile(n_tokens)};
  const size_t padded = (size_t)(n_tokens + act.tile) * (size_t)k_blocks(out_cols) * 128;
  if (output == K_W4A8_SWIGLU_S8) a.y_scale = gpu_alloc(padded / 128 * 4);
  struct k_w4a8_plan plan;
  if (!k_w4a8_plan(&a, n_sm, &plan)) {
    verdict(false, "w4a8 %dx%d T=%d: no plan", rows, cols, n_tokens);
    return;
  }
  const double quant_error = quantise_x(x, n_tokens, cols, &act);
  ref_w4_gemm(&w, x, n_tokens, sums);
  a.x = act.data, a.x_scale = act.scale, a.x_sum = act.sum;
  a.y = gpu_alloc(output == K_W4A8_SWIGLU_S8 ? padded : n_out * 4 * (size_t)plan.n_split);
  gpu_check_call(sits_k_w4a8(&a, n_sm, gpu_stream()), "sits_k_w4a8");
  const float *got = read_w4a8(&a, plan.tile, plan.token_tiles, plan.n_split, out_cols),
              *want = out_cols == rows ? sums : swiglu_of(sums, n_tokens, rows);
  const double error = relative_error(got, want, n_out);
  /* f32 sums 2e-5; f16 rounds to 5e-4; s8 with a scale a group: half a step is 1/254 of the group's maximum, which
   * is six times the root mean square here. */
  const double limit = output == K_W4A8_SLAB_F32 || output == K_W4A8_F32 ? 2e-5 : output == K_W4A8_SWIGLU_S8 ? 2e-2 : 1e-3;
  static const char *names[] = {"slabs", "f16", "swiglu", "f32", "swiglu s8"};
  verdict(error < limit && quant_error < 0.502, "w4a8 %s %dx%d T=%d %s: split %d, tile %d: %.2e, quantisation %.3f steps",
          is_grouped ? "grouped" : "absorbed", rows, cols, n_tokens, names[output], plan.n_split, plan.tile, error, quant_error);
  gpu_release_all();
}

static void many_tokens(void)
{
  static const int32_t tokens[] = {1, 16, 17, 32, 33, 64, 65, 96, 100, 128, 130, 300};
  for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++) {
    if (gpu_is_small() && tokens[t] > 100) break;
    const enum k_w4a8_output whole = t % 2 ? K_W4A8_F16 : K_W4A8_SWIGLU;
    for (int is_grouped = 0; is_grouped < 2; is_grouped++) {
      run_w4a8(144, 256, tokens[t], K_W4A8_SLAB_F32, is_grouped);
      run_w4a8(640, 1408, tokens[t], whole, is_grouped);
      run_w4a8(600, 200, tokens[t], K_W4A8_F32, is_grouped);
    }
    run_w4a8(608, 640, tokens[t], K_W4A8_SWIGLU_S8, true);
    run_w4a8(1001, 1408, tokens[t], t % 2 ? K_W4A8_SLAB_F32 : K_W4A8_F16, false); /* rows that come in no fours */
  }
  for (int is_grouped = 0; is_grouped < 2; is_grouped++) {
    run_w4a8(128, 128, 40, K_W4A8_SLAB_F32, is_grouped);
    run_w4a8(1024, 4096, 33, K_W4A8_SLAB_F32, is_grouped);
    run_w4a8(256, 14336, 64, K_W4A8_SLAB_F32, is_grouped);
    run_w4a8(100, 200, 20, K_W4A8_F32, is_grouped);
    run_w4a8(40000, 384, 24, K_W4A8_F32, is_grouped); /* more chunks than SMs: several items a CTA */
    if (!gpu_is_small()) run_w4a8(40000, 384, 70, K_W4A8_F32, is_grouped);
  }
  if (gpu_is_small()) return;
  run_w4a8(40000, 384, 128, K_W4A8_SWIGLU, false);
  run_w4a8(6000, 4096, 200, K_W4A8_SLAB_F32, false); /* the same with two k groups */
  run_w4a8(40000, 640, 64, K_W4A8_SWIGLU_S8, true);
}

static float e4m3_value(uint8_t b) {
  int e = b >> 3 & 15, m = b & 7;
  float v = e ? ldexpf(1.f + (float)m / 8.f, e - 7) : ldexpf((float)m / 8.f, -6);
  return b & 0x80 ? -v : v;
}

static void run_expand(int32_t rows, int32_t cols, enum k_w4_format format, bool to_e4m3) {
  struct test_weight w = random_weight(rows, cols, format, to_e4m3);
  const int32_t padded = k_blocks(cols) * 128;
  const size_t n = (size_t)rows * padded, bytes = n * (to_e4m3 ? 1 : 2);
  struct k_expand a = {gpu_copy(w.packed, w.packed_bytes),
                       format,
                       rows,
                       cols,
                       gpu_copy(w.channel, (size_t)k_row_tiles(rows) * 64),
                       to_e4m3,
                       gpu_alloc(bytes)};
  gpu_check_call(sits_k_expand(&a, gpu_stream()), "sits_k_expand");
  uint8_t *got = host_alloc(bytes);
  gpu_read(got, a.out, bytes);
  size_t n_bad = 0;
  for (int32_t r = 0; r < rows; r++)
    for (int32_t c = 0; c < padded; c++) {
      uint16_t h;
      memcpy(&h, got + ((size_t)r * padded + c) * 2 * !to_e4m3, 2);
      float v = to_e4m3 ? e4m3_value(got[(size_t)r * padded + c]) * w.channel[r] : half_value(h);
      float want = c < cols ? w.values[(size_t)r * cols + c] : 0.f;
      n_bad += to_e4m3 ? v != want : v != round_half(want);
    }
  verdict(n_bad == 0, "expand %s %dx%d to %s: %zu of %zu differ", format == K_W4_G128 ? "g128" : "g32m", rows, cols,
          to_e4m3 ? "e4m3" : "f16", n_bad, n);
  gpu_release_all();
}

int main(void) {
  n_sm = gpu_open();
  gpu_check_call(sits_k_w4a16_init(), "init");
  gpu_check_call(sits_k_w4a8_init(), "init");
  static const int32_t shapes[][2] = {{16, 32}, {32, 128}, {96, 576}, {400, 640}, {1152, 1536}, {6144, 512}, {64, 14336}};
  static const int32_t tokens[] = {1, 2, 8, 9, 16};
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
      for (int f = 0; f < 2; f++)
        run_decode((struct decode_case){shapes[s][0], shapes[s][1], tokens[t], (enum k_w4_format)f, K_OUT_F32, (s + t) % 2});
  for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
    for (int f = 0; f < 2; f++)
      for (int o = K_OUT_F16; o <= K_OUT_SWIGLU; o++)
        if (o != K_OUT_F32)
          run_decode((struct decode_case){608, 1408, tokens[t], (enum k_w4_format)f, (enum k_w4_output)o, o != K_OUT_RESIDUAL});
  run_decode((struct decode_case){4099, 160, 3, K_W4_G32M, K_OUT_F32, false});
  many_tokens();
  run_expand(48, 640, K_W4_G128, true);
  run_expand(40, 640, K_W4_G128, false);
  run_expand(40, 576, K_W4_G32M, false);
  return gpu_finish();
}
