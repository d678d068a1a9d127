/* Calibration: the model itself runs over a text, on the CPU backend, layer by layer (compile_layers.h), and an observer sees every input
 * of a matrix product before it is rounded. Entry points: compile_calibrate for energies and samples of all sites; calibration_open and
 * calibration_hessians for Hessians, layer after layer.
 *
 * Workers call the observer at once, in any order. Ops run one after the other, so the inputs of one op are collected in a buffer, and
 * when the last token of the batch is there they are added up in the order of tokens: sums do not depend on who came first, and the same
 * text gives the same file. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backend/program.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "text/tokenizer.h"
#include "tools/compile/compile.h"
#include "tools/compile/compile_layers.h"

struct gatherer {
  struct compile_stats *stats;
  const struct model *model;         /* whose tensors the ops name */
  const struct layer_walk *walk;
  int32_t first_site, last_site;     /* Hessians wanted */
  bool only_hessians;
  float *rows;                       /* [layer_walk_batch][widest] inputs of the op at hand */
  int32_t n_seen;                    /* of its rows */
  pthread_mutex_t lock;
  bool has_failed;
};

int32_t compile_site_width(const struct model *model, int32_t site)
{
  const struct model_config *c = &model->config;
  if (site == COMPILE_HEAD_SITE(model)) return c->n_embd;
  const int32_t kind = site % MODEL_SITES;
  return kind == MODEL_SITE_O ? c->n_heads * c->head_dim : kind == MODEL_SITE_DOWN ? c->n_ff : c->n_embd;
}

/* The walk's programs have one layer, whatever its number. */
static int32_t site_of(const struct gatherer *g, const struct program_op *op)
{
  const struct model *model = g->model;
  const struct sits_utd *w = op->parts[0].weight;
  if (op->layer < 0) return w == model->output ? COMPILE_HEAD_SITE(model) : -1;
  const struct model_layer *l = &model->layers[layer_walk_at(g->walk)];
  const int32_t base = layer_walk_at(g->walk) * MODEL_SITES;
  if (w == l->wq || w == l->wk || w == l->wv) return base + MODEL_SITE_QKV;
  if (w == l->wo) return base + MODEL_SITE_O;
  if (w == l->w_gate || w == l->w_up) return base + MODEL_SITE_GATE_UP;
  return w == l->w_down ? base + MODEL_SITE_DOWN : -1;
}

/* h += sum over tokens of x x^T, upper triangle. */
#define ADD_OUTER(name, attributes) \
  static attributes void name(float *h, const float *x, int32_t n_tokens, int32_t width) \
  { \
    for (int32_t i = 0; i < width; i++) { \
      float *row = h + (int64_t)i * width; \
      for (int32_t t = 0; t < n_tokens; t++) { \
        const float *xt = x + (int64_t)t * width, xi = xt[i]; \
        for (int32_t j = i; j < width; j++) row[j] += xi * xt[j]; \
      } \
    } \
  }
ADD_OUTER(add_outer_plain, )
#if defined(__x86_64__)
#if defined(__clang__) /* which vectorises at -O2 already */
ADD_OUTER(add_outer_avx2, __attribute__((target("avx2,fma"))))
#else
ADD_OUTER(add_outer_avx2, __attribute__((target("avx2,fma"), optimize("O3"))))
#endif
#endif

static void add_outer(float *h, const float *x, int32_t n_tokens, int32_t width)
{
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    add_outer_avx2(h, x, n_tokens, width);
    return;
  }
#endif
  add_outer_plain(h, x, n_tokens, width);
}

/* Every stride-th token, and every second of those kept whenever they fill the room: an even spread over a text of any length. */
static void add_sample(struct compile_stats *s, int32_t site, const float *rows, int32_t n, int32_t width)
{
  if (!s->sample[site]) return;
  for (int32_t t = 0; t < n; t++) {
    if ((s->n_tokens[site] + t) % s->stride[site] != 0) continue;
    if (s->n_sampled[site] == COMPILE_SAMPLE) {
      for (int32_t i = 1; i < COMPILE_SAMPLE / 2; i++)
        memcpy(s->sample[site] + (int64_t)i * width, s->sample[site] + (int64_t)2 * i * width, (size_t)width * sizeof *rows);
      s->n_sampled[site] = COMPILE_SAMPLE / 2;
      s->stride[site] *= 2;
    }
    memcpy(s->sample[site] + (int64_t)s->n_sampled[site]++ * width, rows + (int64_t)t * width, (size_t)width * sizeof *rows);
  }
}

