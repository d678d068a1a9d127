/* See metrics_gpu.h. Only the few entry points below are used; their signatures are NVML's own, its handles opaque pointers. */
#include "front/metrics/metrics_gpu.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/cond.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/metrics/metrics_text.h"

#define LIBRARY "libnvidia-ml.so.1"
enum { MAX_GPUS = 64, UUID_BYTES = 96, TEMPERATURE_GPU = 0 };
#define INTERVAL_US 1000000
#define STALE_US 10000000
#define STOP_US 2000000

struct nvml_utilization { unsigned gpu, memory; };           /* percent */
struct nvml_memory { unsigned long long total, free, used; }; /* bytes */

struct nvml {
  int (*init)(void);
  int (*shutdown)(void);
  int (*count)(unsigned *);
  int (*handle)(unsigned, void **);
  int (*uuid)(void *, char *, unsigned);
  int (*utilization)(void *, struct nvml_utilization *);
  int (*memory)(void *, struct nvml_memory *);
  int (*temperature)(void *, int, unsigned *);               /* optional */
  int (*power)(void *, unsigned *);                          /* optional, milliwatts */
};

struct sample {
  bool has_utilization, has_memory, has_temperature, has_power;
  unsigned utilization, temperature, power_mw;
  unsigned long long total_bytes, used_bytes;
};

struct metrics_gpu {
  void *library;                        /* [init] */
  struct nvml nvml;                     /* [init] */
  void *handles[MAX_GPUS];              /* [sampler] [n] */
  char uuids[MAX_GPUS][UUID_BYTES];     /* [sampler] [n]; others read them once sampled_us is set */
  int n;                                /* [sampler] likewise */
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  bool is_stopping, has_ended;          /* [mutex] */
  int64_t sampled_us;                   /* [mutex] */
  struct sample samples[MAX_GPUS];      /* [mutex] [n] */
};

/* POSIX gives functions as object pointers; memcpy converts without a cast that ISO C forbids. */
static bool find(void *library, const char *name, void *out)
{
  void *symbol = dlsym(library, name);
  memcpy(out, &symbol, sizeof symbol);
  return symbol != NULL;
}

static bool load(struct metrics_gpu *gpu)
{
  struct nvml *nvml = &gpu->nvml;
  gpu->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (!gpu->library) {
    log_debug("metrics", "no GPU figures: %s", dlerror());
    return false;
  }
  bool ok = find(gpu->library, "nvmlInit_v2", &nvml->init) && find(gpu->library, "nvmlShutdown", &nvml->shutdown) &&
            find(gpu->library, "nvmlDeviceGetCount_v2", &nvml->count) &&
            find(gpu->library, "nvmlDeviceGetHandleByIndex_v2", &nvml->handle) && find(gpu->library, "nvmlDeviceGetUUID", &nvml->uuid) &&
            find(gpu->library, "nvmlDeviceGetUtilizationRates", &nvml->utilization) &&
            find(gpu->library, "nvmlDeviceGetMemoryInfo", &nvml->memory);
  if (!ok) log_debug("metrics", "no GPU figures: %s lacks a function", LIBRARY);
  find(gpu->library, "nvmlDeviceGetTemperature", &nvml->temperature);
  find(gpu->library, "nvmlDeviceGetPowerUsage", &nvml->power);
  return ok;
}

static bool find_gpus(struct metrics_gpu *gpu)
{
  unsigned n = 0;
  int failed = gpu->nvml.init();
  if (failed) {
    log_debug("metrics", "no GPU figures: NVML does not start (%d)", failed);
    return false;
  }
  if (gpu->nvml.count(&n)) n = 0;
  for (unsigned i = 0; i < n && gpu->n < MAX_GPUS; i++) {
    if (gpu->nvml.handle(i, &gpu->handles[gpu->n]) || gpu->nvml.uuid(gpu->handles[gpu->n], gpu->uuids[gpu->n], UUID_BYTES)) continue;
    gpu->uuids[gpu->n++][UUID_BYTES - 1] = '\0';
  }
  if (!gpu->n) gpu->nvml.shutdown();
  return gpu->n > 0;
}

static struct sample take(const struct metrics_gpu *gpu, int i)
{
  struct sample sample = {0};
  struct nvml_utilization utilization;
  struct nvml_memory memory;
  sample.has_utilization = !gpu->nvml.utilization(gpu->handles[i], &utilization); /* MIG instances have none */
  if (sample.has_utilization) sample.utilization = utilization.gpu;
  sample.has_memory = !gpu->nvml.memory(gpu->handles[i], &memory);
  if (sample.has_memory) {
    sample.total_bytes = memory.total;
    sample.used_bytes = memory.used;
  }
  sample.has_temperature = gpu->nvml.temperature && !gpu->nvml.temperature(gpu->handles[i], TEMPERATURE_GPU, &sample.temperature);
  sample.has_power = gpu->nvml.power && !gpu->nvml.power(gpu->handles[i], &sample.power_mw);
  return sample;
}

