/* Sliding window of the newest steps' times with an approximate high quantile: a ring of samples over a histogram with 16 buckets per
 * octave (the answer is at most 6 % high), and the exact share of samples over a limit. Add and forget O(1);
 * a quantile walks the buckets. */
#ifndef SITS_ALPS_ALPS_WINDOW_H
#define SITS_ALPS_ALPS_WINDOW_H

#include <stdbool.h>
#include <stdint.h>

#define ALPS_WINDOW_STEPS 512
#define ALPS_WINDOW_BUCKETS (16 * 28) /* 1 us .. 2^28 us */

struct alps_window {
  uint16_t bucket[ALPS_WINDOW_STEPS];
  int32_t weight[ALPS_WINDOW_STEPS];     /* streams that waited for that step */
  bool is_over[ALPS_WINDOW_STEPS];
  int32_t n, next;
  int64_t total, total_over;
  int64_t counts[ALPS_WINDOW_BUCKETS];
};

void alps_window_add(struct alps_window *window, int64_t us, int32_t weight, bool is_over);
double alps_window_over(const struct alps_window *window);                      /* share of samples over the limit, 0..1 */
double alps_window_quantile(const struct alps_window *window, double q); /* us; 0 when empty */

#endif
