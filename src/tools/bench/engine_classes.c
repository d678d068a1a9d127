/* Service classes: high-class requests alone and beside four times what the machine can do of low class.
 *
 * Phases with and without the low class take turns on one engine, and in each pair the same high-class prompts come at the same times, so
 * that what else goes on on the host meets both alike. A phase ends when all its high-class requests have had their first tokens. Results:
 * the P99s of both sides, their ratio and what chance makes of it (an interval from drawing the pairs of requests anew), and where the
 * slowest of each side have spent their time: waiting for the step in flight and for room, then in which steps. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/engine_load.h"

enum { MOST_FIRSTS = 20000, MOST_STEPS = 1 << 18, SLOWEST = 8, DRAWS = 2000, ENOUGH = 300, CAPACITY_PHASES = 5, WARM_US = 1000000 };

static const double OVERLOAD = 4, HIGH_LOAD = 0.5; /* of the low-class requests that the machine can do */

struct told_step { struct engine_step_times times; int64_t ended_us; };

struct step_log { struct told_step steps[MOST_STEPS]; atomic_int n; };

static struct step_log step_log;

/* engine_options.on_step */
static void note_step(void *user, const struct engine_step_times *times)
{
  struct step_log *log = user;
  const int n = atomic_load(&log->n);
  if (n == MOST_STEPS) return;
  log->steps[n] = (struct told_step){*times, clock_monotonic_us()};
  atomic_store(&log->n, n + 1);
}

enum { ALONE, LOADED, SIDES };
static const char *const SIDE_NAMES[SIDES] = {"alone", "overload"};

struct classes {
  struct load load;
  struct load_kind high[SIDES], low;
  struct load_first firsts[SIDES][MOST_FIRSTS];
  double ms[SIDES][MOST_FIRSTS], drawn[SIDES][MOST_FIRSTS], ratios[DRAWS];
};

static struct classes scene;

/* Low-class requests a second while some always wait: of several phases the best, so that the overload is one at the machine's best too. */
static double measure_capacity(struct classes *c, json_t *rows)
{
  int64_t most_tokens = 0;
  for (int i = 0; i < CAPACITY_PHASES; i++) {
    struct load_kind full = c->low;
    full.concurrency = 32;
    load_phase(&c->load, &full, 1, 0, WARM_US);
    json_array_append_new(rows, load_row("capacity", &full, c->load.seconds));
    if (full.n_tokens > most_tokens) most_tokens = full.n_tokens;
  }
  return (double)most_tokens / c->load.seconds / (c->low.n_prompt + c->low.n_output);
}

static void run_side(struct classes *c, int side, uint64_t first_number)
{
  struct load_kind kinds[2] = {c->high[side], c->low};
  load_phase(&c->load, kinds, side == LOADED ? 2 : 1, first_number, WARM_US);
  c->high[side] = kinds[0];
  c->low = kinds[1];
}

/* Where so many of the ratios that other draws of these requests would have given lie. */
static double ratio_quantile(struct classes *c, int64_t n, double percent)
{
  for (int64_t draw = 0; draw < DRAWS; draw++) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t from = (int64_t)(hash_mix((uint64_t)draw, (uint64_t)i) % (uint64_t)n);
      for (int side = 0; side < SIDES; side++) c->drawn[side][i] = c->ms[side][from];
    }
    c->ratios[draw] = bench_percentile(c->drawn[LOADED], n, 99) / bench_percentile(c->drawn[ALONE], n, 99);
  }
  return bench_percentile(c->ratios, DRAWS, percent);
}

static int by_time_falling(const void *a, const void *b)
{
  const struct load_first *x = a, *y = b;
  const int64_t x_us = x->token_us - x->submitted_us, y_us = y->token_us - y->submitted_us;
  return (x_us < y_us) - (x_us > y_us);
}

/* The steps that ended between a request's arrival and its first token (the last one just behind it), ms from the arrival. */
static json_t *steps_of(const struct load_first *first)
{
  json_t *steps = json_array();
  const int n = atomic_load(&step_log.n);
  for (int i = 0; i < n; i++) {
    const struct told_step *s = &step_log.steps[i];
    if (s->ended_us < first->submitted_us) continue;
    if (s->ended_us - s->times.step_us > first->token_us) break;
    const double ended_ms = (double)(s->ended_us - first->submitted_us) * 1e-3;
    json_array_append_new(steps, json_pack("{s:f, s:f, s:f, s:f, s:i, s:i}", "ended_ms", ended_ms, "step_ms",
                                           (double)s->times.step_us * 1e-3, "predicted_ms", (double)s->times.predicted_us * 1e-3,
                                           "sliced_ms", (double)s->times.sliced_us * 1e-3, "decodes", s->times.n_decode, "prompt_tokens",
                                           s->times.n_prompt_tokens));
  }
  return steps;
}