/* The buffered inputs of a site, complete. */
static void add_rows(struct gatherer *g, int32_t site, int32_t width, int32_t n)
{
  struct compile_stats *s = g->stats;
  const bool wants_hessian = site >= g->first_site && site < g->last_site;
  if (g->only_hessians && !wants_hessian) return;
  if (wants_hessian && !s->hessian[site]) s->hessian[site] = mem_calloc((size_t)width * (size_t)width, sizeof **s->hessian);
  if (wants_hessian && !s->hessian[site]) {
    g->has_failed = true;
    return;
  }
  for (int32_t t = 0; t < n && !g->only_hessians; t++)
    for (int32_t c = 0; c < width; c++) {
      const double x = (double)g->rows[(int64_t)t * width + c];
      s->energy[site][c] += x * x;
    }
  add_sample(s, site, g->rows, n, width);
  if (wants_hessian) add_outer(s->hessian[site], g->rows, n, width);
  s->n_tokens[site] += n;
}

static void observe(void *user, const struct program_op *op, const float *x, int32_t first, int32_t n_tokens, int32_t width)
{
  struct gatherer *g = user;
  const int32_t site = site_of(g, op), n_batch = layer_walk_tokens(g->walk);
  if (site < 0 || width != compile_site_width(g->model, site)) return;
  pthread_mutex_lock(&g->lock);
  memcpy(g->rows + (int64_t)first * width, x, (size_t)n_tokens * (size_t)width * sizeof *x);
  g->n_seen += n_tokens;
  if (g->n_seen == n_batch) {
    add_rows(g, site, width, n_batch);
    g->n_seen = 0;
  }
  pthread_mutex_unlock(&g->lock);
}

static enum sits_status encode_text(const struct compile_options *o, const struct model *model, struct token_list *ids,
                                    struct sits_error *err)
{
  struct tokenizer *tokenizer;
  struct mapfile file;
  enum sits_status status = tokenizer_load(model->source, &tokenizer, err);
  if (status) return status;
  status = mapfile_open(&file, o->calibration, err);
  if (!status) {
    status = tokenizer_encode(tokenizer, (const char *)file.data, file.n_bytes, 0, ids);
    if (status) sits_fail(err, status, "%.150s: cannot be encoded", o->calibration);
    mapfile_close(&file);
  }
  tokenizer_destroy(tokenizer);
  return status;
}

/* ---- a walk over the calibration text ---- */

struct calibration {
  const struct compile_options *options;
  struct layer_walk *walk;
  struct gatherer gatherer;
};

void calibration_close(struct calibration *c)
{
  if (!c) return;
  layer_walk_close(c->walk);
  mem_free(c->gatherer.rows);
  pthread_mutex_destroy(&c->gatherer.lock);
  mem_free(c);
}

enum sits_status calibration_open(const struct compile_options *o, const struct model *model, struct calibration **out,
                                  struct sits_error *err)
{
  const struct model_config *config = &model->config;
  const struct layer_walk_options walk = {.n_threads = (int32_t)o->threads, .kv_codec = "f16"};
  struct token_list ids = {0};
  if (!o->calibration)
    return sits_fail_param(err, SITS_CONFIG, "calibration", "this recipe needs --calibration FILE, a text to measure activations on");
  struct calibration *c = mem_calloc(1, sizeof *c);
  if (!c) return sits_fail(err, SITS_NOMEM, "out of memory");
  c->options = o;
  c->gatherer = (struct gatherer){.model = model, .lock = PTHREAD_MUTEX_INITIALIZER};
  int32_t ctx = (int32_t)o->calibration_ctx;
  if (ctx > config->max_context) ctx = config->max_context;
  enum sits_status status = encode_text(o, model, &ids, err);
  int64_t n_windows = ids.n / ctx;
  if (n_windows > o->calibration_windows) n_windows = o->calibration_windows;
  if (!status && n_windows == 0)
    status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "calibration", "the calibration text has %" PRId64 " tokens, a window needs %d",
                             ids.n, ctx);
  if (!status) status = layer_walk_open(model, &walk, ids.ids, n_windows, ctx, &c->walk, err);
  token_list_fini(&ids);
  if (!status) {
    const int32_t attended = config->n_heads * config->head_dim, wide = config->n_embd > attended ? config->n_embd : attended;
    c->gatherer.walk = c->walk;
    c->gatherer.rows = mem_calloc((size_t)layer_walk_batch(c->walk) * (size_t)(config->n_ff > wide ? config->n_ff : wide),
                                  sizeof *c->gatherer.rows);
    if (!c->gatherer.rows) status = sits_fail(err, SITS_NOMEM, "out of memory for calibration");
  }
  if (status) calibration_close(c);
  else *out = c;
  return status;
}

