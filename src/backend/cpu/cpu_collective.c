/* Collectives between CPU ranks: of one process, where each rank reads the others' buffers where they lie, or of several, which send each
 * other all of them. Entry points: cpu_collective, cpu_round_shares.
 *
 * In one process, two meetings: at the first everybody's input is complete and its address known, after the second everybody has read and
 * the inputs may be overwritten. Sums run in rank order, so every rank gets the same bits. */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_program.h"
#include "backend/group.h"

static void reduce(const struct cpu_ops *ops, const void **inputs, int32_t n_ranks, int64_t n, int32_t width, float *out)
{
  for (int64_t t = 0; t < n; t++) {
    float *y = out + t * width;
    memcpy(y, (const float *)inputs[0] + t * width, (size_t)width * sizeof *y);
    for (int32_t r = 1; r < n_ranks; r++) ops->add(y, (const float *)inputs[r] + t * width, width, y);
  }
}

static void gather(const void **inputs, int32_t n_ranks, int64_t n, int32_t width, float *out)
{
  for (int64_t t = 0; t < n; t++)
    for (int32_t r = 0; r < n_ranks; r++)
      memcpy(out + (t * n_ranks + r) * width, (const float *)inputs[r] + t * width, (size_t)width * sizeof *out);
}

void cpu_round_shares(float *x, int64_t n, int32_t width)
{
  for (int64_t t = 0; t < n; t++)
    for (int32_t c = 0; c < width; c += BACKEND_COMPRESS_GROUP) {
      float *run = x + t * width + c, top = 0;
      const int32_t size = width - c < BACKEND_COMPRESS_GROUP ? width - c : BACKEND_COMPRESS_GROUP;
      for (int32_t i = 0; i < size; i++) top = fmaxf(top, fabsf(run[i]));
      const float scale = top / 127.F, inverse = top > 0 ? 127.F / top : 0;
      for (int32_t i = 0; i < size; i++) run[i] = scale * rintf(run[i] * inverse);
    }
}

void cpu_collective(struct backend_program *p, const struct cpu_step *step)
{
  struct group *group = p->backend->options.group;
  const int32_t rank = p->program->dims.rank, n_ranks = program_n_ranks(p->program), n = cpu_step_tokens(p, step);
  const size_t size = (size_t)n * (size_t)step->in_width;
  const void *inputs[BACKEND_MAX_RANKS] = {step->in[0]};
  const bool is_linked = group != NULL && group_is_linked(group);
  const bool is_compressed = step->op->kind == PROGRAM_ALL_REDUCE && step->op->layer >= 0 && p->backend->options.compress_reduce;
  if (is_compressed && n > BACKEND_COMPRESS_TOKENS) /* the embedding's rows are no sums: they stay as they are */
    cpu_round_shares(step->in[0], n, step->in_width);
  bool is_whole = group == NULL || (is_linked ? group_exchange(group, rank, step->in[0], size * sizeof(float), p->exchanged, false)
                                              : group_meet(group, rank, step->in[0], inputs, false));
  for (int32_t r = 0; is_linked && r < n_ranks; r++) inputs[r] = p->exchanged + (size_t)r * size;
  if (is_whole) {
    if (step->op->kind == PROGRAM_ALL_REDUCE) reduce(p->backend->ops, inputs, n_ranks, n, step->in_width, step->out[0]);
    else gather(inputs, n_ranks, n, step->in_width, step->out[0]);
    is_whole = group == NULL || is_linked || group_meet(group, rank, NULL, NULL, false);
  }
  if (!is_whole) atomic_store(&p->has_lost_rank, true);
}
