/* Norms, conversions, embedding and sampling against the host. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu_test.h"

/* Memory for n rows of an activation. */
static struct k_act make_act(enum k_act_form form, int32_t n, int32_t width) {
  const int32_t blocks = k_blocks(width), tile = form == K_ACT_FRAG_F16    ? k_w4a16_tokens(n)
                                                 : form == K_ACT_TILE_S8  ? k_w4a8_tile(n)
                                                 : form == K_ACT_GROUP_S8 ? k_w4a8_group_tile(n)
                                                                          : 1;
  const size_t rows = (size_t)(n + tile - 1) / tile * tile, size = form == K_ACT_ROW_F16 || form == K_ACT_FRAG_F16 ? 2 : 1;
  struct k_act a = {.form = form, .data = gpu_alloc(rows * blocks * 128 * size), .tile = tile};
  if (size == 1) a.scale = gpu_alloc(rows * (form == K_ACT_GROUP_S8 ? blocks : 1) * 4);
  if (form == K_ACT_TILE_S8) a.sum = gpu_alloc(rows * 4);
  return a;
}

static float e4m3_value(uint8_t v) {
  const int e = v >> 3 & 15, m = v & 7;
  const float f = e ? ldexpf(1.f + (float)m / 8.f, e - 7) : ldexpf((float)m / 8.f, -6);
  return v & 0x80 ? -f : f;
}

/* Its values -> got[n][padded], what a form does not write 0. The 8-bit integers: returns how many steps they are off at most; INFINITY:
 * a row's sum is wrong. */
static double read_act(const struct k_act *a, int32_t n, int32_t width, const float *want, float *got) {
  const int32_t blocks = k_blocks(width), padded = blocks * 128;
  const bool is_f16 = a->form == K_ACT_ROW_F16 || a->form == K_ACT_FRAG_F16, is_grouped = a->form == K_ACT_GROUP_S8;
  const size_t rows = (size_t)(n + a->tile - 1) / a->tile * a->tile, n_scales = rows * (is_grouped ? blocks : 1);
  uint16_t *half = host_alloc(rows * padded * 2);
  uint8_t *code = (uint8_t *)half;
  float *scale = host_alloc(n_scales * 4);
  int32_t *sum = host_alloc(rows * 4);
  double worst = 0;
  gpu_read(half, a->data, rows * padded * (is_f16 ? 2 : 1));
  if (a->scale) gpu_read(scale, a->scale, n_scales * 4);
  if (a->sum) gpu_read(sum, a->sum, rows * 4);
  for (int32_t r = 0; r < n; r++)
    for (int32_t c = 0; c < padded; c++) {
      const size_t i = (size_t)r * padded + c, block = (size_t)(r / a->tile) * blocks + c / 128;
      const int32_t row = r % a->tile, chunk = ((c & 127) >> 4) ^ (row & 7);
      if (is_f16)
        got[i] = a->form == K_ACT_ROW_F16 ? half_value(half[i]) : c < width ? half_value(half[k_frag_index(a->tile, c, r)]) : 0;
      else if (a->form == K_ACT_ROW_E4M3)
        got[i] = e4m3_value(code[i]) * scale[r];
      else {
        const float step = is_grouped ? scale[block * a->tile + row] : scale[r];
        const int8_t q = (int8_t)code[(block * a->tile + row) * 128 + chunk * 16 + (c & 15)];
        got[i] = step * q, sum[r] -= q;
        worst = fmax(worst, fabs(got[i] - want[i]) / step);
      }
    }
  for (int32_t r = 0; a->sum && r < n; r++)
    if (sum[r] != 0) worst = INFINITY;
  return worst;
}

static const char *const form_names[] = {"f16", "s8", "s8 in groups", "e4m3", "fragments"};

