/* Entries and their states, the counts, and what is learned from each step.
 *
 *   FREE --alps_enqueue--> WAITING --admit (inside alps_plan)--> RUNNING --alps_requeue--> WAITING
 *   RUNNING --alps_leave--> LEAVING --alps_requeue--> WAITING
 *   FREE --alps_fork-----> RUNNING      any state --alps_remove--> FREE
 */
#include "alps/alps.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "alps/alps_internal.h"
#include "base/log.h"
#include "base/mem.h"

enum { DEFAULT_CHUNK_TOKENS = 2048, CONTROL_EVERY = 8 };

static const double MARGIN_LEAST = 0.7, MARGIN_MOST = 1.1, MARGIN_STEP = 0.01; /* over 1: chunks are whole tokens */
static const double LATE_SHARE = 0.005; /* of the tokens behind the first may come late, */
static const double LATE_MOST = 512;    /* so many at once where few did before */
static const int32_t DEFAULT_WEIGHTS[ALPS_CLASSES] = {64, 8, 1};

static const char *const POLICY_NAMES[] = {[ALPS_BUDGET] = "alps", [ALPS_WHOLE] = "continuous", [ALPS_CHUNKED] = "chunked",
                                           [ALPS_STATIC] = "static"};

enum alps_policy alps_policy_named(const char *name)
{
  for (int i = 0; name && i <= ALPS_STATIC; i++) {
    if (strcmp(name, POLICY_NAMES[i]) == 0) return (enum alps_policy)i;
  }
  return ALPS_BUDGET;
}

const char *alps_policy_name(enum alps_policy policy)
{
  return POLICY_NAMES[policy];
}

static void init_tables(struct alps *alps)
{
  for (uint32_t i = 0; i < alps->n_buckets; i++) alps->tenant_buckets[i] = -1;
  for (int32_t i = 0; i < alps->options.max_entries; i++) {
    alps->tenants[i].hash_next = i + 1 < alps->options.max_entries ? i + 1 : -1;
  }
  for (int c = 0; c < ALPS_CLASSES; c++) {
    alps->classes[c].tenants_root = -1;
    for (int32_t i = 0; i < ALPS_LENGTHS; i++) alps->classes[c].timely[i] = -1;
  }
}

static void set_defaults(struct alps_options *o)
{
  if (o->chunk_tokens <= 0) o->chunk_tokens = DEFAULT_CHUNK_TOKENS;
  if (o->page_tokens <= 0) o->page_tokens = 64;
  if (o->max_rows < o->max_seqs) o->max_rows = o->max_seqs;
  if (o->policy != ALPS_BUDGET) o->ttft_target_us = 0;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    if (o->class_weight[c] <= 0) o->class_weight[c] = DEFAULT_WEIGHTS[c];
  }
}

enum sits_status alps_create(const struct alps_options *options, struct alps **out)
{
  if (options->max_entries <= 0 || options->max_seqs <= 0 || options->max_batch_tokens <= 0 || options->n_pages <= 0) {
    return SITS_INVALID_ARGUMENT;
  }
  struct alps *alps = mem_calloc(1, sizeof *alps);
  if (!alps) return SITS_NOMEM;
  alps->options = *options;
  set_defaults(&alps->options);
  size_t n = (size_t)options->max_entries, s = (size_t)options->max_seqs;
  alps->n_buckets = 16;
  while (alps->n_buckets < n) alps->n_buckets *= 2;
  alps->entries = mem_calloc(n, sizeof *alps->entries);
  alps->entry_links = mem_calloc(n, sizeof *alps->entry_links);
  alps->tenants = mem_calloc(n, sizeof *alps->tenants);
  alps->tenant_links = mem_calloc(n, sizeof *alps->tenant_links);
  alps->tenant_buckets = mem_calloc(alps->n_buckets, sizeof(int32_t));
  alps->running = mem_calloc(s, sizeof(int32_t));
  alps->prefill = mem_calloc(s, sizeof(int32_t));
  alps->items = mem_calloc(s, sizeof *alps->items);
  alps->victims = mem_calloc(s, sizeof(int32_t));
  if (!alps->entries || !alps->entry_links || !alps->tenants || !alps->tenant_links || !alps->tenant_buckets || !alps->running ||
      !alps->prefill || !alps->items || !alps->victims) {
    alps_destroy(alps);
    return SITS_NOMEM;
  }
  init_tables(alps);
  alps_cost_init(&alps->cost, &options->prior, options->tile_tokens);
  alps_verify_init(&alps->verify);
  alps->margin = ALPS_MARGIN_START;
  alps->slice_id = -1;
  alps->slice_ratio = 1;
  alps->sequence_cap = options->max_seqs;
  alps->pressed_class = ALPS_CLASSES;
  alps->next_order = 1;
  *out = alps;
  return SITS_OK;
}

