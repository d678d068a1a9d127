/* The collectives' kernels: several ranks on one device, a stream each, and on two devices where there are two. Every rank must hold the
 * same bits, and the right sum; waiting must end when a rank does not come, or when the host says so; a long run must never mismatch.
 * Arguments: `long N` for N calls between two ranks only; `alone` for one rank only (for checkers that run kernels one by one), `pair` for
 * a few calls between two; `time` for microseconds of a call between two devices by protocol, size and CTAs a row. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_test.h"

enum { MOST = 4, PUSH_ROWS = 64 };

struct set {
  int32_t n_ranks, width, rows, device[MOST];
  cudaStream_t stream[MOST];
  struct k_reduce reduce[MOST];
  int32_t *words[MOST]; /* pinned: abort, lost */
};

static int32_t n_sm;

static void on(const struct set *s, int32_t r) { gpu_check_call(cudaSetDevice(s->device[r]), "cudaSetDevice"); }
static struct k_stream at(const struct set *s, int32_t r, bool pdl) { return (struct k_stream){(struct CUstream_st *)s->stream[r], pdl}; }

static void open_set(struct set *s, int32_t n_ranks, int32_t n_devices, int32_t rows, int32_t width, uint64_t timeout_ns)
{
  *s = (struct set){.n_ranks = n_ranks, .width = width, .rows = rows};
  for (int32_t r = 0; r < n_ranks; r++) s->device[r] = r % n_devices;
  void *push[MOST], *bulk[MOST];
  uint32_t *flag[MOST];
  for (int32_t r = 0; r < n_ranks; r++) {
    on(s, r);
    push[r] = gpu_zeros(k_reduce_push_bytes(n_ranks, PUSH_ROWS, width));
    bulk[r] = gpu_alloc(k_reduce_bulk_bytes(n_ranks, rows, width));
    flag[r] = gpu_zeros(k_reduce_flag_bytes(n_ranks, rows));
  }
  for (int32_t r = 0; r < n_ranks; r++) {
    struct k_reduce *a = &s->reduce[r];
    on(s, r);
    gpu_check_call(cudaStreamCreateWithFlags(&s->stream[r], cudaStreamNonBlocking), "stream");
    gpu_check_call(cudaHostAlloc((void **)&s->words[r], 64, cudaHostAllocPortable), "pinned");
    s->words[r][0] = s->words[r][1] = 0;
    *a = (struct k_reduce){.ranks = {r, n_ranks, gpu_zeros(sizeof(struct k_ranks_state)), s->words[r], s->words[r] + 1, timeout_ns},
                           .eps = 1e-5f, .width = width, .push_rows = PUSH_ROWS, .bulk_rows = rows,
                           .max_ctas = n_devices > 1 ? n_sm : n_sm / 4};
    for (int32_t q = 0; q < n_ranks; q++) a->push[q] = push[q], a->bulk[q] = bulk[q], a->bulk_flag[q] = flag[q];
  }
}

static void close_set(struct set *s)
{
  for (int32_t r = 0; r < s->n_ranks; r++) {
    on(s, r);
    gpu_check_call(cudaStreamSynchronize(s->stream[r]), "stream");
    cudaStreamDestroy(s->stream[r]);
    cudaFreeHost(s->words[r]);
  }
  gpu_release_all();
  gpu_check_call(cudaSetDevice(0), "cudaSetDevice");
}

