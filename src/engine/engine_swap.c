/* Pages of pre-empted sequences on their way to host memory and back, in pieces between the steps, so that the others need not wait.
 *
 *   out   engine_swap_out takes places; from the last page on each is copied, then free for others. When all are out it waits again.
 *   in    engine_swap_in takes pages for all; when they are filled the sequence goes on. Where that is short they are filled at once
 *         (engine_swap_fill) and it goes on in the same plan: one that only has pages is the next victim, and where memory is short it
 *         would come and go in turns and compute nothing.
 *
 * A turn copies for a share of a usual step, longer when nothing computes; and at once what the decodes of the turn lack
 * (engine_swap_hurry). Between pieces a sequence may end or, coming back, lose its new pages again: what lies in host memory stays good. */
#include <assert.h>
#include <math.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine_internal.h"

static const double SWAP_SHARE = 0.125; /* of a usual step */
static const int64_t SWAP_IDLE_US = 5000;
static const double SWAP_SHORT_US = 1000; /* is noticed by nobody */

static unsigned char *host_place(const struct sits_engine *engine, int32_t place)
{
  return engine->host_memory + (uint64_t)place * engine->page_bytes;
}

static void begin(struct sits_engine *engine, struct engine_choice *choice, enum engine_swapping way)
{
  choice->swap.way = way;
  choice->swap.place = choice->swap.at.head;
  choice->swap.n_left = choice->swap.at.n_pages;
  engine->swapping[engine->n_swapping++] = choice->id;
}

bool engine_swap_out(struct sits_engine *engine, struct engine_choice *choice)
{
  if (engine->options.n_host_pages == 0 || kv_swap_out(engine->pages, choice->slot, &choice->swap.at) != SITS_OK) return false;
  begin(engine, choice, SWAP_OUT);
  engine_give_back(engine, choice, choice->swap.n_left);
  return true;
}

bool engine_swap_in(struct sits_engine *engine, struct engine_choice *choice)
{
  int32_t n_moves = 0;
  struct kv_move move;
  if (kv_reserve(engine->pages, choice->slot, choice->swap.at.n_tokens, &move, &n_moves) != SITS_OK) return false;
  begin(engine, choice, SWAP_IN);
  return true;
}

void engine_swap_stop(struct sits_engine *engine, struct engine_choice *choice)
{
  if (choice->swap.way == SWAP_NONE) return;
  const bool is_whole = choice->swap.way == SWAP_IN; /* in host memory */
  choice->swap.way = SWAP_NONE;
  for (int32_t i = 0; i < engine->n_swapping; i++) {
    if (engine->swapping[i] != choice->id) continue;
    engine->n_swapping--;
    for (; i < engine->n_swapping; i++) engine->swapping[i] = engine->swapping[i + 1];
  }
  if (!is_whole) kv_swap_free(engine->pages, &choice->swap.at);
}

/* All pages are out, or cannot be copied: then the sequence is computed again. */
static void end_out(struct sits_engine *engine, struct engine_choice *choice, bool is_whole)
{
  if (is_whole) choice->swap.way = SWAP_IN; /* so it is kept */
  engine_swap_stop(engine, choice);
  engine->stats.n_preemptions_swapped += is_whole;
  engine_close_slot(engine, choice);
  engine_wait_again(engine, choice);
}

static void take_in(struct sits_engine *engine, struct engine_choice *choice)
{
  engine_swap_stop(engine, choice);
  choice->n_computed = choice->swap.at.n_tokens;
  kv_commit(engine->pages, choice->slot, choice->tokens, choice->n_computed);
  kv_swap_free(engine->pages, &choice->swap.at);
}

/* The pages are filled. */
static void end_in(struct sits_engine *engine, struct engine_choice *choice)
{
  take_in(engine, choice);
  alps_arrived(engine->alps, choice->id);
  engine_tell_filled(engine, choice);
}