/* n_selected: rows of h that go out, in another order; 0: all. */
static void run_norm(int32_t n_rows, int32_t width, int32_t n_slabs, int32_t n_selected, enum k_act_form form) {
  const size_t n = (size_t)n_rows * width;
  const int32_t padded = k_blocks(width) * 128, n_out = n_selected ? n_selected : n_rows;
  const size_t size = (size_t)n_out * padded;
  float *h = host_alloc(n * 4), *slabs = host_alloc(n * 4 * (n_slabs + 1)), *gain = host_alloc(width * 4), *want = host_alloc(size * 4);
  float *sum = host_alloc(n * 4), *got = host_alloc(size * 4);
  int32_t *rows = host_alloc((size_t)n_out * 4);
  for (int32_t r = 0; r < n_out; r++) rows[r] = n_selected ? (n_rows - 1 + r * 131) % n_rows : r;
  for (size_t i = 0; i < n; i++) h[i] = rand_unit() * 4, sum[i] = h[i];
  for (size_t i = 0; i < n * n_slabs; i++) slabs[i] = rand_unit(), sum[i % n] += slabs[i];
  for (int32_t i = 0; i < width; i++) gain[i] = 1 + rand_unit() / 2;
  for (int32_t r = 0; r < n_out; r++) {
    const float *x = sum + (size_t)rows[r] * width;
    double s = 0;
    for (int32_t i = 0; i < width; i++) s += (double)x[i] * x[i];
    for (int32_t i = 0; i < width; i++) want[(size_t)r * padded + i] = (float)(x[i] / sqrt(s / width + 1e-5) * gain[i]);
  }
  const struct k_norm a = {.h = gpu_copy(h, n * 4), .slabs = n_slabs ? gpu_copy(slabs, n * 4 * n_slabs) : NULL, .n_slabs = n_slabs,
                           .slab_stride = (int64_t)n, .gain = gpu_copy(gain, width * 4), .eps = 1e-5f, .n_rows = n_out, .width = width,
                           .row_token = n_selected ? gpu_copy(rows, (size_t)n_out * 4) : NULL, .out = make_act(form, n_out, width)};
  gpu_check_call(sits_k_norm(&a, gpu_stream()), "sits_k_norm");
  const double steps = read_act(&a.out, n_out, width, want, got), error = relative_error(got, want, size);
  gpu_read(h, a.h, n * 4);
  const double residual = relative_error(h, sum, n);
  const double limit = form == K_ACT_ROW_E4M3 ? 0.035 : form == K_ACT_TILE_S8 || form == K_ACT_GROUP_S8 ? 0.01 : 1e-3;
  verdict(error < limit && steps < 0.502 && residual < 1e-6,
          "norm %dx%d, %d slabs, %d selected rows, to %s: %.2e, %.3f steps, residual %.2e", n_rows, width, n_slabs, n_selected,
          form_names[form], error, steps, residual);
  gpu_release_all();
}

static void run_norms(void) {
  run_norm(1, 64, 0, 0, K_ACT_ROW_F16);
  run_norm(7, 576, 1, 0, K_ACT_ROW_F16);
  run_norm(33, 4096, 4, 0, K_ACT_ROW_F16);
  run_norm(5, 4096, 0, 2, K_ACT_ROW_F16);
  run_norm(300, 4096, 0, 0, K_ACT_ROW_F16);
  run_norm(257, 576, 0, 0, K_ACT_ROW_F16);
  run_norm(256, 6000, 0, 0, K_ACT_ROW_F16);
  run_norm(400, 4096, 0, 300, K_ACT_ROW_F16);
  run_norm(1, 4096, 2, 0, K_ACT_FRAG_F16);
  run_norm(5, 576, 0, 0, K_ACT_FRAG_F16);
  run_norm(16, 6000, 1, 0, K_ACT_FRAG_F16);
  for (enum k_act_form form = K_ACT_TILE_S8; form <= K_ACT_ROW_E4M3; form++) {
    run_norm(17, 576, 3, 0, form);
    run_norm(130, 10000, 0, 0, form);
    run_norm(40, 4096, 0, 33, form);
    run_norm(300, 4096, 0, 0, form);
    run_norm(100, 6000, 0, 260, form);
  }
}

