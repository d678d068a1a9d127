/* AWQ scales of a model's sites. Entry points: compile_scales_make, compile_row_scale.
 *
 * A site can be scaled when all its matrices are rounded anew and what makes its input can take the inverse: the norm before q, k, v and
 * before gate, up; the rows of v for o (one factor serves all query heads that share a kv head); the rows of up for down. The factors are
 * (rms of the channel / their geometric mean) ^ a, with the a of least expected output error among 0, 1/4, ..., 1: on a sample of rows, the
 * rounding error of each weight times the channel's energy, and, where the input is rounded to 4 bits, its own expected error times the
 * weight.
 */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "tools/compile/compile.h"
#include "tensor/dequant.h"

#define SAMPLE_ROWS 32               /* of each matrix */
#define N_POWERS 4
#define LEAST_SCALE 1e-3F
#define MOST_SCALE 1e3F
#define RANGE_RMS 6.0                /* range of 32 values over the rms of the widest channel, about */

struct site_view {
  const struct sits_utd *matrices[3];
  int n_matrices;
  const struct sits_utd *maker;      /* matrix whose rows take the inverse; NULL: a norm does */
  bool is_blocked;                   /* the maker has a bias, which the inverse would have to reach too; or a rotation lies between */
};

static struct site_view view_site(const struct model *m, int32_t site)
{
  const struct model_layer *l = &m->layers[site / MODEL_SITES];
  switch (site % MODEL_SITES) {
  case MODEL_SITE_QKV: return (struct site_view){{l->wq, l->wk, l->wv}, 3, NULL, false};
  case MODEL_SITE_O: return (struct site_view){{l->wo}, 1, l->wv, l->bv != NULL};
  case MODEL_SITE_GATE_UP: return (struct site_view){{l->w_gate, l->w_up}, 2, NULL, false};
  default: return (struct site_view){{l->w_down}, 1, l->w_up, l->act[MODEL_SITE_DOWN].rotation > 0};
  }
}

static bool can_scale(const struct quant_recipe *recipe, const struct site_view *v)
{
  bool can = !v->is_blocked;
  for (int i = 0; i < v->n_matrices && can; i++) {
    const struct quant_spec spec = compile_spec(recipe, v->matrices[i], false);
    can = !quant_keeps(v->matrices[i], &spec);
  }
  if (!can || !v->maker) return can;
  const struct quant_spec spec = compile_spec(recipe, v->maker, false);
  return !quant_keeps(v->maker, &spec);
}

/* Row of v behind column c of o. */
static int64_t v_row(const struct model *m, int64_t c)
{
  const int32_t D = m->config.head_dim, group = m->config.n_heads / m->config.n_kv_heads;
  return c / D / group * D + c % D;
}

/* Root mean square of each channel; for o the largest of those that share a row of v. Channels without energy count as the faintest. */
static void channel_rms(const struct model *m, int32_t site, const struct compile_stats *stats, double *rms)
{
  const int32_t width = compile_site_width(m, site);
  double least = INFINITY;
  for (int32_t c = 0; c < width; c++) {
    rms[c] = sqrt(stats->energy[site][c] / (double)stats->n_tokens[site]);
    if (rms[c] > 0 && rms[c] < least) least = rms[c];
  }
  for (int32_t c = 0; c < width; c++) rms[c] = rms[c] > 0 ? rms[c] : isfinite(least) ? least : 1.0;
  if (site % MODEL_SITES != MODEL_SITE_O) return;
  for (int32_t a = 0; a < width; a++)
    for (int32_t b = 0; b < a; b++)
      if (v_row(m, a) == v_row(m, b)) rms[a] = rms[b] = rms[a] > rms[b] ? rms[a] : rms[b];
}

static void make_scale(const double *rms, int32_t width, double power, float *scale)
{
  double mean = 0;
  for (int32_t c = 0; c < width; c++) mean += log(rms[c]) / width;
  for (int32_t c = 0; c < width; c++) {
    const float s = (float)exp(power * (log(rms[c]) - mean));
    scale[c] = s < LEAST_SCALE ? LEAST_SCALE : s > MOST_SCALE ? MOST_SCALE : s;
  }
}

