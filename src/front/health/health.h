/* Health: whether the process lives, whether it may be sent requests, and the state of its model. Answered from memory at any time; never
 * asks the engine's queue, so a busy engine is never unhealthy and a wedged one is.
 *
 * Live: the process runs, has not failed, and the engine's heartbeat is younger than the limit. Ready: live, loaded, not draining.
 * Threads: all thread-safe. */
#ifndef SITS_FRONT_HEALTH_HEALTH_H
#define SITS_FRONT_HEALTH_HEALTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum health_state { HEALTH_LOADING, HEALTH_READY, HEALTH_DRAINING, HEALTH_FAILED };

typedef int64_t health_heartbeat(void *context); /* age in microseconds of the engine loop's last turn; negative: the device failed */

struct health {
  _Atomic int state;                  /* [atomic] enum health_state */
  _Atomic(health_heartbeat *) heartbeat; /* [atomic] NULL before the engine runs; set after context */
  void *context;                      /* [init] written before heartbeat */
  int64_t wedged_after_us;            /* [init] */
};

void health_init(struct health *health, int64_t wedged_after_us);
/* A failed state is final; draining yields to failed only. */
void health_set(struct health *health, enum health_state state);
void health_watch(struct health *health, health_heartbeat *heartbeat, void *context);
void health_unwatch(struct health *health);

enum health_state health_state(const struct health *health);
int64_t health_heartbeat_age_us(const struct health *health); /* 0 when there is no engine */
bool health_is_live(const struct health *health);
bool health_is_ready(const struct health *health);
/* "loading", "ready", "draining", "failed" or "wedged". */
const char *health_text(const struct health *health);

#endif
