/* See compile_layers.h. The hidden states of all tokens are rows of a table that a program of one layer (program_from_layer) embeds: a
 * batch loads its rows, runs, and writes what comes out to the same place of the file. Keys and values of one window and one layer are in
 * memory. */
#include "tools/compile/compile_layers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/program.h"
#include "base/mem.h"
#include "model/arch.h"
#include "tensor/dequant.h"
#include "tensor/source.h"

#define BATCH_TOKENS 512             /* of a layer */
#define HEAD_TOKENS 64               /* of the head, whose rows are as wide as the vocabulary */

struct states { int file; int32_t layer; }; /* [n_windows][ctx][E] f32 in a file; -1: none */

struct layer_walk {
  const struct model *model;
  const struct backend_vtable *vtable;
  struct layer_walk_options options;
  enum kv_codec codec;
  int64_t n_windows;
  int32_t ctx, batch, width;
  int32_t n_running;                 /* tokens of the batch at hand */
  struct states now, mark;
  float *table;                      /* rows of the batch, in a mapping of table_bytes of which only those rows are touched */
  size_t table_bytes;
  int32_t *tokens, *positions, *pages; /* [batch] [batch] [pages of a window] */
};

/* A program of one layer, open on a backend of its own. */
struct stage {
  const struct layer_walk *walk;
  struct sits_utd input;
  struct backend *backend;
  struct program *program;
  struct backend_program *compiled;
  struct backend_kv *kv;
};

/* ---- hidden states ---- */

static enum sits_status open_states(struct states *states, struct sits_error *err)
{
  char path[4096];
  const char *folder = getenv("TMPDIR");
  const int n = snprintf(path, sizeof path, "%s/sits2026-layers-XXXXXX", folder && *folder ? folder : "/tmp");
  states->file = n < (int)sizeof path ? mkstemp(path) : -1;
  if (states->file < 0) return sits_fail(err, SITS_IO, "%.150s: a file for hidden states: %s", path, strerror(errno));
  unlink(path);
  return SITS_OK;
}

static enum sits_status move_rows(struct states *states, bool is_write, int64_t first, float *rows, int64_t n, int32_t width,
                                  struct sits_error *err)
{
  const size_t n_bytes = (size_t)n * (size_t)width * sizeof *rows;
  const off_t base = (off_t)first * width * (off_t)sizeof *rows;
  for (size_t at = 0; at < n_bytes;) {
    void *bytes = (char *)rows + at;
    const ssize_t some = is_write ? pwrite(states->file, bytes, n_bytes - at, base + (off_t)at)
                                  : pread(states->file, bytes, n_bytes - at, base + (off_t)at);
    if (some > 0) at += (size_t)some;
    else if (some == 0 || errno != EINTR) return sits_fail(err, SITS_IO, "hidden states: %s", some == 0 ? "cut short" : strerror(errno));
  }
  return SITS_OK;
}

static enum sits_status embed(struct layer_walk *w, const int32_t *ids, struct sits_error *err)
{
  const int64_t n = w->n_windows * w->ctx;
  enum sits_status status = open_states(&w->now, err);
  for (int64_t at = 0; at < n && !status; at += w->batch) {
    const int64_t some = n - at < w->batch ? n - at : w->batch;
    for (int64_t i = 0; i < some && !status; i++) {
      if (ids[at + i] < 0 || ids[at + i] >= w->model->config.n_vocab)
        status = sits_fail_param(err, SITS_INVALID_ARGUMENT, "text", "token id %d is not within the model's vocabulary", ids[at + i]);
      else dequant_tensor_row(w->model->tok_embd, ids[at + i], w->table + i * w->width);
    }
    if (!status) status = move_rows(&w->now, true, at, w->table, some, w->width, err);
  }
  source_drop_pages(w->model->source, w->model->tok_embd);
  return status;
}

/* ---- one layer ---- */

static void stage_close(struct stage *s)
{
  const struct backend_vtable *vtable = s->walk->vtable;
  if (s->kv) vtable->kv_destroy(s->kv);
  if (s->compiled) vtable->program_destroy(s->compiled);
  if (s->program) program_destroy(s->program);
  if (s->backend) vtable->close(s->backend);
}