/* Sorts the side's requests. */
static json_t *decomposition(struct classes *c, int side)
{
  struct load_kind *kind = &c->high[side];
  double *ms = c->drawn[0];
  json_t *slowest = json_array(), *out;
  const int64_t n = kind->n_firsts;
  for (int64_t i = 0; i < n; i++) ms[i] = (double)(kind->firsts[i].scheduled_us - kind->firsts[i].submitted_us) * 1e-3;
  out = json_pack("{s:s, s:s, s:o}", "case", SIDE_NAMES[side], "kind", "parts", "until_admitted_ms", bench_summary(ms, n));
  for (int64_t i = 0; i < n; i++) ms[i] = (double)(kind->firsts[i].token_us - kind->firsts[i].scheduled_us) * 1e-3;
  json_object_set_new(out, "from_there_ms", bench_summary(ms, n));
  qsort(kind->firsts, (size_t)n, sizeof *kind->firsts, by_time_falling);
  for (int64_t i = 0; i < n && i < SLOWEST; i++) {
    const struct load_first *f = &kind->firsts[i];
    const double ttft_ms = (double)(f->token_us - f->submitted_us) * 1e-3, wait_ms = (double)(f->scheduled_us - f->submitted_us) * 1e-3;
    json_array_append_new(slowest, json_pack("{s:f, s:f, s:o}", "ttft_ms", ttft_ms, "until_admitted_ms", wait_ms, "steps", steps_of(f)));
  }
  json_object_set_new(out, "slowest", slowest);
  return out;
}

static void report(struct classes *c, double seconds, double can_do, json_t *rows)
{
  const int64_t n = c->high[ALONE].n_firsts < c->high[LOADED].n_firsts ? c->high[ALONE].n_firsts : c->high[LOADED].n_firsts;
  for (int side = 0; side < SIDES; side++) {
    load_ttft(&c->high[side], c->ms[side]);
    json_array_append_new(rows, load_row(SIDE_NAMES[side], &c->high[side], seconds));
  }
  json_array_append_new(rows, load_row(SIDE_NAMES[LOADED], &c->low, seconds));
  const double lowest = ratio_quantile(c, n, 5), highest = ratio_quantile(c, n, 95);
  const double alone = bench_percentile(c->ms[ALONE], n, 99), loaded = bench_percentile(c->ms[LOADED], n, 99);
  const double low_share = (double)c->low.n_tokens / (c->low.n_prompt + c->low.n_output) / seconds / can_do;
  fprintf(stderr, "classes: high class first token p99 %.1f ms alone, %.1f ms under overload: %.2fx (%.2f to %.2f by chance)%s; "
          "low class gets %.0f %% of what it can get alone\n", alone, loaded, loaded / alone, lowest, highest,
          n < ENOUGH ? ", of too few requests for a P99" : "", 100 * low_share);
  json_array_append_new(rows, json_pack("{s:s, s:f, s:f, s:f, s:f}", "case", "summary", "ttft_p99_ratio", loaded / alone,
                                        "ratio_5_percent", lowest, "ratio_95_percent", highest, "low_class_share_of_capacity", low_share));
  for (int side = 0; side < SIDES; side++) json_array_append_new(rows, decomposition(c, side));
}

bool engine_bench_classes(const struct engine_bench_options *o, json_t *rows)
{
  struct classes *c = &scene;
  c->low = (struct load_kind){.name = "low", .service_class = SITS_CLASS_LOW, .tenant = 2, .n_prompt = 192, .n_output = 32,
                              .n_burst = 32};
  if (!load_open(&c->load, o, 192 + 32, note_step, &step_log)) return false;
  const double can_do = measure_capacity(c, rows);
  c->low.rate = OVERLOAD * can_do;
  for (int side = 0; side < SIDES; side++)
    c->high[side] = (struct load_kind){.name = "high", .service_class = SITS_CLASS_HIGH, .tenant = 1, .n_prompt = 96, .n_output = 16,
                                       .rate = HIGH_LOAD * can_do, .is_awaited = true, .firsts = c->firsts[side],
                                       .most_firsts = MOST_FIRSTS};
  for (int64_t pair = 0; pair < o->pairs; pair++) {
    const int first = (int)(pair & 1); /* each side is the first as often as the other */
    run_side(c, first, (uint64_t)pair << 32);
    run_side(c, 1 - first, (uint64_t)pair << 32);
  }
  load_close(&c->load);
  report(c, c->load.seconds * (double)o->pairs, can_do, rows);
  return true;
}