static void read_from(const struct set *s, int32_t r, void *host, const void *device, size_t bytes)
{
  on(s, r);
  gpu_check_call(cudaStreamSynchronize(s->stream[r]), "kernel");
  gpu_check_call(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

static const char *name_of(enum k_reduce_protocol protocol)
{
  return protocol == K_REDUCE_PUSH ? "push" : protocol == K_REDUCE_BULK ? "bulk" : "bulk s8";
}

/* A share as it is summed: f16, and for S8 rounded in runs of 128 columns. */
static void round_share(enum k_reduce_protocol protocol, const float *share, int32_t width, float *out)
{
  for (int32_t c = 0; c < width; c++) out[c] = round_half(fminf(share[c], 65504.f));
  for (int32_t c0 = 0; protocol == K_REDUCE_BULK_S8 && c0 < width; c0 += 128) {
    const int32_t end = c0 + 128 < width ? c0 + 128 : width;
    float top = 0;
    for (int32_t c = c0; c < end; c++) top = fmaxf(top, fabsf(out[c]));
    for (int32_t c = c0; c < end; c++) out[c] = top > 0 ? rintf(out[c] * (127.f / top)) * (top / 127.f) : 0;
  }
}

/* Three calls in a row, so that both sets of slots are used and one twice. */
static void run_reduce(int32_t n_ranks, int32_t n_devices, int32_t rows, int32_t width, int32_t n_slabs, enum k_reduce_protocol protocol,
                       int32_t split)
{
  const bool is_half = n_slabs == 0;
  if (is_half) n_slabs = 1;
  struct set s;
  const size_t n = (size_t)rows * width;
  const int32_t padded = k_blocks(width) * 128;
  float *h = host_alloc(n * 4), *gain = host_alloc(width * 4), *want = host_alloc((size_t)rows * padded * 4),
        *got = host_alloc((size_t)rows * padded * 4);
  float *slabs[MOST], *back[MOST];
  uint16_t *half = host_alloc((size_t)rows * padded * 2);
  open_set(&s, n_ranks, n_devices, rows, width, 2000000000u);
  for (size_t i = 0; i < n; i++) h[i] = rand_unit() * 4;
  for (int32_t i = 0; i < width; i++) gain[i] = 1 + rand_unit() / 2;
  for (int32_t r = 0; r < n_ranks; r++) {
    slabs[r] = host_alloc(n * 4 * n_slabs), back[r] = host_alloc(n * 4);
    for (size_t i = 0; i < n * n_slabs; i++) slabs[r][i] = rand_unit();
    slabs[r][7] = 1e6f; /* saturates */
    struct k_reduce *a = &s.reduce[r];
    on(&s, r);
    a->protocol = protocol, a->n_tokens = rows, a->n_slabs = n_slabs, a->slab_stride = (int64_t)n, a->split = split;
    if (is_half) { /* the first slab, as f16; not saturated */
      for (size_t i = 0; i < n; i++) half[i] = half_bits(slabs[r][i]);
      half[7] = 0x7C00;
      a->own_half = gpu_copy(half, n * 2);
    } else
      a->slabs = gpu_copy(slabs[r], n * 4 * n_slabs);
    a->h = gpu_copy(h, n * 4), a->gain = gpu_copy(gain, width * 4);
    a->out = (struct k_act){K_ACT_ROW_F16, gpu_alloc((size_t)rows * padded * 2), NULL, 0, NULL};
    gpu_check_call(cudaDeviceSynchronize(), "set up");
  }
  for (int32_t call = 0; call < 3; call++)
    for (int32_t r = 0; r < n_ranks; r++) {
      on(&s, r);
      gpu_check_call(sits_k_reduce(&s.reduce[r], at(&s, r, false)), "sits_k_reduce");
    }
  float *share = host_alloc(width * 4), *total = host_alloc(width * 4);
  for (int32_t call = 0; call < 3; call++)
    for (int32_t t = 0; t < rows; t++) {
      memset(total, 0, width * 4);
      for (int32_t r = 0; r < n_ranks; r++) {
        for (int32_t c = 0; c < width; c++) {
          float all = 0;
          for (int32_t k = 0; k < n_slabs; k++) all += slabs[r][k * n + (size_t)t * width + c];
          share[c] = all;
        }
        round_share(protocol, share, width, share);
        for (int32_t c = 0; c < width; c++) total[c] += share[c];
      }
      for (int32_t c = 0; c < width; c++) h[(size_t)t * width + c] += total[c];
    }
  for (int32_t t = 0; t < rows; t++) {
    double sum = 0;
    for (int32_t c = 0; c < width; c++) sum += (double)h[(size_t)t * width + c] * h[(size_t)t * width + c];
    for (int32_t c = 0; c < width; c++)
      want[(size_t)t * padded + c] = (float)fmin(fmax(h[(size_t)t * width + c] / sqrt(sum / width + 1e-5) * gain[c], -65504), 65504);
  }
  bool same = true, lost = false;
  double residual = 0, error = 0;
  for (int32_t r = 0; r < n_ranks; r++) {
    read_from(&s, r, back[r], s.reduce[r].h, n * 4);
    read_from(&s, r, half, s.reduce[r].out.data, (size_t)rows * padded * 2);
    for (size_t i = 0; i < (size_t)rows * padded; i++) got[i] = half_value(half[i]);
    same = same && memcmp(back[r], back[0], n * 4) == 0;
    residual = fmax(residual, relative_error(back[r], h, n)), error = fmax(error, relative_error(got, want, (size_t)rows * padded));
    lost = lost || s.words[r][1] != 0;
  }
  verdict(same && !lost && residual < 1e-6 && error < 1e-3, "%s by %d, %d ranks on %d: %dx%d, %d slabs: %.2e, residual %.2e%s%s",
          name_of(protocol), split, n_ranks, n_devices, rows, width, n_slabs, error, residual,
          same ? "" : ", ranks differ", lost ? ", lost" : "");
  close_set(&s);
}

/* A library's way: share, (here) no exchange, residual. */
static void run_share(int32_t rows, int32_t width)
{
  struct set s;
  const size_t n = (size_t)rows * width;
  float *slabs = host_alloc(n * 8), *want = host_alloc(n * 4), *h = host_alloc(n * 4);
  open_set(&s, 1, 1, rows, width, 1000000000u);
  for (size_t i = 0; i < 2 * n; i++) slabs[i] = rand_unit();
  for (size_t i = 0; i < n; i++) want[i] = round_half(slabs[i] + slabs[n + i]);
  struct k_reduce *a = &s.reduce[0];
  a->protocol = K_REDUCE_NONE, a->n_tokens = rows, a->n_slabs = 2, a->slab_stride = (int64_t)n;
  void *share = gpu_alloc(n * 2);
  a->slabs = gpu_copy(slabs, n * 8), a->h = gpu_zeros(n * 4), a->gain = gpu_zeros(width * 4);
  gpu_check_call(cudaDeviceSynchronize(), "set up");
  gpu_check_call(sits_k_reduce_share(a, share, at(&s, 0, false)), "share");
  a->own_half = share;
  gpu_check_call(sits_k_reduce(a, at(&s, 0, false)), "residual");
  read_from(&s, 0, h, a->h, n * 4);
  verdict(memcmp(h, want, n * 4) == 0, "share and residual: %dx%d", rows, width);
  close_set(&s);
}

static void run_gather(int32_t n_ranks, int32_t n_devices, int32_t rows, int32_t cols)
{
  struct set s;
  struct k_gather a[MOST];
  const size_t n = (size_t)rows * cols;
  float *x = host_alloc(n * 4 * n_ranks), *got = host_alloc(n * 4 * n_ranks), *out[MOST];
  uint32_t *flag[MOST];
  bool right = true;
  open_set(&s, n_ranks, n_devices, 1, 8, 2000000000u);
  for (size_t i = 0; i < n * n_ranks; i++) x[i] = rand_unit();
  for (int32_t r = 0; r < n_ranks; r++) {
    on(&s, r);
    a[r] = (struct k_gather){.ranks = s.reduce[r].ranks, .x = gpu_copy(x + n * r, n * 4), .n_rows = rows, .n_cols = cols,
                             .max_ctas = n_sm / 4};
    out[r] = gpu_alloc(n * 4 * n_ranks), flag[r] = gpu_zeros((size_t)n_ranks * K_GATHER_CTAS * 4);
    gpu_check_call(cudaDeviceSynchronize(), "set up");
  }
  for (int32_t call = 0; call < 3; call++)
    for (int32_t r = 0; r < n_ranks; r++) {
      memcpy(a[r].out, out, sizeof out), memcpy(a[r].flag, flag, sizeof flag);
      on(&s, r);
      gpu_check_call(sits_k_gather_columns(&a[r], at(&s, r, false)), "gather");
    }
  for (int32_t q = 0; q < n_ranks; q++) {
    read_from(&s, q, got, out[q], n * 4 * n_ranks);
    for (int32_t t = 0; t < rows; t++)
      for (int32_t r = 0; r < n_ranks; r++)
        right = right && memcmp(got + ((size_t)t * n_ranks + r) * cols, x + n * r + (size_t)t * cols, (size_t)cols * 4) == 0;
    right = right && s.words[q][1] == 0;
  }
  verdict(right, "gather, %d ranks on %d: %dx%d each", n_ranks, n_devices, rows, cols);
  close_set(&s);
}

/* Rank 0 alone: it must give up, at its time-out or when told to, and say so; later calls must not wait again. */
static void run_lost(enum k_reduce_protocol protocol, bool is_told)
{
  struct set s;
  open_set(&s, 2, 1, 4, 512, is_told ? 60000000000ull : 200000000u);
  struct k_reduce *a = &s.reduce[0];
  a->protocol = protocol, a->n_tokens = 4, a->n_slabs = 1, a->slab_stride = 4 * 512;
  a->slabs = gpu_zeros(4 * 512 * 4), a->h = gpu_zeros(4 * 512 * 4), a->gain = gpu_zeros(512 * 4);
  cudaEvent_t from, to;
  float ms = 0;
  gpu_check_call(cudaEventCreate(&from), "event");
  gpu_check_call(cudaEventCreate(&to), "event");
  gpu_check_call(cudaDeviceSynchronize(), "set up");
  gpu_check_call(cudaEventRecord(from, s.stream[0]), "event");
  for (int32_t i = 0; i < 3; i++) gpu_check_call(sits_k_reduce(a, at(&s, 0, false)), "sits_k_reduce");
  gpu_check_call(cudaEventRecord(to, s.stream[0]), "event");
  if (is_told) *(volatile int32_t *)s.words[0] = 1;
  gpu_check_call(cudaStreamSynchronize(s.stream[0]), "kernel");
  gpu_check_call(cudaEventElapsedTime(&ms, from, to), "event");
  verdict(s.words[0][1] == 1 && ms < 1000, "%s: a rank alone gives up %s after %.0f ms", name_of(protocol),
          is_told ? "when told" : "in time", ms);
  close_set(&s);
}

/* h counts the calls exactly: every rank adds the same a call, a number that 8 bits with a scale hold exactly too. */
static void run_long(int32_t n_devices, int64_t n_calls, enum k_reduce_protocol protocol, int32_t rows)
{
  enum { WIDTH = 2048, CALLS = 500 };
  struct set s;
  cudaGraphExec_t exec[2];
  const size_t n = (size_t)rows * WIDTH;
  float *ones = host_alloc(n * 4), *h = host_alloc(n * 4);
  open_set(&s, 2, n_devices, rows, WIDTH, 2000000000u);
  const float one = protocol == K_REDUCE_BULK_S8 ? 127.f : 0.5f;
  for (size_t i = 0; i < n; i++) ones[i] = one;
  for (int32_t r = 0; r < 2; r++) {
    struct k_reduce *a = &s.reduce[r];
    cudaGraph_t graph;
    on(&s, r);
    a->protocol = protocol, a->n_tokens = rows, a->n_slabs = 1, a->slab_stride = (int64_t)n;
    a->slabs = gpu_copy(ones, n * 4), a->h = gpu_zeros(n * 4), a->gain = gpu_zeros(WIDTH * 4);
    a->out = (struct k_act){K_ACT_ROW_F16, gpu_alloc(n * 2), NULL, 0, NULL};
    gpu_check_call(cudaDeviceSynchronize(), "set up");
    gpu_check_call(cudaStreamBeginCapture(s.stream[r], cudaStreamCaptureModeThreadLocal), "capture");
    for (int32_t i = 0; i < CALLS; i++) gpu_check_call(sits_k_reduce(a, at(&s, r, n_devices > 1)), "sits_k_reduce");
    gpu_check_call(cudaStreamEndCapture(s.stream[r], &graph), "capture");
    gpu_check_call(cudaGraphInstantiate(&exec[r], graph, 0), "graph");
    cudaGraphDestroy(graph);
  }
  for (int64_t i = 0; i < n_calls / CALLS; i++) {
    for (int32_t r = 0; r < 2; r++) {
      on(&s, r);
      gpu_check_call(cudaGraphLaunch(exec[r], s.stream[r]), "launch");
    }
    if (i % 16 == 15)
      for (int32_t r = 0; r < 2; r++) gpu_check_call(cudaStreamSynchronize(s.stream[r]), "kernel");
  }
  int64_t bad = 0;
  for (int32_t r = 0; r < 2; r++) {
    read_from(&s, r, h, s.reduce[r].h, n * 4);
    for (size_t i = 0; i < n; i++) bad += h[i] != (float)(n_calls / CALLS * CALLS) * 2 * one;
    bad += s.words[r][1];
    cudaGraphExecDestroy(exec[r]);
  }
  verdict(bad == 0, "%s on %d: %lld calls of %d rows, %lld wrong", name_of(protocol), n_devices,
          (long long)(n_calls / CALLS * CALLS), rows, (long long)bad);
  close_set(&s);
}

/* Microseconds of a call, both ranks in a graph of CALLS: the least of several runs. */
static float time_reduce(enum k_reduce_protocol protocol, int32_t n_devices, int32_t rows, int32_t width, int32_t split, bool is_half)
{
  enum { CALLS = 20, RUNS = 6 };
  struct set s;
  cudaGraphExec_t exec[2];
  cudaEvent_t from, to;
  float ms = 0, least = 1e9f;
  const size_t n = (size_t)rows * width;
  open_set(&s, 2, n_devices, rows, width, 2000000000u);
  for (int32_t r = 0; r < 2; r++) {
    struct k_reduce *a = &s.reduce[r];
    cudaGraph_t graph;
    on(&s, r);
    a->protocol = protocol, a->n_tokens = rows, a->n_slabs = 1, a->slab_stride = (int64_t)n, a->split = split;
    if (is_half) a->own_half = gpu_zeros(n * 2);
    else a->slabs = gpu_zeros(n * 4);
    a->h = gpu_zeros(n * 4), a->gain = gpu_zeros(width * 4);
    a->out = (struct k_act){K_ACT_ROW_F16, gpu_alloc(n * 2), NULL, 0, NULL};
    if (protocol != K_REDUCE_PUSH) a->split = k_reduce_bulk_split(width);
    if (n_devices > 1 && protocol != K_REDUCE_PUSH) a->max_ctas *= k_reduce_bulk_per_sm(width, a->split, protocol);
    gpu_check_call(cudaDeviceSynchronize(), "set up");
    gpu_check_call(cudaStreamBeginCapture(s.stream[r], cudaStreamCaptureModeThreadLocal), "capture");
    for (int32_t i = 0; i < CALLS; i++) gpu_check_call(sits_k_reduce(a, at(&s, r, n_devices > 1)), "sits_k_reduce");
    gpu_check_call(cudaStreamEndCapture(s.stream[r], &graph), "capture");
    gpu_check_call(cudaGraphInstantiate(&exec[r], graph, 0), "graph");
    cudaGraphDestroy(graph);
  }
  on(&s, 0);
  gpu_check_call(cudaEventCreate(&from), "event");
  gpu_check_call(cudaEventCreate(&to), "event");
  for (int32_t i = 0; i < RUNS; i++) {
    on(&s, 1);
    gpu_check_call(cudaGraphLaunch(exec[1], s.stream[1]), "launch");
    on(&s, 0);
    gpu_check_call(cudaEventRecord(from, s.stream[0]), "event");
    gpu_check_call(cudaGraphLaunch(exec[0], s.stream[0]), "launch");
    gpu_check_call(cudaEventRecord(to, s.stream[0]), "event");
    for (int32_t r = 0; r < 2; r++) on(&s, r), gpu_check_call(cudaStreamSynchronize(s.stream[r]), "kernel");
    gpu_check_call(cudaEventElapsedTime(&ms, from, to), "event");
    if (i > 0 && ms < least) least = ms;
  }
  for (int32_t r = 0; r < 2; r++) cudaGraphExecDestroy(exec[r]);
  if (s.words[0][1]) least = 0;
  close_set(&s);
  return least * 1000 / CALLS;
}

static void print_times(int32_t n_devices)
{
  static const int32_t widths[] = {2048, 4096, 8192}, many[] = {512, 2048, 8192};
  for (int32_t w = 0; w < 3; w++)
    for (int32_t rows = 1; rows <= PUSH_ROWS; rows *= 2) {
      printf("E=%d T=%d push", widths[w], rows);
      for (int32_t split = 1; split <= 8; split *= 2)
        if (rows * split <= n_sm / (n_devices > 1 ? 1 : 2))
          printf(" by %d: %.2f", split, (double)time_reduce(K_REDUCE_PUSH, n_devices, rows, widths[w], split, false));
      printf(" bulk: %.2f\n", (double)time_reduce(K_REDUCE_BULK, n_devices, rows, widths[w], 1, false));
    }
  for (int32_t w = 1; w < 3; w++)
    for (int32_t i = 0; i < 3; i++)
      printf("E=%d T=%d bulk: %.2f s8: %.2f\n", widths[w], many[i],
             (double)time_reduce(K_REDUCE_BULK, n_devices, many[i], widths[w], 1, true),
             (double)time_reduce(K_REDUCE_BULK_S8, n_devices, many[i], widths[w], 1, true));
}

static const int32_t shapes[][2] = {{1, 8}, {1, 64}, {2, 576}, {1, 4096}, {7, 2048}, {16, 8192}, {33, 4096}, {64, 1024}, {3, 16384}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* One rank, every shape. */
static void run_alone(void)
{
  for (size_t i = 0; i < SHAPES; i++) {
    for (int32_t split = 1; split <= 8; split *= 2) run_reduce(1, 1, shapes[i][0], shapes[i][1], 2, K_REDUCE_PUSH, split);
    run_reduce(1, 1, shapes[i][0], shapes[i][1], 2, K_REDUCE_BULK, k_reduce_bulk_split(shapes[i][1]));
    run_reduce(1, 1, shapes[i][0], shapes[i][1], 2, K_REDUCE_BULK_S8, k_reduce_bulk_split(shapes[i][1]));
  }
  run_share(5, 576);
}

/* Two ranks, a few shapes: what a checker can follow. */
static void run_pair(int32_t n_devices)
{
  for (int32_t split = 1; split <= 2; split++) run_reduce(2, n_devices, 2, 1024, 2, K_REDUCE_PUSH, split);
  run_reduce(2, n_devices, 9, 1024, 2, K_REDUCE_BULK, 1);
  run_reduce(2, n_devices, 9, 1024, 0, K_REDUCE_BULK_S8, 1);
  run_gather(2, n_devices, 3, 256);
}

/* Several ranks on d devices: every shape, large ones, gathering, many calls. */
static void run_together(int32_t d)
{
  const int64_t n_calls = 20000;
  for (int32_t ranks = 2; ranks <= (d == 1 ? 4 : 2); ranks++)
    for (size_t i = 0; i < SHAPES; i++) {
      if (ranks > 2 && i % 3 != 0) continue;
      run_reduce(ranks, d, shapes[i][0], shapes[i][1], 1 + (int32_t)i % 3, K_REDUCE_PUSH, 1 << i % 4);
      const int32_t split = i % 2 ? 1 : k_reduce_bulk_split(shapes[i][1]);
      run_reduce(ranks, d, shapes[i][0], shapes[i][1], 1 + (int32_t)i % 3, K_REDUCE_BULK, split);
      run_reduce(ranks, d, shapes[i][0], shapes[i][1], 1 + (int32_t)i % 3, K_REDUCE_BULK_S8, split);
    }
  run_reduce(2, d, 700, 2048, 1, K_REDUCE_BULK, 1);
  run_reduce(2, d, 3000, 576, 2, K_REDUCE_BULK, 1);
  run_reduce(2, d, 900, 4096, 0, K_REDUCE_BULK, 1);
  run_reduce(2, d, 900, 4096, 0, K_REDUCE_BULK_S8, 1);
  run_reduce(2, d, 301, 8192, 0, K_REDUCE_BULK, 2);
  run_reduce(2, d, 301, 8192, 0, K_REDUCE_BULK_S8, 2);
  run_reduce(2, d, 700, 576, 1, K_REDUCE_BULK_S8, 1);
  run_reduce(2, d, 3, 8192, 0, K_REDUCE_PUSH, 2);
  run_reduce(2, d, 64, 8192, 0, K_REDUCE_PUSH, 1);
  run_reduce(2, d, 64, 8192, 0, K_REDUCE_PUSH, 2);
  run_gather(2, d, 1, 64128);
  run_gather(2, d, 33, 256);
  run_gather(3, d, 5, 17);
  run_long(d, n_calls, K_REDUCE_PUSH, 1);
  run_long(d, n_calls / 4, K_REDUCE_PUSH, 16);
  run_long(d, n_calls / 4, K_REDUCE_BULK, 300);
  run_long(d, n_calls / 4, K_REDUCE_BULK_S8, 300);
}

/* 2 where two devices reach each other. */
static int32_t open_devices(void)
{
  int n_devices = 0, can = 0;
  gpu_check_call(sits_k_reduce_init(), "init");
  gpu_check_call(cudaGetDeviceCount(&n_devices), "devices");
  if (n_devices > 1) gpu_check_call(cudaDeviceCanAccessPeer(&can, 0, 1), "peer");
  for (int32_t d = 0; can && d < 2; d++) {
    gpu_check_call(cudaSetDevice(d), "device");
    gpu_check_call(cudaDeviceEnablePeerAccess(1 - d, 0), "peer");
    gpu_check_call(sits_k_reduce_init(), "init");
  }
  gpu_check_call(cudaSetDevice(0), "device");
  return can ? 2 : 1;
}

int main(int argc, char **argv)
{
  n_sm = gpu_open();
  const char *what = argc > 1 ? argv[1] : gpu_is_small() ? "alone" : "all";
  const int32_t n_devices = open_devices();
  if (strcmp(what, "long") == 0 && argc > 2) {
    run_long(n_devices, strtoll(argv[2], NULL, 10), K_REDUCE_PUSH, 1);
    return gpu_finish();
  }
  if (strcmp(what, "time") == 0) {
    print_times(n_devices);
    return gpu_finish();
  }
  run_alone();
  if (strcmp(what, "pair") == 0) run_pair(n_devices);
  if (strcmp(what, "all") != 0) return gpu_finish();
  for (int32_t d = 1; d <= n_devices; d++) run_together(d);
  for (int i = 0; i < 2; i++) run_lost(K_REDUCE_PUSH, i), run_lost(K_REDUCE_BULK, i), run_lost(K_REDUCE_BULK_S8, i);
  return gpu_finish();
}
