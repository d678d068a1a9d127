/* Random operations on the planner against a small model that keeps each entry's counts and the pages they need. After each plan: nothing
 * is planned twice, no limit is passed, pages suffice, every running sequence that may decode does; a twin fed with the same calls plans
 * the same; and everything that is not removed finishes. SITS_PROPERTY_OPS and SITS_PROPERTY_SEED change the run. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alps/alps.h"
#include "base/mem.h"

enum { N_ENTRIES = 48, MAX_SEQS = 8, MAX_TOKENS = 96, MAX_ROWS = 24, N_PAGES = 40, P = 64 };

struct entry {
  bool is_used, is_running, is_held, wants_rows;
  bool is_leaving, is_coming;  /* its pages are being copied away, or back */
  int32_t n_prompt, n_known, n_limit, n_computed, n_pages, width, service_class;
  int32_t n_away;              /* tokens whose pages are away */
  struct alps_admitted admitted; /* as the planner was told, for the twin */
  int64_t born;
};

struct world {
  struct alps *alps, *twin;
  uint64_t random;
  struct entry entries[N_ENTRIES];
  int32_t n_pages_free;
  int64_t now_us;
  int32_t slice_tokens, slice_id, slice_n; /* the chunk in slices */
  int64_t n_slices, n_given_up, n_more, n_preempted, n_left, n_came, n_hurried, n_finished, n_planned, oldest_us;
  bool is_twin_turn;
};

static uint32_t draw(struct world *w, uint32_t n)
{
  w->random = w->random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((w->random >> 33) % n);
}

static int32_t pages_for(int32_t n)
{
  return (n + P - 1) / P;
}

static int32_t free_id(const struct world *w)
{
  for (int32_t i = 0; i < N_ENTRIES; i++) {
    if (!w->entries[i].is_used) return i;
  }
  return -1;
}

static int32_t n_free_ids(const struct world *w)
{
  int32_t n = 0;
  for (int32_t i = 0; i < N_ENTRIES; i++) n += !w->entries[i].is_used;
  return n;
}

static int32_t n_promised(const struct world *w)
{
  int32_t n = 0;
  for (int32_t i = 0; i < N_ENTRIES; i++) n += w->entries[i].is_used ? w->entries[i].width - 1 : 0;
  return n;
}

static void do_enqueue(struct world *w)
{
  int32_t id = free_id(w), width = draw(w, 6) ? 1 : 1 + (int32_t)draw(w, 4);
  if (id < 0 || n_free_ids(w) - n_promised(w) < width) return;
  struct entry *e = &w->entries[id];
  *e = (struct entry){.is_used = true, .n_prompt = 1 + (int32_t)draw(w, draw(w, 4) ? 60 : 900), .width = width,
                      .wants_rows = draw(w, 8) == 0, .service_class = (int32_t)draw(w, ALPS_CLASSES), .born = w->now_us};
  e->n_known = e->n_prompt;
  e->n_limit = e->n_prompt + 1 + (int32_t)draw(w, 120);
  struct alps_request request = {.service_class = e->service_class, .priority = (int32_t)draw(w, 3) - 1, .tenant = draw(w, 4),
                                 .arrival_us = w->now_us, .n_known = e->n_prompt, .n_limit = e->n_limit, .width = width,
                                 .wants_rows = e->wants_rows};
  alps_enqueue(w->alps, id, &request);
  alps_enqueue(w->twin, id, &request);
}

static void drop_pages(struct world *w, struct entry *e)
{
  w->n_pages_free += e->n_pages;
  e->n_pages = 0;
}

static void do_remove(struct world *w, int32_t id)
{
  struct entry *e = &w->entries[id];
  if (!e->is_used) return;
  drop_pages(w, e);
  *e = (struct entry){0};
  alps_remove(w->alps, id);
  alps_remove(w->twin, id);
}

static void admit(void *user, int32_t id, struct alps_admitted *out)
{
  struct world *w = user;
  struct entry *e = &w->entries[id];
  if (!w->is_twin_turn) {
    assert_true(e->is_used && !e->is_running);
    e->is_running = true;
    e->is_coming = e->n_away > 0 && pages_for(e->n_away) <= w->n_pages_free;
    e->n_computed = e->is_coming ? e->n_away : 0;
    e->n_pages = pages_for(e->n_computed);
    w->n_pages_free -= e->n_pages;
    e->n_away = 0;
    e->admitted = (struct alps_admitted){.n_computed = e->n_computed, .n_pages = e->n_pages, .n_available = w->n_pages_free,
                                         .is_coming = e->is_coming};
  }
  *out = e->admitted;
}