static void run_convert(int32_t n_rows, int32_t width, enum k_act_source source, int32_t n_walking) {
  const int32_t padded = k_blocks(width) * 128, ld = source == K_SRC_F16 ? width : 2 * width;
  const size_t n = (size_t)n_rows * ld, size = (size_t)n_rows * padded;
  uint16_t *half = host_alloc(n * 2);
  float *x = host_alloc(n * 4), *want = host_alloc(size * 4), *got = host_alloc(size * 4);
  for (size_t i = 0; i < n; i++) x[i] = round_half(rand_unit() * 3), half[i] = half_bits(x[i]);
  for (int32_t r = 0; r < n_rows; r++)
    for (int32_t c = 0; c < width; c++) {
      const float *row = x + (size_t)r * ld;
      float g = source == K_SRC_F16 ? 0 : row[c / 8 * 16 + c % 8], u = source == K_SRC_F16 ? 0 : row[c / 8 * 16 + 8 + c % 8];
      want[(size_t)r * padded + c] = source == K_SRC_F16 ? row[c] : g / (1.f + expf(-g)) * u;
    }
  void *dev = source == K_SRC_F32_GATE_UP ? gpu_copy(x, n * 4) : gpu_copy(half, n * 2);
  const struct k_convert a = {source, dev, ld, n_rows, width, make_act(K_ACT_ROW_E4M3, n_rows, width), n_walking};
  gpu_check_call(sits_k_convert(&a, gpu_stream()), "sits_k_convert");
  (void)read_act(&a.out, n_rows, width, want, got);
  double error = relative_error(got, want, size);
  verdict(error < 0.035, "convert %dx%d source %d to e4m3, %d walking: %.3f", n_rows, width, source, n_walking, error);
  gpu_release_all();
}

/* One group of 32 as tensor/act_format.h says; outliers count as zero and are left alone. */
static void ref_round_group(const float *x, const uint8_t *outliers, int32_t c0, bool is_int8, float *y) {
  float lo = 0, hi = 0;
  for (int32_t i = 0; i < 32; i++)
    if (!(outliers && outliers[(c0 + i) / 8] >> (c0 + i) % 8 & 1)) lo = fminf(lo, x[i]), hi = fmaxf(hi, x[i]);
  const float s = (hi - lo) / (is_int8 ? 254.f : 15.f);
  const float z = is_int8 ? rintf((hi + lo) / (2 * s)) : rintf(-lo / s), least = is_int8 ? z - 127 : -z, last = is_int8 ? z + 127 : 15 - z;
  for (int32_t i = 0; i < 32; i++) y[i] = hi > lo ? s * fminf(fmaxf(rintf(x[i] / s), least), last) : 0;
}

/* Runs of n values times the orthonormal Walsh-Hadamard matrix. */
static void ref_rotate(float *x, int32_t width, int32_t n) {
  for (int32_t d = 1; d < n; d *= 2)
    for (int32_t i = 0; i < width; i++)
      if (!(i & d)) {
        const double a = x[i], b = x[i + d];
        x[i] = (float)((a + b) * sqrt(0.5)), x[i + d] = (float)((a - b) * sqrt(0.5));
      }
}

