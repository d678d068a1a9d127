/* LINEAR and its fusions: make the activation ready, multiply a range of rows panel by panel, finish each panel while it is in cache.
 * Entry points: cpu_linear_prepare, cpu_linear_item. */
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

/* Whether each worker prepares all n tokens for itself. An observer is to see everything once. */
static bool prepares_privately(const struct backend_program *p, int32_t n)
{
  return n <= (p->observer.fn != NULL ? 2 : p->backend->private_tokens);
}

static void quantize(const struct linear *l, const float *x, int32_t t0, int32_t t1, void *const act[CPU_ACT_FORMATS])
{
  bool is_done[CPU_ACT_FORMATS] = {false};
  for (int i = 0; i < l->step->n_parts; i++) {
    const struct cpu_weight *w = l->step->parts[i].weight;
    const enum cpu_act_format format = cpu_act_format_as(w, l->step->act);
    if (is_done[format]) continue;
    cpu_act_make(w, l->step->act, l->step->is_outlier, x, l->step->in_width, l->n, t0, t1, act[format], act[CPU_ACT_SIDE]);
    is_done[format] = true;
  }
}

/* Normalise and rotate where asked, then quantise tokens t0..t1 into act. normed: room for those rows at their places. */
static void prepare(const struct linear *l, int32_t t0, int32_t t1, float *normed, void *const act[CPU_ACT_FORMATS])
{
  const int64_t width = l->step->in_width;
  const float *x = l->step->in[0];
  if (l->step->op->fused & PROGRAM_FUSE_NORM) {
    for (int32_t t = t0; t < t1; t++)
      l->ops->rmsnorm(x + t * width, l->step->gain, (int32_t)width, l->p->program->dims.rms_eps, normed + t * width);
    x = normed;
  }
  const int32_t block = l->step->op->act != NULL ? l->step->op->act->rotation : 0;
  if (block > 0) {
    if (x != normed) memcpy(normed + t0 * width, x + t0 * width, (size_t)((t1 - t0) * width) * sizeof *x);
    for (int64_t i = t0 * width; i < t1 * width; i += block) l->ops->hadamard(normed + i, block);
    x = normed;
  }
  if (l->p->observer.fn != NULL && !prepares_privately(l->p, l->n))
    l->p->observer.fn(l->p->observer.user, l->step->op, x + t0 * width, t0, t1 - t0, (int32_t)width);
  quantize(l, x, t0, t1, act);
}

static int64_t panel_rows(const struct linear *l, int n_strips);
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* y[0] belongs to row r0. */
static void multiply_act(const struct linear *l, const struct cpu_weight *w, int64_t r0, int64_t r1, float *y, int64_t ldy)
{
  const enum cpu_act_format format = cpu_act_format_as(w, l->step->act);
  if (format != cpu_act_format(w)) cpu_matmul_expanded(w, l->act[format], l->n, r0, r1, y - r0, ldy, l->worker->rows_f32);
  else cpu_matmul(w, l->act[format], l->n, r0, r1, y - r0, ldy, l->worker->scratch);
  if (l->step->act != ACT_INT4 || l->step->op->act->n_outliers == 0) return;
  const int64_t panel = panel_rows(l, 1);
  float *side = l->worker->side;
  for (int64_t a = r0; a < r1; a += panel) {
    const int64_t b = least(a + panel, r1), n = b - a;
    cpu_matmul(w, l->act[CPU_ACT_SIDE], l->n, a, b, side - a, n, l->worker->scratch);
    for (int32_t t = 0; t < l->n; t++) l->ops->add(y + t * ldy + (a - r0), side + t * n, (int32_t)n, y + t * ldy + (a - r0));
  }
}

/* Rows r0..r1, row r0 landing at y[0]; cpu_matmul itself counts from row 0. */
static void multiply(const struct linear *l, const struct cpu_part *part, int64_t r0, int64_t r1, float *y, int64_t ldy)
{
  multiply_act(l, part->weight, r0, r1, y, ldy);
  if (part->bias == NULL) return;
  for (int32_t t = 0; t < l->n; t++) l->ops->add(y + t * ldy, part->bias + r0, (int32_t)(r1 - r0), y + t * ldy);
}

/* Rows of a panel such that `n_strips` of them fit the strip. */
static int64_t panel_rows(const struct linear *l, int n_strips)
{
  const int64_t unit = l->step->unit, fit = (int64_t)l->p->strip_floats / (n_strips * l->n) / unit * unit;
  return fit < unit ? unit : fit;
}

/* Plain outputs go straight to their buffers. */
static void plain_part(const struct linear *l, struct cpu_range range)
{
  const struct cpu_part *part = &l->step->parts[range.part];
  multiply(l, part, range.r0, range.r1, l->step->out[range.part] + range.r0, part->rows);
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

static void qkv_part(const struct linear *l, struct cpu_range range)
{
  const int32_t D = l->p->program->dims.head_dim;
  const int64_t panel = panel_rows(l, 1);
  for (int64_t r0 = range.r0; r0 < range.r1; r0 += panel) {
    const int64_t r1 = least(r0 + panel, range.r1), n = r1 - r0;
    multiply(l, &l->step->parts[range.part], r0, r1, l->worker->strip, n);
    for (int32_t t = 0; t < l->n; t++)
      for (int64_t r = 0; r < n; r += D) finish_head(l, range.part, t, (int32_t)((r0 + r) / D), l->worker->strip + t * n + r);
  }
}

static struct linear linear_of(struct backend_program *p, const struct cpu_step *step, int32_t worker)
{
  return (struct linear){.p = p, .step = step, .ops = p->backend->ops, .worker = &p->workers[worker], .n = cpu_step_tokens(p, step)};
}

/* A few tokens are shared out two by two, so that no worker waits while another does all of them. */
static int32_t tokens_of_item(int32_t n) { return n <= 4 * CPU_TOKENS_PER_ITEM ? 2 : CPU_TOKENS_PER_ITEM; }

int32_t cpu_linear_prepare_items(const struct backend_program *p, int32_t n)
{
  return prepares_privately(p, n) ? 0 : (n + tokens_of_item(n) - 1) / tokens_of_item(n);
}

void cpu_linear_prepare(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker)
{
  const struct linear l = linear_of(p, step, worker);
  const int32_t t0 = item * tokens_of_item(l.n), t1 = t0 + tokens_of_item(l.n);
  prepare(&l, t0, t1 < l.n ? t1 : l.n, p->normed, p->act);
}

void cpu_linear_item(struct backend_program *p, const struct cpu_step *step, int32_t item, int32_t worker, uint32_t tag)
{
  struct linear l = linear_of(p, step, worker);
  const struct cpu_range range = step->ranges[item];
  const bool is_private = prepares_privately(p, l.n);
  if (is_private && l.worker->prepared != tag) {
    prepare(&l, 0, l.n, l.worker->normed, l.worker->act);
    l.worker->prepared = tag;
  }
  for (int f = 0; f < CPU_ACT_FORMATS; f++) l.act[f] = is_private ? l.worker->act[f] : p->act[f];
  if (step->op->fused & PROGRAM_FUSE_SWIGLU) swiglu_parts(&l, range);
  else if (step->op->fused & PROGRAM_FUSE_ADD) add_part(&l, range);
  else if (step->op->fused & PROGRAM_FUSE_QKV) qkv_part(&l, range);
  else plain_part(&l, range);
}
