/* A loop over independent items on several threads. For tools and start-up: threads live as long as the call. */
#ifndef SITS_BASE_PARALLEL_H
#define SITS_BASE_PARALLEL_H

#include <stdint.h>

/* Items first..last-1, by one of the threads; worker: 0..n_threads-1, one number at one time, for workspaces. */
typedef void (*parallel_body)(void *context, int32_t worker, int64_t first, int64_t last);

/* Items 0..n-1 in runs of `grain`, each by whichever thread is free, the caller among them; returns when all are done. Whatever a body
 * wrote can be read then. Threads that cannot be started are done without. n_threads, grain >= 1. */
void parallel_for(int32_t n_threads, int64_t n, int64_t grain, parallel_body body, void *context);

#endif