/* What stays until the end is reserved before what comes and goes with each layer: else the heap would grow by holes between them. */
static enum sits_status stats_init(struct compile_stats *s, const struct model *model, bool only_hessians, struct sits_error *err)
{
  const size_t n = (size_t)COMPILE_HEAD_SITE(model) + 1;
  *s = (struct compile_stats){.n_sites = (int32_t)n, .energy = mem_calloc(n, sizeof *s->energy),
                              .n_tokens = mem_calloc(n, sizeof *s->n_tokens), .hessian = mem_calloc(n, sizeof *s->hessian),
                              .sample = mem_calloc(n, sizeof *s->sample), .n_sampled = mem_calloc(n, sizeof *s->n_sampled),
                              .stride = mem_calloc(n, sizeof *s->stride)};
  if (!s->energy || !s->n_tokens || !s->hessian || !s->sample || !s->n_sampled || !s->stride)
    return sits_fail(err, SITS_NOMEM, "out of memory");
  for (size_t i = 0; i < n; i++) {
    const size_t width = (size_t)compile_site_width(model, (int32_t)i);
    s->stride[i] = 1;
    if (only_hessians) continue;
    s->energy[i] = mem_calloc(width, sizeof **s->energy);
    s->sample[i] = mem_calloc(COMPILE_SAMPLE * width, sizeof **s->sample);
    if (!s->energy[i] || !s->sample[i]) return sits_fail(err, SITS_NOMEM, "out of memory for input statistics");
  }
  return SITS_OK;
}

/* The next layer, or after the last one the head, seen by the gatherer. */
static enum sits_status gather(struct calibration *c, struct compile_stats *stats, bool advance, struct sits_error *err)
{
  struct gatherer *g = &c->gatherer;
  const struct backend_observer observer = {observe, g};
  const bool is_head = layer_walk_at(c->walk) == g->model->config.n_layers;
  g->stats = stats;
  g->n_seen = 0;
  enum sits_status status = is_head ? layer_walk_head(c->walk, &observer, 0, NULL, NULL, err)
                                    : layer_walk_run(c->walk, &observer, advance, err);
  g->stats = NULL;
  if (!status && g->has_failed) status = sits_fail(err, SITS_NOMEM, "out of memory for input statistics");
  return status;
}

enum sits_status calibration_hessians(struct calibration *c, int32_t first_site, int32_t last_site, struct compile_stats *out,
                                      struct sits_error *err)
{
  struct gatherer *g = &c->gatherer;
  *out = (struct compile_stats){0};
  enum sits_status status = SITS_OK;
  while (layer_walk_at(c->walk) < first_site / MODEL_SITES && !status) status = layer_walk_run(c->walk, NULL, true, err);
  if (!status) status = stats_init(out, g->model, true, err);
  g->first_site = first_site;
  g->last_site = last_site;
  g->only_hessians = true;
  if (!status) status = gather(c, out, false, err);
  for (int32_t i = first_site; i < last_site && !status; i++)
    if (!out->hessian[i]) status = sits_fail(err, SITS_INTERNAL, "calibration saw nothing of site %d", i);
  if (status) compile_stats_fini(out);
  return status;
}

enum sits_status compile_calibrate(const struct compile_options *options, const struct model *model, struct compile_stats *out,
                                   struct sits_error *err)
{
  struct calibration *c = NULL;
  *out = (struct compile_stats){0};
  enum sits_status status = calibration_open(options, model, &c, err);
  if (!status) status = stats_init(out, model, false, err);
  for (int32_t layer = 0; layer <= model->config.n_layers && !status; layer++) {
    status = gather(c, out, true, err);
    if (!options->quiet && !status) fprintf(stderr, "\rcalibration: layer %d of %d", layer, model->config.n_layers);
  }
  if (!options->quiet) fprintf(stderr, "\n");
  calibration_close(c);
  for (int32_t i = 0; i + 1 < out->n_sites && !status; i++)
    if (out->n_tokens[i] == 0) status = sits_fail(err, SITS_INTERNAL, "calibration saw nothing of site %d", i);
  if (status) compile_stats_fini(out);
  return status;
}

void compile_stats_fini(struct compile_stats *stats)
{
  for (int32_t i = 0; i < stats->n_sites; i++) {
    if (stats->energy) mem_free(stats->energy[i]);
    if (stats->hessian) mem_free(stats->hessian[i]);
    if (stats->sample) mem_free(stats->sample[i]);
  }
  mem_free(stats->energy);
  mem_free(stats->n_tokens);
  mem_free(stats->hessian);
  mem_free(stats->sample);
  mem_free(stats->n_sampled);
  mem_free(stats->stride);
  *stats = (struct compile_stats){0};
}