void alps_destroy(struct alps *alps)
{
  if (!alps) return;
  mem_free(alps->entries);
  mem_free(alps->entry_links);
  mem_free(alps->tenants);
  mem_free(alps->tenant_links);
  mem_free(alps->tenant_buckets);
  mem_free(alps->running);
  mem_free(alps->prefill);
  mem_free(alps->items);
  mem_free(alps->victims);
  mem_free(alps);
}

/* A class that comes back from idling starts level with the busy ones, as a tenant does. */
static void wake_class(struct alps *alps, int32_t service_class)
{
  struct alps_class *c = &alps->classes[service_class];
  if (c->n_waiting > 0 || c->n_running > 0) return;
  c->was_given_up = false;
  double least = INFINITY;
  for (int i = 0; i < ALPS_CLASSES; i++) {
    const struct alps_class *other = &alps->classes[i];
    if (i != service_class && (other->n_waiting > 0 || other->n_running > 0)) least = fmin(least, other->pass);
  }
  if (isfinite(least) && c->pass < least) c->pass = least;
}

void alps_enqueue(struct alps *alps, int32_t id, const struct alps_request *request)
{
  struct alps_entry *e = &alps->entries[id];
  assert(e->state == ALPS_FREE && request->n_known > 0 && request->width > 0);
  wake_class(alps, request->service_class);
  alps->classes[request->service_class].came_us = request->arrival_us;
  *e = (struct alps_entry){.state = ALPS_WAITING, .request = *request, .n_prompt = request->n_known, .run_at = -1,
                           .order = alps->next_order++};
  e->family = e->order;
  e->tenant = alps_tenant_acquire(alps, request->tenant, request->service_class);
  alps_queue_add(alps, id);
}

void alps_start_running(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  assert(alps->n_running < alps->options.max_seqs);
  e->state = ALPS_RUNNING;
  e->run_at = alps->n_running;
  e->admitted = alps->next_order++;
  alps->running[alps->n_running++] = id;
  alps->classes[e->request.service_class].n_running++;
  alps->tenants[e->tenant].n_running++;
  alps->n_unborn += e->request.width - 1;
}

static void stop_running(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  if (alps->slice_id == id) alps->slice_id = -1;
  int32_t last = alps->running[--alps->n_running];
  alps->running[e->run_at] = last;
  alps->entries[last].run_at = e->run_at;
  e->run_at = -1;
  e->is_coming = false;
  alps->classes[e->request.service_class].n_running--;
  alps->tenants[e->tenant].n_running--;
  alps->n_unborn -= e->request.width - 1;
}

/* A held entry that waits, and a leaving one, is in no queue, so that it blocks nobody; its tenant must not forget it. */
static void park(struct alps *alps, int32_t id)
{
  alps->tenants[alps->entries[id].tenant].n_parked++;
  alps->n_parked++;
}

static void unpark(struct alps *alps, int32_t id)
{
  alps->tenants[alps->entries[id].tenant].n_parked--;
  alps->n_parked--;
}

void alps_leave(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  assert(e->state == ALPS_RUNNING);
  stop_running(alps, id);
  e->state = ALPS_LEAVING;
  alps->n_leaving++;
  park(alps, id);
}

static void stop_leaving(struct alps *alps, int32_t id)
{
  alps->n_leaving--;
  unpark(alps, id);
}

void alps_arrived(struct alps *alps, int32_t id)
{
  assert(alps->entries[id].state == ALPS_RUNNING);
  alps->entries[id].is_coming = false;
}

void alps_spend(struct alps *alps, int64_t us)
{
  alps->spent_us = us;
}

