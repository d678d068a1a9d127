/* See clock.h. */
#include "base/clock.h"

#include <time.h>

int64_t clock_monotonic_ns(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t clock_monotonic_us(void) { return clock_monotonic_ns() / 1000; }
int64_t clock_unix_s(void) { return (int64_t)time(NULL); }
