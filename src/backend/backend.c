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

const char *kv_codec_name(enum kv_codec codec)
{
  static const char *const names[KV_CODEC_COUNT] = {[KV_F16] = "f16", [KV_INT8] = "int8", [KV_INT4] = "int4", [KV_FP4] = "fp4",
                                                     [KV_FP4_SPARSE] = "fp4-sparse", [KV_F32] = "f32"};
  return codec >= 0 && codec < KV_CODEC_COUNT ? names[codec] : "?";
}
