/* Speed of the CPU matrix multiply beside what the machine can do, measured in the same run.
 *
 * usage: bench_cpu_matmul [--threads N] [--isa auto|scalar|avx2|avx512] [--types q4_0,q4_1,...] [--tokens 1,8,512] [--shape ROWSxK,...]
 *                         [--mb MB]   (total weight bytes walked through, so that caches do not hold them; default 192)
 *                         [--percentile P]   (of the times; default 10)
 *
 * For each type, shape and token count it walks over enough copies of the weight, rows split over the threads with a spin barrier after
 * each multiply, and prints the time of one multiply, activation included, weight bytes per second against the measured read bandwidth (the
 * better one of two ways to prefetch), and operations per second (2 per weight and token) against the measured int8 dot-product peak of
 * those threads. Every time is the chosen percentile of many short ones (multiplies, reads of 4 MB a thread, a millisecond of dot
 * products), so that other load on the machine, which takes a core away now and then, spoils few of them; to set beside medians of another
 * program, ask for the 50th.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu_matmul.h"
#include "base/clock.h"
#include "base/mem.h"
#include "tensor/dequant.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 64
#define MAX_LIST 32
#define MAX_COPIES 512

#define MAX_TIMES 4096
#define READ_BYTES ((size_t)4 << 20) /* a thread and piece */
#define PEAK_STEPS 300000

struct job {
  int n_threads, n_weights, n_tokens;
  struct cpu_weight *weights[MAX_COPIES];
  const float *x;
  float *y;
  void *act;
  const uint8_t *region;
  size_t region_bytes;
};

struct team {
  atomic_int arrived, phase;
  int n;
};

static struct job job;
static struct team team;
static uint64_t sink[MAX_THREADS];

static void barrier(void)
{
  int phase = atomic_load_explicit(&team.phase, memory_order_acquire);
  if (atomic_fetch_add_explicit(&team.arrived, 1, memory_order_acq_rel) + 1 == team.n) {
    atomic_store_explicit(&team.arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&team.phase, phase + 1, memory_order_release);
    return;
  }
  while (atomic_load_explicit(&team.phase, memory_order_acquire) == phase) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

static double now_s(void) { return (double)clock_monotonic_ns() * 1e-9; }

#if defined(__x86_64__)
/* far: bytes ahead that are asked for into the L2 cache, 0 = none; those 4 KB ahead always go to L1. */
__attribute__((target("avx2"))) static uint64_t read_all(const uint8_t *at, size_t n, size_t far)
{
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i + 256 <= n; i += 256) {
    const __m256i *p = (const __m256i *)(at + i);
    a = _mm256_or_si256(a, _mm256_or_si256(_mm256_load_si256(p), _mm256_load_si256(p + 1)));
    b = _mm256_or_si256(b, _mm256_or_si256(_mm256_load_si256(p + 2), _mm256_load_si256(p + 3)));
    c = _mm256_or_si256(c, _mm256_or_si256(_mm256_load_si256(p + 4), _mm256_load_si256(p + 5)));
    d = _mm256_or_si256(d, _mm256_or_si256(_mm256_load_si256(p + 6), _mm256_load_si256(p + 7)));
    for (size_t line = i; line < i + 256; line += 64) {
      if (far > 0) _mm_prefetch((const char *)at + line + far, _MM_HINT_T1);
      _mm_prefetch((const char *)at + line + 4096, _MM_HINT_T0);
    }
  }
  return (uint64_t)_mm256_extract_epi64(_mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d)), 0);
}

__attribute__((target("avx512f,avx512vnni"), optimize("O3"))) static uint64_t vnni_ops(int64_t n)
{
  __m512i acc[12], u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(5);
  for (int i = 0; i < 12; i++) acc[i] = _mm512_set1_epi32(i);
  for (int64_t j = 0; j < n; j++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = _mm512_dpbusd_epi32(acc[i], u, s);
    __asm__ volatile("" : "+v"(u), "+v"(s));
  }
  for (int i = 1; i < 12; i++) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
  return (uint64_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(acc[0]));
}

