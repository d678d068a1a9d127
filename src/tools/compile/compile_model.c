/* The compilation itself. Entry point: compile_run. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/cores.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/outfile.h"
#include "tools/compile/compile.h"
#include "tensor/dequant.h"

struct compilation {
  const struct compile_options *options;
  struct quant_recipe recipe;
  struct model *model;
  struct compile_stats stats;        /* energies; empty when the recipe needs none */
  struct compile_scales scales;      /* column NULL: none */
  struct compile_journal journal;
  float **gains;                     /* [n_gains] of norms that were divided by scales; owned */
  int64_t n_gains;
  struct compile_matrix *matrices;   /* [n_matrices] in the order of the source */
  int64_t n_matrices;
  struct act_format *acts;           /* [sites + 1] outliers owned */
  struct engine_writer *writer;
  struct compile_blobs blobs;
  json_t *meta;
};

/* ---- what is asked for ---- */

static bool is_text(const char *a, const char *b) { return strcmp(a, b) == 0; }

static enum sits_status check_target(const struct compile_options *o, const struct model *model, struct sits_error *err)
{
  bool is_rotated = false;
  for (int32_t i = 0; i < model->config.n_layers; i++) is_rotated |= model->layers[i].act[MODEL_SITE_DOWN].rotation > 0;
  if (is_text(o->target, "cuda-sm80"))
    return sits_fail_param(err, SITS_UNSUPPORTED, "target", "target cuda-sm80: the CUDA backend has kernels for sm_90 only");
  if (is_text(o->target, "cuda-sm90") && is_rotated)
    return sits_fail_param(err, SITS_UNSUPPORTED, "target",
                           "target cuda-sm90: the CUDA backend does not rotate inputs, as this model wants");
  if (strcmp(o->kv_cache_compress, "none") == 0) return SITS_OK;
  const struct backend_vtable *cpu = backend_find("cpu");
  struct kv_geometry geometry = {.n_layers = model->config.n_layers, .n_kv_heads = model->config.n_kv_heads,
                                 .head_dim = model->config.head_dim, .n_pages = 1};
  for (int codec = 0; codec < KV_CODEC_COUNT; codec++) {
    geometry.codec = (enum kv_codec)codec;
    if (strcmp(kv_codec_name(geometry.codec), o->kv_cache_compress) == 0 && cpu && cpu->kv_page_bytes(&geometry) > 0) return SITS_OK;
  }
  return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-compress", "kv-cache-compress %s is not supported for this model",
                         o->kv_cache_compress);
}

static enum act_kind kind_named(const char *name)
{
  return is_text(name, "int4") ? ACT_INT4 : is_text(name, "int8") ? ACT_INT8 : is_text(name, "float") ? ACT_FLOAT : ACT_BACKEND;
}

/* Is "LAYER.SITE" in a list with commas? */
static bool is_listed(const char *list, const struct model *model, int32_t site)
{
  char word[32];
  const int n = snprintf(word, sizeof word, "%d.%s", site / MODEL_SITES, model_site_name((enum model_site)(site % MODEL_SITES)));
  for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (strncmp(at, word, (size_t)n) == 0 && (at[n] == ',' || at[n] == '\0')) return site < COMPILE_HEAD_SITE(model);
  return false;
}

/* Every item names a site of the model, once. */
static enum sits_status check_sites(const struct quant_recipe *r, const struct model *model, struct sits_error *err)
{
  int32_t n_items = r->int8_sites ? 1 : 0, n_found = 0;
  for (const char *at = r->int8_sites; at && (at = strchr(at, ',')); at++) n_items++;
  for (int32_t i = 0; i < COMPILE_HEAD_SITE(model); i++) n_found += is_listed(r->int8_sites, model, i);
  if (n_items == n_found) return SITS_OK;
  return sits_fail_param(err, SITS_CONFIG, "int8-sites", "int8-sites: %d items, of which %d name a site of this model (0.qkv to %d.down)",
                         n_items, n_found, model->config.n_layers - 1);
}

