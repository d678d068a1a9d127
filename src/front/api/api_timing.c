/* See api_timing.h. */
#include "front/api/api_timing.h"

#include <stdio.h>

static double ms(int64_t us) { return us > 0 ? (double)us / 1000 : 0; }

struct api_timing api_timing_of(const struct api_usage *usage, int64_t delivered_us)
{
  const struct sits_request_timing *t = &usage->timing;
  const int64_t delivery_us = t->done_us > 0 && delivered_us > t->done_us ? delivered_us - t->done_us : 0;
  return (struct api_timing){.queue_ms = ms(t->queue_us), .prefill_ms = ms(t->prefill_us), .decode_ms = ms(t->decode_us),
                             .scheduling_ms = ms(t->scheduling_us), .delivery_ms = ms(delivery_us),
                             .time_to_first_token_ms = t->first_token_us ? ms(t->first_token_us - t->submitted_us) : 0,
                             .total_ms = ms(t->done_us - t->submitted_us + delivery_us), .n_preemptions = t->n_preemptions};
}

void api_timing_log(const struct api_usage *usage, int64_t delivered_us, char out[API_TIMING_LOG_BYTES])
{
  const struct api_timing t = api_timing_of(usage, delivered_us);
  out[0] = '\0';
  if (usage->timing.submitted_us == 0) return;
  snprintf(out, API_TIMING_LOG_BYTES, " queue_ms=%.1f prefill_ms=%.1f decode_ms=%.1f scheduling_ms=%.1f delivery_ms=%.1f", t.queue_ms,
           t.prefill_ms, t.decode_ms, t.scheduling_ms, t.delivery_ms);
}