/* The entry's last page is free; with it the entry waits again. */
static void leave_page(struct world *w, int32_t id)
{
  struct entry *e = &w->entries[id];
  if (e->n_pages > 0) w->n_pages_free++, e->n_pages--;
  if (e->n_pages > 0) return;
  e->is_leaving = false;
  w->n_left++;
  alps_requeue(w->alps, id, e->n_known);
  alps_requeue(w->twin, id, e->n_known);
}

/* Pages move between steps. */
static void move_pages(struct world *w)
{
  for (int32_t id = 0; id < N_ENTRIES; id++) {
    struct entry *e = &w->entries[id];
    if (e->is_leaving && draw(w, 2)) leave_page(w, id);
    if (!e->is_coming || draw(w, 3)) continue;
    e->is_coming = false;
    w->n_came++;
    alps_arrived(w->alps, id);
    alps_arrived(w->twin, id);
  }
}

/* The planner cannot go on without a page of somebody who leaves. */
static void hurry(struct world *w)
{
  int32_t id = 0;
  while (id < N_ENTRIES && !w->entries[id].is_leaving) id++;
  assert_true(id < N_ENTRIES);
  leave_page(w, id);
  w->n_hurried++;
}

static void preempt(struct world *w, int32_t id)
{
  struct entry *e = &w->entries[id];
  assert_true(e->is_running);
  const bool leaves = !e->is_coming && e->n_computed >= P && draw(w, 2);
  if (leaves || e->is_coming) e->n_away = e->n_computed / P * P;
  e->is_running = e->is_coming = false;
  e->n_computed = 0;
  w->n_preempted++;
  if (leaves) {
    e->is_leaving = true;
    alps_leave(w->alps, id);
    alps_leave(w->twin, id);
    return;
  }
  drop_pages(w, e);
  alps_requeue(w->alps, id, e->n_known);
  alps_requeue(w->twin, id, e->n_known);
}

/* Items and slice are what their entries allow, and fit tokens, rows and pages. */
static void check_room(struct world *w, const struct alps_plan *plan, int32_t n_planned_of[N_ENTRIES])
{
  int32_t n_tokens = 0, n_rows = 0, n_need = 0;
  assert_in_range(plan->n_items, 0, MAX_SEQS);
  for (int32_t i = 0; i < plan->n_items; i++) {
    const struct alps_item *item = &plan->items[i];
    const struct entry *e = &w->entries[item->id];
    assert_true(e->is_running && !e->is_held && !e->is_coming);
    assert_int_equal(n_planned_of[item->id]++, 0);
    assert_in_range(item->n_tokens, 1, e->n_known - e->n_computed);
    assert_int_equal(item->is_last, e->n_computed + item->n_tokens == e->n_known);
    n_tokens += item->n_tokens;
    n_rows += e->wants_rows && e->n_known == e->n_prompt ? item->n_tokens : item->is_last;
    n_need += pages_for(e->n_computed + item->n_tokens) - e->n_pages;
  }
  if (plan->slice.id >= 0) {
    const struct entry *e = &w->entries[plan->slice.id];
    assert_true(e->is_running && !e->is_held && !e->is_coming && !e->wants_rows && w->slice_tokens > 0);
    assert_int_equal(n_planned_of[plan->slice.id], 0);
    assert_in_range(plan->slice.n_tokens, 1, e->n_known - e->n_computed < w->slice_tokens ? e->n_known - e->n_computed : w->slice_tokens);
    assert_int_equal(plan->slice.is_last, e->n_computed + plan->slice.n_tokens == e->n_known);
    assert_int_equal(plan->slice_class, e->service_class);
    assert_true(plan->slice_us > 0);
    if (plan->slice_begins) n_need += pages_for(e->n_computed + plan->slice.n_tokens) - e->n_pages;
    else assert_true(plan->slice.id == w->slice_id && plan->slice.n_tokens == w->slice_n);
  }
  assert_int_equal(n_tokens, plan->n_tokens);
  assert_in_range(n_tokens, 0, MAX_TOKENS);
  assert_in_range(n_rows, 0, MAX_ROWS);
  assert_in_range(n_need, 0, w->n_pages_free);
}