enum act_kind compile_site_kind(const struct quant_recipe *r, const struct model *model, int32_t site)
{
  if (site == COMPILE_HEAD_SITE(model)) return kind_named(r->head_activations);
  const int32_t layer = site / MODEL_SITES;
  const bool is_down = site % MODEL_SITES == MODEL_SITE_DOWN && !is_text(r->down_activations, "same");
  const enum act_kind kind = kind_named(is_down ? r->down_activations : r->activations);
  const bool is_end = layer < r->int8_first_layers || layer >= model->config.n_layers - r->int8_last_layers;
  return kind == ACT_INT4 && (is_end || is_listed(r->int8_sites, model, site)) ? ACT_INT8 : kind;
}

static bool needs_energies(const struct quant_recipe *r, const struct model *model)
{
  for (int32_t i = 0; i < COMPILE_HEAD_SITE(model); i++)
    if (compile_site_kind(r, model, i) == ACT_INT4 && r->outliers > 0) return true;
  return false;
}

/* ---- sites ---- */

struct ranked { double energy; int32_t channel; };

static int by_energy(const void *a, const void *b)
{
  const struct ranked *x = a, *y = b;
  if (x->energy != y->energy) return x->energy < y->energy ? 1 : -1;
  return x->channel - y->channel;
}

static int by_channel(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

enum sits_status compile_site_act(const struct quant_recipe *recipe, const struct model *model, int32_t site,
                                  const struct compile_stats *stats,
                                  struct act_format *out, struct sits_error *err)
{
  const int32_t width = compile_site_width(model, site);
  *out = (struct act_format){.kind = compile_site_kind(recipe, model, site)};
  if (site != COMPILE_HEAD_SITE(model)) out->rotation = model->layers[site / MODEL_SITES].act[site % MODEL_SITES].rotation;
  const int64_t most = width / 4, n = recipe->outliers < most ? recipe->outliers : most;
  if (out->kind != ACT_INT4 || n == 0) return SITS_OK;
  struct ranked *ranked = mem_calloc((size_t)width, sizeof *ranked);
  int32_t *outliers = mem_calloc((size_t)n, sizeof *outliers);
  if (!ranked || !outliers) {
    mem_free(ranked);
    mem_free(outliers);
    return sits_fail(err, SITS_NOMEM, "out of memory for outliers");
  }
  for (int32_t c = 0; c < width; c++) ranked[c] = (struct ranked){stats->energy[site][c], c};
  qsort(ranked, (size_t)width, sizeof *ranked, by_energy);
  for (int64_t i = 0; i < n; i++) outliers[i] = ranked[i].channel;
  qsort(outliers, (size_t)n, sizeof *outliers, by_channel);
  mem_free(ranked);
  out->n_outliers = (int32_t)n;
  out->outliers = outliers;
  return SITS_OK;
}

static enum sits_status make_acts(struct compilation *c, struct sits_error *err)
{
  const int32_t n = COMPILE_HEAD_SITE(c->model) + 1;
  c->acts = mem_calloc((size_t)n, sizeof *c->acts);
  if (!c->acts) return sits_fail(err, SITS_NOMEM, "out of memory");
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; i < n && !status; i++) status = compile_site_act(&c->recipe, c->model, i, &c->stats, &c->acts[i], err);
  return status;
}

/* ---- matrices ---- */

/* The site that reads a matrix, or -2 for tensors that are no matrix of the model. */
static int32_t site_of_matrix(const struct model *m, const struct sits_utd *w, bool *is_outer)
{
  *is_outer = w == m->output || w == m->tok_embd;
  if (w == m->output) return COMPILE_HEAD_SITE(m);
  if (w == m->tok_embd) return -1;
  for (int32_t i = 0; i < m->config.n_layers; i++) {
    const struct model_layer *l = &m->layers[i];
    const int32_t base = i * MODEL_SITES;
    if (w == l->wq || w == l->wk || w == l->wv) return base + MODEL_SITE_QKV;
    if (w == l->wo) return base + MODEL_SITE_O;
    if (w == l->w_gate || w == l->w_up) return base + MODEL_SITE_GATE_UP;
    if (w == l->w_down) return base + MODEL_SITE_DOWN;
  }
  return -2;
}

