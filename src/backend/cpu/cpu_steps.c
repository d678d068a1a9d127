/* The steps that are a few lines each, item by item. Entry points: cpu_phase_items, cpu_phase_item. To add an op: a case in both. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_program.h"
#include "tensor/dequant.h"

/* Tokens t0..t1 of a step that works token by token. */
struct span { int64_t t0, t1; };

static struct span span_of(const struct backend_program *p, const struct cpu_step *step, int32_t item)
{
  const int64_t n = cpu_step_tokens(p, step), t0 = (int64_t)item * CPU_TOKENS_PER_ITEM, t1 = t0 + CPU_TOKENS_PER_ITEM;
  return (struct span){t0, t1 < n ? t1 : n};
}

/* cos and sin of every token's angles, with the sign folded into the sine (cpu_ops.h). The angle is rounded to f32 as the reference
 * implementations do; its cosine is then exact to f32. */
static void fill_rotations(struct backend_program *p, struct span span)
{
  const struct program_rope *rope = &p->program->rope;
  const int32_t half = rope->dims / 2;
  const bool is_interleaved = rope->style == PROGRAM_ROPE_INTERLEAVED;
  for (int64_t t = span.t0; t < span.t1; t++) {
    float *c = p->batch.cosines + t * rope->dims, *s = p->batch.sines + t * rope->dims;
    for (int32_t i = 0; i < half; i++) {
      const double angle = (float)p->batch.in->positions[t] * rope->inv_freq[i];
      double sine, cosine;
      sincos(angle, &sine, &cosine);
      const int32_t a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : half + i;
      c[a] = c[b] = (float)cosine * rope->magnitude;
      s[b] = (float)sine * rope->magnitude;
      s[a] = -s[b];
    }
  }
}

static void run_embed(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const struct program_dims *dims = &p->program->dims;
  const struct cpu_weight *w = step->parts[0].weight;
  const int32_t n = dims->n_vocab / program_n_ranks(p->program), first = n * dims->rank; /* the rows that are here */
  for (int64_t t = span.t0; t < span.t1; t++) {
    const int32_t row = p->batch.in->tokens[t] - first;
    float *x = step->out[0] + t * step->out_width;
    if (row < 0 || row >= n) memset(x, 0, (size_t)step->out_width * sizeof *x);
    else if (w) cpu_weight_row(w, row, x);
    else dequant_tensor_row(step->op->parts[0].weight, row, x);
  }
}

static void run_rmsnorm(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width;
  for (int64_t t = span.t0; t < span.t1; t++)
    p->backend->ops->rmsnorm(step->in[0] + t * n, step->gain, n, p->program->dims.rms_eps, step->out[0] + t * n);
}

static void run_head_norm(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width, D = p->program->dims.head_dim;
  for (int64_t i = span.t0 * n; i < span.t1 * n; i += D)
    p->backend->ops->rmsnorm(step->in[0] + i, step->gain, D, p->program->dims.rms_eps, step->out[0] + i);
}

static void rotate(const struct backend_program *p, int64_t t, float *x)
{
  const struct program_rope *rope = &p->program->rope;
  p->backend->ops->rope(x, p->batch.cosines + t * rope->dims, p->batch.sines + t * rope->dims, rope->dims,
                        rope->style == PROGRAM_ROPE_INTERLEAVED);
}

static void run_rope(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width, D = p->program->dims.head_dim, G = p->program->dims.n_kv_heads;
  const float eps = p->program->dims.rms_eps;
  const bool is_fused = (step->op->fused & PROGRAM_FUSE_ROPE) != 0;
  for (int64_t t = span.t0; t < span.t1; t++) {
    float *x = step->out[0] + t * n;
    if (x != step->in[0] + t * n) memcpy(x, step->in[0] + t * n, (size_t)n * sizeof *x);
    for (int32_t i = 0; i < n; i += D) {
      if (is_fused && step->q_gain != NULL) p->backend->ops->rmsnorm(x + i, step->q_gain, D, eps, x + i);
      rotate(p, t, x + i);
    }
    for (int32_t g = 0; is_fused && g < G; g++) {
      float *k = step->in[1] + (t * G + g) * D; /* dead after this op, so it may be changed */
      if (step->k_gain != NULL) p->backend->ops->rmsnorm(k, step->k_gain, D, eps, k);
      rotate(p, t, k);
    }
  }
}

void cpu_rotate_head(const struct cpu_ops *ops, float *x, int32_t head_dim)
{
  const int32_t block = head_dim & -head_dim;
  for (int32_t i = 0; i < head_dim; i += block) ops->hadamard(x + i, block);
}

void cpu_store_k(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *k)
{
  const struct backend_kv *kv = p->batch.kv;
  const int32_t page = p->batch.page[t];
  if (kv->codec->rotates_k) cpu_rotate_head(p->backend->ops, k, p->program->dims.head_dim);
  uint16_t *open = kv->open != NULL ? cpu_kv_open_tile(kv, p->batch.tile[t], layer, head) : NULL;
  kv->codec->append_k(kv, cpu_kv_block(kv, page, layer, head), p->batch.slot[t], k, open);
}