/* Rotated and rounded activations. A value within rounding error of the middle between two levels may fall to either side: few do. */
static void run_round(int32_t n_rows, int32_t width, enum k_act_round round, int32_t n_outliers, int32_t rotation, int32_t frag_m) {
  const int32_t padded = k_blocks(width) * 128;
  const size_t n = (size_t)n_rows * width, n_out = frag_m ? (size_t)padded * frag_m : (size_t)n_rows * padded;
  uint16_t *half = host_alloc(n * 2), *got = host_alloc(n_out * 2);
  float *x = host_alloc(n * 4), *want = host_alloc(n * 4);
  uint8_t *outliers = n_outliers ? host_alloc(width / 8) : NULL;
  if (outliers) memset(outliers, 0, width / 8);
  for (int32_t i = 0; i < n_outliers; i++) outliers[i * 37 % width / 8] |= (uint8_t)(1 << i * 37 % width % 8);
  int32_t n_far = 0;
  for (int32_t r = 0; r < n_rows; r++) {
    float most = 0;
    for (int32_t c = 0; c < width; c++) {
      const bool is_outlier = outliers && outliers[c / 8] >> c % 8 & 1;
      const size_t i = (size_t)r * width + c;
      x[i] = round_half((rand_unit() + 0.3f) * (is_outlier ? 40 : 2) * (c / 32 % 5 == 4 ? 0 : 1));
      half[i] = half_bits(x[i]);
    }
    ref_rotate(x + (size_t)r * width, width, rotation);
    for (int32_t c = 0; c < width; c++)
      if (outliers && outliers[c / 8] >> c % 8 & 1) most = fmaxf(most, fabsf(x[(size_t)r * width + c]));
    float *y = want + (size_t)r * width;
    if (round == K_ROUND_NONE) memcpy(y, x + (size_t)r * width, width * 4);
    for (int32_t c = 0; c < width && round != K_ROUND_NONE; c += 32)
      ref_round_group(x + (size_t)r * width + c, outliers, c, round == K_ROUND_INT8, y + c);
    for (int32_t c = 0; outliers && c < width; c++)
      if (outliers[c / 8] >> c % 8 & 1) y[c] = most > 0 ? most / 127 * rintf(x[(size_t)r * width + c] / (most / 127)) : 0;
  }
  struct k_convert a = {K_SRC_F16, gpu_copy(half, n * 2), width, n_rows, width,
                        {.form = frag_m ? K_ACT_FRAG_F16 : K_ACT_ROW_F16,
                         .data = gpu_alloc(n_out * 2),
                         .tile = frag_m,
                         .round = round,
                         .outliers = outliers ? gpu_copy(outliers, width / 8) : NULL,
                         .rotation = rotation}};
  gpu_check_call(sits_k_convert(&a, gpu_stream()), "sits_k_convert");
  gpu_read(got, a.out.data, n_out * 2);
  for (int32_t r = 0; r < n_rows; r++)
    for (int32_t c = 0; c < width; c++) {
      const size_t at = frag_m ? (size_t)k_frag_index(frag_m, c, r) : (size_t)r * padded + c;
      const float v = half_value(got[at]), w = want[(size_t)r * width + c];
      n_far += !(fabsf(v - w) <= 6e-4f * fabsf(w) + (round == K_ROUND_NONE ? 1e-4f : 1e-6f));
    }
  verdict(n_far * 1000 <= (int64_t)n, "round %dx%d to %d bits, %d outliers, rotation %d, %s: %d of %zu differ", n_rows, width,
          round == K_ROUND_NONE ? 16 : round == K_ROUND_INT8 ? 8 : 4, n_outliers, rotation, frag_m ? "fragments" : "rows", n_far, n);
  gpu_release_all();
}

