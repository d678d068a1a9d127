/* See health.h. */
#include "front/health/health.h"

#include <stddef.h>

void health_init(struct health *health, int64_t wedged_after_us)
{
  atomic_init(&health->state, HEALTH_LOADING);
  atomic_init(&health->heartbeat, NULL);
  health->context = NULL;
  health->wedged_after_us = wedged_after_us;
}

void health_set(struct health *health, enum health_state state)
{
  int now = atomic_load(&health->state);
  do {
    if (now >= (int)state) return; /* states only move forward: loading, ready, draining, failed */
  } while (!atomic_compare_exchange_weak(&health->state, &now, (int)state));
}

void health_watch(struct health *health, health_heartbeat *heartbeat, void *context)
{
  health->context = context;
  atomic_store(&health->heartbeat, heartbeat);
}

void health_unwatch(struct health *health) { atomic_store(&health->heartbeat, NULL); }

enum health_state health_state(const struct health *health) { return (enum health_state)atomic_load(&health->state); }

int64_t health_heartbeat_age_us(const struct health *health)
{
  health_heartbeat *heartbeat = atomic_load(&health->heartbeat);
  return heartbeat ? heartbeat(health->context) : 0;
}

bool health_is_live(const struct health *health)
{
  if (health_state(health) == HEALTH_FAILED) return false;
  int64_t age_us = health_heartbeat_age_us(health);
  return age_us >= 0 && age_us <= health->wedged_after_us;
}

bool health_is_ready(const struct health *health) { return health_state(health) == HEALTH_READY && health_is_live(health); }

const char *health_text(const struct health *health)
{
  static const char *const texts[] = {"loading", "ready", "draining", "failed"};
  enum health_state state = health_state(health);
  if (state == HEALTH_FAILED) return texts[state];
  int64_t age_us = health_heartbeat_age_us(health);
  if (age_us < 0) return "failed";
  return age_us > health->wedged_after_us ? "wedged" : texts[state];
}