static void check_plan(struct world *w, const struct alps_plan *plan)
{
  int32_t n_planned_of[N_ENTRIES] = {0};
  check_room(w, plan, n_planned_of);
  int32_t highest = ALPS_CLASSES, n_running = 0;
  for (int32_t i = 0; i < N_ENTRIES; i++) {
    const struct entry *e = &w->entries[i];
    n_running += e->is_running ? e->width : e->is_leaving;
    if (e->is_used && !e->is_held && (!e->is_running || e->is_coming || e->n_known - e->n_computed > 1 || e->n_known == e->n_prompt) &&
        e->service_class < highest) {
      highest = e->service_class;
    }
  }
  assert_in_range(n_running, 0, MAX_SEQS); /* forks have their slots */
  for (int32_t i = 0; i < N_ENTRIES; i++) {
    const struct entry *e = &w->entries[i];
    bool decodes = e->is_running && !e->is_held && !e->is_coming && e->n_known - e->n_computed == 1 && e->n_known > e->n_prompt;
    if (decodes && e->service_class <= highest) assert_int_equal(n_planned_of[i], 1);
  }
}

static void update(struct world *w, int32_t id)
{
  const struct entry *e = &w->entries[id];
  alps_update(w->alps, id, e->n_known, e->n_computed, e->n_pages, 0);
  alps_update(w->twin, id, e->n_known, e->n_computed, e->n_pages, 0);
}

static void fork_all(struct world *w, int32_t id)
{
  while (w->entries[id].width > 1) {
    int32_t twin = free_id(w);
    assert_true(twin >= 0);
    w->entries[id].width--;
    w->entries[twin] = w->entries[id];
    w->entries[twin].width = 1;
    w->entries[twin].n_pages = 0; /* this model copies nothing: its pages are all shared, and counted with the first */
    alps_fork(w->alps, id, twin);
    alps_fork(w->twin, id, twin);
    w->entries[twin].n_computed = 0; /* so it reads the prompt again in pages of its own */
    update(w, twin);
  }
}

static void execute_item(struct world *w, const struct alps_item *item)
{
  struct entry *e = &w->entries[item->id];
  e->n_computed += item->n_tokens;
  w->n_pages_free -= pages_for(e->n_computed) - e->n_pages;
  e->n_pages = pages_for(e->n_computed);
  if (e->n_computed < e->n_known) {
    update(w, item->id);
    return;
  }
  fork_all(w, item->id);
  e->n_known++;
  if (e->n_known > e->n_limit || draw(w, 60) == 0) {
    w->n_finished++;
    if (w->now_us - e->born > w->oldest_us) w->oldest_us = w->now_us - e->born;
    do_remove(w, item->id);
  } else {
    update(w, item->id);
  }
}

static void execute(struct world *w, const struct alps_plan *plan)
{
  struct alps_item items[MAX_SEQS];
  memcpy(items, plan->items, (size_t)plan->n_items * sizeof *items);
  for (int32_t i = 0; i < plan->n_items; i++) execute_item(w, &items[i]);
}

/* The chunk of a lower class that was being read in slices makes room for that of entry `id`, if there is one. */
static void give_up_slice(struct world *w, int32_t id)
{
  struct entry *e = &w->entries[w->slice_id];
  if (w->n_slices == 0 || w->slice_id == id || !e->is_running || e->is_coming || e->n_pages <= pages_for(e->n_computed)) return;
  w->n_pages_free += e->n_pages - pages_for(e->n_computed);
  e->n_pages = pages_for(e->n_computed);
  update(w, w->slice_id);
  w->n_given_up++;
}

/* A slice: its pages when the chunk begins; now and then it ends, or could not begin. */
static void execute_slice(struct world *w, struct alps_plan *plan, struct alps_plan *twin)
{
  struct alps_item item = plan->slice;
  struct entry *e = &w->entries[item.id];
  if (plan->slice_begins) give_up_slice(w, item.id);
  if (plan->slice_begins && draw(w, 20) == 0) {
    alps_drop_slice(w->alps);
    alps_drop_slice(w->twin);
    return;
  }
  if (plan->slice_begins) {
    w->n_pages_free -= pages_for(e->n_computed + item.n_tokens) - e->n_pages;
    e->n_pages = pages_for(e->n_computed + item.n_tokens);
    update(w, item.id);
  }
  w->slice_id = item.id;
  w->slice_n = item.n_tokens;
  w->n_slices++;
  plan->sliced_us = twin->sliced_us += 100;
  plan->slice_ended = twin->slice_ended = draw(w, 3) == 0;
  if (plan->slice_ended) execute_item(w, &item);
}

