/* See clock.h. */
#include "base/clock.h"

#include <stdio.h>
#include <time.h>

int64_t clock_monotonic_ns(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t clock_monotonic_us(void) { return clock_monotonic_ns() / 1000; }
int64_t clock_unix_s(void) { return (int64_t)time(NULL); }

int64_t clock_unix_us(void)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void clock_format_utc(int64_t unix_us, char out[32])
{
  time_t seconds = (time_t)(unix_us / 1000000);
  struct tm utc;
  gmtime_r(&seconds, &utc);
  size_t n = strftime(out, 32, "%Y-%m-%dT%H:%M:%S", &utc);
  snprintf(out + n, 32 - n, ".%06dZ", (int)(unix_us % 1000000));
}
