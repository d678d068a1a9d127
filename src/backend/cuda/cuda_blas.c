/* See cuda_blas.h. */
#include "backend/cuda/cuda_blas.h"

#include <dlfcn.h>
#include <pthread.h>

#define TEXT_OF(x) #x
#define LIBRARY_OF(major) "libcublasLt.so." TEXT_OF(major)
#define LIBRARY LIBRARY_OF(CUBLAS_VER_MAJOR) /* of the header's own major version: the interface that was compiled */

struct cuda_blas cuda_blas;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *missing = LIBRARY;

static void load(void)
{
  void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return;
#define FIND(name) \
  if ((*(void **)&cuda_blas.name = dlsym(library, "cublasLt" #name)) == NULL) { \
    missing = LIBRARY " with cublasLt" #name; \
    return; \
  }
  CUDA_BLAS_MAP(FIND)
#undef FIND
  missing = NULL;
}

enum sits_status cuda_blas_load(struct sits_error *err)
{
  pthread_once(&once, load);
  return missing == NULL ? SITS_OK : sits_fail(err, SITS_UNAVAILABLE, "cuda: %s was not found", missing);
}