static bool is_vector_of(const struct model *m, const struct sits_utd *w)
{
  if (w == m->output_norm || is_text(w->name, "rope_freqs.weight")) return true;
  for (int32_t i = 0; i < m->config.n_layers; i++) {
    const struct model_layer *l = &m->layers[i];
    const struct sits_utd *const vectors[] = {l->attn_norm, l->bq, l->bk, l->bv, l->bo, l->q_norm, l->k_norm, l->ffn_norm};
    for (size_t k = 0; k < sizeof vectors / sizeof vectors[0]; k++)
      if (vectors[k] == w) return true;
  }
  return false;
}

struct quant_spec compile_spec(const struct quant_recipe *r, const struct sits_utd *source, bool is_outer)
{
  struct quant_spec spec = {.dtype = is_text(r->weights, "int4") ? SITS_DTYPE_I4 : is_text(r->weights,
                                                                                           "int8") ? SITS_DTYPE_I8 : SITS_DTYPE_F16,
                            .group = (int32_t)r->weight_group, .has_minimum = r->weight_minimum, .keep_grid = r->keep_grid,
                            .clip = r->clip,
                            .scales = is_text(r->weight_scales, "multiples") ? QUANT_SCALES_MULTIPLES
                                      : is_text(r->weight_scales, "powers")  ? QUANT_SCALES_POWERS : QUANT_SCALES_F16};
  if (!is_outer) return spec;
  const bool is_float = source->dtype == SITS_DTYPE_F32 || source->dtype == SITS_DTYPE_F16 || source->dtype == SITS_DTYPE_BF16;
  const bool is_half = is_text(r->head, "f16") || (is_text(r->head, "keep") && is_float);
  return (struct quant_spec){.dtype = is_half ? SITS_DTYPE_F16 : SITS_DTYPE_I8, .group = 32, .keep_grid = true};
}

/* "keep": blocks that have no neutral form travel as they are. */
static bool passes(const struct quant_recipe *r, const struct compile_matrix *m)
{
  const enum sits_dtype source = m->source->dtype;
  return m->is_outer && is_text(r->head, "keep") && source >= SITS_DTYPE_Q4_0 && source <= SITS_DTYPE_Q6_K && source != SITS_DTYPE_Q8_0;
}

/* An integer activation needs an integer weight; where a matrix became floats, its site is read unrounded. */
static void settle_act(struct compilation *c, const struct compile_matrix *m)
{
  const enum sits_dtype made = m->made.utd.dtype;
  if (m->site < 0 || (made != SITS_DTYPE_F16 && made != SITS_DTYPE_BF16 && made != SITS_DTYPE_F32)) return;
  struct act_format *act = &c->acts[m->site];
  mem_free((void *)act->outliers);
  *act = (struct act_format){.kind = ACT_FLOAT, .rotation = act->rotation};
}

/* Rounded, measured and put away; or taken over from a run that was cut. */
static enum sits_status make_matrix(struct compilation *c, struct compile_matrix *m, const struct quant_hessian *hessian,
                                    struct sits_error *err)
{
  if (m->is_done) return SITS_OK;
  if (passes(&c->recipe, m)) {
    m->made = (struct quant_tensor){.utd = *m->source, .is_kept = true};
    m->is_done = true;
    return SITS_OK;
  }
  struct quant_spec spec = compile_spec(&c->recipe, m->source, m->is_outer);
  bool has_failed = false;
  float *row_scale = c->scales.column ? compile_row_scale(c->model, &c->scales, m->source, &has_failed) : NULL;
  if (has_failed) return sits_fail(err, SITS_NOMEM, "out of memory");
  spec.row_scale = row_scale;
  spec.n_threads = c->options->threads > 0 ? (int32_t)c->options->threads : cores_usable();
  spec.column_scale = c->scales.column && m->site >= 0 ? c->scales.column[m->site] : NULL;
  enum sits_status status = quant_convert(m->source, &spec, hessian, &m->made, err);
  if (!status) {
    settle_act(c, m);
    m->has_minimum = m->made.utd.minimums != NULL;
    if (m->site >= 0 && c->stats.sample)
      m->output_error = compile_output_error(m, &c->acts[m->site], &c->stats, spec.column_scale, row_scale);
    status = compile_journal_put(&c->journal, m, err);
    m->is_done = !status;
    source_drop_pages(c->model->source, m->source);
  }
  mem_free(row_scale);
  return status;
}

