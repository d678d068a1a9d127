/* Models without a file: the shapes of known ones, weights without data. A backend that can makes random 4-bit weights on the device
 * (groups of 128), so that speed can be judged without a checkpoint; the others refuse. Entry point: model_synthetic.
 *
 * Shapes: llama3-1b (tied head), llama3-8b, llama3-70b as published; "tiny" is for tests. Every norm gain is one. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/model.h"
#include "model/model_read.h"

struct shape {
  const char *name;
  int32_t layers, embd, heads, kv_heads, head_dim, ff, vocab;
  bool tied;
};

static const struct shape shapes[] = {
    {"llama3-1b", 16, 2048, 32, 8, 64, 8192, 128256, true},
    {"llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, false},
    {"llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, false},
    {"tiny", 2, 512, 4, 2, 128, 1024, 1024, false},
};

/* Weights of a layer, then the three outer ones; columns 0: a vector. */
enum { PER_LAYER = 9, OUTER = 3 };

static const struct sits_utd *add(struct sits_utd *at, const char *name, int64_t rows, int64_t columns)
{
  *at = (struct sits_utd){.dtype = columns ? SITS_DTYPE_I4 : SITS_DTYPE_F32,
                          .n_dims = columns ? 2 : 1,
                          .dims = {rows, columns},
                          .quant = columns ? SITS_QUANT_GROUP : SITS_QUANT_NONE,
                          .group_size = columns ? 128 : 0,
                          .group_axis = columns ? 1 : 0,
                          .scale_dtype = SITS_DTYPE_F16,
                          .layout = SITS_LAYOUT_ROW_MAJOR,
                          .place = SITS_PLACE_DEVICE};
  snprintf(at->name, sizeof at->name, "%s", name);
  return at;
}

static void add_layer(struct model_layer *l, struct sits_utd *at, const struct model_config *c)
{
  const int64_t q = (int64_t)c->n_heads * c->head_dim, kv = (int64_t)c->n_kv_heads * c->head_dim;
  l->attn_norm = add(at++, "attn_norm", c->n_embd, 0);
  l->wq = add(at++, "wq", q, c->n_embd);
  l->wk = add(at++, "wk", kv, c->n_embd);
  l->wv = add(at++, "wv", kv, c->n_embd);
  l->wo = add(at++, "wo", c->n_embd, q);
  l->ffn_norm = add(at++, "ffn_norm", c->n_embd, 0);
  l->w_gate = add(at++, "w_gate", c->n_ff, c->n_embd);
  l->w_up = add(at++, "w_up", c->n_ff, c->n_embd);
  l->w_down = add(at++, "w_down", c->n_embd, c->n_ff);
}

enum sits_status model_synthetic(const char *name, struct model **out, struct sits_error *err)
{
  const struct shape *s = NULL;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (strcmp(name, shapes[i].name) == 0) s = &shapes[i];
  if (!s)
    return sits_fail_param(err, SITS_INVALID_ARGUMENT, "model",
                           "synthetic model '%.32s' is not one of llama3-1b, llama3-8b, llama3-70b, tiny", name);
  struct model *m = mem_calloc(1, sizeof *m);
  if (!m) return sits_fail(err, SITS_NOMEM, "out of memory");
  struct model_config *c = &m->config;
  *c = (struct model_config){.arch = MODEL_LLAMA,
                             .n_layers = s->layers,
                             .n_embd = s->embd,
                             .n_heads = s->heads,
                             .n_kv_heads = s->kv_heads,
                             .head_dim = s->head_dim,
                             .n_ff = s->ff,
                             .n_vocab = s->vocab,
                             .max_context = 131072,
                             .rms_eps = 1e-5f,
                             .rope_theta = 500000.f,
                             .rope_dims = s->head_dim,
                             .rope_style = ROPE_HALF_SPLIT,
                             .tied_head = s->tied};
  snprintf(c->name, sizeof c->name, "synthetic:%s", s->name);
  m->layers = mem_calloc((size_t)s->layers, sizeof *m->layers);
  m->synthetic = mem_calloc((size_t)s->layers * PER_LAYER + OUTER, sizeof *m->synthetic);
  m->rope_inv_freq = mem_calloc((size_t)s->head_dim / 2, sizeof(float));
  if (!m->layers || !m->synthetic || !m->rope_inv_freq) {
    model_close(m);
    return sits_fail(err, SITS_NOMEM, "out of memory");
  }
  for (int32_t i = 0; i < s->layers; i++) add_layer(&m->layers[i], m->synthetic + (size_t)i * PER_LAYER, c);
  struct sits_utd *outer = m->synthetic + (size_t)s->layers * PER_LAYER;
  m->tok_embd = add(outer, "tok_embd", s->vocab, s->embd);
  m->output_norm = add(outer + 1, "output_norm", s->embd, 0);
  m->output = s->tied ? m->tok_embd : add(outer + 2, "output", s->vocab, s->embd);
  m->rope_magnitude = model_rope_frequencies(c, NULL, m->rope_inv_freq);
  *out = m;
  return SITS_OK;
}
