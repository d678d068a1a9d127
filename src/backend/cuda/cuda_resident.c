/* 4-bit weights expanded once, when the program is compiled, for the steps that would expand them each time: 8 bits (e4m3) or 16 a weight
 * instead of 4. Of a step of 512 tokens that is 3.4 ms of 12.2, of one of 2,048 3.5 of 32.5 (Llama-3-8B shapes, H200). Entry points:
 * cuda_is_wide_e4m3, cuda_resident_load.
 *
 * `prefill-weights` says how many: `expand` none, `resident` every layer's or a refusal, `auto` layer by layer as long as all of them
 * together take no more than 1/AUTO_SHARE of the memory that weights and workspaces left free. The packed weights stay: steps of few tokens
 * read those. The head is never kept: it multiplies few rows.
 */
#include <string.h>

#include "backend/cuda/cuda_internal.h"
#include "base/log.h"

#define AUTO_SHARE 4

bool cuda_is_wide_e4m3(const struct backend_program *p, const struct cuda_weight *w)
{
  return w->channel != NULL && w->has_powers && w->act == NULL && p->backend->recipe != CUDA_RECIPE_W4A16 && p->has_e4m3 &&
         w->rows % CUDA_E4M3_ALIGN == 0;
}

static size_t bytes_of(const struct backend_program *p, const struct cuda_weight *w)
{
  if (w->form != CUDA_W4 || w->resident != NULL) return 0;
  return (size_t)w->rows * (size_t)k_blocks(w->cols) * K_GROUP * (cuda_is_wide_e4m3(p, w) ? 1 : 2);
}

static enum sits_status keep(struct backend_program *p, struct cuda_weight *w)
{
  const size_t bytes = bytes_of(p, w);
  if (bytes == 0) return SITS_OK;
  w->resident = cuda_memory_alloc(p->backend, p, bytes);
  if (w->resident == NULL) return SITS_NOMEM;
  const struct k_expand expand = {w->data, w->format, w->rows, w->cols, w->channel, cuda_is_wide_e4m3(p, w), w->resident};
  return CUDA_CALL(p->backend, sits_k_expand(&expand, (struct k_stream){(struct CUstream_st *)p->backend->stream, false}));
}

static enum sits_status refuse(struct backend_program *p, int32_t layer, struct sits_error *err)
{
  if (p->backend->is_failed) return sits_fail(err, SITS_DEVICE, "cuda: the device has failed");
  return sits_fail_param(err, SITS_NOMEM, "prefill-weights",
                         "cuda: prefill-weights resident: the expanded weights of layer %d of %d do not fit the device; auto keeps as many "
                         "as fit, expand none",
                         layer, p->program->dims.n_layers);
}

enum sits_status cuda_resident_load(struct backend_program *p, struct sits_error *err)
{
  const bool is_auto = p->backend->prefill_weights == CUDA_PREFILL_AUTO;
  size_t free_bytes = 0, total = 0;
  if (p->backend->prefill_weights == CUDA_PREFILL_EXPAND) return SITS_OK;
  if (CUDA_CALL(p->backend, cudaMemGetInfo(&free_bytes, &total)) != SITS_OK) return SITS_DEVICE;
  size_t left = is_auto ? free_bytes / AUTO_SHARE : SIZE_MAX;
  int32_t l = 0;
  for (; l < p->program->dims.n_layers; l++) {
    const struct cuda_layer *layer = &p->layers[l];
    struct cuda_weight *const weights[] = {layer->qkv, layer->o, layer->gate_up, layer->down};
    size_t bytes = 0;
    for (int i = 0; i < 4; i++) bytes += bytes_of(p, weights[i]);
    if (bytes > left) break;
    left -= bytes;
    enum sits_status status = SITS_OK;
    for (int i = 0; i < 4 && status == SITS_OK; i++) status = keep(p, weights[i]);
    if (status != SITS_OK && (!is_auto || p->backend->is_failed)) return refuse(p, l, err);
    if (status != SITS_OK) break;
  }
  log_info("cuda", "expanded weights of %d of %d layers stay in memory", l, p->program->dims.n_layers);
  return SITS_OK;
}
