/* Rotations fused into weights. With Q_r the rotation of the residual stream, Q_h that of a head's values and B the block Walsh-Hadamard
 * matrix of down's input, and g a norm's gain:
 *
 *   embedding E Q_r^T;  q, k, gate, up: W diag(g) Q_r^T;  v: Q_h W diag(g) Q_r^T;  o: Q_r W Q_h^T;  down: Q_r W B;  head: W diag(g) Q_r^T
 *
 * gains become 1, biases of v and o are rotated with the rows. A norm without gain commutes with Q_r, and attention with Q_h, so the model
 * computes what it did; only B happens at run time (act_format.h). Untouched tensors keep their bytes. One matrix in f32 at a time;
 * results wait in a temporary file. Entry point: opt_prepare. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "opt.h"
#include "quant/quant_rotate.h"
#include "tensor/dequant.h"
#include "tools/compile/compile.h"

#define HEAD_SEED 0x5eed             /* with signs: the cache's own Walsh-Hadamard would undo one without */

struct change {                      /* of one tensor; all NULL: none */
  const struct sits_utd *gain;       /* folded into the columns */
  const struct quant_rotation *columns, *rows;
  bool becomes_one;                  /* a gain that was folded */
};

struct preparation {
  const struct model *model;
  const struct opt_plan *plan;
  struct quant_rotation *residual, *head, *down;
  FILE *spool;
  char spool_path[4096];
  struct mapfile map;
  struct sits_utd *tensors;          /* [n] as they will be written; data: offset in the spool until mapped */
  bool *is_spooled;
  int64_t n;
};

static struct change change_in_layer(const struct preparation *p, int32_t i, const struct sits_utd *t)
{
  const struct model_layer *l = &p->model->layers[i];
  const struct quant_rotation *head = p->plan->heads[i] ? p->head : NULL;
  const bool is_rotated = p->residual != NULL;
  if (t == l->attn_norm || t == l->ffn_norm) return (struct change){.becomes_one = is_rotated};
  if (t == l->wq || t == l->wk) return (struct change){is_rotated ? l->attn_norm : NULL, p->residual, NULL, false};
  if (t == l->wv) return (struct change){is_rotated ? l->attn_norm : NULL, p->residual, head, false};
  if (t == l->wo) return (struct change){NULL, head, p->residual, false};
  if (t == l->w_gate || t == l->w_up) return (struct change){is_rotated ? l->ffn_norm : NULL, p->residual, NULL, false};
  if (t == l->w_down) return (struct change){NULL, p->plan->down[i] ? p->down : NULL, p->residual, false};
  if (t == l->bv) return (struct change){NULL, NULL, head, false};
  if (t == l->bo) return (struct change){NULL, NULL, p->residual, false};
  return (struct change){0};
}

static struct change change_of(const struct preparation *p, const struct sits_utd *t)
{
  const struct model *m = p->model;
  const bool is_rotated = p->residual != NULL;
  if (t == m->tok_embd) return (struct change){NULL, p->residual, NULL, false};
  if (t == m->output) return (struct change){is_rotated ? m->output_norm : NULL, p->residual, NULL, false};
  if (t == m->output_norm) return (struct change){.becomes_one = is_rotated};
  struct change change = {0};
  for (int32_t i = 0; i < m->config.n_layers && !change.columns && !change.rows && !change.becomes_one; i++)
    change = change_in_layer(p, i, t);
  return change;
}

/* ---- one tensor ---- */

/* Rows rotate in runs of the rotation's order, column by column. */
static void rotate_rows(const struct quant_rotation *r, float *x, int64_t rows, int64_t width, float *column, float *work)
{
  for (int64_t c = 0; c < width; c++) {
    for (int64_t i = 0; i < rows; i++) column[i] = x[i * width + c];
    quant_rotate(r, column, rows, work);
    for (int64_t i = 0; i < rows; i++) x[i * width + c] = column[i];
  }
}

static enum sits_status spool(struct preparation *p, const void *bytes, size_t n_bytes, struct sits_error *err)
{
  return fwrite(bytes, 1, n_bytes, p->spool) == n_bytes ? SITS_OK : sits_fail(err, SITS_IO, "%.150s: %s", p->spool_path, strerror(errno));
}

