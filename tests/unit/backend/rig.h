/* Test rig: a model file opened, stitched, compiled and given pages on one backend; and a step runner that keeps no state but the pages.
 * Header-only, one test program includes it. A failure to set up is a test failure with the error's text. */
#ifndef TESTS_UNIT_BACKEND_RIG_H
#define TESTS_UNIT_BACKEND_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/program.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/arch.h"
#include "model/model.h"

struct rig_options { const char *isa; int32_t n_threads, max_batch_tokens, max_seqs, n_pages; uint32_t fusions; enum kv_codec codec;
  int32_t n_ranks, timeout_ms; bool compress; };

struct rig {
  const struct backend_vtable *vt;
  struct model *model, *owned;     /* owned: closed with the rig; NULL when the model is the caller's */
  struct program *program;
  struct backend *backend;
  struct backend_program *compiled;
  struct backend_kv *kv;
  int32_t n_pages;
  const struct backend_blocks *blocks; /* [parts] of each step, of sparse codecs; NULL: none */
};

#define RIG_OK(call, error) \
  do { \
    if ((call) != SITS_OK) fail_msg("%s: %s", #call, (error).text); \
  } while (0)

static inline const char *rig_shared(const char *relative)
{
  static char path[2][1024];
  static int turn;
  const char *root = getenv("SITS_SHARED_DATA");
  turn = !turn;
  snprintf(path[turn], sizeof path[turn], "%s/%s", root != NULL ? root : "../shared/data", relative);
  return path[turn];
}

/* The real model, or NULL when this machine has none. */
static inline const char *rig_real_model(void)
{
  static char path[1024];
  const char *given = getenv("SITS_TEST_MODEL"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (given != NULL) snprintf(path, sizeof path, "%s", given);
  else if (cache != NULL) snprintf(path, sizeof path, "%s/sits2026/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
  else snprintf(path, sizeof path, "%s/.cache/sits2026/SmolLM2-135M-Instruct.Q4_1.gguf", home != NULL ? home : "");
  return access(path, R_OK) == 0 ? path : NULL;
}

/* The model stays the caller's. */
static struct rig rig_attach(struct model *model, const struct rig_options *o)
{
  struct rig rig = {.vt = backend_find("cpu"), .model = model, .n_pages = o->n_pages};
  if (o->n_ranks > 1) rig.vt = backend_ranks(rig.vt);
  struct sits_error err = {0};
  RIG_OK(program_for_ranks(rig.model, o->fusions & rig.vt->fusions, NULL, o->n_ranks, &rig.program, &err), err);
  const struct backend_options options = {
      .n_threads = o->n_threads, .max_batch_tokens = o->max_batch_tokens, .max_seqs = o->max_seqs, .isa = o->isa,
      .n_ranks = o->n_ranks, .collective_timeout_ms = o->timeout_ms, .compress_reduce = o->compress};
  RIG_OK(rig.vt->open(&options, &rig.backend, &err), err);
  RIG_OK(rig.vt->compile(rig.backend, rig.program, &rig.compiled, &err), err);
  const struct kv_geometry geometry = {.n_layers = rig.model->config.n_layers, .n_kv_heads = rig.model->config.n_kv_heads,
                                       .head_dim = rig.model->config.head_dim, .n_pages = o->n_pages, .codec = o->codec,
                                       .n_ranks = o->n_ranks};
  RIG_OK(rig.vt->kv_create(rig.backend, &geometry, &rig.kv, &err), err);
  return rig;
}

static inline struct rig rig_open(const char *model_path, const struct rig_options *o)
{
  struct model *model = NULL;
  struct sits_error err = {0};
  RIG_OK(model_open(model_path, &model, &err), err);
  struct rig rig = rig_attach(model, o);
  rig.owned = model;
  return rig;
}

static void rig_close(struct rig *rig)
{
  rig->vt->kv_destroy(rig->kv);
  rig->vt->program_destroy(rig->compiled);
  rig->vt->close(rig->backend);
  program_destroy(rig->program);
  model_close(rig->owned);
}

/* One sequence's part of a step: tokens at positions p0.. in the pages of `table`. */
enum { RIG_STRIDE = 256 };
struct rig_part { const int32_t *tokens; int32_t n, p0; const int32_t *table; };

/* Run a step over several sequences, asking for the logits of every token (all_rows) or of each part's last. Returned rows are valid
 * until the next step. */
static const float *rig_step(struct rig *rig, const struct rig_part *parts, int32_t n_parts, bool all_rows)
{
  enum { MAX_TOKENS = 4096, MAX_SEQS = 64, STRIDE = RIG_STRIDE };
  static int32_t tokens[MAX_TOKENS], positions[MAX_TOKENS], rows[MAX_TOKENS];
  static int32_t starts[MAX_SEQS + 1], lens[MAX_SEQS], table[MAX_SEQS][STRIDE];
  int32_t T = 0, R = 0;
  memset(table, 0xff, sizeof table);
  for (int32_t s = 0; s < n_parts; s++) {
    starts[s] = T;
    lens[s] = parts[s].p0 + parts[s].n;
    for (int32_t i = 0; i < parts[s].n; i++, T++) {
      tokens[T] = parts[s].tokens[i];
      positions[T] = parts[s].p0 + i;
      if (all_rows || i == parts[s].n - 1) rows[R++] = T;
    }
    for (int32_t i = 0; i < (lens[s] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS; i++) table[s][i] = parts[s].table[i];
  }
  starts[n_parts] = T;
  const struct backend_batch batch = {.n_tokens = T, .n_seqs = n_parts, .n_rows = R, .tokens = tokens, .positions = positions,
                                      .seq_start = starts, .kv_len = lens, .block_table = table[0], .table_stride = STRIDE,
                                      .row_token = rows, .blocks = rig->blocks};
  struct backend_result result;
  assert_int_equal(rig->vt->submit(rig->compiled, rig->kv, &batch), SITS_OK);
  assert_int_equal(rig->vt->wait(rig->compiled, &result), SITS_OK);
  return result.logits;
}

static inline int32_t rig_argmax(const float *x, int32_t n)
{
  int32_t best = 0;
  for (int32_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

#endif
