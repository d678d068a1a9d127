/* Group scales of a row that are small whole multiples of one number: what quant_weight.h calls multiples and powers, and what a scale for
 * each row is (one group, or groups that happen to agree). Integer kernels multiply weights by the factors and the row's sums by that
 * number. Pure, no allocation, any thread.
 */
#ifndef SITS_TENSOR_ROW_SCALE_H
#define SITS_TENSOR_ROW_SCALE_H

#include <stdint.h>

#define ROW_SCALE_MOST 16            /* the largest factor */

/* Ascending: what holds of all rows of a matrix is the least of what holds of each. */
enum row_scale_kind {
  ROW_SCALE_FREE,                    /* not of that kind */
  ROW_SCALE_MULTIPLES,               /* every scale = m * channel to the bit, m = 0, 1 .. 16 */
  ROW_SCALE_POWERS                   /* the same, m = 0, 1, 2, 4, 8, 16 */
};

/* scales: n >= 1 values of f16, at any address. channel: the largest number of that kind, more than 0, with at most 11 significant bits;
 * 1 where all scales are zero; not written where they are FREE, as they are with a negative or infinite scale, a NaN, or a factor beyond
 * ROW_SCALE_MOST. */
enum row_scale_kind row_scale_find(const void *scales, int64_t n, float *channel);

#endif