static enum sits_status list_matrices(struct compilation *c, struct sits_error *err)
{
  const int64_t n = source_n_tensors(c->model->source);
  c->matrices = mem_calloc((size_t)n, sizeof *c->matrices);
  if (!c->matrices) return sits_fail(err, SITS_NOMEM, "out of memory");
  for (int64_t i = 0; i < n; i++) {
    struct compile_matrix m = {.source = source_tensor_at(c->model->source, i), .output_error = -1};
    m.site = site_of_matrix(c->model, m.source, &m.is_outer);
    if (m.site == -2) continue;
    if (compile_journal_take(&c->journal, &m)) settle_act(c, &m);
    c->matrices[c->n_matrices++] = m;
  }
  return SITS_OK;
}

/* Matrices of sites first..last-1, or those of no site as well with first 0; Hessians where the statistics have them. */
static enum sits_status make_range(struct compilation *c, const struct compile_stats *stats, int32_t first, int32_t last,
                                   struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  for (int32_t site = first; site < last && !status; site++) {
    struct quant_hessian *hessian = NULL;
    if (stats && stats->hessian[site]) status = quant_hessian_create(stats->hessian[site], compile_site_width(c->model, site), &hessian,
                                                                     err);
    for (int64_t i = 0; i < c->n_matrices && !status; i++)
      if (c->matrices[i].site == site) status = make_matrix(c, &c->matrices[i], hessian, err);
    quant_hessian_destroy(hessian);
    if (!c->options->quiet && stats) fprintf(stderr, "\rrounding: site %d of %d", site + 1, COMPILE_HEAD_SITE(c->model));
  }
  return status;
}

/* Hessians of the inputs as they will be: divided by the sites' scales. */
static void scale_hessians(const struct compilation *c, struct compile_stats *stats, int32_t first, int32_t last)
{
  for (int32_t site = first; site < last; site++) {
    const float *scale = c->scales.column ? c->scales.column[site] : NULL;
    const int64_t width = compile_site_width(c->model, site);
    for (int64_t i = 0; scale && stats->hessian[site] && i < width; i++)
      for (int64_t j = i; j < width; j++) stats->hessian[site][i * width + j] /= scale[i] * scale[j];
  }
}

static bool is_site_done(const struct compilation *c, int32_t site)
{
  bool is_done = true;
  for (int64_t i = 0; i < c->n_matrices; i++) is_done &= c->matrices[i].site != site || c->matrices[i].is_done;
  return is_done;
}

/* Sites of one layer from `first` on whose Hessians fit the memory together, at least one. */
static int32_t last_of_part(const struct compilation *c, int32_t first)
{
  const int32_t end = (first / MODEL_SITES + 1) * MODEL_SITES;
  int64_t bytes = 0;
  int32_t last = first;
  for (; last < end; last++) {
    const int64_t width = compile_site_width(c->model, last), more = width * width * (int64_t)sizeof(float);
    if (last > first && bytes + more > c->options->hessian_memory) break;
    bytes += more;
  }
  return last;
}