void cpu_store_v(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *v)
{
  const struct backend_kv *kv = p->batch.kv;
  const int32_t page = p->batch.page[t];
  if (kv->codec->rotates_v) cpu_rotate_head(p->backend->ops, v, p->program->dims.head_dim);
  kv->codec->append_v(kv, cpu_kv_block(kv, page, layer, head), p->batch.slot[t], v);
}

/* One head, all tokens: a block of the cache belongs to one worker at a time, which sees its tokens in order. */
static void append_head(struct backend_program *p, int32_t layer, float *k, float *v, int32_t head)
{
  const int32_t G = p->program->dims.n_kv_heads, D = p->program->dims.head_dim;
  for (int32_t t = 0; t < p->batch.in->n_tokens; t++) {
    cpu_store_k(p, layer, t, head, k + ((int64_t)t * G + head) * D);
    cpu_store_v(p, layer, t, head, v + ((int64_t)t * G + head) * D);
  }
}

static void run_swiglu(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width;
  for (int64_t t = span.t0; t < span.t1; t++)
    p->backend->ops->swiglu(step->in[0] + t * n, step->in[1] + t * n, n, step->out[0] + t * n);
}

static void run_add(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width;
  for (int64_t t = span.t0; t < span.t1; t++) {
    p->backend->ops->add(step->in[0] + t * n, step->in[1] + t * n, n, step->out[0] + t * n);
    if (step->op->fused & PROGRAM_FUSE_ADD_NORM)
      p->backend->ops->rmsnorm(step->out[0] + t * n, step->gain, n, p->program->dims.rms_eps, step->out[1] + t * n);
  }
}

static void run_select(struct backend_program *p, const struct cpu_step *step, struct span span)
{
  const int32_t n = step->in_width;
  for (int64_t r = span.t0; r < span.t1; r++)
    memcpy(step->out[0] + r * n, step->in[0] + (int64_t)p->batch.in->row_token[r] * n, (size_t)n * sizeof(float));
}

int32_t cpu_phase_items(const struct backend_program *p, const struct cpu_phase *phase)
{
  const struct cpu_step *step = phase->step;
  const int32_t n = cpu_step_tokens(p, step), n_spans = (n + CPU_TOKENS_PER_ITEM - 1) / CPU_TOKENS_PER_ITEM;
  if (n == 0) return 0; /* no logits wanted */
  if (phase->kind == CPU_PHASE_APPEND) return p->program->dims.n_kv_heads;
  switch (step->op->kind) {
  case PROGRAM_EMBED: return 2 * n_spans; /* the rotations are made beside */
  case PROGRAM_LINEAR:
    if (phase->kind == CPU_PHASE_PREPARE) return cpu_linear_prepare_items(p, n);
    return step->n_ranges;
  case PROGRAM_ATTENTION: return cpu_attention_items(p);
  case PROGRAM_ALL_REDUCE: case PROGRAM_ALL_GATHER: return 1;
  default: return n_spans;
  }
}

void cpu_phase_item(struct backend_program *p, const struct cpu_phase *phase, int32_t item, int32_t worker, uint32_t tag)
{
  const struct cpu_step *step = phase->step;
  const struct program_op *op = step->op;
  if (phase->kind == CPU_PHASE_APPEND) {
    const int first = op->kind == PROGRAM_ROPE ? 1 : 0; /* fused: in is q, k, v */
    append_head(p, op->layer, step->in[first], step->in[first + 1], item);
    return;
  }
  switch (op->kind) {
  case PROGRAM_EMBED:
    if (item % 2 == 0) run_embed(p, step, span_of(p, step, item / 2));
    else fill_rotations(p, span_of(p, step, item / 2));
    break;
  case PROGRAM_LINEAR:
    if (phase->kind == CPU_PHASE_PREPARE) cpu_linear_prepare(p, step, item, worker);
    else cpu_linear_item(p, step, item, worker, tag);
    break;
  case PROGRAM_ATTENTION: cpu_attention_item(p, step, item, worker); break;
  case PROGRAM_RMSNORM: run_rmsnorm(p, step, span_of(p, step, item)); break;
  case PROGRAM_HEAD_NORM: run_head_norm(p, step, span_of(p, step, item)); break;
  case PROGRAM_ROPE: run_rope(p, step, span_of(p, step, item)); break;
  case PROGRAM_SWIGLU: run_swiglu(p, step, span_of(p, step, item)); break;
  case PROGRAM_ADD: run_add(p, step, span_of(p, step, item)); break;
  case PROGRAM_SELECT_ROWS: run_select(p, step, span_of(p, step, item)); break;
  case PROGRAM_ALL_REDUCE: case PROGRAM_ALL_GATHER: cpu_collective(p, step); break;
  case PROGRAM_KV_APPEND: case PROGRAM_OP_KINDS: break;
  }
}
