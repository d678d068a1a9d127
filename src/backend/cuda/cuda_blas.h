/* cuBLASLt, found at run time: half a gigabyte that only a process with a device maps. Linked in, its relocations alone took 84 MB of every
 * process and most of the time to start. Calls are cuda_blas.NAME for cublasLtNAME (cublasLt.h), typed from that header. */
#ifndef SITS_BACKEND_CUDA_BLAS_H
#define SITS_BACKEND_CUDA_BLAS_H

#include <cublasLt.h>

#include "sits2026/status.h"

#define CUDA_BLAS_MAP(X)                                                                                                                 \
  X(Create) X(Destroy) X(Matmul) X(MatmulAlgoGetHeuristic) X(MatmulDescCreate) X(MatmulDescDestroy) X(MatmulDescSetAttribute)            \
  X(MatmulPreferenceCreate) X(MatmulPreferenceDestroy) X(MatmulPreferenceSetAttribute) X(MatrixLayoutCreate) X(MatrixLayoutDestroy)

struct cuda_blas {
#define FIELD(name) __typeof__(&cublasLt##name) name;
  CUDA_BLAS_MAP(FIELD)
#undef FIELD
};

extern struct cuda_blas cuda_blas; /* [after cuda_blas_load succeeded] read-only */

/* SITS_UNAVAILABLE, naming the library or the call, where it is not there. Any thread; loaded once, never unloaded. */
enum sits_status cuda_blas_load(struct sits_error *err) SITS_MUST_CHECK;

#endif