static void run_embed(enum k_w4_format format, bool packed) {
  const int32_t vocab = 100, width = 576, n = 5, m = 8, parts = k_w4a16_ssq_parts(width);
  static const int32_t tokens[5] = {0, 99, -2, 16, 1000}, drawn[2] = {5, 17}, ids[5] = {0, 99, 17, 16, 0};
  struct test_weight w = random_weight(vocab, width, format, false);
  float *gain = host_alloc(width * 4), *got = host_alloc((size_t)n * width * 4), *want = host_alloc((size_t)n * width * 4),
        *ssq = host_alloc((size_t)parts * m * 4);
  uint16_t *table = host_alloc((size_t)vocab * width * 2);
  for (int64_t i = 0; i < (int64_t)vocab * width; i++) table[i] = half_bits(w.values[i]);
  for (int32_t i = 0; i < width; i++) gain[i] = 1 + rand_unit() / 2;
  for (int32_t t = 0; t < n; t++)
    for (int32_t c = 0; c < width; c++) {
      float v = w.values[(size_t)ids[t] * width + c];
      want[(size_t)t * width + c] = packed ? v : round_half(v);
    }
  const size_t frag = (size_t)k_blocks(width) * 128 * m * 2;
  struct k_embed a = {gpu_copy(tokens, sizeof tokens),
                      gpu_copy(drawn, sizeof drawn),
                      packed ? gpu_copy(w.packed, w.packed_bytes) : gpu_copy(table, (size_t)vocab * width * 2),
                      packed,
                      format,
                      n,
                      width,
                      width,
                      vocab,
                      gpu_alloc((size_t)n * width * 4),
                      m,
                      gpu_alloc(frag),
                      gpu_copy(gain, width * 4),
                      gpu_alloc((size_t)parts * m * 4),
                      parts};
  gpu_check_call(sits_k_embed(&a, gpu_stream()), "sits_k_embed");
  gpu_read(got, a.h, (size_t)n * width * 4);
  gpu_read(ssq, a.ssq, (size_t)parts * m * 4);
  uint16_t *f = host_alloc(frag);
  gpu_read(f, a.next, frag);
  double error = relative_error(got, want, (size_t)n * width), worst = 0;
  for (int32_t t = 0; t < n; t++) {
    double have = 0, sum = 0;
    for (int32_t p = 0; p < parts; p++) have += ssq[p * m + t];
    for (int32_t c = 0; c < width; c++) {
      double v = want[(size_t)t * width + c];
      sum += v * v;
      worst = fmax(worst, fabs(half_value(f[k_frag_index(m, c, t)]) - v * gain[c]));
    }
    worst = fmax(worst, fabs(have / sum - 1));
  }
  verdict(error < 1e-6 && worst < 1e-3, "embed %s: %.1e, fragment and squares %.1e",
          packed ? format == K_W4_G128 ? "g128" : "g32m" : "f16", error, worst);
  gpu_release_all();
}

