/* See ref_program.h. */
#include "ref_program.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "ref_ops.h"

struct ref_sequence {
  const struct program *program;
  ref_store_fn store;
  int32_t n_tokens, max_tokens;
  double *k, *v;                    /* [L][max_tokens][G][D] */
  double *given;                    /* [L][max_tokens][G] */
  bool *is_hidden;                  /* [L][max_tokens][G] */
  int32_t nearest;                  /* pages before a query that it gives to; 0: nothing is measured */
  double **buffers;                 /* [n_buffers][width] of the current token */
  double **gains, **biases;         /* [n_ops] expanded, NULL where none */
};

static void *take(size_t n_bytes)
{
  void *p = mem_calloc(1, n_bytes);
  if (p == NULL) abort();
  return p;
}

static double *expanded(const struct sits_utd *utd)
{
  if (utd == NULL) return NULL;
  double *out = take((size_t)sits_utd_elements(utd) * sizeof *out);
  ref_expand(utd, out);
  return out;
}

struct ref_sequence *ref_sequence_create(const struct program *program, int32_t max_tokens, ref_store_fn store)
{
  const struct program_dims *d = &program->dims;
  struct ref_sequence *s = take(sizeof *s);
  const size_t n_heads = (size_t)d->n_layers * (size_t)max_tokens * (size_t)d->n_kv_heads, n = n_heads * (size_t)d->head_dim;
  *s = (struct ref_sequence){.program = program, .store = store, .max_tokens = max_tokens, .k = take(n * sizeof(double)),
                             .v = take(n * sizeof(double)), .given = take(n_heads * sizeof(double)),
                             .is_hidden = take(n_heads * sizeof(bool)),
                             .buffers = take((size_t)program->n_buffers * sizeof(double *)),
                             .gains = take((size_t)program->n_ops * sizeof(double *)),
                             .biases = take((size_t)program->n_ops * sizeof(double *))};
  for (int32_t i = 0; i < program->n_buffers; i++) s->buffers[i] = take((size_t)program->buffers[i].width * sizeof(double));
  for (int32_t i = 0; i < program->n_ops; i++) {
    if ((program->ops[i].fused & ~(uint32_t)PROGRAM_MOVE_SELECT) != 0 || program->ops[i].n_parts > 1) abort();
    s->gains[i] = expanded(program->ops[i].gain);
    s->biases[i] = program->ops[i].n_parts > 0 ? expanded(program->ops[i].parts[0].bias) : NULL;
  }
  return s;
}

void ref_sequence_destroy(struct ref_sequence *s)
{
  for (int32_t i = 0; i < s->program->n_buffers; i++) mem_free(s->buffers[i]);
  for (int32_t i = 0; i < s->program->n_ops; i++) {
    mem_free(s->gains[i]);
    mem_free(s->biases[i]);
  }
  mem_free(s->buffers);
  mem_free(s->gains);
  mem_free(s->biases);
  mem_free(s->k);
  mem_free(s->v);
  mem_free(s->given);
  mem_free(s->is_hidden);
  mem_free(s);
}

static void embed(const struct sits_utd *table, int32_t token, double *out)
{
  struct sits_utd row = *table;
  row.dims[0] = 1;
  row.n_bytes = table->n_bytes / (size_t)table->dims[0];
  row.data = (const unsigned char *)table->data + row.n_bytes * (size_t)token;
  ref_expand(&row, out);
}

static void store(const struct ref_sequence *s, double *to, const double *from, bool is_value)
{
  const int32_t G = s->program->dims.n_kv_heads, D = s->program->dims.head_dim;
  memcpy(to, from, (size_t)(G * D) * sizeof *to);
  for (int32_t g = 0; g < G && s->store != NULL; g++) s->store(to + g * D, D, is_value);
}

/* One token through a weight, expanded anew: y[r] = sum_k W[r][k] x[k] + bias[r]. */
static void linear(const struct sits_utd *w, const double *bias, const double *x, double *y)
{
  const int64_t rows = w->dims[0], n = w->dims[1];
  double *all = expanded(w);
  for (int64_t r = 0; r < rows; r++) {
    y[r] = bias != NULL ? bias[r] : 0;
    for (int64_t k = 0; k < n; k++) y[r] += all[r * n + k] * x[k];
  }
  mem_free(all);
}

