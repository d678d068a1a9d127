/* Activations rotated and rounded as a model's file says: 8 or 4 bits in groups of 32 columns, outliers of the 4-bit kind in 8. Entry
 * points: cuda_act_plan, cuda_act_form.
 *
 * The kernels that make a GEMM's input (norm, convert) rotate its runs of columns, round each value to its group's grid and hand it on as
 * f16, which holds a grid value to 11 bits; the GEMM is the one for f16 activations. So every engine file computes what its name says, at
 * the speed of w4a16. The fast path has no such kernels, so a program with rounded layers takes the general one.
 */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/mem.h"

static enum sits_status load_outliers(struct backend_program *p, struct cuda_weight *w, struct sits_error *err)
{
  const struct act_format *act = w->act;
  const size_t bytes = (size_t)w->parts[0].weight->dims[1] / 8;
  uint8_t *host = mem_calloc(1, bytes);
  w->outliers = cuda_memory_alloc(p->backend, p, bytes);
  if (host == NULL || w->outliers == NULL) {
    mem_free(host);
    return sits_fail(err, SITS_NOMEM, "cuda: %s: out of memory", w->parts[0].weight->name);
  }
  for (int32_t i = 0; i < act->n_outliers; i++)
    if (act->outliers[i] >= 0 && (size_t)act->outliers[i] < bytes * 8)
      host[act->outliers[i] / 8] |= (uint8_t)(1U << act->outliers[i] % 8);
  const enum sits_status status = CUDA_CALL(p->backend, cudaMemcpy(w->outliers, host, bytes, cudaMemcpyHostToDevice));
  mem_free(host);
  return status;
}

enum sits_status cuda_act_plan(struct backend_program *p, struct cuda_weight *w, const struct program_op *op, struct sits_error *err)
{
  const struct sits_utd *first = w->parts[0].weight;
  w->has_plain_input = op->act == NULL || (op->act->kind <= ACT_FLOAT && op->act->rotation == 0);
  if (op->act == NULL || (op->act->kind == ACT_BACKEND && op->act->rotation == 0)) return SITS_OK;
  if (w->act != NULL)
    return w->act == op->act ? SITS_OK
                             : sits_fail(err, SITS_UNSUPPORTED, "cuda: %s is read by two products that round differently", first->name);
  w->act = op->act;
  if (op->act->rotation > K_MOST_ROTATION)
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: its input is rotated in runs of %d, beyond %d", first->name, op->act->rotation,
                     K_MOST_ROTATION);
  if (op->act->kind <= ACT_FLOAT) return SITS_OK;
  if (first->dims[1] % ACT_GROUP)
    return sits_fail(err, SITS_UNSUPPORTED, "cuda: %s: rows of %lld are no multiple of %d, which %s activations want", first->name,
                     (long long)first->dims[1], ACT_GROUP, act_kind_name(op->act->kind));
  w->round = op->act->kind == ACT_INT8 ? K_ROUND_INT8 : K_ROUND_INT4;
  return w->round == K_ROUND_INT4 && op->act->n_outliers > 0 ? load_outliers(p, w, err) : SITS_OK;
}

struct k_act cuda_act_form(const struct backend_program *p, const struct cuda_weight *w, int32_t n)
{
  struct k_act x = cuda_gemm_form(p, w, n);
  const bool is_f16 = x.form == K_ACT_ROW_F16 || x.form == K_ACT_FRAG_F16;
  if (w->act == NULL) return x;
  if (!is_f16) x = (struct k_act){.form = K_ACT_ROW_F16, .data = p->act}; /* 8 bits a token are not what the file asks for */
  x.round = w->round;
  x.rotation = w->act->rotation;
  x.outliers = w->outliers;
  return x;
}