void alps_requeue(struct alps *alps, int32_t id, int32_t n_known)
{
  struct alps_entry *e = &alps->entries[id];
  assert(e->state == ALPS_RUNNING || e->state == ALPS_LEAVING);
  if (e->state == ALPS_RUNNING) stop_running(alps, id);
  else stop_leaving(alps, id);
  e->state = ALPS_WAITING;
  e->was_preempted = true;
  e->request.n_known = n_known;
  e->request.n_ready = 0;
  e->n_computed = e->n_pages = e->copy_pages = e->n_draft = 0;
  if (e->is_held) park(alps, id);
  else alps_queue_add(alps, id);
}

void alps_fork(struct alps *alps, int32_t from, int32_t id)
{
  struct alps_entry *e = &alps->entries[id], *f = &alps->entries[from];
  assert(e->state == ALPS_FREE && f->state == ALPS_RUNNING && f->request.width > 1);
  f->request.width--;
  alps->n_unborn--;
  *e = *f;
  e->request.width = 1;
  e->is_held = false;
  e->order = alps->next_order++;
  alps_start_running(alps, id);
}

void alps_narrow(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  assert(e->state != ALPS_FREE && e->request.width > 1);
  e->request.width--;
  if (e->state == ALPS_RUNNING) alps->n_unborn--;
}

void alps_remove(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  if (e->state == ALPS_FREE) return;
  if (e->state == ALPS_RUNNING && e->n_computed + 1 >= e->n_prompt) { /* it drew: the last token is not in n_known any more */
    int32_t n_output = e->request.n_known - e->n_prompt + 1;
    alps->output_mean += (alps->output_mean > 0 ? 0.02 : 1) * (n_output - alps->output_mean);
  }
  if (alps->slice_id == id) alps->classes[e->request.service_class].was_given_up = false; /* its chunk may have been its end */
  if (e->state == ALPS_RUNNING) stop_running(alps, id);
  else if (e->state == ALPS_LEAVING) stop_leaving(alps, id);
  else if (e->is_held) unpark(alps, id);
  else alps_queue_remove(alps, id);
  alps_tenant_release(alps, e->tenant);
  e->state = ALPS_FREE;
}

void alps_update(struct alps *alps, int32_t id, int32_t n_known, int32_t n_computed, int32_t n_pages, int32_t copy_pages)
{
  struct alps_entry *e = &alps->entries[id];
  assert(e->state == ALPS_RUNNING && n_computed <= n_known);
  if (alps->slice_id == id && n_computed > e->n_computed) {
    alps->slice_id = -1;
    alps->classes[e->request.service_class].was_given_up = false;
  }
  if (n_computed > e->n_charged) {
    alps_tenant_charge(alps, e->tenant, n_computed - e->n_charged);
    e->n_charged = n_computed;
  }
  e->request.n_known = n_known;
  e->n_computed = n_computed;
  e->n_pages = n_pages;
  e->copy_pages = copy_pages;
  e->n_draft = 0;
}

void alps_update_copies(struct alps *alps, int32_t id, int32_t copy_pages)
{
  assert(alps->entries[id].state == ALPS_RUNNING);
  alps->entries[id].copy_pages = copy_pages;
}

int32_t alps_copies(const struct alps *alps, int32_t id)
{
  return alps->entries[id].copy_pages;
}

void alps_drop_slice(struct alps *alps)
{
  alps->slice_id = -1;
}

void alps_hold(struct alps *alps, int32_t id, bool is_held)
{
  struct alps_entry *e = &alps->entries[id];
  if (e->is_held == is_held) return;
  e->is_held = is_held;
  if (e->state != ALPS_WAITING) return;
  if (is_held) {
    alps_queue_remove(alps, id);
    park(alps, id);
  } else {
    unpark(alps, id);
    alps_queue_add(alps, id);
  }
}

void alps_offer(struct alps *alps, int32_t id, int32_t n_draft, const float *chance)
{
  alps->entries[id].n_draft = n_draft;
  alps->entries[id].chance = chance;
}

/* Half a percent of the tokens may come late. What steps that were not meant to be late take of it is not there for those that are. */
static void count_late(struct alps *alps, int32_t n_tokens, bool is_late)
{
  const double credit = alps->late_credit + LATE_SHARE * n_tokens - (is_late ? n_tokens : 0);
  alps->late_credit = fmax(-LATE_MOST, fmin(credit, LATE_MOST));
}

/* The safety factor tracks the step time's high quantile: a late step that had a prompt in it takes a little off, every one in time gives
 * back a hundredth of that and less, so that it settles where about one step in 200 is late; while the window's P99 is over the target
 * nothing is given back. When decoding alone takes the whole target, smaller chunks cannot help, and the batch shrinks instead, unless even
 * a lone sequence takes it. */