static void *sampler_main(void *argument)
{
  struct metrics_gpu *gpu = argument;
  bool has_gpus = find_gpus(gpu); /* here, because NVML's start may hang too */
  pthread_mutex_lock(&gpu->mutex);
  while (has_gpus && !gpu->is_stopping) {
    struct sample samples[MAX_GPUS];
    pthread_mutex_unlock(&gpu->mutex);
    for (int i = 0; i < gpu->n; i++) samples[i] = take(gpu, i);
    pthread_mutex_lock(&gpu->mutex);
    memcpy(gpu->samples, samples, sizeof *samples * (size_t)gpu->n);
    gpu->sampled_us = clock_monotonic_us();
    struct timespec end = cond_deadline(INTERVAL_US);
    if (!gpu->is_stopping) pthread_cond_timedwait(&gpu->wake, &gpu->mutex, &end);
  }
  gpu->has_ended = true;
  pthread_cond_broadcast(&gpu->wake);
  pthread_mutex_unlock(&gpu->mutex);
  return NULL;
}

struct metrics_gpu *metrics_gpu_start(void)
{
  struct metrics_gpu *gpu = mem_calloc(1, sizeof *gpu);
  if (!gpu) return NULL;
  if (load(gpu)) {
    cond_init_monotonic(&gpu->wake);
    pthread_mutex_init(&gpu->mutex, NULL);
    if (!pthread_create(&gpu->thread, NULL, sampler_main, gpu)) return gpu;
    pthread_cond_destroy(&gpu->wake);
    pthread_mutex_destroy(&gpu->mutex);
  }
  if (gpu->library) dlclose(gpu->library);
  mem_free(gpu);
  return NULL;
}

void metrics_gpu_stop(struct metrics_gpu *gpu)
{
  if (!gpu) return;
  struct timespec end = cond_deadline(STOP_US);
  int failed = 0;
  pthread_mutex_lock(&gpu->mutex);
  gpu->is_stopping = true;
  pthread_cond_broadcast(&gpu->wake);
  while (!gpu->has_ended && failed != ETIMEDOUT) failed = pthread_cond_timedwait(&gpu->wake, &gpu->mutex, &end);
  bool has_ended = gpu->has_ended;
  pthread_mutex_unlock(&gpu->mutex);
  if (!has_ended) { /* it hangs in the driver; what it uses must stay */
    log_warn("metrics", "NVML does not answer; its thread is left behind");
    pthread_detach(gpu->thread);
    return;
  }
  pthread_join(gpu->thread, NULL);
  if (gpu->n) gpu->nvml.shutdown();
  dlclose(gpu->library);
  pthread_cond_destroy(&gpu->wake);
  pthread_mutex_destroy(&gpu->mutex);
  mem_free(gpu);
}

/* ---- rendering ---- */

static bool get_utilization(const struct sample *s, double *out) { return *out = s->utilization / 100.0, s->has_utilization; }
static bool get_total(const struct sample *s, double *out) { return *out = (double)s->total_bytes, s->has_memory; }
static bool get_used(const struct sample *s, double *out) { return *out = (double)s->used_bytes, s->has_memory; }
static bool get_temperature(const struct sample *s, double *out) { return *out = s->temperature, s->has_temperature; }
static bool get_power(const struct sample *s, double *out) { return *out = s->power_mw / 1000.0, s->has_power; }

static const struct { const char *name, *help; bool (*get)(const struct sample *, double *); } rows[] = {
  {"gpu_utilization_ratio", "Share of the last sampling period in which a kernel ran, 0 to 1.", get_utilization},
  {"gpu_memory_total_bytes", "Memory of the GPU.", get_total},
  {"gpu_memory_used_bytes", "Memory in use, of all processes.", get_used},
  {"gpu_temperature_celsius", "Temperature of the GPU.", get_temperature},
  {"gpu_power_watts", "Power drawn.", get_power},
};

void metrics_gpu_render(struct metrics_gpu *gpu, const char *label, struct buf *out)
{
  if (!gpu) return;
  struct sample samples[MAX_GPUS];
  pthread_mutex_lock(&gpu->mutex);
  memcpy(samples, gpu->samples, sizeof samples);
  bool is_fresh = gpu->sampled_us && clock_monotonic_us() - gpu->sampled_us < STALE_US;
  pthread_mutex_unlock(&gpu->mutex);
  for (size_t r = 0; is_fresh && r < sizeof rows / sizeof *rows; r++) {
    bool has_header = false;
    for (int i = 0; i < gpu->n; i++) {
      double value;
      if (!rows[r].get(&samples[i], &value)) continue;
      if (!has_header) metrics_text_header(out, rows[r].name, "gauge", rows[r].help);
      has_header = true;
      buf_printf(out, "sits2026:%s{%s,gpu=\"%d\",uuid=\"", rows[r].name, label, i);
      metrics_text_escape(out, gpu->uuids[i]);
      buf_printf(out, "\"} %.15g\n", value);
    }
  }
}
