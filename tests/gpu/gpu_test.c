/* gpu_test.h: see there. */
#include "gpu_test.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/dequant.h"

#define MAX_BUFFERS 512

static void *device_buffers[MAX_BUFFERS], *host_buffers[MAX_BUFFERS];
static int n_device, n_host, n_pass, n_fail;
static uint64_t rng = 0x9E3779B97F4A7C15ull;

void gpu_check_call(int e, const char *what) {
  if (!e) return;
  printf("FAIL  %s: %s\n", what, cudaGetErrorString((cudaError_t)e));
  exit(1);
}

int32_t gpu_open(void) {
  int n = 0, major = 0, sms = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
    printf("SKIP  no CUDA device\n");
    exit(77);
  }
  gpu_check_call(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "attribute");
  gpu_check_call(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  if (major != 9) {
    printf("SKIP  compute capability %d, these tests want 9\n", major);
    exit(77);
  }
  return sms;
}

bool gpu_is_small(void) {
  return getenv("SITS_GPU_SMALL") != NULL;
}

struct k_stream gpu_stream(void) {
  return (struct k_stream){0, false};
}

struct k_stream gpu_edge_stream(void) {
  static cudaStream_t stream;
  if (!stream) gpu_check_call(cudaStreamCreate(&stream), "cudaStreamCreate");
  return (struct k_stream){stream, true};
}

int gpu_finish(void) {
  gpu_release_all();
  printf("%d passed, %d failed\n", n_pass, n_fail);
  return n_fail ? 1 : 0;
}

void *gpu_alloc(size_t bytes) {
  void *p = NULL;
  if (n_device == MAX_BUFFERS) gpu_check_call(cudaErrorMemoryAllocation, "too many test buffers");
  gpu_check_call(cudaMalloc(&p, bytes + 16), "cudaMalloc");
  gpu_check_call(cudaMemset(p, 0xFF, bytes), "cudaMemset");
  return device_buffers[n_device++] = p;
}
void *gpu_zeros(size_t bytes) {
  void *p = gpu_alloc(bytes);
  gpu_check_call(cudaMemset(p, 0, bytes), "cudaMemset");
  return p;
}
void *gpu_copy(const void *host, size_t bytes) {
  void *p = gpu_alloc(bytes);
  gpu_check_call(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return p;
}
void gpu_read(void *host, const void *device, size_t bytes) {
  gpu_check_call(cudaDeviceSynchronize(), "kernel");
  gpu_check_call(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}
void gpu_write(void *device, const void *host, size_t bytes) {
  gpu_check_call(cudaDeviceSynchronize(), "kernel");
  gpu_check_call(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}
void *host_alloc(size_t bytes) {
  void *p = mem_calloc(1, bytes);
  if (!p || n_host == MAX_BUFFERS) gpu_check_call(cudaErrorMemoryAllocation, "host memory");
  return host_buffers[n_host++] = p;
}
void gpu_release_all(void) {
  for (int i = 0; i < n_device; i++) cudaFree(device_buffers[i]);
  for (int i = 0; i < n_host; i++) mem_free(host_buffers[i]);
  n_device = n_host = 0;
}

uint32_t rand_u32(void) {
  rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
  return (uint32_t)(rng >> 32);
}
float rand_unit(void) { return (float)(int32_t)rand_u32() * 0x1p-31f; }
uint16_t half_bits(float x) { return float_to_half(x); }
float half_value(uint16_t h) { return half_to_float(h); }
float round_half(float x) { return half_to_float(float_to_half(x)); }

double relative_error(const float *got, const float *want, size_t n) {
  double d = 0, r = 0;
  for (size_t i = 0; i < n; i++) {
    double e = (double)got[i] - want[i];
    if (!isfinite(got[i])) return INFINITY;
    d += e * e, r += (double)want[i] * want[i];
  }
  return r > 0 ? sqrt(d / r) : sqrt(d);
}

void verdict(bool ok, const char *format, ...) {
  va_list args;
  printf("%s  ", ok ? "PASS" : "FAIL");
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
  fflush(stdout);
  *(ok ? &n_pass : &n_fail) += 1;
}

static void put_half(uint8_t *at, float x) {
  uint16_t h = half_bits(x);
  memcpy(at, &h, 2);
}

/* One 16 x 128 unit: random codes and scales; values of the rows and columns that exist. */
static void random_unit(struct test_weight *w, int32_t row0, int32_t col0, uint8_t *unit, bool two_level) {
  const bool g128 = w->format == K_W4_G128;
  for (int32_t r = 0; r < 16; r++) {
    float scale[4], minimum[4];
    for (int32_t s = 0; s < 4; s++) {
      bool exists = row0 + r < w->rows && col0 + s * 32 < w->cols;
      float x = two_level ? w->channel[row0 + r] * (float)(1 << (rand_u32() % 5)) : 0.02f * (1.5f + rand_unit());
      scale[s] = exists ? round_half(x) : 0.f;
      minimum[s] = exists ? round_half(-0.15f * (1.f + 0.3f * rand_unit())) : 0.f;
      if (g128) scale[s] = scale[0], minimum[s] = -8.f * scale[0];
      uint8_t *at = unit + K_W4_NIBBLE_BYTES + (g128 ? (r & 7) * 4 + (r >> 3) * 2 : s * 64 + (r & 7) * 8 + (r >> 3) * 4);
      put_half(at, scale[s]);
      if (!g128) put_half(at + 2, minimum[s]);
    }
    for (int32_t c = 0; c < 128; c++) {
      int32_t word, rotate;
      uint32_t q = rand_u32() & 15u, bits;
      k_w4_place(r, c, &word, &rotate);
      memcpy(&bits, unit + word * 4, 4);
      bits |= rotate ? q << rotate | q >> (32 - rotate) : q;
      memcpy(unit + word * 4, &bits, 4);
      if (row0 + r < w->rows && col0 + c < w->cols)
        w->values[(size_t)(row0 + r) * w->cols + col0 + c] = scale[c >> 5] * (float)q + minimum[c >> 5];
    }
  }
}

struct test_weight random_weight(int32_t rows, int32_t cols, enum k_w4_format format, bool two_level) {
  struct test_weight w = {rows, cols, format, NULL, 0, NULL, NULL};
  const int32_t tiles = k_row_tiles(rows), blocks = k_blocks(cols), unit = k_w4_unit_bytes(format);
  w.packed_bytes = (size_t)tiles * blocks * unit;
  w.packed = host_alloc(w.packed_bytes);
  w.values = host_alloc((size_t)rows * cols * sizeof(float));
  w.channel = host_alloc((size_t)tiles * 16 * sizeof(float));
  for (int32_t r = 0; r < tiles * 16; r++) w.channel[r] = round_half(0.01f * (1.5f + rand_unit()));
  for (int32_t t = 0; t < tiles; t++)
    for (int32_t b = 0; b < blocks; b++) random_unit(&w, t * 16, b * 128, w.packed + ((size_t)t * blocks + b) * unit, two_level);
  return w;
}
