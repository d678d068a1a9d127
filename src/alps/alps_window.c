/* See alps_window.h. */
#include "alps/alps_window.h"

#include <math.h>

static int32_t bucket_of(int64_t us)
{
  if (us < 1) us = 1;
  int32_t octave = 63 - __builtin_clzll((uint64_t)us);
  if (octave >= ALPS_WINDOW_BUCKETS / 16) return ALPS_WINDOW_BUCKETS - 1;
  int64_t fraction = octave >= 4 ? us >> (octave - 4) & 15 : us << (4 - octave) & 15;
  return octave * 16 + (int32_t)fraction;
}

void alps_window_add(struct alps_window *window, int64_t us, int32_t weight, bool is_over)
{
  if (weight <= 0) return;
  int32_t at = window->next;
  if (window->n == ALPS_WINDOW_STEPS) {
    window->counts[window->bucket[at]] -= window->weight[at];
    window->total -= window->weight[at];
    if (window->is_over[at]) window->total_over -= window->weight[at];
  } else {
    window->n++;
  }
  window->bucket[at] = (uint16_t)bucket_of(us);
  window->weight[at] = weight;
  window->is_over[at] = is_over;
  if (is_over) window->total_over += weight;
  window->counts[window->bucket[at]] += weight;
  window->total += weight;
  window->next = (at + 1) % ALPS_WINDOW_STEPS;
}

double alps_window_over(const struct alps_window *window)
{
  return window->total > 0 ? (double)window->total_over / (double)window->total : 0;
}

double alps_window_quantile(const struct alps_window *window, double q)
{
  if (window->total == 0) return 0;
  int64_t above = (int64_t)((1 - q) * (double)window->total), seen = 0;
  for (int32_t b = ALPS_WINDOW_BUCKETS - 1; b >= 0; b--) {
    seen += window->counts[b];
    if (seen > above) return ldexp(1 + (b % 16 + 1) / 16.0, b / 16);
  }
  return 0;
}
