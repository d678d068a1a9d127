/* LINEAR and its fusions: make the activation ready, multiply this worker's rows panel by panel, finish each panel while it is in cache.
 * Entry point: cpu_linear. */
#include <string.h>

#include "backend/cpu/cpu_program.h"

struct linear {                      /* one step's run by one worker */
  struct backend_program *p;
  const struct cpu_step *step;
  const struct cpu_ops *ops;
  struct cpu_worker *worker;
  const void *act[CPU_ACT_FORMATS];
  int32_t n;                         /* tokens */
};

static void quantize(const struct linear *l, const float *x, int32_t t0, int32_t t1, void *const act[CPU_ACT_FORMATS])
{
  bool is_done[CPU_ACT_FORMATS] = {false};
  for (int i = 0; i < l->step->n_parts; i++) {
    const struct cpu_weight *w = l->step->parts[i].weight;
    const enum cpu_act_format format = cpu_act_format(w);
    if (is_done[format]) continue;
    cpu_act_quantize(w, x, l->step->in_width, l->n, t0, t1, act[format]);
    is_done[format] = true;
  }
}

/* Normalise where fused, then quantise: everything by each worker when there are few tokens, shared out otherwise. */
static void prepare(struct linear *l, int32_t worker)
{
  struct backend_program *p = l->p;
  const int32_t width = l->step->in_width;
  const bool has_norm = (l->step->op->fused & PROGRAM_FUSE_NORM) != 0, is_private = l->n <= CPU_PRIVATE_TOKENS;
  int64_t t0 = 0, t1 = l->n;
  if (!is_private) cpu_split(l->n, 4, p->backend->n_threads, worker, &t0, &t1);
  const float *x = l->step->in[0];
  if (has_norm) {
    float *normed = is_private ? l->worker->normed : p->normed;
    for (int64_t t = t0; t < t1; t++)
      l->ops->rmsnorm(x + t * width, l->step->gain, width, p->program->dims.rms_eps, normed + t * width);
    x = normed;
  }
  void *const *act = is_private ? l->worker->act : p->act;
  if (t0 < t1) quantize(l, x, (int32_t)t0, (int32_t)t1, act);
  if (!is_private) cpu_pool_barrier(p->backend->pool);
  for (int f = 0; f < CPU_ACT_FORMATS; f++) l->act[f] = act[f];
}

/* Rows r0..r1, row r0 landing at y[0]; cpu_matmul itself counts from row 0. */
static void multiply(const struct linear *l, const struct cpu_part *part, int64_t r0, int64_t r1, float *y, int64_t ldy)
{
  cpu_matmul(part->weight, l->act[cpu_act_format(part->weight)], l->n, r0, r1, y - r0, ldy, l->worker->scratch);
  if (part->bias == NULL) return;
  for (int32_t t = 0; t < l->n; t++) l->ops->add(y + t * ldy, part->bias + r0, (int32_t)(r1 - r0), y + t * ldy);
}

/* Rows of a panel such that `n_strips` of them fit the strip. */
static int64_t panel_rows(const struct linear *l, int n_strips)
{
  const int64_t unit = l->step->unit, fit = (int64_t)l->p->strip_floats / (n_strips * l->n) / unit * unit;
  return fit < unit ? unit : fit;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Plain outputs go straight to their buffers. */
static void plain_part(const struct linear *l, int i, struct cpu_range range)
{
  const struct cpu_part *part = &l->step->parts[i];
  if (range.r0 < range.r1) multiply(l, part, range.r0, range.r1, l->step->out[i] + range.r0, part->rows);
}

static void add_part(const struct linear *l, struct cpu_range range)
{
  const struct cpu_part *part = &l->step->parts[0];
  const int64_t panel = panel_rows(l, 1);
  for (int64_t r0 = range.r0; r0 < range.r1; r0 += panel) {
    const int64_t r1 = least(r0 + panel, range.r1), n = r1 - r0;
    multiply(l, part, r0, r1, l->worker->strip, n);
    for (int32_t t = 0; t < l->n; t++) {
      const int64_t at = t * part->rows + r0;
      l->ops->add(l->step->in[1] + at, l->worker->strip + t * n, (int32_t)n, l->step->out[0] + at);
    }
  }
}

static void swiglu_parts(const struct linear *l, struct cpu_range range)
{
  const int64_t panel = panel_rows(l, 2), width = l->step->parts[0].rows;
  for (int64_t r0 = range.r0; r0 < range.r1; r0 += panel) {
    const int64_t r1 = least(r0 + panel, range.r1), n = r1 - r0;
    float *gate = l->worker->strip, *up = gate + n * l->n;
    multiply(l, &l->step->parts[0], r0, r1, gate, n);
    multiply(l, &l->step->parts[1], r0, r1, up, n);
    for (int32_t t = 0; t < l->n; t++) l->ops->swiglu(gate + t * n, up + t * n, (int32_t)n, l->step->out[0] + t * width + r0);
  }
}

/* One head of one token, in the strip: norm and rotation for q (part 0) and k (part 1), then to its place. */
static void finish_head(const struct linear *l, int part, int32_t t, int32_t head, float *x)
{
  const struct backend_program *p = l->p;
  const struct program_rope *rope = &p->program->rope;
  const int32_t D = p->program->dims.head_dim;
  if (part < 2) {
    const float *gain = part == 0 ? l->step->q_gain : l->step->k_gain;
    if (gain != NULL) l->ops->rmsnorm(x, gain, D, p->program->dims.rms_eps, x);
    l->ops->rope(x, p->batch.cosines + (int64_t)t * rope->dims, p->batch.sines + (int64_t)t * rope->dims, rope->dims,
                 rope->style == PROGRAM_ROPE_INTERLEAVED);
  }
  if (part == 0) memcpy(l->step->out[0] + (int64_t)t * l->step->out_width + (int64_t)head * D, x, (size_t)D * sizeof *x);
  else if (part == 1) cpu_store_k(l->p, l->step->op->layer, t, head, x);
  else cpu_store_v(l->p, l->step->op->layer, t, head, x);
}

static void qkv_part(const struct linear *l, int i, struct cpu_range range)
{
  const int32_t D = l->p->program->dims.head_dim;
  const int64_t panel = panel_rows(l, 1);
  for (int64_t r0 = range.r0; r0 < range.r1; r0 += panel) {
    const int64_t r1 = least(r0 + panel, range.r1), n = r1 - r0;
    multiply(l, &l->step->parts[i], r0, r1, l->worker->strip, n);
    for (int32_t t = 0; t < l->n; t++)
      for (int64_t r = 0; r < n; r += D) finish_head(l, i, t, (int32_t)((r0 + r) / D), l->worker->strip + t * n + r);
  }
}

void cpu_linear(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  struct linear l = {.p = p, .step = step, .ops = p->backend->ops, .worker = &p->workers[worker],
                     .n = step->is_rows ? p->batch.in->n_rows : p->batch.in->n_tokens};
  const struct cpu_range *ranges = step->ranges + (int64_t)worker * PROGRAM_MAX_PARTS;
  prepare(&l, worker);
  if (step->op->fused & PROGRAM_FUSE_SWIGLU) {
    swiglu_parts(&l, ranges[0]);
  } else if (step->op->fused & PROGRAM_FUSE_ADD) {
    add_part(&l, ranges[0]);
  } else {
    for (int i = 0; i < step->n_parts; i++) {
      if (step->op->fused & PROGRAM_FUSE_QKV) qkv_part(&l, i, ranges[i]);
      else plain_part(&l, i, ranges[i]);
    }
  }
}
