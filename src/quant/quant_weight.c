/* See quant_weight.h. Entry point: quant_convert, which keeps a grid (keep_*), copies floats (convert_float) or rounds (convert_integer).
 * */
#include "quant/quant_weight.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/parallel.h"
#include "quant/quant_gptq.h"
#include "tensor/dequant.h"

#define BLOCK 32

/* ---- one group ---- */

static float half_round(float v) { return half_to_float(float_to_half(v)); }

/* Of a value that is clamped to the grid, so small: 1.5 x 2^23 added and taken off, ties to even, which compilers turn into vectors. */
static inline float round_to_grid(const struct quant_grid *grid, float value)
{
  const float q = (value - grid->minimum) / grid->scale, lowest = (float)grid->lowest, highest = (float)grid->highest;
  const float clamped = q < lowest ? lowest : q > highest ? highest : q;
  return (clamped + 0x1.8p23F) - 0x1.8p23F;
}

int32_t quant_round(const struct quant_grid *grid, float value)
{
  if (!(grid->scale > 0 && grid->scale < INFINITY)) return 0 < grid->lowest ? grid->lowest : 0; /* infinite: refused when it is stored */
  return (int32_t)round_to_grid(grid, value);
}

/* I4: q is u, 0..15, with minimums, else u - 8, -8..7. I8: -128..127 with minimums (offset into the minimum), else -127..127. */
static struct quant_grid make_grid(float lo, float hi, int bits, bool has_minimum)
{
  struct quant_grid grid = {0};
  if (has_minimum) {
    grid.lowest = bits == 4 ? 0 : -128;
    grid.highest = bits == 4 ? 15 : 127;
    grid.scale = half_round((hi - lo) / (float)(grid.highest - grid.lowest));
    grid.minimum = half_round(lo - grid.scale * (float)grid.lowest);
  } else {
    const float most = fabsf(lo) > fabsf(hi) ? fabsf(lo) : fabsf(hi);
    grid.lowest = bits == 4 ? -8 : -127;
    grid.highest = bits == 4 ? 7 : 127;
    grid.scale = half_round(most / (bits == 4 ? 7.0F : 127.0F));
  }
  return grid;
}