/* Expected squared error of one output of that row with scaled columns; x: workspace. */
static double row_error(const float *row, const float *scale, const double *rms, int32_t width, const struct quant_spec *spec, bool is_int4,
                        float *x)
{
  const int32_t group = spec->group && width % spec->group == 0 ? spec->group : spec->group ? ACT_GROUP : width;
  double sum = 0;
  struct quant_rule rule = {.bits = spec->dtype == SITS_DTYPE_I4 ? 4 : 8, .has_minimum = spec->has_minimum, .clip = spec->clip,
                            .scales = spec->scales};
  for (int32_t c = 0; c < width; c++) x[c] = row[c] * scale[c];
  rule.channel = quant_channel(x, NULL, width, group, &rule);
  for (int32_t g = 0; g < width; g += group) {
    const struct quant_grid grid = quant_fit(x + g, NULL, group, &rule);
    for (int32_t c = g; c < g + group; c++) {
      const double e = (double)(quant_value(&grid, quant_round(&grid, x[c])) - x[c]) / (double)scale[c] * rms[c];
      sum += e * e;
    }
  }
  for (int32_t g = 0; g < width && is_int4; g += ACT_GROUP) {
    double widest = 0;
    for (int32_t c = g; c < g + ACT_GROUP; c++) widest = fmax(widest, rms[c] / (double)scale[c]);
    const double step = RANGE_RMS * widest / 15;
    for (int32_t c = g; c < g + ACT_GROUP; c++) sum += (double)x[c] * (double)x[c] * step * step / 12;
  }
  return sum;
}

static double site_error(const struct quant_recipe *recipe, const struct model *m, int32_t site, const struct site_view *v,
                         const double *rms,
                         const float *scale, float *row, float *x)
{
  const int32_t width = compile_site_width(m, site);
  double sum = 0;
  for (int i = 0; i < v->n_matrices; i++) {
    const struct quant_spec spec = compile_spec(recipe, v->matrices[i], false);
    const int64_t rows = v->matrices[i]->dims[0], step = rows > SAMPLE_ROWS ? rows / SAMPLE_ROWS : 1;
    for (int64_t r = 0; r < rows; r += step) {
      dequant_tensor_row(v->matrices[i], r, row);
      sum += row_error(row, scale, rms, width, &spec, compile_site_kind(recipe, m, site) == ACT_INT4, x);
    }
  }
  return sum;
}

/* Leaves out->column[site] NULL when the channels are best left alone. */
static enum sits_status scale_site(const struct quant_recipe *recipe, const struct model *m, int32_t site, struct compile_stats *stats,
                                   struct compile_scales *out, struct sits_error *err)
{
  const struct site_view v = view_site(m, site);
  const int32_t width = compile_site_width(m, site);
  if (!can_scale(recipe, &v)) return SITS_OK;
  double *rms = mem_calloc((size_t)width, sizeof *rms);
  float *work = mem_calloc(3 * (size_t)width, sizeof *work), *scale = mem_calloc((size_t)width, sizeof *scale);
  if (!rms || !work || !scale) {
    mem_free(rms);
    mem_free(work);
    mem_free(scale);
    return sits_fail(err, SITS_NOMEM, "out of memory for scales");
  }
  channel_rms(m, site, stats, rms);
  double least = INFINITY;
  int best = 0;
  for (int a = 0; a <= N_POWERS; a++) {
    make_scale(rms, width, (double)a / N_POWERS, work);
    const double error = site_error(recipe, m, site, &v, rms, work, work + width, work + 2 * width);
    if (error < least) least = error, best = a;
  }
  make_scale(rms, width, (double)best / N_POWERS, scale);
  for (int32_t c = 0; c < width && best > 0; c++) stats->energy[site][c] /= (double)scale[c] * (double)scale[c];
  if (best > 0) {
    out->column[site] = scale;
    out->n_scaled++;
  } else {
    mem_free(scale);
  }
  mem_free(rms);
  mem_free(work);
  return SITS_OK;
}

enum sits_status compile_scales_make(const struct quant_recipe *recipe, const struct model *model, struct compile_stats *stats,
                                     struct compile_scales *out, struct sits_error *err)
{
  const int32_t n = COMPILE_HEAD_SITE(model);
  *out = (struct compile_scales){.n_sites = n, .column = mem_calloc((size_t)n + 1, sizeof *out->column)};
  if (!out->column) return sits_fail(err, SITS_NOMEM, "out of memory for scales");
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < n && !status; i++) status = scale_site(recipe, model, i, stats, out, err);
  return status;
}

void compile_scales_fini(struct compile_scales *scales)
{
  for (int32_t i = 0; scales->column && i < scales->n_sites; i++) mem_free(scales->column[i]);
  mem_free(scales->column);
  *scales = (struct compile_scales){0};
}

float *compile_row_scale(const struct model *model, const struct compile_scales *scales, const struct sits_utd *w, bool *failed)
{
  const float *site = NULL;
  bool is_v = false;
  for (int32_t i = 0; i < model->config.n_layers; i++) {
    if (w == model->layers[i].wv) site = scales->column[i * MODEL_SITES + MODEL_SITE_O], is_v = true;
    if (w == model->layers[i].w_up) site = scales->column[i * MODEL_SITES + MODEL_SITE_DOWN];
  }
  if (!site) return NULL;
  const int32_t width = is_v ? model->config.n_heads * model->config.head_dim : model->config.n_ff;
  float *out = mem_calloc((size_t)w->dims[0], sizeof *out);
  *failed = !out;
  for (int32_t c = 0; c < width && out; c++) out[is_v ? v_row(model, c) : c] = 1.0F / site[c];
  return out;
}