__attribute__((target("avx2"), optimize("O3"))) static uint64_t avx2_ops(int64_t n)
{
  __m256i acc[8], u = _mm256_set1_epi8(3), s = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 8; i++) acc[i] = _mm256_set1_epi32(i);
  for (int64_t j = 0; j < n; j++) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), ones));
    __asm__ volatile("" : "+x"(u), "+x"(s));
  }
  for (int i = 1; i < 8; i++) acc[0] = _mm256_add_epi32(acc[0], acc[i]);
  return (uint64_t)_mm256_extract_epi32(acc[0], 0);
}
#else
static uint64_t read_all(const uint8_t *at, size_t n, size_t far)
{
  uint64_t sum = 0;
  (void)far;
  for (size_t i = 0; i < n; i += 8) sum |= *(const uint64_t *)(at + i);
  return sum;
}
#endif

enum work { WORK_READ, WORK_READ_FAR, WORK_PEAK, WORK_MATMUL };
static enum work work;
static enum cpu_isa isa;
static double times[MAX_TIMES];
static int n_times, percentile = 10;

/* Thread 0 notes how long a piece took; start is its beginning. */
static void note(int thread, double start)
{
  if (thread == 0 && n_times < MAX_TIMES) times[n_times++] = now_s() - start;
}

static void do_matmul(int thread)
{
  static _Thread_local void *scratch;
  if (!scratch) scratch = mem_aligned(4096, CPU_MATMUL_SCRATCH_BYTES);
  for (int i = 0; i < job.n_weights; i++) {
    const struct cpu_weight *w = job.weights[i];
    int64_t rows = cpu_weight_rows(w), tile = cpu_weight_row_tile(w), tiles = (rows + tile - 1) / tile;
    double start = now_s();
    int64_t r0 = tiles * thread / job.n_threads * tile, r1 = tiles * (thread + 1) / job.n_threads * tile;
    cpu_act_quantize(w, job.x, cpu_weight_k(w), job.n_tokens, job.n_tokens * thread / job.n_threads,
                     job.n_tokens * (thread + 1) / job.n_threads, job.act);
    barrier();
    cpu_matmul(w, job.act, job.n_tokens, r0, r1 < rows ? r1 : rows, job.y, rows, scratch);
    barrier();
    note(thread, start);
  }
}

static void do_work(int thread)
{
  if (work == WORK_READ || work == WORK_READ_FAR) {
    for (size_t at = 0; at + READ_BYTES * (size_t)job.n_threads <= job.region_bytes; at += READ_BYTES * (size_t)job.n_threads) {
      double start = now_s();
      sink[thread] += read_all(job.region + at + READ_BYTES * (size_t)thread, READ_BYTES, work == WORK_READ_FAR ? 8192 : 0);
      barrier();
      note(thread, start);
    }
  } else if (work == WORK_PEAK) {
#if defined(__x86_64__)
    for (int i = 0; i < 50; i++) {
      double start = now_s();
      sink[thread] += isa == CPU_AVX512 ? vnni_ops(PEAK_STEPS) : avx2_ops(PEAK_STEPS);
      barrier();
      note(thread, start);
    }
#endif
  } else {
    do_matmul(thread);
  }
}

static void *worker(void *arg)
{
  int thread = (int)(intptr_t)arg;
  for (;;) {
    barrier();
    if (job.n_threads == 0) return NULL;
    do_work(thread);
    barrier();
  }
}

