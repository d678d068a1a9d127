/* See cond.h. */
#include "base/cond.h"

#include "base/clock.h"

void cond_init_monotonic(pthread_cond_t *cond)
{
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(cond, &monotonic);
  pthread_condattr_destroy(&monotonic);
}

struct timespec cond_deadline(int64_t timeout_us)
{
  int64_t end_us = clock_monotonic_us() + timeout_us;
  return (struct timespec){.tv_sec = end_us / 1000000, .tv_nsec = end_us % 1000000 * 1000};
}