/* GPTQ: layer by layer, and of a layer as many sites at a time as their Hessians fit the memory; the layer runs once for each such part. */
static enum sits_status make_by_gptq(struct compilation *c, struct sits_error *err)
{
  const int32_t n = COMPILE_HEAD_SITE(c->model);
  struct calibration *calibration = NULL;
  enum sits_status status = calibration_open(c->options, c->model, &calibration, err);
  for (int32_t first = 0, last; first < n && !status; first = last) {
    last = first + 1;
    if (is_site_done(c, first)) continue;
    last = last_of_part(c, first);
    struct compile_stats stats;
    status = calibration_hessians(calibration, first, last, &stats, err);
    if (status) break;
    scale_hessians(c, &stats, first, last);
    status = make_range(c, &stats, first, last, err);
    compile_stats_fini(&stats);
  }
  calibration_close(calibration);
  if (!c->options->quiet) fprintf(stderr, "\n");
  return status;
}

static enum sits_status make_matrices(struct compilation *c, struct sits_error *err)
{
  const int32_t head = COMPILE_HEAD_SITE(c->model);
  enum sits_status status = is_text(c->recipe.method, "gptq") ? make_by_gptq(c, err) : make_range(c, NULL, 0, head, err);
  for (int64_t i = 0; i < c->n_matrices && !status; i++)
    if (c->matrices[i].site < 0 || c->matrices[i].site == head) status = make_matrix(c, &c->matrices[i], NULL, err);
  return status;
}

/* ---- the file ---- */

/* Multiply-adds of the layers' matrices for a token, and how many of them have 4 bits on both sides. */
static double share_4x4(const struct compilation *c)
{
  double all = 0, both = 0;
  for (int64_t i = 0; i < c->n_matrices; i++) {
    const struct compile_matrix *m = &c->matrices[i];
    if (m->is_outer) continue;
    const double rows = (double)m->made.utd.dims[0], width = (double)m->made.utd.dims[1];
    const struct act_format *act = &c->acts[m->site];
    const bool is_four = m->made.utd.dtype == SITS_DTYPE_I4 || m->made.utd.dtype == SITS_DTYPE_Q4_K;
    all += rows * width;
    if (is_four && act->kind == ACT_INT4) both += rows * (width - act->n_outliers);
  }
  return all > 0 ? both / all : 0;
}

static json_t *site_row(const struct compilation *c, int32_t site)
{
  const struct act_format *act = &c->acts[site];
  const bool is_head = site == COMPILE_HEAD_SITE(c->model);
  json_t *row = json_pack("{si ss ss}", "layer", is_head ? -1 : site / MODEL_SITES, "site",
                          is_head ? "head" : model_site_name((enum model_site)(site % MODEL_SITES)), "act", act_kind_name(act->kind));
  if (row && act->rotation > 0) json_object_set_new(row, "rotation", json_integer(act->rotation));
  if (act->n_outliers == 0 || !row) return row;
  json_t *list = json_array();
  for (int32_t i = 0; i < act->n_outliers; i++) json_array_append_new(list, json_integer(act->outliers[i]));
  json_object_set_new(row, "outliers", list);
  return row;
}

static enum sits_status make_meta(struct compilation *c, struct sits_error *err)
{
  const struct compile_options *o = c->options;
  json_t *sites = json_array();
  for (int32_t i = 0; i <= COMPILE_HEAD_SITE(c->model); i++) json_array_append_new(sites, site_row(c, i));
  c->meta = json_pack("{ss ss ss ss ss sf si so}", "model", c->model->config.name, "origin",
                      source_kind(c->model->source) == SOURCE_GGUF ? "gguf" : "hf", "recipe", c->recipe.name, "target", o->target,
                      "kv_cache",
                      o->kv_cache_compress, "share_4x4", share_4x4(c), "scaled_inputs", c->scales.n_scaled, "sites",
                      sites);
  return c->meta ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
}

