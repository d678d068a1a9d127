/* Which devices carry a model's ranks, and in which order: each next rank is the device best linked to the last one (the driver's
 * performance rank of the pair: links of the chip before a bus) of those that all ranks before it reach, for every pair writes to each
 * other's memory. Where reach is partial it is so between islands, so nothing is ever tried again. Entry point: cuda_choose_devices. */
#include "backend/cuda/cuda_comm.h"

enum { MOST_DEVICES = 32 };

/* Smaller is better. */
static int distance(int32_t from, int32_t to)
{
  int can = 0, rank = 0;
  if (cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrAccessSupported, from, to) != cudaSuccess || !can) return CUDA_UNREACHABLE;
  return cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, from, to) == cudaSuccess ? rank : CUDA_UNREACHABLE - 1;
}

/* Does d reach all of devices[0..n), and they it? */
static bool reaches_all(const int *distances, int32_t n_devices, const int32_t *devices, int32_t n, int32_t d)
{
  for (int32_t i = 0; i < n; i++)
    if (d == devices[i] || distances[devices[i] * n_devices + d] >= CUDA_UNREACHABLE ||
        distances[d * n_devices + devices[i]] >= CUDA_UNREACHABLE)
      return false;
  return true;
}

int32_t cuda_choose_linked(const int *distances, int32_t n_devices, int32_t n, int32_t *devices)
{
  for (int32_t r = 1; r < n; r++) {
    const int *to = distances + devices[r - 1] * n_devices;
    int32_t best = -1;
    for (int32_t d = 0; d < n_devices; d++)
      if (reaches_all(distances, n_devices, devices, r, d) && (best < 0 || to[d] < to[best])) best = d;
    if (best < 0) return r;
    devices[r] = best;
  }
  return n;
}

enum sits_status cuda_choose_devices(int32_t first, int32_t n, int32_t *devices, struct sits_error *err)
{
  int distances[MOST_DEVICES * MOST_DEVICES];
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess) n_devices = 0;
  if (n_devices > MOST_DEVICES) n_devices = MOST_DEVICES;
  if (first + n > n_devices)
    return sits_fail_param(err, SITS_CONFIG, "tensor-parallel-size",
                           "tensor-parallel-size %d: this machine has %d usable devices (tensor-parallel-devices may name one twice)", n,
                           n_devices);
  for (int32_t from = 0; from < n_devices; from++)
    for (int32_t to = 0; to < n_devices; to++) distances[from * n_devices + to] = from == to ? 0 : distance(from, to);
  devices[0] = first;
  const int32_t n_found = cuda_choose_linked(distances, n_devices, n, devices);
  if (n_found == n) return SITS_OK;
  return sits_fail_param(err, SITS_UNSUPPORTED, "tensor-parallel-size",
                         "cuda: from device %d on %d devices reach each other's memory, %d are wanted", first, n_found, n);
}
