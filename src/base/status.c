/* The status table's lookups and the two ways to fill a struct sits_error. */
#include "sits2026/status.h"

#include <stdarg.h>
#include <stdio.h>

static const struct sits_status_info status_table[SITS_STATUS_COUNT] = {
#define ROW(name, text, http, type, code, grpc, retry) [SITS_##name] = {#name, text, http, type, code, grpc, retry},
    SITS_STATUS_MAP(ROW)
#undef ROW
};

const struct sits_status_info *sits_status_info(enum sits_status status)
{
  if ((unsigned)status >= SITS_STATUS_COUNT) status = SITS_INTERNAL;
  return &status_table[status];
}

static void fill(struct sits_error *err, enum sits_status status, const char *param, const char *format, va_list args)
{
  err->status = status;
  vsnprintf(err->text, sizeof err->text, format, args);
  snprintf(err->param, sizeof err->param, "%s", param);
}

enum sits_status sits_fail(struct sits_error *err, enum sits_status status, const char *format, ...)
{
  if (err) {
    va_list args;
    va_start(args, format);
    fill(err, status, "", format, args);
    va_end(args);
  }
  return status;
}

enum sits_status sits_fail_param(struct sits_error *err, enum sits_status status, const char *param, const char *format, ...)
{
  if (err) {
    va_list args;
    va_start(args, format);
    fill(err, status, param, format, args);
    va_end(args);
  }
  return status;
}