static void fail_in(struct sits_engine *engine, struct engine_choice *choice)
{
  engine_swap_stop(engine, choice);
  kv_swap_free(engine->pages, &choice->swap.at);
  engine_close_slot(engine, choice);
  engine_wait_again(engine, choice);
}

/* The next page of one that is on its way. False: it cannot be copied. */
static bool copy_page(struct sits_engine *engine, struct engine_choice *choice)
{
  struct engine_swap *swap = &choice->swap;
  const struct backend_vtable *vtable = engine->options.vtable;
  const bool is_out = swap->way == SWAP_OUT;
  const int64_t started_us = clock_monotonic_us();
  const int32_t *pages;
  kv_pages(engine->pages, choice->slot, &pages);
  unsigned char *host = host_place(engine, swap->place);
  const int32_t page = pages[swap->n_left - 1];
  const enum sits_status status = is_out ? vtable->kv_read_page(engine->options.kv, page, host)
                                         : vtable->kv_write_page(engine->options.kv, page, host);
  engine->page_copy_us += 0.05 * ((double)(clock_monotonic_us() - started_us) - engine->page_copy_us);
  if (status != SITS_OK) {
    log_error("engine", "a page cannot be swapped request=%s how=%s", choice->request->params.id, is_out ? "out" : "in");
    return false;
  }
  swap->n_left--;
  swap->place = kv_swap_next(engine->pages, swap->place);
  if (is_out) engine_give_back(engine, choice, swap->n_left);
  return true;
}

/* One page of the one that has been on its way longest; those that leave go first, for others wait for their pages. */
static void move_page(struct sits_engine *engine)
{
  int32_t i = 0;
  while (i < engine->n_swapping && engine->by_id[engine->swapping[i]]->swap.way != SWAP_OUT) i++;
  struct engine_choice *choice = engine->by_id[engine->swapping[i < engine->n_swapping ? i : 0]];
  const bool is_out = choice->swap.way == SWAP_OUT;
  if (!copy_page(engine, choice)) {
    if (is_out) end_out(engine, choice, false);
    else fail_in(engine, choice);
  } else if (choice->swap.n_left == 0) {
    if (is_out) end_out(engine, choice, true);
    else end_in(engine, choice);
  }
}

static double turn_us(const struct sits_engine *engine) { return SWAP_SHARE * engine->stats.step_us_ewma; }

bool engine_swap_fill(struct sits_engine *engine, struct engine_choice *choice)
{
  const double most_us = fmax(turn_us(engine), SWAP_SHORT_US);
  const int64_t started_us = clock_monotonic_us();
  bool is_whole = true;
  if (engine->options.swap_step_pages > 0 || engine->page_copy_us * choice->swap.n_left > most_us) return false;
  while (is_whole && choice->swap.n_left > 0) is_whole = copy_page(engine, choice); /* one that fails is found again in its turn */
  engine->swapped_us += clock_monotonic_us() - started_us;
  if (is_whole) take_in(engine, choice);
  return is_whole;
}

void engine_swap_hurry(struct sits_engine *engine)
{
  const int64_t started_us = clock_monotonic_us();
  move_page(engine);
  engine->swapped_us += clock_monotonic_us() - started_us;
}

bool engine_swap_run(struct sits_engine *engine)
{
  const bool is_idle = engine->plan.n_items == 0 && engine->plan.slice.id < 0;
  const int64_t started_us = clock_monotonic_us();
  const int64_t most_us = is_idle ? SWAP_IDLE_US : (int64_t)turn_us(engine);
  int32_t n = 0;
  engine->swapped_us = 0;
  if (engine->n_swapping == 0) return false;
  while (engine->n_swapping > 0) {
    const int64_t spent_us = clock_monotonic_us() - started_us;
    const int32_t most = engine->options.swap_step_pages;
    if (n > 0 && (most > 0 ? n >= most : (double)spent_us + engine->page_copy_us > (double)most_us)) break;
    move_page(engine);
    n++;
  }
  engine->swapped_us = clock_monotonic_us() - started_us;
  alps_spend(engine->alps, engine->swapped_us);
  return true;
}
