/* Which backends this build has. To add one: define its vtable and name it here. */
#include "backend/backend.h"

#include <string.h>

extern const struct backend_vtable backend_cpu;
#ifdef SITS_HAVE_CUDA
extern const struct backend_vtable backend_cuda;
bool cuda_is_usable(void);
#endif

const struct backend_vtable *backend_find(const char *name)
{
#ifdef SITS_HAVE_CUDA
  if (strcmp(name, "cuda") == 0) return &backend_cuda;
  if (strcmp(name, "auto") == 0 && cuda_is_usable()) return &backend_cuda;
#endif
  if (strcmp(name, "cpu") == 0 || strcmp(name, "auto") == 0) return &backend_cpu;
  return NULL;
}

void backend_wrap(struct backend_vtable *out, const struct backend_vtable *calls, const struct backend_vtable *inner)
{
  *out = *calls;
  out->name = inner->name;
  out->fusions = inner->fusions;
  out->costs = inner->costs;
  out->can_sample = inner->can_sample;
}

void kv_beside_of_ranks(const struct backend_vtable *inner, struct backend_program *const *programs, int32_t n,
                        const struct kv_geometry *geometry, struct kv_beside *out)
{
  const struct kv_geometry share = kv_geometry_of_rank(geometry);
  const uint64_t n_ranks = (uint64_t)(geometry->n_ranks > 1 ? geometry->n_ranks : 1);
  *out = (struct kv_beside){0};
  for (int32_t r = 0; r < n && inner->kv_beside != NULL; r++) {
    struct kv_beside one;
    inner->kv_beside(programs[r], &share, &one);
    if (one.fixed_bytes * n_ranks > out->fixed_bytes) out->fixed_bytes = one.fixed_bytes * n_ranks;
    if (one.spare_bytes * n_ranks > out->spare_bytes) out->spare_bytes = one.spare_bytes * n_ranks;
  }
}

const char *kv_codec_name(enum kv_codec codec)
{
  static const char *const names[KV_CODEC_COUNT] = {[KV_F16] = "f16", [KV_INT8] = "int8", [KV_INT4] = "int4", [KV_FP4] = "fp4",
                                                     [KV_FP4_SPARSE] = "fp4-sparse", [KV_F32] = "f32"};
  return codec >= 0 && codec < KV_CODEC_COUNT ? names[codec] : "?";
}
