/* Clocks. */
#ifndef SITS_BASE_CLOCK_H
#define SITS_BASE_CLOCK_H

#include <stdint.h>

int64_t clock_monotonic_us(void); /* since an arbitrary point, never goes back */
int64_t clock_monotonic_ns(void);
int64_t clock_unix_s(void);       /* seconds since 1970 */
int64_t clock_unix_us(void);      /* microseconds since 1970 */
/* "2026-11-30T05:39:14.123456Z" */
void clock_format_utc(int64_t unix_us, char out[32]);

#endif