static enum sits_status stage_open(struct stage *s, const struct layer_walk *w, const struct backend_observer *observer,
                                   struct sits_error *err)
{
  const struct model_config *c = &w->model->config;
  const bool is_head = w->now.layer == c->n_layers;
  const int32_t batch = is_head && HEAD_TOKENS < w->batch ? HEAD_TOKENS : w->batch;
  const struct backend_options backend = {.n_threads = w->options.n_threads, .isa = w->options.isa, .max_batch_tokens = batch,
                                          .max_seqs = batch};
  const struct kv_geometry geometry = {.n_layers = 1, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .codec = w->codec,
                                       .n_pages = (w->ctx + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS};
  *s = (struct stage){.walk = w, .input = {.name = "hidden states", .dtype = SITS_DTYPE_F32, .n_dims = 2,
                                           .dims = {is_head ? c->n_vocab : c->n_embd, c->n_embd}, .data = w->table,
                                           .layout = SITS_LAYOUT_ROW_MAJOR, .place = SITS_PLACE_HOST}};
  s->input.n_bytes = (size_t)sits_utd_row_major_bytes(&s->input);
  enum sits_status status = w->vtable->open(&backend, &s->backend, err);
  if (!status) status = program_from_layer(w->model, w->now.layer, &s->input, w->vtable, &s->program, err);
  if (!status) status = w->vtable->compile(s->backend, s->program, &s->compiled, err);
  if (!status) status = w->vtable->kv_create(s->backend, &geometry, &s->kv, err);
  if (!status && observer) w->vtable->observe(s->compiled, observer);
  if (status) stage_close(s);
  return status;
}

/* Rows 0..n-1 of the table, which are tokens at..at+n-1 of a window. */
static enum sits_status run_batch(struct layer_walk *w, const struct stage *s, int32_t at, int32_t n, struct backend_result *result,
                                  struct sits_error *err)
{
  const int32_t starts[2] = {0, n}, length = at + n;
  for (int32_t i = 0; i < n; i++) w->positions[i] = at + i;
  w->n_running = n;
  const struct backend_batch batch = {.n_tokens = n, .n_seqs = 1, .n_rows = n, .tokens = w->tokens, .positions = w->positions,
                                      .seq_start = starts, .kv_len = &length, .block_table = w->pages,
                                      .table_stride = (w->ctx + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS, .row_token = w->tokens};
  enum sits_status status = w->vtable->submit(s->compiled, s->kv, &batch);
  if (!status) status = w->vtable->wait(s->compiled, result);
  return status ? sits_fail(err, status, "layer %d: the backend failed: %s", w->now.layer, sits_status_info(status)->text) : SITS_OK;
}

enum sits_status layer_walk_run(struct layer_walk *w, const struct backend_observer *observer, bool advance, struct sits_error *err)
{
  struct stage stage;
  struct backend_result result;
  if (w->now.layer >= w->model->config.n_layers) return sits_fail(err, SITS_INTERNAL, "no layer is left to run");
  enum sits_status status = stage_open(&stage, w, observer, err);
  if (status) return status;
  for (int64_t window = 0; window < w->n_windows && !status; window++)
    for (int32_t at = 0; at < w->ctx && !status; at += w->batch) {
      const int32_t n = w->ctx - at < w->batch ? w->ctx - at : w->batch;
      status = move_rows(&w->now, false, window * w->ctx + at, w->table, n, w->width, err);
      if (!status) status = run_batch(w, &stage, at, n, &result, err);
      if (!status && advance) {
        memcpy(w->table, result.logits, (size_t)n * (size_t)w->width * sizeof *w->table);
        status = move_rows(&w->now, true, window * w->ctx + at, w->table, n, w->width, err);
      }
    }
  stage_close(&stage);
  if (!status && advance) w->now.layer++;
  return status;
}

enum sits_status layer_walk_head(struct layer_walk *w, const struct backend_observer *observer, int32_t first, layer_row_fn fn, void *user,
                                 struct sits_error *err)
{
  struct stage stage;
  struct backend_result result;
  if (w->now.layer != w->model->config.n_layers) return sits_fail(err, SITS_INTERNAL, "layers are left to run before the head");
  enum sits_status status = stage_open(&stage, w, observer, err);
  if (status) return status;
  const int32_t batch = HEAD_TOKENS < w->batch ? HEAD_TOKENS : w->batch, V = w->model->config.n_vocab;
  for (int64_t window = 0; window < w->n_windows && !status; window++)
    for (int32_t at = first; at < w->ctx && !status; at += batch) {
      const int32_t n = w->ctx - at < batch ? w->ctx - at : batch;
      status = move_rows(&w->now, false, window * w->ctx + at, w->table, n, w->width, err);
      if (!status) status = run_batch(w, &stage, at, n, &result, err);
      for (int32_t i = 0; i < n && fn && !status; i++) fn(user, window, at + i, result.logits + (size_t)i * (size_t)V);
    }
  stage_close(&stage);
  return status;
}

/* ---- marks ---- */

static enum sits_status copy_states(struct layer_walk *w, struct states *from, struct states *to, struct sits_error *err)
{
  const int64_t n = w->n_windows * w->ctx;
  enum sits_status status = SITS_OK;
  for (int64_t at = 0; at < n && !status; at += w->batch) {
    const int64_t some = n - at < w->batch ? n - at : w->batch;
    status = move_rows(from, false, at, w->table, some, w->width, err);
    if (!status) status = move_rows(to, true, at, w->table, some, w->width, err);
  }
  to->layer = from->layer;
  return status;
}

enum sits_status layer_walk_mark(struct layer_walk *w, struct sits_error *err)
{
  const enum sits_status status = w->mark.file >= 0 ? SITS_OK : open_states(&w->mark, err);
  return status ? status : copy_states(w, &w->now, &w->mark, err);
}

enum sits_status layer_walk_back(struct layer_walk *w, struct sits_error *err)
{
  return w->mark.file >= 0 ? copy_states(w, &w->mark, &w->now, err) : sits_fail(err, SITS_INTERNAL, "no mark to go back to");
}

/* ---- life ---- */

int32_t layer_walk_at(const struct layer_walk *w) { return w->now.layer; }

int32_t layer_walk_tokens(const struct layer_walk *w) { return w->n_running; }

int32_t layer_walk_batch(const struct layer_walk *w) { return w->batch; }

static enum sits_status choose_codec(struct layer_walk *w, struct sits_error *err)
{
  const struct model_config *c = &w->model->config;
  const char *wish = w->options.kv_codec && strcmp(w->options.kv_codec, "auto") != 0 ? w->options.kv_codec : w->model->kv_codec;
  const char *name = wish && strcmp(wish, "none") != 0 ? wish : kv_codec_name(KV_F16);
  struct kv_geometry geometry = {.n_layers = 1, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .n_pages = 1};
  for (int codec = 0; codec < KV_CODEC_COUNT; codec++) {
    geometry.codec = (enum kv_codec)codec;
    if (strcmp(name, kv_codec_name(geometry.codec)) != 0 || w->vtable->kv_page_bytes(&geometry) == 0) continue;
    w->codec = geometry.codec;
    return SITS_OK;
  }
  return sits_fail_param(err, SITS_UNSUPPORTED, "kv-cache-dtype", "kv-cache-dtype '%.32s' is not supported for this model", name);
}

/* The head's table has as many rows as the vocabulary, but a batch touches only its own. */
static enum sits_status map_table(struct layer_walk *w, struct sits_error *err)
{
  const struct model_config *c = &w->model->config;
  const size_t rows = (size_t)(c->n_vocab > c->n_embd ? c->n_vocab : c->n_embd);
  w->table_bytes = rows * (size_t)c->n_embd * sizeof *w->table;
  void *table = mmap(NULL, w->table_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) return sits_fail(err, SITS_NOMEM, "out of memory for hidden states");
  w->table = table;
  return SITS_OK;
}

enum sits_status layer_walk_open(const struct model *model, const struct layer_walk_options *options, const int32_t *ids,
                                 int64_t n_windows, int32_t ctx, struct layer_walk **out, struct sits_error *err)
{
  struct layer_walk *w = mem_calloc(1, sizeof *w);
  if (!w) return sits_fail(err, SITS_NOMEM, "out of memory");
  const struct model_config *c = &model->config;
  const int32_t rows = c->n_embd < c->n_vocab ? c->n_embd : c->n_vocab, n_pages = (ctx + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
  *w = (struct layer_walk){.model = model, .options = *options, .vtable = backend_find("cpu"), .n_windows = n_windows, .ctx = ctx,
                           .now.file = -1, .mark.file = -1, .width = c->n_embd, .batch = rows < BATCH_TOKENS ? rows : BATCH_TOKENS};
  enum sits_status status = w->vtable ? SITS_OK : sits_fail(err, SITS_UNSUPPORTED, "this build has no CPU backend");
  if (!status) status = choose_codec(w, err);
  if (!status) status = map_table(w, err);
  w->tokens = mem_calloc((size_t)w->batch, sizeof *w->tokens);
  w->positions = mem_calloc((size_t)w->batch, sizeof *w->positions);
  w->pages = mem_calloc((size_t)n_pages, sizeof *w->pages);
  if (!status && (!w->tokens || !w->positions || !w->pages)) status = sits_fail(err, SITS_NOMEM, "out of memory");
  for (int32_t i = 0; i < w->batch && !status; i++) w->tokens[i] = i;
  for (int32_t i = 0; i < n_pages && !status; i++) w->pages[i] = i;
  if (!status) status = embed(w, ids, err);
  if (status) layer_walk_close(w);
  else *out = w;
  return status;
}

void layer_walk_close(struct layer_walk *w)
{
  if (!w) return;
  if (w->now.file >= 0) close(w->now.file);
  if (w->mark.file >= 0) close(w->mark.file);
  if (w->table) munmap(w->table, w->table_bytes);
  mem_free(w->tokens);
  mem_free(w->positions);
  mem_free(w->pages);
  mem_free(w);
}
