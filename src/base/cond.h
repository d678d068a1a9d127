/* Condition variables on the monotonic clock, so that a change of the wall clock stretches no wait. */
#ifndef SITS_BASE_COND_H
#define SITS_BASE_COND_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

void cond_init_monotonic(pthread_cond_t *cond);
/* The point for pthread_cond_timedwait that is so far from now. */
struct timespec cond_deadline(int64_t timeout_us);

#endif
