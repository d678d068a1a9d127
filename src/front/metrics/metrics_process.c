/* See metrics_process.h. */
#include "front/metrics/metrics_process.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static void row(struct buf *out, const char *name, const char *type, const char *help, double value)
{
  buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", name, help, name, type, name, value);
}

/* Seconds since 1970 at which the machine started. */
static bool boot_time(double *out)
{
  char line[256];
  unsigned long long seconds = 0;
  FILE *file = fopen("/proc/stat", "r");
  if (!file) return false;
  while (!seconds && fgets(line, sizeof line, file))
    if (sscanf(line, "btime %llu", &seconds) != 1) seconds = 0;
  fclose(file);
  *out = (double)seconds;
  return seconds > 0;
}

void metrics_process_render(struct buf *out)
{
  char line[1024] = "";
  FILE *file = fopen("/proc/self/stat", "r");
  if (!file) return;
  const char *got = fgets(line, sizeof line, file);
  fclose(file);
  const char *at = got ? strrchr(line, ')') : NULL; /* the program's name may hold anything */
  unsigned long long user, system, start, virtual_bytes;
  long long resident_pages;
  double ticks = (double)sysconf(_SC_CLK_TCK), boot_s;
  if (!at || sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d %*d %*d %llu %llu %lld", &user, &system,
                    &start, &virtual_bytes, &resident_pages) != 5)
    return;
  row(out, "process_cpu_seconds_total", "counter", "User and system time.", (double)(user + system) / ticks);
  row(out, "process_resident_memory_bytes", "gauge", "Memory that is in RAM.", (double)resident_pages * (double)sysconf(_SC_PAGESIZE));
  row(out, "process_virtual_memory_bytes", "gauge", "Address space in use.", (double)virtual_bytes);
  if (boot_time(&boot_s)) row(out, "process_start_time_seconds", "gauge", "Start, in seconds since 1970.", boot_s + (double)start / ticks);
  struct rlimit limit;
  if (!getrlimit(RLIMIT_NOFILE, &limit)) row(out, "process_max_fds", "gauge", "Descriptors that it may open.", (double)limit.rlim_cur);
}