static double grid_error(const struct quant_grid *grid, const float *x, const float *weight, int64_t n)
{
  enum { LANES = 8 };
  double sums[LANES] = {0};
  const float zero = quant_value(grid, quant_round(grid, 0));
  for (int64_t i = 0; i + LANES <= n; i += LANES) {
    float e[LANES];
    for (int k = 0; k < LANES; k++)
      e[k] = (grid->scale > 0 ? grid->scale * round_to_grid(grid, x[i + k]) + grid->minimum : zero) - x[i + k];
    for (int k = 0; k < LANES; k++) sums[k] += (double)(e[k] * e[k]) * (weight ? (double)weight[i + k] : 1.0);
  }
  for (int64_t i = n / LANES * LANES; i < n; i++) {
    const float e = quant_value(grid, quant_round(grid, x[i])) - x[i];
    sums[0] += (double)(e * e) * (weight ? (double)weight[i] : 1.0);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static void range_of(const float *x, int64_t n, float *lo, float *hi)
{
  *lo = *hi = x[0];
  for (int64_t i = 1; i < n; i++) {
    *lo = x[i] < *lo ? x[i] : *lo;
    *hi = x[i] > *hi ? x[i] : *hi;
  }
}

/* ---- multiples of a row's scale ---- */

enum { MOST_MULTIPLE = 16 };

static bool is_multiple(enum quant_scales scales, int m) { return scales == QUANT_SCALES_MULTIPLES || (m & (m - 1)) == 0; }

/* At least v, with 7 significant bits in the range of f16: m times that is an f16 for m up to 16. */
static float seven_bits(float v)
{
  int exponent;
  const float fraction = frexpf(v, &exponent); /* 0.5..1 */
  if (exponent < -17) return ceilf(v * 0x1p24F) * 0x1p-24F; /* fewer than seven bits of f16's least step */
  return ldexpf(ceilf(fraction * 128.0F) / 128.0F, exponent);
}

/* 4 bits with a given step: placed so that the range is in the middle, or at either end of it. */
static struct quant_grid grid_of_step(float lo, float hi, float scale, bool has_minimum, int place)
{
  if (!has_minimum) return (struct quant_grid){.scale = scale, .lowest = -8, .highest = 7};
  const float minimum = place == 0 ? (lo + hi - 15.0F * scale) * 0.5F : place == 1 ? lo : hi - 15.0F * scale;
  return (struct quant_grid){.scale = scale, .minimum = half_round(minimum), .lowest = 0, .highest = 15};
}

static float wanted_step(float lo, float hi, bool has_minimum)
{
  return has_minimum ? (hi - lo) / 15.0F : (fabsf(lo) > fabsf(hi) ? fabsf(lo) : fabsf(hi)) / 7.0F;
}

/* Without clipping the least multiple that spans the group's range; with it the one of least error among those of half that and more. */
static struct quant_grid fit_multiple(const float *x, const float *weight, int64_t n, const struct quant_rule *rule)
{
  float lo, hi;
  range_of(x, n, &lo, &hi);
  const float wanted = wanted_step(lo, hi, rule->has_minimum);
  struct quant_grid best = {0};
  double least = INFINITY;
  for (int m = 1; m <= MOST_MULTIPLE; m++) {
    const float step = (float)m * rule->channel;
    const bool spans = step >= wanted || m == MOST_MULTIPLE;
    if (!is_multiple(rule->scales, m) || (!spans && (!rule->clip || step < 0.5F * wanted))) continue;
    for (int place = 0; place < (rule->has_minimum && rule->clip ? 3 : 1); place++) {
      const struct quant_grid grid = grid_of_step(lo, hi, step, rule->has_minimum, place);
      const double error = grid_error(&grid, x, weight, n);
      if (error < least) least = error, best = grid;
    }
    if (spans) break;
  }
  return best;
}

/* The widest group decides about where the scale lies; a few below that, where 16 times them clips it, are tried with the least multiple
 * that spans a group. */
float quant_channel(const float *row, const float *weight, int64_t n, int64_t group, const struct quant_rule *rule)
{
  struct quant_rule quick = *rule;
  float widest = 0, best = 0;
  double least = INFINITY;
  if (rule->scales == QUANT_SCALES_F16) return 0;
  for (int64_t g = 0; g < n; g += group) {
    float lo, hi;
    range_of(row + g, group, &lo, &hi);
    const float step = wanted_step(lo, hi, rule->has_minimum);
    if (step > widest) widest = step;
  }
  quick.clip = false;
  for (int k = 0; k < (rule->clip ? 5 : 1) && widest > 0; k++) {
    double error = 0;
    quick.channel = seven_bits(widest * (1.0F - 0.1F * (float)k) / (float)MOST_MULTIPLE);
    for (int64_t g = 0; g < n; g += group) {
      const struct quant_grid grid = fit_multiple(row + g, weight ? weight + g : NULL, group, &quick);
      error += grid_error(&grid, row + g, weight ? weight + g : NULL, group);
    }
    if (error < least) least = error, best = quick.channel;
  }
  return best;
}

struct quant_grid quant_fit(const float *x, const float *weight, int64_t n, const struct quant_rule *rule)
{
  const bool has_minimum = rule->has_minimum;
  float lo, hi;
  if (rule->scales != QUANT_SCALES_F16) return fit_multiple(x, weight, n, rule);
  range_of(x, n, &lo, &hi);
  struct quant_grid best = make_grid(lo, hi, rule->bits, has_minimum);
  if (!rule->clip || rule->bits != 4) return best;
  double least = grid_error(&best, x, weight, n);
  /* With a minimum the two ends move by themselves, in fewer steps; without one they move together. */
  const int n_high = has_minimum ? 4 : 12, n_low = has_minimum ? 4 : 1;
  const float step = has_minimum ? 0.12F : 0.04F, middle = has_minimum ? (lo + hi) * 0.5F : 0.0F;
  for (int a = 0; a < n_high && least > 0; a++)
    for (int b = 0; b < n_low; b++) {
      const float keep_high = 1.0F - step * (float)a, keep_low = has_minimum ? 1.0F - step * (float)b : keep_high;
      const struct quant_grid grid =
          make_grid(middle + (lo - middle) * keep_low, middle + (hi - middle) * keep_high, rule->bits, has_minimum);
      const double error = grid_error(&grid, x, weight, n);
      if (error < least) least = error, best = grid;
    }
  return best;
}

/* ---- whole tensors ---- */

static enum sits_status no_memory(const char *name, struct sits_error *err)
{
  return sits_fail_param(err, SITS_NOMEM, name, "%s: out of memory", name);
}

void quant_tensor_fini(struct quant_tensor *tensor)
{
  mem_free(tensor->data);
  mem_free(tensor->scales);
  mem_free(tensor->minimums);
  *tensor = (struct quant_tensor){0};
}

void quant_describe(const struct sits_utd *source, enum sits_dtype dtype, int32_t group, struct sits_utd *u)
{
  *u = (struct sits_utd){.dtype = dtype, .n_dims = 2, .dims = {source->dims[0], source->dims[1]}, .scale_dtype = SITS_DTYPE_F16,
                         .layout = SITS_LAYOUT_ROW_MAJOR};
  memcpy(u->name, source->name, sizeof u->name);
  u->n_bytes = (size_t)sits_utd_row_major_bytes(u);
  if (dtype != SITS_DTYPE_I4 && dtype != SITS_DTYPE_I8) return;
  u->quant = group == 0 ? SITS_QUANT_CHANNEL : SITS_QUANT_GROUP;
  u->group_size = group == 0 ? (int32_t)u->dims[1] : group;
  u->group_axis = 1;
}

/* Room for a tensor of that type; scales for groups of `group`. */
static bool allocate(struct quant_tensor *out, const struct sits_utd *source, enum sits_dtype dtype, int32_t group, bool has_minimum)
{
  struct sits_utd *u = &out->utd;
  quant_describe(source, dtype, group, u);
  u->data = out->data = mem_calloc(1, u->n_bytes);
  if (dtype != SITS_DTYPE_I4 && dtype != SITS_DTYPE_I8) return out->data != NULL;
  const size_t n_groups = (size_t)(u->dims[0] * (u->dims[1] / u->group_size));
  u->scales = out->scales = mem_calloc(n_groups, sizeof(uint16_t));
  u->minimums = out->minimums = has_minimum ? mem_calloc(n_groups, sizeof(uint16_t)) : NULL;
  return out->data && out->scales && (!has_minimum || out->minimums);
}

static void put4(uint8_t *row, int64_t i, int32_t u)
{
  row[i / 2] = (uint8_t)(i % 2 ? (row[i / 2] & 15) | u << 4 : (row[i / 2] & 0xf0) | u);
}

static void store(struct quant_tensor *out, int64_t row, int64_t i, int32_t q)
{
  const struct sits_utd *u = &out->utd;
  if (u->dtype == SITS_DTYPE_I8) ((int8_t *)out->data)[row * u->dims[1] + i] = (int8_t)q;
  else put4((uint8_t *)out->data + row * u->dims[1] / 2, i, u->minimums ? q : q + 8);
}

/* The source's squares, and for a kept tensor nothing else: it has no error. */
static double sum_squares(const float *x, int64_t n)
{
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sum;
}

/* Element i of a block of 32 (Q4_0, Q4_1, Q5_0, Q5_1: i beside i + 16 in a byte, fifth bits apart), as the integer that its scale
 * multiplies. */
static int32_t block_integer(enum sits_dtype dtype, const uint8_t *block, int i)
{
  uint32_t fifths = 0;
  const size_t header = dtype == SITS_DTYPE_Q4_1 || dtype == SITS_DTYPE_Q5_1 ? 4 : 2;
  const bool is_five = dtype == SITS_DTYPE_Q5_0 || dtype == SITS_DTYPE_Q5_1;
  if (dtype == SITS_DTYPE_Q8_0) return (int8_t)block[header + (size_t)i];
  if (is_five) memcpy(&fifths, block + header, sizeof fifths);
  const int32_t u = (block[header + (is_five ? 4 : 0) + (size_t)i % 16] >> (i / 16 * 4) & 15) | (int32_t)(fifths >> i & 1) << 4;
  return header == 4 ? u : u - (is_five ? 16 : 8);
}

/* The same scale, minimum and integers. In 8 bits a narrower grid takes only a few of the 256 values, but they are the right ones. */
static void keep_block(const struct sits_utd *source, const uint8_t *block, struct quant_tensor *out, int64_t row, int64_t g)
{
  const int64_t index = row * (source->dims[1] / BLOCK) + g;
  memcpy((uint16_t *)out->scales + index, block, 2);
  if (out->minimums) memcpy((uint16_t *)out->minimums + index, block + 2, 2);
  for (int i = 0; i < BLOCK; i++) store(out, row, g * BLOCK + i, block_integer(source->dtype, block, i));
}

static enum sits_status keep_grid(const struct sits_utd *source, enum sits_dtype dtype, struct quant_tensor *out, struct sits_error *err)
{
  const size_t block_bytes = (size_t)sits_dtype_info(source->dtype)->block_bytes;
  const uint8_t *block = source->data;
  const bool has_minimum = source->dtype == SITS_DTYPE_Q4_1 || source->dtype == SITS_DTYPE_Q5_1;
  if (!allocate(out, source, dtype, BLOCK, has_minimum)) return no_memory(source->name, err);
  for (int64_t row = 0; row < source->dims[0]; row++)
    for (int64_t g = 0; g < source->dims[1] / BLOCK; g++, block += block_bytes) keep_block(source, block, out, row, g);
  return SITS_OK;
}

static void keep_bytes(const struct sits_utd *source, struct quant_tensor *out)
{
  out->utd = *source;
}

/* A row of the matrix that is to be rounded. */
static void load_row(const struct sits_utd *source, const struct quant_spec *spec, int64_t r, float *row)
{
  dequant_tensor_row(source, r, row);
  const float factor = spec->row_scale ? spec->row_scale[r] : 1.0F;
  if (!spec->column_scale && !spec->row_scale) return;
  for (int64_t i = 0; i < source->dims[1]; i++) row[i] *= factor * (spec->column_scale ? spec->column_scale[i] : 1.0F);
}

/* ---- rows, dealt to threads ---- */

enum row_fault { ROW_FINE, ROW_NOT_FINITE, ROW_NO_F16, ROW_NO_SCALE };

static const char *const fault_texts[] = {[ROW_NOT_FINITE] = "a value is not finite", [ROW_NO_F16] = "a value does not fit 16-bit floats",
                                          [ROW_NO_SCALE] = "a scale does not fit 16-bit floats"};

struct row_result { double norm, error, bound; enum row_fault fault; }; /* squares of Frobenius norms */

struct workspace { float *row, *kept; int32_t *q; struct quant_grid *grids; }; /* of a thread: [K] [K] [K] [groups] */

struct conversion {
  const struct sits_utd *source;
  const struct quant_spec *spec;
  const struct quant_hessian *hessian;
  struct quant_tensor *out;
  int64_t group;                     /* of integers */
  struct quant_rule rule;            /* all but the row's scale */
  enum row_fault (*convert)(const struct conversion *c, int64_t r, const struct workspace *w, struct row_result *result);
  struct row_result *results;        /* [rows] */
  struct workspace *workspaces;      /* [threads] */
};

static void convert_range(void *context, int32_t worker, int64_t first, int64_t last)
{
  const struct conversion *c = context;
  for (int64_t r = first; r < last; r++) c->results[r].fault = c->convert(c, r, &c->workspaces[worker], &c->results[r]);
}

/* Norms and the first fault in the order of rows, whoever converted them. */
static enum sits_status sum_rows(const struct conversion *c, struct sits_error *err)
{
  struct row_result sum = {0};
  for (int64_t r = 0; r < c->source->dims[0]; r++) {
    const struct row_result *row = &c->results[r];
    if (row->fault)
      return sits_fail_param(err, SITS_FORMAT, c->source->name, "tensor '%s': %s", c->source->name, fault_texts[row->fault]);
    sum.norm += row->norm, sum.error += row->error, sum.bound += row->bound;
  }
  c->out->norm = sqrt(sum.norm), c->out->error = sqrt(sum.error), c->out->bound = sqrt(sum.bound);
  return SITS_OK;
}

static enum sits_status convert_rows(struct conversion *c, struct sits_error *err)
{
  enum { RUN = 16 };
  const size_t n = (size_t)c->source->dims[1], n_groups = n / (size_t)c->group, rows = (size_t)c->source->dims[0];
  const size_t bytes = n * (2 * sizeof(float) + sizeof(int32_t)) + n_groups * sizeof(struct quant_grid);
  const int32_t n_threads = c->spec->n_threads > 1 ? c->spec->n_threads : 1;
  char *work = mem_calloc((size_t)n_threads, bytes);
  c->results = mem_calloc(rows ? rows : 1, sizeof *c->results);
  c->workspaces = mem_calloc((size_t)n_threads, sizeof *c->workspaces);
  enum sits_status status = work && c->results && c->workspaces ? SITS_OK : no_memory(c->source->name, err);
  for (int32_t i = 0; i < n_threads && !status; i++) {
    struct workspace *w = &c->workspaces[i];
    w->row = (float *)(work + (size_t)i * bytes);
    w->kept = w->row + n;
    w->q = (int32_t *)(w->kept + n);
    w->grids = (struct quant_grid *)(w->q + n);
  }
  if (!status) parallel_for(n_threads, (int64_t)rows, RUN, convert_range, c);
  if (!status) status = sum_rows(c, err);
  mem_free(work);
  mem_free(c->results);
  mem_free(c->workspaces);
  return status;
}

static enum row_fault float_row(const struct conversion *c, int64_t r, const struct workspace *w, struct row_result *result)
{
  const int64_t n = c->source->dims[1];
  uint16_t *to = (uint16_t *)c->out->data + r * n;
  load_row(c->source, c->spec, r, w->row);
  result->norm = sum_squares(w->row, n);
  for (int64_t i = 0; i < n; i++) {
    to[i] = float_to_half(w->row[i]);
    const float back = half_to_float(to[i]);
    if (!isfinite(back)) return isfinite(w->row[i]) ? ROW_NO_F16 : ROW_NOT_FINITE;
    result->error += (double)(back - w->row[i]) * (double)(back - w->row[i]);
  }
  return ROW_FINE;
}

static enum sits_status convert_float(struct conversion *c, struct sits_error *err)
{
  struct quant_tensor *out = c->out;
  if (!allocate(out, c->source, SITS_DTYPE_F16, 0, false)) return no_memory(c->source->name, err);
  c->convert = float_row;
  const enum sits_status status = convert_rows(c, err);
  out->bound = out->norm * 0x1p-11; /* relative rounding error of f16 */
  out->is_kept = out->error == 0;
  return status;
}

static bool store_grid(struct quant_tensor *out, int64_t index, const struct quant_grid *grid)
{
  const uint16_t scale = float_to_half(grid->scale), minimum = float_to_half(grid->minimum);
  ((uint16_t *)out->scales)[index] = scale;
  if (out->minimums) ((uint16_t *)out->minimums)[index] = minimum;
  return isfinite(half_to_float(scale)) && isfinite(half_to_float(minimum));
}

/* Integers and grids of a row, to nearest, or with the error of each column pushed into those that follow (GPTQ); w->row is used up. */
static void round_row(const struct conversion *c, const struct workspace *w)
{
  const int64_t n = c->source->dims[1], group = c->group;
  struct quant_rule rule = c->rule;
  rule.channel = quant_channel(w->row, c->hessian ? c->hessian->diagonal : NULL, n, group, &rule);
  if (c->hessian) {
    quant_gptq_row(c->hessian, w->row, group, &rule, w->grids, w->q);
    return;
  }
  for (int64_t g = 0; g < n / group; g++) {
    w->grids[g] = quant_fit(w->row + g * group, NULL, group, &rule);
    for (int64_t i = g * group; i < (g + 1) * group; i++) w->q[i] = quant_round(&w->grids[g], w->row[i]);
  }
}

static enum row_fault integer_row(const struct conversion *c, int64_t r, const struct workspace *w, struct row_result *result)
{
  const int64_t n = c->source->dims[1], group = c->group, n_groups = n / group;
  bool is_finite = true, fits = true;
  load_row(c->source, c->spec, r, w->row);
  for (int64_t i = 0; i < n; i++) is_finite = is_finite && isfinite(w->row[i]);
  if (!is_finite) return ROW_NOT_FINITE;
  result->norm = sum_squares(w->row, n);
  memcpy(w->kept, w->row, (size_t)n * sizeof *w->kept);
  round_row(c, w);
  for (int64_t g = 0; g < n_groups; g++) {
    fits = store_grid(c->out, r * n_groups + g, &w->grids[g]) && fits;
    result->bound += (double)group * (double)w->grids[g].scale * (double)w->grids[g].scale / 12;
  }
  if (!fits) return ROW_NO_SCALE;
  for (int64_t i = 0; i < n; i++) {
    const double e = (double)quant_value(&w->grids[i / group], w->q[i]) - (double)w->kept[i];
    result->error += e * e;
    store(c->out, r, i, w->q[i]);
  }
  return ROW_FINE;
}

static enum sits_status convert_integer(struct conversion *c, struct sits_error *err)
{
  const struct quant_spec *spec = c->spec;
  c->rule = (struct quant_rule){.bits = spec->dtype == SITS_DTYPE_I4 ? 4 : 8, .has_minimum = spec->has_minimum, .clip = spec->clip,
                                .scales = spec->scales};
  if (!allocate(c->out, c->source, spec->dtype, spec->group, spec->has_minimum)) return no_memory(c->source->name, err);
  c->convert = integer_row;
  return convert_rows(c, err);
}

/* Does the source hold integers that are as good as the wanted ones already? */
static bool is_on_grid(enum sits_dtype source, const struct quant_spec *spec)
{
  if (!spec->keep_grid || spec->column_scale || spec->row_scale) return false;
  const bool is_four = source == SITS_DTYPE_Q4_0 || source == SITS_DTYPE_Q4_1;
  if (spec->dtype == SITS_DTYPE_I8) return is_four || source == SITS_DTYPE_Q5_0 || source == SITS_DTYPE_Q5_1 || source == SITS_DTYPE_Q8_0;
  return spec->dtype == SITS_DTYPE_I4 && (is_four || source == SITS_DTYPE_Q4_K);
}

bool quant_keeps(const struct sits_utd *source, const struct quant_spec *spec)
{
  return spec->dtype == SITS_DTYPE_F16 || source->dims[1] % BLOCK != 0 || is_on_grid(source->dtype, spec);
}

static enum row_fault norm_row(const struct conversion *c, int64_t r, const struct workspace *w, struct row_result *result)
{
  dequant_tensor_row(c->source, r, w->row);
  result->norm = sum_squares(w->row, c->source->dims[1]);
  return isfinite(result->norm) ? ROW_FINE : ROW_NOT_FINITE;
}

static enum sits_status take_norm(struct conversion *c, struct sits_error *err)
{
  c->convert = norm_row;
  c->out->is_kept = true;
  return convert_rows(c, err);
}

enum sits_status quant_convert(const struct sits_utd *source, const struct quant_spec *spec, const struct quant_hessian *hessian,
                               struct quant_tensor *out, struct sits_error *err)
{
  struct quant_spec fitting = *spec;
  const bool is_half = (source->dtype == SITS_DTYPE_F16 || source->dtype == SITS_DTYPE_BF16) && !spec->column_scale && !spec->row_scale;
  enum sits_status status = SITS_OK;
  *out = (struct quant_tensor){0};
  while (fitting.group > BLOCK && source->dims[1] % fitting.group != 0) fitting.group /= 2;
  if (source->dims[1] % BLOCK != 0) fitting.dtype = SITS_DTYPE_F16;
  struct conversion c = {.source = source, .spec = &fitting, .hessian = hessian, .out = out,
                         .group = fitting.group ? fitting.group : source->dims[1]};
  if (fitting.dtype == SITS_DTYPE_F16 && is_half) {
    keep_bytes(source, out);
    status = take_norm(&c, err);
  } else if (fitting.dtype == SITS_DTYPE_F16) {
    status = convert_float(&c, err);
  } else if (is_on_grid(source->dtype, &fitting)) {
    if (source->dtype == SITS_DTYPE_Q4_K) keep_bytes(source, out);
    else status = keep_grid(source, fitting.dtype, out, err);
    if (!status) status = take_norm(&c, err);
  } else {
    status = convert_integer(&c, err);
  }
  if (status) quant_tensor_fini(out);
  return status;
}
