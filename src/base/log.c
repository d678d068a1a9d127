/* See log.h. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static atomic_int min_level = LOG_INFO;
static const char *const level_names[] = {"debug", "info", "warn", "error"};

void log_set_level(enum log_level level) { atomic_store_explicit(&min_level, (int)level, memory_order_relaxed); }
int log_enabled(enum log_level level) { return (int)level >= atomic_load_explicit(&min_level, memory_order_relaxed); }

void log_write(enum log_level level, const char *subsystem, const char *format, ...)
{
  if (!log_enabled(level) || level >= LOG_OFF) return;
  char line[2048];
  struct timespec now;
  struct tm utc;
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &utc);
  size_t used = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &utc);
  used += (size_t)snprintf(line + used, sizeof line - used, ".%03ldZ %-5s %-7s ", now.tv_nsec / 1000000, level_names[level], subsystem);
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line + used, sizeof line - used - 1, format, args);
  va_end(args);
  size_t end = n < 0 ? used : used + (size_t)n;
  if (end > sizeof line - 2) end = sizeof line - 2;
  for (size_t i = used; i < end; i++)
    if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = '?';
  line[end++] = '\n';
  ssize_t ignored = write(STDERR_FILENO, line, end);
  (void)ignored;
}
