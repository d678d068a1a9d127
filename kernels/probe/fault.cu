/* Faults on purpose, for tests of what follows: a launch that the runtime refuses, or a kernel that traps.
 *
 * Arguments: is_trap; the stream. A trap is a sticky error: every later call of the process on this device fails.
 * Links: test tests/gpu/test_faults.c.
 */
#include "common/launch.cuh"
#include "kernels.h"

namespace {
__global__ void fault_kernel() { asm volatile("trap;"); }
} // namespace

extern "C" int sits_k_fault(bool is_trap, struct k_stream at) {
  return launch_kernel(fault_kernel, dim3(1), dim3(is_trap ? 1 : 4096), 0, (cudaStream_t)at.stream, false); /* 4,096 threads: too many */
}