static int by_value(const void *a, const void *b)
{
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The chosen percentile of the seconds of a piece over n passes of all threads. */
static double timed(enum work what, int n)
{
  work = what;
  n_times = 0;
  for (int i = 0; i < n; i++) {
    barrier();
    do_work(0);
    barrier();
  }
  qsort(times, (size_t)n_times, sizeof times[0], by_value);
  return times[n_times * percentile / 100];
}

static void fill_weight(enum sits_dtype t, uint8_t *bytes, int64_t n_blocks)
{
  const struct sits_dtype_info *info = sits_dtype_info(t);
  uint64_t seed = 99;
  uint16_t d = float_to_half(0.01F);
  int at = t == SITS_DTYPE_Q2_K ? 80 : t == SITS_DTYPE_Q3_K ? 108 : t == SITS_DTYPE_Q6_K ? 208 : 0;
  bool has_min = t == SITS_DTYPE_Q4_1 || t == SITS_DTYPE_Q5_1 || t == SITS_DTYPE_Q2_K || t == SITS_DTYPE_Q4_K || t == SITS_DTYPE_Q5_K;
  for (int64_t i = 0; i < n_blocks * info->block_bytes; i++) {
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    bytes[i] = (uint8_t)(seed >> 56);
  }
  for (int64_t b = 0; b < n_blocks; b++) {
    uint8_t *block = bytes + b * info->block_bytes;
    if (info->block_elements == 1) {
      float f = (float)((int)(b * 7919 % 201) - 100) * 0.01F;
      uint16_t h = t == SITS_DTYPE_F16 ? float_to_half(f) : float_to_bf16(f);
      if (t == SITS_DTYPE_F32) memcpy(block, &f, 4);
      else memcpy(block, &h, 2);
      continue;
    }
    memcpy(block + at, &d, 2);
    if (has_min) memcpy(block + at + 2, &d, 2);
  }
}

/* Returns false when the weight cannot be made. */
static bool make_weights(enum sits_dtype t, int64_t rows, int64_t k, size_t want_bytes, double *pack_s)
{
  struct sits_utd u = {.name = "bench", .dtype = t, .n_dims = 2, .dims = {rows, k}};
  int64_t bytes = sits_utd_row_major_bytes(&u);
  uint8_t *data = bytes > 0 ? mem_alloc((size_t)bytes) : NULL;
  if (!data) return false;
  fill_weight(t, data, bytes / sits_dtype_info(t)->block_bytes);
  u.data = data;
  u.n_bytes = (size_t)bytes;
  size_t packed = cpu_weight_packed_bytes(&u, isa), n = want_bytes / packed + 1;
  if (n > MAX_COPIES) n = MAX_COPIES;
  uint8_t *region = cpu_weight_region(packed * n);
  if (!region) return false;
  job.region = region;
  *pack_s = 1e30;
  for (size_t i = 0; i < n; i++) {
    struct sits_error err;
    if (cpu_weight_create_in(&u, isa, region + packed * i, &job.weights[i], &err) != SITS_OK) {
      fprintf(stderr, "%s\n", err.text);
      return false;
    }
    double start = now_s();
    cpu_weight_pack(job.weights[i], &u, 0, rows);
    double s = now_s() - start;
    *pack_s = s < *pack_s ? s : *pack_s;
  }
  job.n_weights = (int)n;
  mem_free(data);
  return true;
}

static void run_case(enum sits_dtype t, int64_t rows, int64_t k, const int *tokens, int n_counts, size_t want_bytes, double bandwidth,
                     double peak)
{
  double pack_s, weight_bytes;
  int most = 1;
  if (!make_weights(t, rows, k, want_bytes, &pack_s)) return;
  weight_bytes = (double)cpu_weight_bytes(job.weights[0]);
  for (int i = 0; i < n_counts; i++) most = tokens[i] > most ? tokens[i] : most;
  float *x = mem_alloc((size_t)most * (size_t)k * sizeof *x);
  job.y = mem_aligned(64, (size_t)most * (size_t)rows * sizeof *job.y);
  job.act = mem_aligned(64, cpu_act_bytes(job.weights[0], most) + cpu_act_bytes(job.weights[0], 4));
  if (!x || !job.y || !job.act) return;
  for (int64_t i = 0; i < most * k; i++) x[i] = (float)((i * 7919) % 2003 - 1001) * 0.001F;
  job.x = x;
  int all = job.n_weights;
  for (int i = 0; i < n_counts; i++) {
    job.n_tokens = tokens[i];
    job.n_weights = tokens[i] >= 64 && all > 6 ? 6 : all;
    double s = timed(WORK_MATMUL, 4), ops = 2.0 * (double)rows * (double)k * tokens[i];
    printf("%-5s %6" PRId64 " x %-6" PRId64 " tokens %4d  %9.1f us  %6.2f GB/s %5.1f %% of read  %7.1f GOP/s %5.1f %% of peak  "
           "pack %.2f GB/s\n", sits_dtype_info(t)->name, rows, k, tokens[i], s * 1e6, weight_bytes / s * 1e-9,
           100 * weight_bytes / s / bandwidth, ops / s * 1e-9, 100 * ops / s / peak, weight_bytes / pack_s * 1e-9);
    fflush(stdout);
  }
  for (int i = 0; i < all; i++) cpu_weight_destroy(job.weights[i]);
  mem_free((void *)(uintptr_t)job.region);
  mem_free(x);
  mem_free(job.y);
  mem_free(job.act);
}

static int parse_ints(const char *text, int *out)
{
  int n = 0;
  char *end;
  for (; n < MAX_LIST && *text; text = *end == ',' ? end + 1 : end) {
    long v = strtol(text, &end, 10);
    if (end == text || v <= 0) break;
    out[n++] = (int)v;
    if (!*end) break;
  }
  return n;
}

static bool wants(const char *list, const char *name)
{
  size_t n = strlen(name);
  for (const char *p = list; (p = strstr(p, name)) != NULL; p += n)
    if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
  return false;
}

int main(int argc, char **argv)
{
  const char *types = "q4_1,q4_0,q8_0", *shapes = "576x576,1536x576,576x1536,2048x2048,8192x2048,2048x8192", *level = "auto";
  int tokens[MAX_LIST] = {1, 4, 8, 16, 512}, n_counts = 5, threads = 2;
  size_t mb = 192;
  struct sits_error err;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--threads") == 0) threads = (int)strtol(argv[i + 1], NULL, 10);
    else if (strcmp(argv[i], "--percentile") == 0) percentile = (int)strtol(argv[i + 1], NULL, 10);
    else if (strcmp(argv[i], "--isa") == 0) level = argv[i + 1];
    else if (strcmp(argv[i], "--types") == 0) types = argv[i + 1];
    else if (strcmp(argv[i], "--tokens") == 0) n_counts = parse_ints(argv[i + 1], tokens);
    else if (strcmp(argv[i], "--shape") == 0) shapes = argv[i + 1];
    else if (strcmp(argv[i], "--mb") == 0) mb = (size_t)strtol(argv[i + 1], NULL, 10);
  }
  if (percentile < 0 || percentile > 99) {
    fprintf(stderr, "--percentile: 0 to 99\n");
    return 1;
  }
  if (cpu_isa_choose(level, &isa, &err) != SITS_OK) {
    fprintf(stderr, "%s\n", err.text);
    return 1;
  }
  team.n = job.n_threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
  pthread_t ids[MAX_THREADS];
  for (int i = 1; i < team.n; i++)
    if (pthread_create(&ids[i], NULL, worker, (void *)(intptr_t)i) != 0) return 1;

  job.region_bytes = (size_t)512 << 20;
  uint8_t *region = cpu_weight_region(job.region_bytes);
  if (!region) return 1;
  memset(region, 1, job.region_bytes);
  job.region = region;
  double read_s = timed(WORK_READ, 3), far_s = timed(WORK_READ_FAR, 3);
  double bandwidth = (double)READ_BYTES * team.n / (far_s < read_s ? far_s : read_s);
  mem_free(region);
  double per_step = isa == CPU_AVX512 ? 12 * 128.0 : 8 * 64.0;
  double peak = per_step * PEAK_STEPS * team.n / timed(WORK_PEAK, 2);
  printf("%s, %d threads: read %.1f GB/s, int8 dot products %.0f GOP/s\n", cpu_isa_name(isa), team.n, bandwidth * 1e-9, peak * 1e-9);

  for (int t = 0; t < SITS_DTYPE_COUNT; t++) {
    if (!wants(types, sits_dtype_info((enum sits_dtype)t)->name)) continue;
    for (const char *p = shapes; *p;) {
      char *end;
      long rows = strtol(p, &end, 10), k = *end == 'x' ? strtol(end + 1, &end, 10) : 0;
      if (rows <= 0 || k <= 0) break;
      run_case((enum sits_dtype)t, rows, k, tokens, n_counts, mb << 20, bandwidth, peak);
      p = *end == ',' ? end + 1 : end;
    }
  }
  job.n_threads = 0;
  barrier();
  for (int i = 1; i < team.n; i++) pthread_join(ids[i], NULL);
  return 0;
}
