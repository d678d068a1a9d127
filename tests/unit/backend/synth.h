/* Small random models of any shape, for comparing a backend with the reference. Header-only; include after rig.h. */
#ifndef TESTS_UNIT_BACKEND_SYNTH_H
#define TESTS_UNIT_BACKEND_SYNTH_H

#include <math.h>

#include "base/arena.h"

struct synth_shape {
  const char *name;
  int32_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, window, rope_dims; /* rope_dims 0 = D */
  bool is_interleaved, has_bias, has_qk_norm, is_tied;
};

struct synth { struct model model; struct arena arena; uint64_t state; };

static double synth_random(struct synth *s) /* uniform in [-1, 1) */
{
  s->state = s->state * 6364136223846793005u + 1442695040888963407u;
  return (double)(int32_t)(s->state >> 32) / 2147483648.0;
}

static const struct sits_utd *synth_tensor(struct synth *s, const char *name, int64_t rows, int64_t columns, double scale, double centre)
{
  struct sits_utd *utd = arena_calloc(&s->arena, 1, sizeof *utd);
  const int64_t n = (rows > 0 ? rows : 1) * columns;
  float *data = arena_alloc(&s->arena, (size_t)n * sizeof *data);
  assert_true(utd != NULL && data != NULL);
  for (int64_t i = 0; i < n; i++) data[i] = (float)(centre + scale * synth_random(s));
  snprintf(utd->name, sizeof utd->name, "%s", name);
  utd->dtype = SITS_DTYPE_F32;
  utd->n_dims = rows > 0 ? 2 : 1;
  utd->dims[0] = rows > 0 ? rows : columns;
  utd->dims[1] = rows > 0 ? columns : 0;
  utd->data = data;
  utd->n_bytes = (size_t)n * sizeof *data;
  return utd;
}

static void synth_layer(struct synth *s, const struct synth_shape *c, struct model_layer *w)
{
  const int32_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, E = c->n_embd, F = c->n_ff;
  const double e = 1.5 / sqrt(E);
  w->attn_norm = synth_tensor(s, "attn_norm", 0, E, 0.2, 1);
  w->wq = synth_tensor(s, "wq", q, E, 2 * e, 0);
  w->wk = synth_tensor(s, "wk", kv, E, 2 * e, 0);
  w->wv = synth_tensor(s, "wv", kv, E, e, 0);
  w->wo = synth_tensor(s, "wo", E, q, 1.5 / sqrt(q), 0);
  if (c->has_bias) {
    w->bq = synth_tensor(s, "bq", 0, q, 0.5, 0);
    w->bk = synth_tensor(s, "bk", 0, kv, 0.5, 0);
    w->bv = synth_tensor(s, "bv", 0, kv, 0.5, 0);
    w->bo = synth_tensor(s, "bo", 0, E, 0.5, 0);
  }
  if (c->has_qk_norm) {
    w->q_norm = synth_tensor(s, "q_norm", 0, c->head_dim, 0.3, 1);
    w->k_norm = synth_tensor(s, "k_norm", 0, c->head_dim, 0.3, 1);
  }
  w->ffn_norm = synth_tensor(s, "ffn_norm", 0, E, 0.2, 1);
  w->w_gate = synth_tensor(s, "w_gate", F, E, e, 0);
  w->w_up = synth_tensor(s, "w_up", F, E, e, 0);
  w->w_down = synth_tensor(s, "w_down", E, F, 1.5 / sqrt(F), 0);
}

static void synth_init(struct synth *s, const struct synth_shape *c, uint64_t seed)
{
  *s = (struct synth){.state = seed};
  arena_init(&s->arena, 0);
  const int32_t rope_dims = c->rope_dims > 0 ? c->rope_dims : c->head_dim;
  s->model.config = (struct model_config){.n_layers = c->n_layers, .n_embd = c->n_embd, .n_heads = c->n_heads,
      .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim, .n_ff = c->n_ff, .n_vocab = c->n_vocab, .max_context = 4096,
      .sliding_window = c->window, .rms_eps = 1e-5f, .rope_dims = rope_dims,
      .rope_style = c->is_interleaved ? ROPE_INTERLEAVED : ROPE_HALF_SPLIT};
  s->model.rope_magnitude = 1;
  s->model.rope_inv_freq = arena_alloc(&s->arena, (size_t)rope_dims * sizeof(float));
  s->model.layers = arena_calloc(&s->arena, (size_t)c->n_layers, sizeof *s->model.layers);
  assert_true(s->model.rope_inv_freq != NULL && s->model.layers != NULL);
  for (int32_t i = 0; i < rope_dims / 2; i++) s->model.rope_inv_freq[i] = (float)pow(10000, -2.0 * i / rope_dims);
  s->model.tok_embd = synth_tensor(s, "tok_embd", c->n_vocab, c->n_embd, 1, 0);
  s->model.output_norm = synth_tensor(s, "output_norm", 0, c->n_embd, 0.2, 1);
  s->model.output = c->is_tied ? s->model.tok_embd : synth_tensor(s, "output", c->n_vocab, c->n_embd, 0.5, 0);
  for (int32_t i = 0; i < c->n_layers; i++) synth_layer(s, c, &s->model.layers[i]);
}

static void synth_fini(struct synth *s) { arena_fini(&s->arena); }

#endif