static enum sits_status spool_halves(struct preparation *p, const char *name, const float *x, int64_t n, struct sits_error *err)
{
  uint16_t halves[1024];
  enum sits_status status = SITS_OK;
  for (int64_t at = 0; at < n && !status; at += 1024) {
    const int64_t some = n - at < 1024 ? n - at : 1024;
    for (int64_t i = 0; i < some; i++) {
      halves[i] = float_to_half(x[at + i]);
      if (!isfinite(half_to_float(halves[i])))
        return sits_fail_param(err, SITS_FORMAT, name, "tensor '%s': a rotated value does not fit 16-bit floats", name);
    }
    status = spool(p, halves, (size_t)some * sizeof *halves, err);
  }
  return status;
}

/* At most one matrix in f32; without a rotation of rows one row. */
static enum sits_status change_matrix(struct preparation *p, const struct sits_utd *t, const struct change *c, struct sits_error *err)
{
  const int64_t rows = t->dims[0], width = t->dims[1], at_once = c->rows ? rows : 1, widest = rows > width ? rows : width;
  float *x = mem_calloc((size_t)(at_once * width), sizeof *x), *gain = mem_calloc((size_t)width, sizeof *gain);
  float *work = mem_calloc(2 * (size_t)widest, sizeof *work);
  enum sits_status status = x && gain && work ? SITS_OK : sits_fail_param(err, SITS_NOMEM, t->name, "%s: out of memory", t->name);
  for (int64_t i = 0; i < width && !status; i++) gain[i] = 1;
  if (!status && c->gain) dequant_row(c->gain->dtype, c->gain->data, width, gain);
  for (int64_t r = 0; r < rows && !status; r++) {
    float *row = x + (c->rows ? r * width : 0);
    dequant_tensor_row(t, r, row);
    for (int64_t i = 0; i < width; i++) row[i] *= gain[i];
    if (c->columns) quant_rotate(c->columns, row, width, work);
    if (!c->rows) status = spool_halves(p, t->name, row, width, err);
  }
  if (!status && c->rows) {
    rotate_rows(c->rows, x, rows, width, work, work + widest);
    status = spool_halves(p, t->name, x, rows * width, err);
  }
  mem_free(x);
  mem_free(gain);
  mem_free(work);
  return status;
}

/* Gains and biases become f32. */
static enum sits_status change_vector(struct preparation *p, const struct sits_utd *t, const struct change *c, struct sits_error *err)
{
  const int64_t n = t->dims[0];
  float *x = mem_calloc(2 * (size_t)n, sizeof *x);
  if (!x) return sits_fail_param(err, SITS_NOMEM, t->name, "%s: out of memory", t->name);
  dequant_row(t->dtype, t->data, n, x);
  if (c->rows) quant_rotate(c->rows, x, n, x + n);
  for (int64_t i = 0; i < n && c->becomes_one; i++) x[i] = 1;
  const enum sits_status status = spool(p, x, (size_t)n * sizeof *x, err);
  mem_free(x);
  return status;
}

static enum sits_status add_tensor(struct preparation *p, const struct sits_utd *t, const char *name, const struct change *c,
                                   struct sits_error *err)
{
  struct sits_utd *out = &p->tensors[p->n];
  *out = *t;
  snprintf(out->name, sizeof out->name, "%s", name);
  const bool is_changed = c->columns || c->rows || c->becomes_one;
  enum sits_status status = SITS_OK;
  if (is_changed) {
    out->dtype = t->n_dims == 2 ? SITS_DTYPE_F16 : SITS_DTYPE_F32;
    out->quant = SITS_QUANT_NONE;
    out->scales = out->minimums = NULL;
    out->group_size = 0;
    out->n_bytes = (size_t)sits_utd_row_major_bytes(out);
    out->data = (const void *)(uintptr_t)ftello(p->spool);
    p->is_spooled[p->n] = true;
    status = t->n_dims == 2 ? change_matrix(p, t, c, err) : change_vector(p, t, c, err);
  }
  p->n++;
  return status;
}

/* ---- the file ---- */

static json_t *make_meta(const struct preparation *p)
{
  const struct model *m = p->model;
  json_t *sites = json_array();
  for (int32_t i = 0; i < m->config.n_layers; i++)
    if (p->plan->down[i]) json_array_append_new(sites, json_pack("{si ss ss si}", "layer", i, "site", model_site_name(MODEL_SITE_DOWN),
                                                                 "act", act_kind_name(ACT_FLOAT), "rotation", p->plan->block));
  return json_pack("{ss ss ss ss sI so}", "model", m->config.name, "origin", source_kind(m->source) == SOURCE_GGUF ? "gguf" : "hf", "stage",
                   "prepared", "kv_cache", "none", "residual_seed", (json_int_t)p->plan->residual, "sites", sites);
}

