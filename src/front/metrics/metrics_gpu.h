/* GPU figures through NVML, NVIDIA's management library, when the machine has it: loaded at run time, so that the daemon needs neither the
 * library nor a GPU. A thread of its own asks once a second, because a call may take milliseconds, or for ever in a driver that hangs; a
 * scrape reads memory only. Figures older than 10 s are not shown. NVML's names: https://docs.nvidia.com/deploy/nvml-api/ */
#ifndef SITS_FRONT_METRICS_METRICS_GPU_H
#define SITS_FRONT_METRICS_METRICS_GPU_H

#include "base/buf.h"

struct metrics_gpu;

/* NULL when there is no library or no thread. Returns at once; a debug line says when there is no GPU. */
struct metrics_gpu *metrics_gpu_start(void);
/* NULL is fine. A thread that hangs in the driver is left behind after two seconds. */
void metrics_gpu_stop(struct metrics_gpu *gpu);
void metrics_gpu_render(struct metrics_gpu *gpu, const char *label, struct buf *out);

#endif
