/* Clocks. */
#ifndef SITS_BASE_CLOCK_H
#define SITS_BASE_CLOCK_H

#include <stdint.h>

int64_t clock_monotonic_us(void); /* since an arbitrary point, never goes back */
int64_t clock_monotonic_ns(void);
int64_t clock_unix_s(void);       /* seconds since 1970 */

#endif