static void control(struct alps *alps, const struct alps_plan *plan, int64_t step_us)
{
  int64_t target = alps->options.itl_target_us;
  /* Not the slice's fault: items before it left it no time but the least that it has in any case, or the target is outgrown. */
  const int64_t before_us = step_us - plan->sliced_us + plan->slice_least_us;
  bool is_left_none = plan->slice_is_behind && (before_us > plan->slice_us || plan->slice_us > target);
  bool is_sliced = plan->sliced_us > 0 && !is_left_none;
  bool has_prompt = plan->work.n_prompt_tokens > 0 || is_sliced, is_over = alps_window_over(&alps->window) > 0.01;
  if (has_prompt && step_us > target) alps->margin = fmax(MARGIN_LEAST, alps->margin - MARGIN_STEP);
  else if (has_prompt && !is_over) alps->margin = fmin(MARGIN_MOST, alps->margin + MARGIN_STEP / 200);
  if (++alps->reports_since_control < CONTROL_EVERY) return;
  alps->reports_since_control = 0;
  const double decodes_us = fmax((double)target, alps_admission_us(alps, (int32_t)(plan->work.decode_kv_tokens / plan->n_decode)));
  if (is_over && alps->decode_us > decodes_us) alps->sequence_cap = fmax(1, fmin(alps->sequence_cap, alps->n_running) * 0.97);
  else alps->sequence_cap = fmin(alps->options.max_seqs, alps->sequence_cap + 1);
}

/* Steps without prompts show what drafts cost. */
static void note_verify(struct alps *alps, const struct alps_plan *plan, double step_us)
{
  if (plan->n_items == plan->n_decode && plan->n_items > 0) alps_verify_observe(&alps->verify, plan->n_tokens, step_us);
  else alps_verify_pause(&alps->verify);
}

void alps_note_slice(struct alps *alps, const struct alps_plan *plan, int64_t own_us)
{
  alps->slice_spent_us += own_us;
  const double pass = (double)own_us / alps->options.class_weight[plan->slice_class];
  alps->classes[plan->slice_class].pass += pass;
  alps->before.pass[plan->slice_class] += pass; /* it has run, also if the rest of the plan is dropped */
  if (!plan->slice_ended || alps->slice_work.n_prompt_tokens == 0) return;
  alps->slice_token_us = (double)alps->slice_spent_us / alps->slice_work.n_prompt_tokens;
  double ratio = (double)alps->slice_spent_us / alps_cost_predict(&alps->cost, &alps->slice_work);
  alps->slice_ratio += 0.2 * (fmin(ratio, 4) - alps->slice_ratio);
}

void alps_report(struct alps *alps, const struct alps_plan *plan, int64_t step_us)
{
  const int64_t own_us = step_us - plan->once_us;
  double items_us = (double)(own_us - plan->sliced_us);
  int32_t n_read = plan->work.n_prompt_tokens + plan->ended_tokens + (plan->slice_ended ? plan->slice.n_tokens : 0);
  alps_cost_observe(&alps->cost, &plan->work, items_us);
  if (plan->slice.id >= 0) alps_note_slice(alps, plan, plan->sliced_us - plan->ended_us);
  if (n_read > 0 || plan->sliced_us > 0) alps_note_reading(alps, n_read, (double)own_us);
  note_verify(alps, plan, items_us);
  int64_t slice_us = plan->sliced_us; /* what it took beyond its time is excess too, unless its time answers to that of the items */
  if (!plan->slice_is_behind && slice_us > plan->slice_us) slice_us = plan->slice_us;
  if (plan->n_decode > 0 && plan->work.n_prompt_tokens == 0) {
    alps_window_add(&alps->excess, own_us - slice_us - plan->predicted_us, 1, false);
    if (plan->n_decode == alps->n_decode_before) alps_window_add(&alps->steady_excess, own_us - slice_us - plan->predicted_us, 1, false);
  }
  alps->n_decode_before = plan->n_decode;
  /* The gap that this step's tokens ended: for those that joined it, from their first tokens. */
  const int32_t n_waited = plan->n_decode - plan->n_joined;
  const int64_t joined_us = step_us - plan->joined_us, late_us = alps->options.itl_target_us;
  if (n_waited > 0) alps_window_add(&alps->window, step_us, n_waited, step_us > late_us);
  if (plan->n_joined > 0) alps_window_add(&alps->window, joined_us, plan->n_joined, joined_us > late_us);
  if (plan->n_decode > 0 && plan->work.n_prompt_tokens == 0) {
    alps->decode_us += (alps->decode_us > 0 ? 0.1 : 1) * (items_us - alps->decode_us);
  }
  if (alps->options.itl_target_us == 0 || plan->n_decode == 0) return;
  count_late(alps, n_waited, step_us > late_us);
  count_late(alps, plan->n_joined, joined_us > late_us);
  if (!plan->is_stretched) control(alps, plan, own_us - (n_waited > 0 ? 0 : plan->joined_us));
}

