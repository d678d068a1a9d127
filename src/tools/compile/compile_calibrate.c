/* Calibration: the model itself runs over a text, on the CPU backend, and an observer sees every input of a matrix product before it is
 * rounded. Entry point: compile_calibrate.
 *
 * Workers call the observer at once, in any order. Ops run one after the other, so the inputs of one op are collected in a buffer, and
 * when the last token of the batch is there they are added up in the order of tokens: sums do not depend on who came first, and the same
 * text gives the same file. All rows' logits are asked for, because otherwise the last layer would see one row. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "tools/compile/compile.h"
#include "engine/runner.h"
#include "text/tokenizer.h"

#define BATCH_TOKENS 512

struct gatherer {
  struct compile_stats *stats;
  const struct model *model;         /* whose tensors the ops name */
  int32_t first_site, last_site;     /* Hessians wanted */
  float *rows;                       /* [BATCH_TOKENS][widest] inputs of the op at hand */
  int32_t n_seen, n_batch;           /* of its rows */
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

static int32_t site_of(const struct model *model, const struct program_op *op)
{
  const struct sits_utd *w = op->parts[0].weight;
  if (op->layer < 0) return w == model->output ? COMPILE_HEAD_SITE(model) : -1;
  const struct model_layer *l = &model->layers[op->layer];
  const int32_t base = op->layer * MODEL_SITES;
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
static void add_rows(struct gatherer *g, int32_t site, int32_t width)
{
  struct compile_stats *s = g->stats;
  if (!s->energy[site]) s->energy[site] = mem_calloc((size_t)width, sizeof **s->energy);
  if (!s->sample[site]) s->sample[site] = mem_calloc(COMPILE_SAMPLE * (size_t)width, sizeof **s->sample);
  const bool wants_hessian = site >= g->first_site && site < g->last_site;
  if (wants_hessian && !s->hessian[site]) s->hessian[site] = mem_calloc((size_t)width * (size_t)width, sizeof **s->hessian);
  if (!s->energy[site] || !s->sample[site] || (wants_hessian && !s->hessian[site])) {
    g->has_failed = true;
    return;
  }
  for (int32_t t = 0; t < g->n_batch; t++)
    for (int32_t c = 0; c < width; c++) {
      const double x = (double)g->rows[(int64_t)t * width + c];
      s->energy[site][c] += x * x;
    }
  add_sample(s, site, g->rows, g->n_batch, width);
  if (wants_hessian) add_outer(s->hessian[site], g->rows, g->n_batch, width);
  s->n_tokens[site] += g->n_batch;
}

static void observe(void *user, const struct program_op *op, const float *x, int32_t first, int32_t n_tokens, int32_t width)
{
  struct gatherer *g = user;
  const int32_t site = site_of(g->model, op);
  if (site < 0 || width != compile_site_width(g->model, site)) return;
  pthread_mutex_lock(&g->lock);
  memcpy(g->rows + (int64_t)first * width, x, (size_t)n_tokens * (size_t)width * sizeof *x);
  g->n_seen += n_tokens;
  if (g->n_seen == g->n_batch) {
    add_rows(g, site, width);
    g->n_seen = 0;
  }
  pthread_mutex_unlock(&g->lock);
}

/* One window, alone in the cache, batch by batch. */
static enum sits_status run_window(struct runner *r, struct gatherer *g, const int32_t *ids, int32_t n, int32_t *positions, int32_t *pages,
                                   struct sits_error *err)
{
  enum sits_status status = SITS_OK;
  for (int32_t at = 0; at < n && !status; at += BATCH_TOKENS) {
    const int32_t n_batch = n - at < BATCH_TOKENS ? n - at : BATCH_TOKENS, starts[2] = {0, n_batch}, length = at + n_batch;
    for (int32_t i = 0; i < n_batch; i++) {
      positions[i] = at + i;
      positions[BATCH_TOKENS + i] = i; /* rows */
    }
    g->n_batch = n_batch;
    g->n_seen = 0;
    const struct backend_batch batch = {.n_tokens = n_batch, .n_seqs = 1, .n_rows = n_batch, .tokens = ids + at, .positions = positions,
                                        .seq_start = starts, .kv_len = &length, .block_table = pages,
                                        .table_stride = r->geometry.n_pages, .row_token = positions + BATCH_TOKENS};
    struct backend_result result;
    status = r->vtable->submit(r->compiled, r->kv, &batch);
    if (!status) status = r->vtable->wait(r->compiled, &result);
    if (status) status = sits_fail(err, status, "calibration: the backend failed: %s", sits_status_info(status)->text);
  }
  return status;
}

static enum sits_status run_text(const struct compile_options *o, struct runner *r, struct gatherer *g, const struct token_list *ids,
                                 struct sits_error *err)
{
  int32_t ctx = (int32_t)o->calibration_ctx;
  if (ctx > r->model->config.max_context) ctx = r->model->config.max_context;
  int64_t n_windows = ids->n / ctx;
  if (n_windows > o->calibration_windows) n_windows = o->calibration_windows;
  if (n_windows == 0)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "calibration", "the calibration text has %" PRId64 " tokens, a window needs %d",
                           ids->n, ctx);
  const int32_t n_pages = (ctx + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  enum sits_status status = runner_kv_create(r, n_pages, err);
  if (status) return status;
  int32_t *positions = mem_calloc(2 * BATCH_TOKENS, sizeof *positions), *pages = mem_calloc((size_t)n_pages, sizeof *pages);
  if (!positions || !pages) status = sits_fail(err, SITS_NOMEM, "out of memory");
  for (int32_t i = 0; i < n_pages && !status; i++) pages[i] = i;
  for (int64_t w = 0; w < n_windows && !status; w++) {
    status = run_window(r, g, ids->ids + w * ctx, ctx, positions, pages, err);
    if (!o->quiet && !status) fprintf(stderr, "\rcalibration: window %" PRId64 " of %" PRId64, w + 1, n_windows);
  }
  if (!o->quiet) fprintf(stderr, "\n");
  mem_free(positions);
  mem_free(pages);
  return status;
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

static enum sits_status gather(const struct compile_options *o, struct gatherer *g, struct sits_error *err)
{
  struct token_list ids = {0};
  struct runner runner;
  const struct runner_options options = {.model_path = o->model, .device = "cpu", .kv_codec = "f16",
                                         .backend = {.n_threads = (int32_t)o->threads, .max_batch_tokens = BATCH_TOKENS,
                                                     .max_seqs = BATCH_TOKENS}};
  enum sits_status status = runner_open(&runner, &options, err);
  if (status) return status;
  g->model = runner.model;
  const struct model_config *c = &runner.model->config;
  const int32_t attended = c->n_heads * c->head_dim, wide = c->n_embd > attended ? c->n_embd : attended;
  g->rows = mem_calloc((size_t)BATCH_TOKENS * (size_t)(c->n_ff > wide ? c->n_ff : wide), sizeof *g->rows);
  if (!g->rows) status = sits_fail(err, SITS_NOMEM, "out of memory for calibration");
  const struct backend_observer observer = {observe, g};
  if (!runner.vtable->observe) status = sits_fail(err, SITS_UNSUPPORTED, "the %s backend cannot be observed", runner.vtable->name);
  else runner.vtable->observe(runner.compiled, &observer);
  if (!status) status = encode_text(o, runner.model, &ids, err);
  if (!status) status = run_text(o, &runner, g, &ids, err);
  if (!status && g->has_failed) status = sits_fail(err, SITS_NOMEM, "out of memory for input statistics");
  token_list_fini(&ids);
  mem_free(g->rows);
  runner_close(&runner);
  return status;
}

enum sits_status compile_calibrate(const struct compile_options *options, const struct model *model, int32_t first_site, int32_t last_site,
                                   struct compile_stats *out, struct sits_error *err)
{
  const size_t n = (size_t)COMPILE_HEAD_SITE(model) + 1;
  *out = (struct compile_stats){.n_sites = (int32_t)n, .energy = mem_calloc(n, sizeof *out->energy),
                                .n_tokens = mem_calloc(n, sizeof *out->n_tokens), .hessian = mem_calloc(n, sizeof *out->hessian),
                                .sample = mem_calloc(n, sizeof *out->sample), .n_sampled = mem_calloc(n, sizeof *out->n_sampled),
                                .stride = mem_calloc(n, sizeof *out->stride)};
  enum sits_status status = SITS_OK;
  if (!out->energy || !out->n_tokens || !out->hessian || !out->sample || !out->n_sampled || !out->stride)
    status = sits_fail(err, SITS_NOMEM, "out of memory");
  for (size_t i = 0; i < n && !status; i++) out->stride[i] = 1;
  if (!status && !options->calibration)
    status = sits_fail_param(err, SITS_CONFIG, "calibration", "this recipe needs --calibration FILE, a text to measure activations on");
  struct gatherer gatherer = {.stats = out, .first_site = first_site, .last_site = last_site, .lock = PTHREAD_MUTEX_INITIALIZER};
  if (!status) status = gather(options, &gatherer, err);
  for (size_t i = 0; i + 1 < n && !status; i++)
    if (!out->energy[i]) status = sits_fail(err, SITS_INTERNAL, "calibration saw nothing of site %zu", i);
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
