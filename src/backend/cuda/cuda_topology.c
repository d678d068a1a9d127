/* Which devices carry a model's ranks, and in which order: each next rank is the device best linked to the last one (the driver's
 * performance rank of the pair: links of the chip before a bus). Entry point: cuda_choose_devices. */
#include "backend/cuda/cuda_comm.h"

enum { MOST_DEVICES = 32, UNREACHABLE = 1 << 20 };

/* Smaller is better. */
static int distance(int32_t from, int32_t to)
{
  int can = 0, rank = 0;
  if (cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrAccessSupported, from, to) != cudaSuccess || !can) return UNREACHABLE;
  return cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, from, to) == cudaSuccess ? rank : UNREACHABLE - 1;
}

enum sits_status cuda_choose_devices(int32_t first, int32_t n, int32_t *devices, struct sits_error *err)
{
  int n_devices = 0;
  bool is_taken[MOST_DEVICES] = {false};
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess) n_devices = 0;
  if (n_devices > MOST_DEVICES) n_devices = MOST_DEVICES;
  if (first + n > n_devices)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-size",
                           "tensor-parallel-size %d: this machine has %d usable devices (tensor-parallel-devices may name one twice)", n,
                           n_devices);
  devices[0] = first;
  is_taken[first] = true;
  for (int32_t r = 1; r < n; r++) {
    int32_t best = -1;
    for (int32_t d = 0; d < n_devices; d++)
      if (!is_taken[d] && (best < 0 || distance(devices[r - 1], d) < distance(devices[r - 1], best))) best = d;
    if (distance(devices[r - 1], best) >= UNREACHABLE)
      return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-size", "cuda: device %d reaches no further device's memory",
                             devices[r - 1]);
    devices[r] = best;
    is_taken[best] = true;
  }
  return SITS_OK;
}