void alps_counts(const struct alps *alps, struct alps_counts *out)
{
  *out = (struct alps_counts){.n_running = alps->n_running, .n_waiting = alps->n_parked, .margin = alps->margin,
                              .itl_p99_us = alps_window_quantile(&alps->window, 0.99)};
  for (int c = 0; c < ALPS_CLASSES; c++) {
    out->n_waiting_by_class[c] = alps->classes[c].n_waiting;
    out->n_waiting += alps->classes[c].n_waiting;
    out->waiting_tokens += alps->classes[c].waiting_tokens;
  }
}

int32_t alps_running(const struct alps *alps, const int32_t **ids)
{
  *ids = alps->running;
  return alps->n_running;
}

const struct alps_cost *alps_cost_model(const struct alps *alps)
{
  return &alps->cost;
}

static void require(bool holds, const char *rule, int32_t id)
{
  if (holds) return;
  log_error("alps", "invariant broken rule=\"%s\" id=%d", rule, id);
  abort();
}

void alps_check(const struct alps *alps)
{
  int32_t n_waiting[ALPS_CLASSES] = {0}, n_running[ALPS_CLASSES] = {0}, n_unborn = 0, n_parked = 0, n_leaving = 0;
  int64_t tokens[ALPS_CLASSES] = {0}, timely[ALPS_CLASSES] = {0};
  for (int32_t id = 0; id < alps->options.max_entries; id++) {
    const struct alps_entry *e = &alps->entries[id];
    if (e->state == ALPS_FREE) continue;
    int32_t c = e->request.service_class;
    const struct alps_tenant *t = &alps->tenants[e->tenant];
    require(t->key == e->request.tenant && t->service_class == c, "an entry knows its tenant", id);
    if (e->state == ALPS_LEAVING) {
      n_parked++;
      n_leaving++;
      require(e->run_at < 0 && !e->is_coming, "a leaving entry does not run", id);
    } else if (e->state == ALPS_WAITING && e->is_held) {
      n_parked++;
    } else if (e->state == ALPS_WAITING) {
      n_waiting[c]++;
      tokens[c] += alps_to_read(e);
      if (alps->options.ttft_target_us > 0 && !e->was_preempted && !e->is_late) timely[c] += alps_to_read(e);
      require(e->n_pages == 0 && e->run_at < 0, "a waiting entry holds nothing", id);
    } else {
      n_running[c]++;
      n_unborn += e->request.width - 1;
      require(alps->running[e->run_at] == id, "a running entry is in the running list", id);
    }
  }
  require(n_parked == alps->n_parked, "parked entries are counted", n_parked);
  require(n_leaving == alps->n_leaving, "leaving entries are counted", n_leaving);
  require(alps->slice_id < 0 || (alps->entries[alps->slice_id].state == ALPS_RUNNING &&
                                 alps->slice_n <= alps->entries[alps->slice_id].request.n_known -
                                                      alps->entries[alps->slice_id].n_computed),
          "the chunk in slices belongs to a running prompt", alps->slice_id);
  int32_t n_all = 0;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    require(n_waiting[c] == alps->classes[c].n_waiting && tokens[c] == alps->classes[c].waiting_tokens, "waiting counts agree", c);
    require(timely[c] == alps->classes[c].timely_tokens, "timely tokens agree", c);
    require(n_running[c] == alps->classes[c].n_running, "running counts agree", c);
    n_all += n_running[c];
  }
  require(n_all == alps->n_running && n_unborn == alps->n_unborn, "the running list is complete", n_all);
  require(alps->n_running + alps->n_unborn + alps->n_leaving <= alps->options.max_seqs, "forks have their slots", alps->n_unborn);
}