/* Kept set by sorting, then the draw in index order. */
static int32_t ref_sample(const float *x, int32_t n, struct k_sample_row p) {
  int32_t best = 0;
  for (int32_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  if (p.temperature <= 0) return best;
  float *sorted = host_alloc((size_t)n * 4);
  memcpy(sorted, x, (size_t)n * 4);
  for (int32_t gap = n / 2; gap > 0; gap /= 2) /* shell sort, descending */
    for (int32_t i = gap; i < n; i++)
      for (int32_t j = i - gap; j >= 0 && sorted[j] < sorted[j + gap]; j -= gap) {
        float s = sorted[j];
        sorted[j] = sorted[j + gap], sorted[j + gap] = s;
      }
  float floor_value = -INFINITY;
  if (p.top_k > 0 && p.top_k < n) floor_value = sorted[p.top_k - 1];
  if (p.min_p > 0) floor_value = fmaxf(floor_value, x[best] + p.temperature * logf(p.min_p));
  double kept = 0, run = 0;
  for (int32_t i = 0; i < n && sorted[i] >= floor_value; i++) kept += exp((sorted[i] - x[best]) / p.temperature);
  if (p.top_p < 1)
    for (int32_t i = 0; i < n && sorted[i] >= floor_value; i++) {
      run += exp((sorted[i] - x[best]) / p.temperature);
      if (run >= kept * p.top_p) {
        floor_value = sorted[i];
        break;
      }
    }
  kept = 0;
  for (int32_t i = 0; i < n; i++)
    if (x[i] >= floor_value) kept += exp((x[i] - x[best]) / p.temperature);
  run = 0;
  for (int32_t i = 0; i < n; i++)
    if (x[i] >= floor_value) {
      run += exp((x[i] - x[best]) / p.temperature);
      if (run > kept * p.u) return i;
    }
  return n - 1;
}

static void run_sample(int32_t n) {
  enum { ROWS = 12 };
  static const struct k_sample_row rows[ROWS] = {{0, 1, 0, 0, 0},
                                                 {1, 1, 0, 0, 0.3f},
                                                 {0.7f, 0.9f, 0, 0, 0.999f},
                                                 {1, 1, 0, 1, 0.5f},
                                                 {1, 1, 0, 5, 0.77f},
                                                 {1.3f, 0.5f, 0.05f, 40, 0.1f},
                                                 {1, 1, 0.2f, 0, 0.6f},
                                                 {2, 0.01f, 0, 0, 0.9f},
                                                 {0.1f, 1, 0, 0, 0.5f},
                                                 {1, 0.95f, 0, 1000000, 0.0f},
                                                 {1, 0.3f, 0.01f, 3, 0.99f},
                                                 {5, 0.999f, 0, 0, 0.25f}};
  float *x = host_alloc((size_t)ROWS * n * 4), logprob[ROWS];
  int32_t token[ROWS], n_bad = 0;
  double worst = 0;
  for (int64_t i = 0; i < (int64_t)ROWS * n; i++) x[i] = (rand_unit() + rand_unit() + rand_unit()) * 4;
  struct k_sample a = {gpu_copy(x, (size_t)ROWS * n * 4), ROWS, n, n, gpu_copy(rows, sizeof rows), gpu_alloc(sizeof token),
                       gpu_alloc(sizeof logprob)};
  gpu_check_call(sits_k_sample(&a, gpu_stream()), "sits_k_sample");
  gpu_read(token, a.token, sizeof token);
  gpu_read(logprob, a.logprob, sizeof logprob);
  for (int32_t r = 0; r < ROWS; r++) {
    const float *row = x + (size_t)r * n;
    int32_t want = ref_sample(row, n, rows[r]);
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp(row[i]);
    if (token[r] < 0 || token[r] >= n)
      n_bad += 1000;
    else
      worst = fmax(worst, fabs(logprob[r] - (row[token[r]] - log(sum))));
    n_bad += token[r] != want;
  }
  verdict(n_bad <= 0 && worst < 1e-4, "sample V=%d: %d of %d rows differ, log probability off by %.1e", n, n_bad, ROWS, worst);
  gpu_release_all();
}

/* Rows where a draw has no weights, or equal ones. Values are 0 but for two or three equal ones at 323, 330 and, where it counts, 1,001, in
 * one warp's part and at the end; a column that is not of the vocabulary holds the largest value of all. */
enum edge_fill { FILL_ZERO, FILL_NEGATIVE_ZERO, FILL_MINUS_INF, FILL_NAN };
static void run_sample_edges(void) {
  enum { V = 1003, LD = 1004, A = 323, B = 330, C = 1001 };
  static const struct edge {
    struct k_sample_row row;
    enum edge_fill fill;
    int32_t n_equal;
    float equal;
    int32_t want;
  } edges[] = {
    {{0, 1, 0, 0, 0.9f}, FILL_ZERO, 0, 0, 0},
    {{0, 1, 0, 0, 0.9f}, FILL_NAN, 3, -5, A},
    {{1e-40f, 1, 0, 0, 0.9f}, FILL_ZERO, 2, 3, A}, /* 1 / T is not a float: as T = 0 */
    {{1e-40f, 0.9f, 0.1f, 7, 0.9f}, FILL_ZERO, 2, 3, A},
    {{1e-38f, 1, 0, 0, 0.9f}, FILL_ZERO, 2, 3, B},
    {{1e-30f, 0.5f, 0, 0, 0.6f}, FILL_NAN, 3, -3, B}, /* values equal to a threshold are all kept */
    {{1e-30f, 1, 0, 0, 0.99f}, FILL_ZERO, 3, 3, C},
    {{1, 1, 0, 0, 0.9f}, FILL_ZERO, 2, INFINITY, A},
    {{1, 0.5f, 0.2f, 2, 0.9f}, FILL_NAN, 2, INFINITY, A},
    {{1, 1, 0, 0, 0.9f}, FILL_MINUS_INF, 0, 0, 0},
    {{1, 0.5f, 0.2f, 2, 0.9f}, FILL_MINUS_INF, 0, 0, 0},
    {{1, 1, 0, 0, 0.9f}, FILL_NAN, 0, 0, 0},
    {{0.7f, 1, 0, 0, 0.9f}, FILL_MINUS_INF, 2, 3, B},
    {{0.7f, 0.9f, 0, 50, 0.99f}, FILL_NAN, 2, 3, B}, /* fewer values than top-k */
    {{1, 1, 1, 0, 0.9f}, FILL_ZERO, 2, 3, B},        /* min-p of 1: the largest alone */
    {{1, 1, 1, 0, 0.4f}, FILL_ZERO, 3, -3, 402},     /* the 401st of 1,000 zeros */
    {{1, 1, 1, 0, 0.5f}, FILL_NEGATIVE_ZERO, 0, 0, 501},
    {{1, 0.25f, 0, 2, 0.5f}, FILL_NEGATIVE_ZERO, 2, 0, 501}, /* 0 and -0 are equal */
  };
  enum { ROWS = sizeof edges / sizeof edges[0] };
  const float fills[] = {0.f, -0.f, -INFINITY, NAN};
  static const int32_t places[] = {A, B, C};
  float *x = host_alloc((size_t)ROWS * LD * 4);
  struct k_sample_row rows[ROWS];
  int32_t token[ROWS], n_bad = 0, first_bad = -1;
  for (int32_t r = 0; r < ROWS; r++) {
    rows[r] = edges[r].row;
    for (int32_t i = 0; i < LD; i++) x[(size_t)r * LD + i] = i < V ? fills[edges[r].fill] : 1e30f;
    for (int32_t i = 0; i < edges[r].n_equal; i++) x[(size_t)r * LD + places[i]] = edges[r].equal;
  }
  struct k_sample a = {.logits = gpu_copy(x, (size_t)ROWS * LD * 4), .n_rows = ROWS, .n_vocab = V, .ld = LD,
                       .rows = gpu_copy(rows, sizeof rows), .token = gpu_alloc(sizeof token)};
  gpu_check_call(sits_k_sample(&a, gpu_stream()), "sits_k_sample");
  gpu_read(token, a.token, sizeof token);
  for (int32_t r = ROWS - 1; r >= 0; r--)
    if (token[r] != edges[r].want) n_bad++, first_bad = r;
  verdict(n_bad == 0, "sample, rows without weights or with equal ones: %d of %d differ, the first %d", n_bad, ROWS, first_bad);
  gpu_release_all();
}

int main(void) {
  gpu_open();
  gpu_check_call(sits_k_convert_init(), "init");
  run_norms();
  run_convert(3, 172 / 4 * 4 - 4, K_SRC_F16, 0);
  run_convert(9, 4096, K_SRC_F16, 0);
  run_convert(5, 14336, K_SRC_F16_GATE_UP, 0);
  run_convert(4, 1536, K_SRC_F32_GATE_UP, 0);
  run_convert(300, 14336, K_SRC_F16_GATE_UP, 0);
  run_convert(257, 8200, K_SRC_F16_GATE_UP, 0);
  run_convert(300, 14336, K_SRC_F16_GATE_UP, 264); /* of two rows each, one, and none */
  run_convert(257, 8200, K_SRC_F16_GATE_UP, 264);
  run_convert(1000, 1544, K_SRC_F16_GATE_UP, 7);
  run_convert(256, 8, K_SRC_F16_GATE_UP, 1);
  run_round(3, 576, K_ROUND_INT8, 0, 0, 0);
  run_round(5, 576, K_ROUND_INT8, 0, 64, 8);
  run_round(33, 1536, K_ROUND_INT4, 0, 512, 0);
  run_round(16, 4096, K_ROUND_INT4, 64, 4096, 16);
  run_round(2, 14336, K_ROUND_INT4, 128, 2048, 0);
  run_round(2, 14336, K_ROUND_INT4, 128, 0, 0);
  run_round(1, 64, K_ROUND_INT4, 1, 4, 1);
  run_round(8, 1536, K_ROUND_NONE, 0, 256, 8);
  run_embed(K_W4_G128, true);
  run_embed(K_W4_G32M, true);
  run_embed(K_W4_G128, false);
  run_sample(512);
  run_sample(1000);
  run_sample(128256);
  run_sample(50257);
  run_sample_edges();
  return gpu_finish();
}