static enum sits_status write_file(struct preparation *p, const char *path, struct sits_error *err)
{
  struct engine_writer *writer = NULL;
  struct compile_blobs blobs = {0};
  json_t *meta = make_meta(p);
  enum sits_status status = engine_writer_create(&writer);
  if (!status && !meta) status = SITS_NOMEM;
  if (status) sits_fail(err, status, "out of memory");
  if (!status && fflush(p->spool) != 0) status = sits_fail(err, SITS_IO, "%.150s: %s", p->spool_path, strerror(errno));
  if (!status) status = mapfile_open(&p->map, p->spool_path, err);
  for (int64_t i = 0; i < p->n && !status; i++) {
    struct sits_utd *t = &p->tensors[i];
    if (p->is_spooled[i]) t->data = p->map.data + (uintptr_t)t->data;
    if (p->is_spooled[i]) t->place = SITS_PLACE_MAPPED_FILE;
    status = engine_writer_add_tensor(writer, t);
    if (status) sits_fail_param(err, status, t->name, "tensor '%s' cannot be written", t->name);
  }
  if (!status) status = compile_blobs_add(&blobs, p->model->source, writer, err);
  if (!status) status = engine_writer_finish(writer, meta, path, err);
  engine_writer_destroy(writer);
  compile_blobs_fini(&blobs);
  json_decref(meta);
  return status;
}

static enum sits_status make_rotations(struct preparation *p, struct sits_error *err)
{
  const struct model_config *c = &p->model->config;
  enum sits_status status = SITS_OK;
  if (p->plan->residual) status = quant_rotation_create(c->n_embd, p->plan->residual, &p->residual, err);
  if (!status) status = quant_rotation_create(c->head_dim, HEAD_SEED, &p->head, err);
  if (!status) status = quant_rotation_create(p->plan->block, 0, &p->down, err);
  return status;
}

static bool is_of_model(const struct model *m, const struct sits_utd *t)
{
  return !(source_kind(m->source) == SOURCE_HF && m->config.tied_head && strcmp(t->name, "lm_head.weight") == 0) &&
         !strstr(t->name, ".rotary_emb.inv_freq");
}

static enum sits_status make_tensors(struct preparation *p, struct sits_error *err)
{
  const struct model *m = p->model;
  const int64_t n = source_n_tensors(m->source);
  p->tensors = mem_calloc((size_t)n + 1, sizeof *p->tensors);
  p->is_spooled = mem_calloc((size_t)n + 1, sizeof *p->is_spooled);
  enum sits_status status = p->tensors && p->is_spooled ? SITS_OK : sits_fail(err, SITS_NOMEM, "out of memory");
  for (int64_t i = 0; i < n && !status; i++) {
    const struct sits_utd *t = source_tensor_at(m->source, i);
    if (!is_of_model(m, t)) continue;
    const struct change change = change_of(p, t);
    status = add_tensor(p, t, t->name, &change, err);
    source_drop_pages(m->source, t);
    opt_progress("rotating", i + 1, n);
  }
  if (status || !p->residual || m->output != m->tok_embd) return status;
  const struct change head = {m->output_norm, p->residual, NULL, false}; /* the tied head reads through a gain that the embedding lacks */
  return add_tensor(p, m->tok_embd, source_kind(m->source) == SOURCE_GGUF ? "output.weight" : "lm_head.weight", &head, err);
}

enum sits_status opt_prepare(const struct model *model, const struct opt_plan *plan, const char *path, struct sits_error *err)
{
  struct preparation p = {.model = model, .plan = plan};
  snprintf(p.spool_path, sizeof p.spool_path, "%.4000s.spool", path);
  p.spool = fopen(p.spool_path, "wb");
  enum sits_status status = p.spool ? SITS_OK : sits_fail(err, SITS_IO, "%.150s: %s", p.spool_path, strerror(errno));
  if (!status) status = make_rotations(&p, err);
  if (!status) status = make_tensors(&p, err);
  if (!status) status = write_file(&p, path, err);
  mapfile_close(&p.map);
  if (p.spool) fclose(p.spool);
  unlink(p.spool_path);
  quant_rotation_destroy(p.residual);
  quant_rotation_destroy(p.head);
  quant_rotation_destroy(p.down);
  mem_free(p.tensors);
  mem_free(p.is_spooled);
  return status;
}