/* The norm whose output is a scaled site: its gain divided by the scales, as f32; NULL: the tensor stays as it is. */
static enum sits_status divide_gain(struct compilation *c, const struct sits_utd *source, struct sits_utd *out, struct sits_error *err)
{
  const float *scale = NULL;
  for (int32_t i = 0; i < c->model->config.n_layers && c->scales.column; i++) {
    if (source == c->model->layers[i].attn_norm) scale = c->scales.column[i * MODEL_SITES + MODEL_SITE_QKV];
    if (source == c->model->layers[i].ffn_norm) scale = c->scales.column[i * MODEL_SITES + MODEL_SITE_GATE_UP];
  }
  *out = *source;
  if (!scale) return SITS_OK;
  const int64_t n = source->dims[0];
  float *gain = mem_calloc((size_t)n, sizeof *gain), **gains = mem_realloc(c->gains, (size_t)(c->n_gains + 1) * sizeof *gains);
  if (gains) c->gains = gains;
  if (!gain || !gains) {
    mem_free(gain);
    return sits_fail(err, SITS_NOMEM, "out of memory");
  }
  c->gains[c->n_gains++] = gain;
  dequant_row(source->dtype, source->data, n, gain);
  for (int64_t i = 0; i < n; i++) gain[i] /= scale[i];
  out->dtype = SITS_DTYPE_F32;
  out->data = gain;
  out->n_bytes = (size_t)n * sizeof *gain;
  return SITS_OK;
}

/* Tensors in the source's order, matrices as they were made, vectors as they are but for the gains before scaled sites. */
static enum sits_status add_tensors(struct compilation *c, struct sits_error *err)
{
  int64_t at = 0;
  for (int64_t i = 0; i < source_n_tensors(c->model->source); i++) {
    const struct sits_utd *source = source_tensor_at(c->model->source, i);
    const bool is_matrix = at < c->n_matrices && c->matrices[at].source == source;
    if (!is_matrix && !is_vector_of(c->model, source)) continue; /* takes no part: a stored copy of a tied head, old buffers */
    struct sits_utd vector;
    enum sits_status status = is_matrix ? SITS_OK : divide_gain(c, source, &vector, err);
    if (status) return status;
    status = engine_writer_add_tensor(c->writer, is_matrix ? &c->matrices[at].made.utd : &vector);
    if (status) return sits_fail_param(err, status, source->name, "tensor '%s' cannot be written", source->name);
    at += is_matrix;
  }
  return SITS_OK;
}

static enum sits_status write_file(struct compilation *c, struct sits_error *err)
{
  enum sits_status status = engine_writer_create(&c->writer);
  if (status) return sits_fail(err, status, "out of memory");
  status = make_meta(c, err);
  if (!status) status = compile_journal_map(&c->journal, c->matrices, c->n_matrices, err);
  if (!status) status = add_tensors(c, err);
  if (!status) status = compile_blobs_add(&c->blobs, c->model->source, c->writer, err);
  return status ? status : engine_writer_finish(c->writer, c->meta, c->options->output, err);
}

static void summarise(const struct compilation *c, int64_t start_us, struct compile_result *out)
{
  *out = (struct compile_result){.share_4x4 = share_4x4(c), .n_scaled = c->scales.n_scaled, .n_resumed = c->journal.n_resumed,
                                 .seconds = (double)(clock_monotonic_us() - start_us) * 1e-6};
  memcpy(out->recipe, c->recipe.name, sizeof out->recipe);
  for (int64_t i = 0; i < c->n_matrices; i++) {
    const struct sits_utd *u = &c->matrices[i].made.utd;
    out->weight_bytes += u->n_bytes + (uint64_t)engine_file_n_groups(u) * (u->minimums ? 4 : 2);
  }
}

static void compilation_fini(struct compilation *c, bool is_finished)
{
  for (int64_t i = 0; i < c->n_matrices; i++) quant_tensor_fini(&c->matrices[i].made);
  mem_free(c->matrices);
  for (int32_t i = 0; c->acts && i <= COMPILE_HEAD_SITE(c->model); i++) mem_free((void *)c->acts[i].outliers);
  mem_free(c->acts);
  compile_stats_fini(&c->stats);
  compile_scales_fini(&c->scales);
  for (int64_t i = 0; i < c->n_gains; i++) mem_free(c->gains[i]);
  mem_free(c->gains);
  engine_writer_destroy(c->writer);
  compile_blobs_fini(&c->blobs);
  json_decref(c->meta);
  compile_journal_close(&c->journal, is_finished);
  if (c->model) model_close(c->model);
  quant_recipe_fini(&c->recipe);
}