static void step_op(struct ref_sequence *s, int32_t index, int32_t token)
{
  const struct program *p = s->program;
  const struct program_op *op = &p->ops[index];
  const struct program_dims *d = &p->dims;
  const int32_t D = d->head_dim, GD = d->n_kv_heads * D, position = s->n_tokens;
  double *in[3], *out[3];
  for (int k = 0; k < 3; k++) {
    in[k] = op->in[k] == PROGRAM_NONE ? NULL : s->buffers[op->in[k]];
    out[k] = op->out[k] == PROGRAM_NONE ? NULL : s->buffers[op->out[k]];
  }
  const int32_t width = out[0] != NULL ? p->buffers[op->out[0]].width : 0;
  const size_t heads = (size_t)(op->layer < 0 ? 0 : op->layer) * (size_t)s->max_tokens * (size_t)d->n_kv_heads;
  const size_t layer = heads * (size_t)D;
  const int32_t n_given = s->nearest > 0 ? (position / KV_PAGE_TOKENS - s->nearest + 1) * KV_PAGE_TOKENS : 0;
  switch (op->kind) {
  case PROGRAM_EMBED: embed(op->parts[0].weight, token, out[0]); break;
  case PROGRAM_RMSNORM: ref_rmsnorm(in[0], s->gains[index], width, d->rms_eps, out[0]); break;
  case PROGRAM_LINEAR: linear(op->parts[0].weight, s->biases[index], in[0], out[0]); break;
  case PROGRAM_HEAD_NORM:
    for (int32_t i = 0; i < width; i += D) ref_rmsnorm(in[0] + i, s->gains[index], D, d->rms_eps, out[0] + i);
    break;
  case PROGRAM_ROPE:
    memmove(out[0], in[0], (size_t)width * sizeof(double));
    for (int32_t i = 0; i < width; i += D)
      ref_rope(out[0] + i, p->rope.dims, p->rope.inv_freq, p->rope.magnitude, position, p->rope.style == PROGRAM_ROPE_INTERLEAVED);
    break;
  case PROGRAM_KV_APPEND:
    store(s, s->k + layer + (size_t)position * (size_t)GD, in[0], false);
    store(s, s->v + layer + (size_t)position * (size_t)GD, in[1], true);
    break;
  case PROGRAM_ATTENTION:
    ref_attention(in[0], s->k + layer, s->v + layer, position, d->n_heads, d->n_kv_heads, D, d->sliding_window,
                  s->is_hidden + heads, s->given + heads, n_given, out[0]);
    break;
  case PROGRAM_SWIGLU: ref_swiglu(in[0], in[1], width, out[0]); break;
  case PROGRAM_ADD:
    for (int32_t i = 0; i < width; i++) out[0][i] = in[0][i] + in[1][i];
    break;
  case PROGRAM_SELECT_ROWS: memcpy(out[0], in[0], (size_t)width * sizeof(double)); break;
  case PROGRAM_ALL_REDUCE: case PROGRAM_ALL_GATHER: /* whole programs have none */
  case PROGRAM_OP_KINDS: abort();
  }
}

void ref_sequence_hide(struct ref_sequence *s, int32_t layer, int32_t kv_head, int32_t first, int32_t n)
{
  const int32_t G = s->program->dims.n_kv_heads;
  for (int32_t i = first; i < first + n; i++) s->is_hidden[((int64_t)layer * s->max_tokens + i) * G + kv_head] = true;
}

void ref_sequence_measure(struct ref_sequence *s, int32_t nearest) { s->nearest = nearest; }

const double *ref_sequence_given(const struct ref_sequence *s) { return s->given; }

void ref_program_step(struct ref_sequence *s, int32_t token, double *logits)
{
  if (s->n_tokens >= s->max_tokens) abort();
  for (int32_t i = 0; i < s->program->n_ops; i++) step_op(s, i, token);
  memcpy(logits, s->buffers[s->program->logits], (size_t)s->program->dims.n_vocab * sizeof *logits);
  s->n_tokens++;
}
