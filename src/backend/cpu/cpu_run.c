/* Running a compiled program: the walk over its steps and the steps that are a few lines each. Entry point: cpu_run_worker. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_program.h"

static int32_t n_tokens_of(const struct backend_program *p, const struct cpu_step *step)
{
  return step->is_rows ? p->batch.in->n_rows : p->batch.in->n_tokens;
}

/* This worker's tokens of a step. */
static void my_tokens(const struct backend_program *p, const struct cpu_step *step, int32_t worker, int64_t *t0, int64_t *t1)
{
  cpu_split(n_tokens_of(p, step), 1, p->backend->n_threads, worker, t0, t1);
}

/* cos and sin of every token's angles, with the sign folded into the sine (cpu_ops.h). The angle is rounded to f32 as the reference
 * implementations do; its cosine is then exact to f32. */
static void fill_rotations(struct backend_program *p, int32_t worker)
{
  const struct program_rope *rope = &p->program->rope;
  const int32_t half = rope->dims / 2;
  const bool is_interleaved = rope->style == PROGRAM_ROPE_INTERLEAVED;
  int64_t t0, t1;
  cpu_split(p->batch.in->n_tokens, 1, p->backend->n_threads, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++) {
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

static void run_embed(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++)
    cpu_weight_row(step->parts[0].weight, p->batch.in->tokens[t], step->out[0] + t * step->out_width);
}

static void run_rmsnorm(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width;
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++)
    p->backend->ops->rmsnorm(step->in[0] + t * n, step->gain, n, p->program->dims.rms_eps, step->out[0] + t * n);
}

static void run_head_norm(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width, D = p->program->dims.head_dim;
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t i = t0 * n; i < t1 * n; i += D)
    p->backend->ops->rmsnorm(step->in[0] + i, step->gain, D, p->program->dims.rms_eps, step->out[0] + i);
}

static void rotate(const struct backend_program *p, int64_t t, float *x)
{
  const struct program_rope *rope = &p->program->rope;
  p->backend->ops->rope(x, p->batch.cosines + t * rope->dims, p->batch.sines + t * rope->dims, rope->dims,
                        rope->style == PROGRAM_ROPE_INTERLEAVED);
}

static void run_rope(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width, D = p->program->dims.head_dim, G = p->program->dims.n_kv_heads;
  const float eps = p->program->dims.rms_eps;
  const bool is_fused = (step->op->fused & PROGRAM_FUSE_ROPE) != 0;
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++) {
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
  if (kv->codec->is_rotated) cpu_rotate_head(p->backend->ops, k, p->program->dims.head_dim);
  kv->codec->append_k(kv, page, cpu_kv_block(kv, page, layer, head), p->batch.slot[t], k);
}

void cpu_store_v(struct backend_program *p, int32_t layer, int32_t t, int32_t head, float *v)
{
  const struct backend_kv *kv = p->batch.kv;
  const int32_t page = p->batch.page[t];
  if (kv->codec->is_rotated) cpu_rotate_head(p->backend->ops, v, p->program->dims.head_dim);
  kv->codec->append_v(kv, page, cpu_kv_block(kv, page, layer, head), p->batch.slot[t], v);
}

/* Heads are split, not tokens: one block of the cache belongs to one worker, which sees its tokens in order. */
static void append_all(struct backend_program *p, int32_t layer, float *k, float *v, int32_t worker)
{
  const int32_t G = p->program->dims.n_kv_heads, D = p->program->dims.head_dim;
  int64_t g0, g1;
  cpu_split(G, 1, p->backend->n_threads, worker, &g0, &g1);
  for (int32_t t = 0; t < p->batch.in->n_tokens; t++)
    for (int64_t g = g0; g < g1; g++) {
      cpu_store_k(p, layer, t, (int32_t)g, k + (t * G + g) * D);
      cpu_store_v(p, layer, t, (int32_t)g, v + (t * G + g) * D);
    }
}

static void run_swiglu(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width;
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++)
    p->backend->ops->swiglu(step->in[0] + t * n, step->in[1] + t * n, n, step->out[0] + t * n);
}

static void run_add(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width;
  int64_t t0, t1;
  my_tokens(p, step, worker, &t0, &t1);
  for (int64_t t = t0; t < t1; t++) {
    p->backend->ops->add(step->in[0] + t * n, step->in[1] + t * n, n, step->out[0] + t * n);
    if (step->op->fused & PROGRAM_FUSE_ADD_NORM)
      p->backend->ops->rmsnorm(step->out[0] + t * n, step->gain, n, p->program->dims.rms_eps, step->out[1] + t * n);
  }
}

static void run_select(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  const int32_t n = step->in_width;
  int64_t r0, r1;
  cpu_split(p->batch.in->n_rows, 1, p->backend->n_threads, worker, &r0, &r1);
  for (int64_t r = r0; r < r1; r++)
    memcpy(step->out[0] + r * n, step->in[0] + (int64_t)p->batch.in->row_token[r] * n, (size_t)n * sizeof(float));
}

static void run_step(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  switch (step->op->kind) {
  case PROGRAM_EMBED: run_embed(p, step, worker); break;
  case PROGRAM_RMSNORM: run_rmsnorm(p, step, worker); break;
  case PROGRAM_LINEAR: cpu_linear(p, step, worker); break;
  case PROGRAM_HEAD_NORM: run_head_norm(p, step, worker); break;
  case PROGRAM_ROPE:
    run_rope(p, step, worker);
    if (step->op->fused & PROGRAM_FUSE_ROPE) {
      cpu_pool_barrier(p->backend->pool);
      append_all(p, step->op->layer, step->in[1], step->in[2], worker);
    }
    break;
  case PROGRAM_KV_APPEND: append_all(p, step->op->layer, step->in[0], step->in[1], worker); break;
  case PROGRAM_ATTENTION: cpu_attention(p, step, worker); break;
  case PROGRAM_SWIGLU: run_swiglu(p, step, worker); break;
  case PROGRAM_ADD: run_add(p, step, worker); break;
  case PROGRAM_SELECT_ROWS: run_select(p, step, worker); break;
  case PROGRAM_OP_KINDS: break;
  }
}

void cpu_run_worker(void *arg, int32_t worker)
{
  struct backend_program *p = arg;
  fill_rotations(p, worker);
  for (int32_t i = 0; i < p->n_steps; i++) {
    const struct cpu_step *step = &p->steps[i];
    if (n_tokens_of(p, step) == 0) continue; /* no logits wanted */
    run_step(p, step, worker);
    cpu_pool_barrier(p->backend->pool); /* also covers the rotations: the first step is the embedding */
  }
}