/* Of all that decides the bytes of a matrix. */
static enum sits_status open_journal(struct compilation *c, struct sits_error *err)
{
  const struct compile_options *o = c->options;
  struct buf text;
  char key[24];
  uint64_t inputs = 0;               /* nothing goes on without a folder */
  const enum sits_status status = o->work ? compile_fingerprint(c->model->source, o->calibration, &inputs, err) : SITS_OK;
  if (status) return status;
  buf_init(&text, 1 << 20);
  const bool ok = option_write_yaml(&c->recipe.set, false, &text) &&
                  buf_printf(&text, "%s %016llx %lld %lld", o->model, (unsigned long long)inputs, (long long)o->calibration_windows,
                             (long long)o->calibration_ctx);
  snprintf(key, sizeof key, "%016llx", (unsigned long long)hash_bytes(1, text.data, text.size));
  buf_fini(&text);
  return ok ? compile_journal_open(&c->journal, o->work, key, err) : sits_fail(err, SITS_NOMEM, "out of memory");
}

/* An engine file is no source, but for what sits2026-opt prepared: rotated, and not rounded yet. */
static enum sits_status check_source(const struct compilation *c, struct sits_error *err)
{
  if (!c->model->source) return sits_fail_param(err, SITS_UNSUPPORTED, "model", "%.150s has no weights to compile", c->options->model);
  const json_t *meta = source_engine_meta(c->model->source);
  const char *stage = json_string_value(json_object_get(meta, "stage"));
  if (!meta || (stage && is_text(stage, "prepared"))) return SITS_OK;
  return sits_fail_param(err, SITS_UNSUPPORTED, "model", "%.150s is an engine file already: compile from its source", c->options->model);
}

/* awq asks for it; auto where there is text and a matrix to gain from it. */
static bool wants_scaling(const struct compilation *c)
{
  if (is_text(c->recipe.scaling, "none") || is_text(c->recipe.weights, "f16") || !c->model) return false;
  if (is_text(c->recipe.scaling, "awq")) return true;
  for (int32_t i = 0; i < c->model->config.n_layers && c->options->calibration; i++) {
    const struct quant_spec spec = compile_spec(&c->recipe, c->model->layers[i].wq, false);
    if (!quant_keeps(c->model->layers[i].wq, &spec)) return true;
  }
  return false;
}

enum sits_status compile_run(const struct compile_options *options, struct compile_result *out, struct sits_error *err)
{
  struct compilation c = {.options = options};
  const int64_t start_us = clock_monotonic_us();
  enum sits_status status = outfile_check(options->output, err); /* before hours of work, not behind them */
  if (!status && options->report) status = outfile_check(options->report, err);
  if (status) return status;
  status = quant_recipe_load(options->recipe ? options->recipe : "w4a8", &c.recipe, err);
  if (status) return status;
  status = model_open(options->model, &c.model, err);
  if (!status) status = check_source(&c, err);
  if (!status) status = check_sites(&c.recipe, c.model, err);
  if (!status) status = check_target(options, c.model, err);
  const bool scales = wants_scaling(&c);
  const bool measures = options->calibration && !is_text(c.recipe.weights, "f16") && options->report;
  if (!status) status = open_journal(&c, err);
  if (!status && (needs_energies(&c.recipe, c.model) || scales || measures))
    status = compile_calibrate(options, c.model, &c.stats, err);
  if (!status && scales) status = compile_scales_make(&c.recipe, c.model, &c.stats, &c.scales, err);
  if (!status) status = make_acts(&c, err);
  if (!status) status = list_matrices(&c, err);
  if (!status) status = make_matrices(&c, err);
  if (!status) status = write_file(&c, err);
  if (!status) status = compile_report(c.matrices, c.n_matrices, (int32_t)c.recipe.weight_group, options->report,
                                        options->quiet, err);
  if (!status) summarise(&c, start_us, out);
  compilation_fini(&c, !status);
  return status;
}
