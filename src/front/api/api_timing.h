/* Where a request's time went, as clients and logs are told: stages in milliseconds that add up to the total.
 *
 *   queue       from submission to the first step that took it
 *   prefill     in steps that worked on it, up to the first token
 *   decode      in steps that worked on it, after that
 *   scheduling  between those: other requests' steps, planning, sampling, pauses for a slow client, pre-emption
 *   delivery    from the engine's end of it to `delivered_us`: detokenizing, writing, the socket
 * Of several prompts in one request each stage is the longest that any of them had. */
#ifndef SITS_FRONT_API_API_TIMING_H
#define SITS_FRONT_API_API_TIMING_H

#include "front/api/api_call.h"

struct api_timing {
  double queue_ms, prefill_ms, decode_ms, scheduling_ms, delivery_ms;
  double time_to_first_token_ms, total_ms; /* 0 without a first token */
  int32_t n_preemptions;
};

/* delivered_us: monotonic, when the answer was handed on; usage->delivered_us for what the answer itself says. */
struct api_timing api_timing_of(const struct api_usage *usage, int64_t delivered_us);

#define API_TIMING_LOG_BYTES 192
/* " queue_ms=1.2 prefill_ms=... delivery_ms=...", or "" for a request that never reached the engine. */
void api_timing_log(const struct api_usage *usage, int64_t delivered_us, char out[API_TIMING_LOG_BYTES]);

#endif
