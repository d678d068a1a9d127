/* Collectives between CPU ranks of one process: each rank reads the others' buffers where they lie. Entry point: cpu_collective.
 *
 * Two meetings: at the first everybody's input is complete and its address known, after the second everybody has read and the inputs may
 * be overwritten. Sums run in rank order, so every rank gets the same bits. */
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

void cpu_collective(struct backend_program *p, const struct cpu_step *step)
{
  struct group *group = p->backend->options.group;
  const int32_t rank = p->program->dims.rank, n_ranks = program_n_ranks(p->program), n = cpu_step_tokens(p, step);
  const void *inputs[BACKEND_MAX_RANKS] = {step->in[0]};
  bool is_whole = group == NULL || group_meet(group, rank, step->in[0], inputs, false);
  if (is_whole) {
    if (step->op->kind == PROGRAM_ALL_REDUCE) reduce(p->backend->ops, inputs, n_ranks, n, step->in_width, step->out[0]);
    else gather(inputs, n_ranks, n, step->in_width, step->out[0]);
    is_whole = group == NULL || group_meet(group, rank, NULL, NULL, false);
  }
  if (!is_whole) atomic_store(&p->has_lost_rank, true);
}