/* What is left of a slice's time: both planners go on in the same way, within the pages that are there. */
static void plan_more(struct world *w, struct alps_plan *plan, struct alps_plan *twin)
{
  while (plan->slice.id >= 0 && plan->slice_ended && draw(w, 2)) {
    w->is_twin_turn = false;
    const int32_t n_free = w->n_pages_free;
    const bool has_time = draw(w, 4) > 0, is_more = alps_plan_more(w->alps, n_free, has_time, admit, w, plan);
    w->is_twin_turn = true;
    assert_int_equal(alps_plan_more(w->twin, n_free, has_time, admit, w, twin), is_more);
    assert_int_equal(plan->n_items, twin->n_items);
    assert_memory_equal(plan->items, twin->items, (size_t)plan->n_items * sizeof *plan->items);
    assert_memory_equal(&plan->slice, &twin->slice, sizeof plan->slice);
    if (!is_more && plan->slice.id >= 0) return; /* not on such a plan */
    int32_t n_planned_of[N_ENTRIES] = {0};
    check_room(w, plan, n_planned_of);
    if (!is_more) return;
    w->n_more++;
    execute_slice(w, plan, twin);
  }
}

/* The items' pages are taken before a slice behind them begins. */
static void reserve(struct world *w, const struct alps_plan *plan)
{
  for (int32_t i = 0; i < plan->n_items; i++) {
    struct entry *e = &w->entries[plan->items[i].id];
    const int32_t n = pages_for(e->n_computed + plan->items[i].n_tokens);
    w->n_pages_free -= n - e->n_pages;
    e->n_pages = n;
  }
}

static void do_step(struct world *w)
{
  struct alps_plan plan, twin;
  enum sits_status status;
  move_pages(w);
  for (;;) {
    const int32_t n_free = w->n_pages_free;
    w->is_twin_turn = false;
    status = alps_plan(w->alps, w->now_us, n_free, admit, w, &plan);
    w->is_twin_turn = true;
    assert_int_equal(alps_plan(w->twin, w->now_us, n_free, admit, w, &twin), status);
    assert_int_equal(plan.n_victims, twin.n_victims);
    if (status != SITS_AGAIN) break;
    for (int32_t i = 0; i < plan.n_victims; i++) {
      assert_int_equal(plan.victims[i], twin.victims[i]);
      preempt(w, plan.victims[i]);
    }
    if (plan.n_victims == 0) hurry(w);
  }
  assert_int_equal(plan.n_items, twin.n_items);
  assert_memory_equal(plan.items, twin.items, (size_t)plan.n_items * sizeof *plan.items);
  check_plan(w, &plan);
  int64_t step_us = 500 + 40 * plan.n_tokens + draw(w, 200);
  w->now_us += step_us;
  w->n_planned += plan.n_items;
  assert_memory_equal(&plan.slice, &twin.slice, sizeof plan.slice);
  if (plan.slice.id >= 0 && plan.slice_is_behind) reserve(w, &plan);
  if (plan.slice.id >= 0) execute_slice(w, &plan, &twin);
  plan_more(w, &plan, &twin);
  execute(w, &plan);
  alps_report(w->alps, &plan, step_us);
  alps_report(w->twin, &twin, step_us);
}

static void one_operation(struct world *w)
{
  uint32_t what = draw(w, 100), id = draw(w, N_ENTRIES);
  if (what < 25) {
    do_enqueue(w);
  } else if (what < 27) {
    if (w->entries[id].width <= 1) do_remove(w, (int32_t)id);
  } else if (what < 30) {
    struct entry *e = &w->entries[id];
    if (!e->is_used) return;
    e->is_held = !e->is_held;
    alps_hold(w->alps, (int32_t)id, e->is_held);
    alps_hold(w->twin, (int32_t)id, e->is_held);
  } else {
    do_step(w);
  }
}

static void release_holds(struct world *w)
{
  for (int32_t i = 0; i < N_ENTRIES; i++) {
    if (!w->entries[i].is_held) continue;
    w->entries[i].is_held = false;
    alps_hold(w->alps, i, false);
    alps_hold(w->twin, i, false);
  }
}

