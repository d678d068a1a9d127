/* First tokens in time. With a first-token target, a waiting prompt is timely until it is given up:
 *
 *   alps_forgo       when the prompts ahead cannot all be read within the target, the longest waiting ones are given up: that saves most of
 *                    the others (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs", 1968)
 *   alps_is_hopeless a prompt that cannot be read before its own deadline any more is given up when its turn comes
 *
 * Before that, steps are stretched: they take up to twice the inter-token target, as long as no more than half a percent of the tokens come
 * late so (alps_plan.c, set_budget). What prompts gain by it is the decoding that they need not wait for.
 *
 * What is given up stands behind the timely ones of its tenant and priority, and one in LATE_EVERY admissions is kept for it. So a burst
 * makes few requests late instead of all. Arrival order is order of deadlines, because the target is the same for all.
 *
 * Timely waiting entries of a class hang in lists by length, four an octave: the longest is found without looking at the others. */
#include <assert.h>
#include <math.h>

#include "alps/alps_internal.h"

static const double READ_SHARE = 0.97;     /* of the target: what the prompts ahead may take, unless a step more would pass it */
static const double PRESSED_SHARE = 0.8;   /* of that: steps are stretched before prompts are given up */
static const double LEAST_READ = 4096;     /* prompt tokens before anything is given up */
static const double READ_MEMORY = 30000;   /* prompt tokens over which the speed of reading is averaged */

static int32_t length_bucket(int32_t n_tokens)
{
  int32_t bucket = (int32_t)(4 * log2((double)n_tokens));
  return bucket < ALPS_LENGTHS ? bucket : ALPS_LENGTHS - 1;
}

void alps_timely_add(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  struct alps_class *c = &alps->classes[e->request.service_class];
  int32_t *head = &c->timely[length_bucket(alps_to_read(e))];
  e->length_prev = -1;
  e->length_next = *head;
  if (*head >= 0) alps->entries[*head].length_prev = id;
  *head = id;
  c->timely_tokens += alps_to_read(e);
}

void alps_timely_remove(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  struct alps_class *c = &alps->classes[e->request.service_class];
  if (e->length_prev >= 0) alps->entries[e->length_prev].length_next = e->length_next;
  else c->timely[length_bucket(alps_to_read(e))] = e->length_next;
  if (e->length_next >= 0) alps->entries[e->length_next].length_prev = e->length_prev;
  c->timely_tokens -= alps_to_read(e);
}

void alps_note_reading(struct alps *alps, int32_t n_tokens, double step_us)
{
  double keep = READ_MEMORY / (READ_MEMORY + n_tokens);
  alps->read_us = keep * alps->read_us + step_us;
  alps->read_tokens = keep * alps->read_tokens + n_tokens;
}

/* Time to read so many prompt tokens beside what else runs; 0 while little is known: a device's first steps are its slowest. */
static double reading_us(const struct alps *alps, double n_tokens)
{
  return alps->read_tokens > LEAST_READ ? n_tokens * alps->read_us / alps->read_tokens : 0;
}

bool alps_is_hopeless(const struct alps *alps, int32_t id)
{
  const struct alps_entry *e = &alps->entries[id];
  double done_us = (double)(alps->now_us - e->request.arrival_us) + reading_us(alps, alps_to_read(e));
  return done_us > (double)alps->options.ttft_target_us;
}

void alps_forgo(struct alps *alps, int64_t running_tokens)
{
  const double target_us = (double)alps->options.ttft_target_us, step_us = (double)alps->options.itl_target_us;
  const double most_us = fmax(target_us / 2, fmin(READ_SHARE * target_us, target_us - step_us));
  double ahead = (double)running_tokens;
  alps->pressed_class = ALPS_CLASSES;
  for (int k = 0; k < ALPS_CLASSES; k++) {
    struct alps_class *c = &alps->classes[k];
    if (alps->pressed_class == ALPS_CLASSES && c->timely_tokens > 0 &&
        reading_us(alps, ahead + (double)c->timely_tokens) > PRESSED_SHARE * most_us)
      alps->pressed_class = k;
    for (int32_t at = ALPS_LENGTHS - 1; at >= 0 && reading_us(alps, ahead + (double)c->timely_tokens) > most_us;) {
      if (c->timely[at] >= 0) alps_queue_give_up(alps, c->timely[at]);
      else at--;
    }
    ahead += (double)c->timely_tokens;
  }
}