enum slices { BEFORE, BY_RATE, BEHIND };

/* Returns how often decodes could not wait for the page of one that left. */
static int64_t run(uint64_t seed, int64_t n_operations, int64_t itl_target_us, int64_t ttft_target_us, int32_t slice_tokens,
                enum slices slices, bool with_faults)
{
  static struct world the_world;
  struct world *w = &the_world;
  struct alps_options options = {.max_entries = N_ENTRIES, .max_seqs = MAX_SEQS, .max_batch_tokens = MAX_TOKENS, .max_rows = MAX_ROWS,
                                 .page_tokens = P, .n_pages = N_PAGES, .itl_target_us = itl_target_us,
                                 .ttft_target_us = ttft_target_us, .slice_tokens = slice_tokens, .slices_by_rate = slices == BY_RATE,
                                 .slices_behind = slices == BEHIND};
  memset(w, 0, sizeof *w);
  w->slice_tokens = slice_tokens;
  w->random = seed;
  w->n_pages_free = N_PAGES;
  assert_int_equal(alps_create(&options, &w->alps), SITS_OK);
  assert_int_equal(alps_create(&options, &w->twin), SITS_OK);
  for (int64_t i = 0; i < n_operations; i++) {
    if (with_faults) mem_fault_arm(1);
    one_operation(w);
    alps_check(w->alps);
    if (with_faults) {
      assert_false(mem_fault_fired()); /* it asked for no memory */
      mem_fault_arm(0);
    }
  }
  release_holds(w);
  for (int i = 0; i < 20000 && n_free_ids(w) < N_ENTRIES; i++) do_step(w);
  assert_int_equal(n_free_ids(w), N_ENTRIES); /* nothing starves */
  assert_int_equal(w->n_pages_free, N_PAGES);
  assert_true(w->n_preempted > 0 && w->n_left > 0 && w->n_came > 0);
  assert_true(w->n_finished > 100);
  assert_true(slice_tokens == 0 || w->n_slices > 100);
  assert_true(slice_tokens > 0 && slices == BEHIND ? w->n_given_up > 5 : w->n_given_up == 0);
  assert_true(slices != BEFORE ? w->n_more > 20 : w->n_more == 0);
  alps_destroy(w->alps);
  alps_destroy(w->twin);
  return w->n_hurried;
}

static int64_t setting(const char *name, int64_t fallback)
{
  const char *text = getenv(name);
  return text ? strtoll(text, NULL, 10) : fallback;
}

static void test_million(void **state)
{
  int64_t n = 0;
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1), setting("SITS_PROPERTY_OPS", 1000000) / 4, 0, 0, 0, BEFORE, false);
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1) + 5, setting("SITS_PROPERTY_OPS", 1000000) / 4, 4000, 0, 0, BEFORE, false);
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1) + 9, setting("SITS_PROPERTY_OPS", 1000000) / 4, 4000, 60000, 0, BEFORE, false);
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1) + 13, setting("SITS_PROPERTY_OPS", 1000000) / 4, 1500, 60000, 48, BEFORE, false);
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1) + 17, setting("SITS_PROPERTY_OPS", 1000000) / 4, 3000, 60000, 200, BY_RATE, false);
  n += run((uint64_t)setting("SITS_PROPERTY_SEED", 1) + 21, setting("SITS_PROPERTY_OPS", 1000000) / 4, 3000, 60000, 48, BEHIND, false);
  assert_true(n > 0);
}

static void test_without_memory(void **state)
{
  run(3, setting("SITS_PROPERTY_OPS", 1000000) / 10, 4000, 60000, 0, BEFORE, true);
  run(4, setting("SITS_PROPERTY_OPS", 1000000) / 20, 1500, 0, 32, BEFORE, true);
}

static void test_creation_survives_no_memory(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip(); /* allocations cannot be made to fail in this build */
#endif
  struct alps_options options = {.max_entries = 8, .max_seqs = 4, .max_batch_tokens = 64, .n_pages = 8};
  for (uint64_t n = 1; n < 100; n++) {
    struct alps *alps = NULL;
    mem_fault_arm(n);
    enum sits_status status = alps_create(&options, &alps);
    mem_fault_arm(0);
    if (status == SITS_OK) {
      assert_true(n > 5);
      alps_destroy(alps);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_null(alps);
  }
  assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_million), cmocka_unit_test(test_without_memory), cmocka_unit_test(test_creation_survives_no_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
