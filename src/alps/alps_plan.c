/* One step's plan. alps_plan: gather running entries, leave out decodes of classes that must wait (time slices), find pages for the
 * decodes, then fill what time, tokens, rows and pages are left with prompt chunks, class by class in order of their passes.
 * The other policies (whole prompts, fixed chunks, static batches) differ only in their limits; see limits(). */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "alps/alps_internal.h"
#include "kv/kv_sparse.h"

static const double PREFILL_FLOOR = 0.05;  /* share of the target that prefill may always take, so that it cannot starve */
static const double DECODE_CEILING = 0.9;  /* share of the budget that decodes alone may take before admission stops */
static const double QUIET_STEP = 4;        /* targets that a step with high-class prompts may take while nobody decodes */
static const double STRETCH = 2;           /* targets that a step takes which is late on purpose */
static const double STRETCH_MOST = 0.15;   /* of the first-token target: who comes in such a step waits for its end */
static const double DEFAULT_SLICE_US = 50000; /* a step where classes meet and there is no target */
static const double SOFT_TARGET_US = 100000;  /* a step with decodes when there is no target: nobody waits for a whole prompt */
static const double LONE_PROMPT_US = 250000;  /* a step without decodes: arrivals and cancels are seen that often */
static const double SOFT_TARGET_STEPS = 4;    /* or that many steps without prompts, where those are long themselves */
static const double DECODE_EASY = 0.7;     /* below it admission does not ask the model */
static const double LONE_ROOM = 2;         /* a target that no sequence keeps alone counts as so many times what one takes */
static const double PATIENCE = 1.5;        /* mean outputs during which a class is admitted nobody for want of time */
static const double OUTPUT_UNKNOWN = 256;  /* mean output while none is known */
static const double SLICE_SPARE = 0.5;     /* most of the time beside the predicted decodes that is kept free for it: the slower a prompt is
                                              read, the longer the decodes become meanwhile */
static const double SLICE_SURE = 0.997;    /* share of the last decodes for whose excess over the prediction a slice leaves time */
static const double SLICE_TILES_SURE = 0.99; /* the same on a GPU, where the rare long step is a graph's capture */
static const double SLICE_LAST = 0.995;    /* share of the target at which decodes end that have a slice before them */
static const double SLICE_END = 0.97;      /* share of the target at which one behind the decodes ends: its last piece of work is not cut */
static const double OUTPUT_GUESS = 1.5;    /* projected output, in mean outputs */

enum { FIRST_TOKENS = 256 }; /* of the very first step, of whose time nothing is known */
enum { STEADY_STEPS = 64 }; /* with a number of decodes that does not change, before room is kept for those alone */
enum { GROWTH_STEPS = 64 }; /* of a prompt in slices, before the growth of the decodes beside it is believed */
enum { MICRO_TOKENS = 24 }; /* least chunk of a class that others come before, in slices: shorter ones read their histories too often */
enum { HIGHER_STAYS_US = 10000000 }; /* since one came, a class is about */
enum { MIXED_TOKENS = 64 }; /* a chunk of at least so many computes about as well beside the decodes as any */
static const double SLICE_SHARE = 0.8; /* by_rate: slices are taken where they read so much of what a chunk promises: the clock ends them */

struct planner {
  struct alps *alps;
  struct alps_plan *plan;
  int32_t n_available;          /* pages left */
  int32_t tokens_left, rows_left;
  double budget_us;             /* time of the step, INFINITY: no target */
  double budget_lower_us;       /* the same when prompts of classes after the highest that has work to do are put in */
  double floor_us;              /* time that its first prompt may take in any case */
  int32_t busiest;              /* that class */
  int32_t n_decode_top;         /* decodes of it and of higher classes in the plan */
  int64_t growth_pages;         /* that running entries are projected to need still */
  int64_t prefill_tokens;       /* that running prompts have left to read */
  struct alps_cost_work decodes[ALPS_CLASSES]; /* of all running entries, as if each were decoding */
  int32_t prefill_at[ALPS_CLASSES], prefill_end[ALPS_CLASSES];
  bool may_admit, may_decode;
  bool is_more;                 /* the plan's first slice has ended, and it goes on */
  int32_t closed_below;         /* entries of classes after this one are not admitted: pages are on their way to one of it */
  bool wants_victim;            /* a higher class could not be admitted for want of room */
  int32_t victim_above;         /* only entries of classes after this one may be victims */
};

static int32_t pages_for(const struct alps *alps, int64_t n_tokens)
{
  return (int32_t)((n_tokens + alps->options.page_tokens - 1) / alps->options.page_tokens);
}

static int32_t page_need(const struct alps *alps, const struct alps_entry *e, int32_t n_tokens)
{
  int32_t n = pages_for(alps, (int64_t)e->n_computed + n_tokens) - e->n_pages;
  return (n > 0 ? n : 0) + e->copy_pages;
}

/* Tokens that an entry is expected to hold at its end. */
static int64_t projected_tokens(const struct alps *alps, const struct alps_entry *e)
{
  int64_t limit = e->request.n_limit;
  if (alps->output_mean <= 0) return limit;
  int64_t guess = e->n_prompt + (int64_t)(OUTPUT_GUESS * alps->output_mean) + 1;
  int64_t least = (int64_t)e->request.n_known + alps->options.page_tokens / 4;
  if (guess < least) guess = least;
  return guess < limit ? guess : limit;
}

static int64_t projected_growth(const struct alps *alps, const struct alps_entry *e)
{
  int64_t whole = pages_for(alps, projected_tokens(alps, e)), budget = alps->options.page_budget;
  int64_t outputs = whole - e->n_prompt / alps->options.page_tokens;
  if (budget > 0 && whole > budget) whole = outputs = budget; /* what drops blocks shares hardly a page any more */
  int64_t n = whole - e->n_pages + (e->request.width - 1) * outputs + e->copy_pages;
  return n > 0 ? n : 0;
}

static bool serves_before(const struct alps *alps, int32_t a, int32_t b)
{
  const struct alps_entry *x = &alps->entries[a], *y = &alps->entries[b];
  if (x->request.service_class != y->request.service_class) return x->request.service_class < y->request.service_class;
  if (x->request.priority != y->request.priority) return x->request.priority < y->request.priority;
  return x->admitted < y->admitted;
}

static void add_item(struct planner *p, int32_t id, int32_t n_tokens, bool is_last)
{
  struct alps_plan *plan = p->plan;
  plan->items[plan->n_items++] = (struct alps_item){.id = id, .n_tokens = n_tokens, .is_last = is_last};
  plan->n_tokens += n_tokens;
  p->tokens_left -= n_tokens;
}

/* Count what a running entry will need. */
static void expect(struct planner *p, const struct alps_entry *e)
{
  p->growth_pages += projected_growth(p->alps, e);
  for (int32_t i = 0; i < e->request.width; i++) alps_cost_add_decode(&p->decodes[e->request.service_class], e->request.n_known);
}

static bool reads_before(const struct alps *alps, int32_t a, int32_t b)
{
  const struct alps_entry *x = &alps->entries[a], *y = &alps->entries[b];
  if (x->request.service_class == y->request.service_class) {
    if (a == alps->slice_id || b == alps->slice_id) return a == alps->slice_id; /* what has begun in slices ends first */
    if (x->is_late != y->is_late) return y->is_late;
  }
  return serves_before(alps, a, b);
}

/* Sort prompts by service order, late ones last in their class, and find where each class begins. */
static void gather_prefill(struct planner *p)
{
  struct alps *alps = p->alps;
  alps->n_prefill = 0;
  for (int32_t i = 0; i < alps->n_running; i++) {
    int32_t id = alps->running[i];
    const struct alps_entry *e = &alps->entries[id];
    expect(p, e);
    if (e->is_held || e->is_coming || alps_is_decoding(e)) continue;
    p->prefill_tokens += e->request.n_known - e->n_computed;
    int32_t at = alps->n_prefill++;
    while (at > 0 && reads_before(alps, id, alps->prefill[at - 1])) {
      alps->prefill[at] = alps->prefill[at - 1];
      at--;
    }
    alps->prefill[at] = id;
  }
  int32_t at = 0;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    p->prefill_at[c] = at;
    while (at < alps->n_prefill && alps->entries[alps->prefill[at]].request.service_class == c) at++;
    p->prefill_end[c] = at;
  }
}

static double decode_cost(const struct alps_cost *cost, const struct alps_cost_work *work)
{
  static const struct alps_cost_work nothing;
  return work->n_decode > 0 ? alps_cost_predict(cost, work) - alps_cost_predict(cost, &nothing) : 0;
}

/* Time slices: while a higher class has prompts to read, a lower class decodes only as often as its share of time allows. */
static void choose_classes(struct planner *p, const struct alps_cost_work work[ALPS_CLASSES], bool decodes[ALPS_CLASSES])
{
  struct alps *alps = p->alps;
  double step_us = alps->options.itl_target_us > 0 ? (double)alps->options.itl_target_us : 0;
  int32_t busiest = ALPS_CLASSES;
  for (int c = ALPS_CLASSES - 1; c >= 0; c--) {
    if (p->prefill_at[c] < p->prefill_end[c] || alps->classes[c].n_waiting > 0) busiest = c;
  }
  p->busiest = busiest;
  int64_t weights = 0;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    if (alps->classes[c].n_running + alps->classes[c].n_waiting > 0) weights += alps->options.class_weight[c];
    if (step_us <= 0) step_us += decode_cost(&alps->cost, &work[c]);
  }
  for (int c = 0; c < ALPS_CLASSES; c++) {
    struct alps_class *class = &alps->classes[c];
    double cost = decode_cost(&alps->cost, &work[c]);
    decodes[c] = true;
    if (work[c].n_decode == 0 || c <= busiest || alps->options.policy != ALPS_BUDGET) {
      class->credit_us = 0; /* the first step of a higher class is its own */
      continue;
    }
    class->credit_us += step_us * alps->options.class_weight[c] / (double)weights;
    if (class->credit_us < cost) decodes[c] = false;
    else class->credit_us = fmin(class->credit_us - cost, cost);
  }
}

/* Predicted time of a step without prompts that holds `work` in so many tokens: as such steps took, where enough is known of them. */
static double verify_us(const struct alps *alps, const struct alps_cost_work *work, int32_t n_tokens)
{
  const double us = alps_verify_predict(&alps->verify, n_tokens);
  return us > 0 ? us : alps_cost_predict(&alps->cost, work);
}

static bool is_planned(const struct alps_plan *plan, int32_t id)
{
  for (int32_t i = 0; i < plan->n_items; i++) {
    if (plan->items[i].id == id) return true;
  }
  return false;
}

/* Pages that a decode takes beyond those of its new positions. Forks that leave the pages which they share in one step leave them to the
 * last one, which copies nothing; under a page budget what it drops is its own then, and a page becomes free. Forks that are further have
 * left already; where one is behind, it keeps the pages shared. */
static int32_t copies_of(const struct planner *p, int32_t id)
{
  const struct alps *alps = p->alps;
  const struct alps_options *o = &alps->options;
  const struct alps_entry *e = &alps->entries[id];
  const bool drops = o->page_budget > 0 && e->n_computed % o->page_tokens == 0 && e->n_computed / o->page_tokens >= o->page_budget;
  int32_t n_others = 0;
  if (e->copy_pages < (drops ? 0 : 1)) return e->copy_pages;
  for (int32_t i = 0; i < alps->n_running; i++) {
    const struct alps_entry *other = &alps->entries[alps->running[i]];
    if (other == e || other->family != e->family || other->n_computed > e->n_computed) continue;
    if (other->n_computed < e->n_computed || !is_planned(p->plan, alps->running[i])) return e->copy_pages;
    n_others++;
  }
  return n_others == 0 ? e->copy_pages : -(int32_t)drops;
}

/* Pages that a decode of n_tokens takes. */
static int32_t decode_need(const struct planner *p, int32_t id, int32_t n_tokens)
{
  const struct alps_entry *e = &p->alps->entries[id];
  return page_need(p->alps, e, n_tokens) - e->copy_pages + copies_of(p, id);
}

/* How many drafted tokens to verify, so that the step's sequences get most tokens for its time. */
static int32_t choose_draft(const struct planner *p, int32_t id)
{
  const struct alps *alps = p->alps;
  const struct alps_entry *e = &alps->entries[id];
  int32_t most = e->n_draft, best = 0, n_decode = alps->n_running - alps->n_prefill, n_others = n_decode > 1 ? n_decode - 1 : 0;
  int32_t n_tokens = p->plan->n_tokens - p->plan->n_items + n_others + 1; /* drafts so far, everybody's next */
  if (most > p->tokens_left - 1) most = p->tokens_left - 1;
  if (most > p->rows_left - 1) most = p->rows_left - 1;
  if (most <= 0 || decode_need(p, id, 1 + most) > p->n_available) return 0;
  struct alps_cost_work work = p->plan->work;
  alps_cost_add_decode(&work, e->request.n_known);
  work.n_decode = n_others + 1;
  double expected = n_others + 1, chance = 1, best_rate = expected / verify_us(alps, &work, n_tokens);
  double limit_us = alps->options.itl_target_us > 0 ? alps->margin * (double)alps->options.itl_target_us : INFINITY;
  for (int32_t k = 1; k <= most; k++) {
    alps_cost_add_chunk(&work, 1, e->request.n_known + k - 1);
    double step_us = verify_us(alps, &work, n_tokens + k);
    chance *= (double)e->chance[k - 1];
    expected += chance;
    if (step_us > limit_us) break;
    if (expected / step_us <= best_rate) continue;
    best_rate = expected / step_us;
    best = k;
  }
  return best;
}

/* Put the decodes into the plan. Returns false when there are not pages enough for them. */
static bool plan_decodes(struct planner *p)
{
  struct alps *alps = p->alps;
  struct alps_cost_work by_class[ALPS_CLASSES] = {{0}};
  bool decodes[ALPS_CLASSES];
  for (int32_t i = 0; i < alps->n_running; i++) {
    const struct alps_entry *e = &alps->entries[alps->running[i]];
    if (!e->is_held && alps_is_decoding(e)) alps_cost_add_decode(&by_class[e->request.service_class], e->request.n_known);
  }
  choose_classes(p, by_class, decodes);
  for (int32_t i = 0; i < alps->n_running && p->tokens_left > 0 && p->rows_left > 0; i++) {
    int32_t id = alps->running[i];
    struct alps_entry *e = &alps->entries[id];
    if (e->is_held || !alps_is_decoding(e) || !decodes[e->request.service_class]) continue;
    if (decode_need(p, id, 1) > p->n_available) return false;
    int32_t n_draft = e->n_draft > 0 ? choose_draft(p, id) : 0;
    p->n_available -= decode_need(p, id, 1 + n_draft);
    p->rows_left -= 1 + n_draft;
    p->n_decode_top += e->request.service_class <= p->busiest;
    add_item(p, id, 1 + n_draft, true);
    alps_cost_add_decode(&p->plan->work, e->request.n_known);
    if (n_draft > 0) alps_cost_add_chunk(&p->plan->work, n_draft, e->request.n_known);
  }
  p->plan->n_decode = p->plan->n_items;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    if (decodes[c]) alps->classes[c].pass += decode_cost(&alps->cost, &by_class[c]) / alps->options.class_weight[c];
  }
  return true;
}

static bool is_worse(const struct alps *alps, int32_t a, int32_t b)
{
  if (alps->entries[a].is_held != alps->entries[b].is_held) return alps->entries[a].is_held;
  return serves_before(alps, b, a);
}

/* Whether an entry may lose its pages to one of above_class: it is of a class after that, or held and of that class too. */
static bool is_below(const struct alps_entry *e, int32_t above_class)
{
  return e->request.service_class >= above_class + !e->is_held;
}

/* The running entry that loses its pages first: one that is held, then lowest class, then least important, then newest. -1 when there is
 * none below above_class but `keep`. */
static int32_t choose_victim(const struct alps *alps, int32_t above_class, int32_t keep)
{
  int32_t worst = -1;
  for (int32_t i = 0; i < alps->n_running; i++) {
    int32_t id = alps->running[i];
    if (id == keep || !is_below(&alps->entries[id], above_class)) continue;
    if (worst < 0 || is_worse(alps, id, worst)) worst = id;
  }
  return worst;
}

/* Whether a class that finds no room may take it from that entry: it makes no progress, or its class has had its share. */
static bool may_evict(const struct alps *alps, int32_t service_class, int32_t victim)
{
  const struct alps_entry *e = &alps->entries[victim];
  return e->is_held || alps->classes[e->request.service_class].pass >= alps->classes[service_class].pass;
}

static int32_t best_running(const struct alps *alps)
{
  int32_t best = -1;
  for (int32_t i = 0; i < alps->n_running; i++) {
    if (best < 0 || serves_before(alps, alps->running[i], best)) best = alps->running[i];
  }
  return best;
}

/* What nobody can keep is no reason to serve one after the other. */
double alps_admission_us(const struct alps *alps, int32_t n_known)
{
  const double budget_us = alps->margin * (double)alps->options.itl_target_us;
  struct alps_cost_work lone = {0};
  alps_cost_add_decode(&lone, n_known);
  const double lone_us = alps_cost_predict(&alps->cost, &lone);
  return lone_us > DECODE_CEILING * budget_us ? LONE_ROOM * lone_us : budget_us;
}

/* Decodes that leave no time for one more end some time, and mostly much sooner; those of streams that talk on need not be waited for. */
static bool has_waited(const struct alps *alps, int32_t service_class)
{
  const double n_tokens = alps->output_mean > 0 ? alps->output_mean : OUTPUT_UNKNOWN;
  return (double)(alps->now_us - alps->classes[service_class].admitted_us) > PATIENCE * n_tokens * alps->decode_us;
}

/* What entries would leave behind if they were evicted. */
struct leavings { int32_t n_seqs, n_unborn; int64_t n_pages, growth_pages; struct alps_cost_work decodes; };

/* Whether there is room for one more entry beside all but those: slots, pages up to its projected end, and time for its decoding. */
static bool has_room(const struct planner *p, const struct alps_entry *e, const struct leavings *without)
{
  const struct alps *alps = p->alps;
  const struct alps_options *o = &alps->options;
  int32_t n_after = alps->n_running - without->n_seqs + alps->n_unborn - without->n_unborn + e->request.width;
  if (n_after + alps->n_leaving > o->max_seqs || p->plan->n_items - without->n_seqs >= o->max_seqs) return false;
  if (alps->n_running - without->n_seqs + alps->n_leaving == 0) return true;
  if (p->growth_pages - without->growth_pages + projected_growth(alps, e) > p->n_available + without->n_pages) return false;
  if (o->policy != ALPS_BUDGET || o->itl_target_us == 0) return true;
  if (has_waited(alps, e->request.service_class)) return true;
  if (n_after > alps->sequence_cap) return false;
  struct alps_cost_work work = {0};
  for (int c = 0; c <= e->request.service_class; c++) {
    work.n_decode += p->decodes[c].n_decode;
    work.decode_kv_tokens += p->decodes[c].decode_kv_tokens;
  }
  work.n_decode -= without->decodes.n_decode;
  work.decode_kv_tokens -= without->decodes.decode_kv_tokens;
  /* With time to spare one more is tried whatever the model says: how cost grows with sequences is learned by having them. */
  double budget = alps_admission_us(alps, e->request.n_known);
  if (alps_cost_predict(&alps->cost, &work) <= DECODE_EASY * budget) return true;
  for (int32_t i = 0; i < e->request.width; i++) alps_cost_add_decode(&work, e->request.n_known);
  return alps_cost_predict(&alps->cost, &work) <= DECODE_CEILING * budget;
}

/* All that may be evicted for an entry of that class, into alps->victims; pages that several share count for each. */
static struct leavings evictable(struct alps *alps, int32_t service_class)
{
  struct leavings all = {0};
  for (int32_t i = 0; i < alps->n_running; i++) {
    const struct alps_entry *e = &alps->entries[alps->running[i]];
    if (!is_below(e, service_class) || !may_evict(alps, service_class, alps->running[i])) continue;
    alps->victims[all.n_seqs++] = alps->running[i];
    all.n_unborn += e->request.width - 1;
    all.n_pages += e->n_pages;
    all.growth_pages += projected_growth(alps, e);
    if (e->request.service_class > service_class) continue; /* the others' time is not counted against it */
    for (int32_t k = 0; k < e->request.width; k++) alps_cost_add_decode(&all.decodes, e->request.n_known);
  }
  return all;
}

/* An entry finds no room. It is made where that is possible: what does not suffice would go back to those it was taken from. */
static void make_room(struct planner *p, const struct alps_entry *e, void *user)
{
  struct alps *alps = p->alps;
  const int32_t service_class = e->request.service_class;
  if (alps->options.policy != ALPS_BUDGET) return;
  if (alps->n_leaving > 0) { /* it is being made, and not for classes after this one */
    p->closed_below = service_class;
    return;
  }
  const int32_t victim = choose_victim(alps, service_class, -1);
  if (victim < 0 || p->plan->n_items != p->plan->n_decode || !may_evict(alps, service_class, victim)) return;
  struct leavings all = evictable(alps, service_class);
  if (!has_room(p, e, &all)) return;
  if (alps->options.freed) all.n_pages = alps->options.freed(user, alps->victims, all.n_seqs); /* looks at each page: not asked before */
  if (!has_room(p, e, &all)) return;
  p->wants_victim = true;
  p->victim_above = service_class;
}

/* Take the next waiting entry of a class into service, if there is room for it; -1 if not. */
static int32_t admit_next(struct planner *p, int32_t service_class, alps_admit_fn admit, void *user)
{
  static const struct leavings nothing;
  struct alps *alps = p->alps;
  int32_t id = p->may_admit && service_class <= p->closed_below ? alps_queue_top(alps, service_class) : -1;
  if (id < 0) return -1;
  struct alps_entry *e = &alps->entries[id];
  if (!has_room(p, e, &nothing)) {
    make_room(p, e, user);
    return -1;
  }
  struct alps_admitted got = {.n_available = p->n_available};
  alps_queue_remove(alps, id);
  alps_start_running(alps, id);
  alps->classes[service_class].admitted_us = alps->now_us;
  admit(user, id, &got);
  e->n_computed = got.n_computed;
  e->n_pages = got.n_pages;
  if (e->n_charged < got.n_computed) e->n_charged = got.n_computed;
  e->copy_pages = 0;
  e->is_coming = got.is_coming;
  expect(p, e);
  p->n_available = got.n_available - p->plan->n_reserved_pages;
  return id;
}

/* Round a chunk that does not end its prompt down to what matrix kernels like. */
static int32_t round_chunk(const struct alps *alps, int32_t n_tokens)
{
  if (alps->options.tile_tokens > 0) return n_tokens; /* the cost model knows */
  if (n_tokens >= 256) return n_tokens / 64 * 64;
  if (n_tokens >= 128) return n_tokens / 16 * 16;
  return n_tokens;
}

/* Tokens of a prompt at this depth that the step's time still has room for. */
static int32_t chunk_by_time(const struct planner *p, int32_t service_class, int32_t depth, int32_t limit)
{
  double budget_us = (service_class > p->busiest ? p->budget_lower_us : p->budget_us) - (double)p->alps->spent_us;
  if (!isfinite(budget_us) || limit <= 0) return limit;
  bool is_first = p->plan->n_items == p->plan->n_decode;
  int32_t n = alps_cost_chunk(&p->alps->cost, &p->plan->work, budget_us, is_first ? p->floor_us : 0, depth, limit);
  return n == 0 && is_first ? 1 : n; /* never nothing: prefill must not starve, and what is never tried is never measured again */
}

/* The most tokens of this entry that fit, time apart. */
static int32_t room_for(const struct planner *p, const struct alps_entry *e)
{
  const struct alps *alps = p->alps;
  int32_t left = e->request.n_known - e->n_computed, n = left;
  if (n > p->tokens_left) n = p->tokens_left;
  int64_t by_pages = ((int64_t)e->n_pages + p->n_available - e->copy_pages) * alps->options.page_tokens - e->n_computed;
  if (n > by_pages) n = by_pages < 0 ? 0 : (int32_t)by_pages;
  if (alps->options.page_budget > 0) {
    int64_t limit = kv_sparse_limit(alps->options.page_budget, alps->options.page_tokens, e->n_computed) - e->n_computed;
    if (n > limit) n = (int32_t)limit;
  }
  if (e->request.wants_rows && n > p->rows_left) n = p->rows_left;
  return n;
}

/* The largest chunk of this entry that every limit allows. */
static int32_t chunk_for(const struct planner *p, const struct alps_entry *e)
{
  int32_t left = e->request.n_known - e->n_computed, n = room_for(p, e);
  if (n == left && p->rows_left == 0) n--;
  n = chunk_by_time(p, e->request.service_class, e->n_computed, n);
  return n < left ? round_chunk(p->alps, n) : n;
}

/* Tokens that the step's time would read of a chunk in slices, by what the chunk takes alone. */
static double sliced_tokens(const struct planner *p, const struct alps_entry *e, int32_t n_chunk)
{
  const struct alps_cost *cost = &p->alps->cost;
  struct alps_cost_work alone = {0};
  alps_cost_add_chunk(&alone, n_chunk, e->n_computed);
  const double budget_us = (e->request.service_class > p->busiest ? p->budget_lower_us : p->budget_us) - (double)p->alps->spent_us;
  return n_chunk * (budget_us - alps_cost_predict(cost, &p->plan->work)) / (p->alps->slice_ratio * alps_cost_predict(cost, &alone));
}

/* Whether a chunk that is half read in slices makes room for the entry's. What was computed of it is lost, so a class whose chunk was given
 * up reads one first before that happens again: it gets on, however many prompts come before it. */
static bool may_take_lane(const struct alps *alps, const struct alps_entry *e)
{
  const int32_t owner = alps->entries[alps->slice_id].request.service_class;
  return alps->options.slices_behind && owner > e->request.service_class && !alps->classes[owner].was_given_up;
}

/* The longest chunk that such an entry begins in slices of so much time. Where higher classes come, about what one slice reads, so that
 * hardly one is half read when they do. */
static int32_t longest_sliced(const struct alps *alps, const struct alps_entry *e, double time_us)
{
  const int32_t most = alps->options.slice_tokens;
  bool has_higher = false;
  for (int c = 0; c < e->request.service_class; c++) {
    has_higher = has_higher || (alps->classes[c].came_us > 0 && alps->now_us - alps->classes[c].came_us < HIGHER_STAYS_US);
  }
  if (!has_higher || !alps->options.slices_behind || alps->slice_token_us <= 0) return most;
  const double n = fmax(time_us / alps->slice_token_us, MICRO_TOKENS);
  return n < most ? (int32_t)n : most;
}

/* Whether the entry's prompt is better read in slices than by the n tokens that there is time for now. */
static bool wants_slices(const struct planner *p, int32_t id, int32_t n)
{
  const struct alps *alps = p->alps;
  const struct alps_entry *e = &alps->entries[id];
  if (id == alps->slice_id) return true;
  if (alps->slice_id >= 0 && !may_take_lane(alps, e)) return false;
  if (alps->options.slice_tokens == 0 || alps->options.policy != ALPS_BUDGET || e->request.wants_rows || alps->options.page_budget > 0 ||
      !isfinite(p->budget_us))
    return false;
  int32_t n_chunk = room_for(p, e);
  if (n_chunk > alps->options.slice_tokens) n_chunk = alps->options.slice_tokens;
  /* The clock ends a slice behind the decodes, and nothing a chunk: one that leaves some of its prompt is read by the clock. */
  const bool may_end = alps->options.slices_behind && n < e->request.n_known - e->n_computed;
  if (n_chunk <= 0 || (n >= n_chunk && !may_end)) return false;
  if (n < MIXED_TOKENS) return true;
  return alps->options.slices_by_rate && p->plan->n_items == p->plan->n_decode && p->plan->n_decode > 0 &&
         sliced_tokens(p, e, n_chunk) > SLICE_SHARE * n;
}

/* Time that slices behind the decodes take in any case, on average. Their contexts grow while a prompt is read, the longer the slower. With
 * the square root of 2 x growth x what is left to read each step shortens the next slice by what the decodes have grown, so no step is
 * longer than this one and the last slice is the prompt's end. Where there is more room than that, it can be read within it; where there is
 * less, it cannot, and keeping to it would end with decodes that fill every step. Growth and reading by measured times: the model sees no
 * prompts meanwhile. */
static double slice_least_us(const struct planner *p, const struct alps_entry *e)
{
  const struct alps *alps = p->alps;
  const double n_kv = (double)p->plan->work.decode_kv_tokens;
  struct alps_cost_coefficients cost;
  if (p->plan->n_decode == 0 || alps->options.itl_target_us == 0 || alps->reading.n_steps < GROWTH_STEPS) return p->floor_us;
  alps_cost_coefficients(&alps->cost, &cost);
  double grown = fmax(0, n_kv - (double)alps->reading.kv_tokens) / alps->reading.n_steps;
  double growth_us = fmin(grown, p->plan->n_decode) * fmin(cost.per_kv_us / 1024, alps->decode_us / n_kv);
  double rest_us = alps->slice_token_us * (e->request.n_known - e->n_computed);
  return fmax(p->floor_us, sqrt(2 * growth_us * rest_us));
}

static void note_growth(struct planner *p, const struct alps_entry *e)
{
  struct alps *alps = p->alps;
  if (alps->reading.admitted != e->admitted) {
    alps->reading.admitted = e->admitted;
    alps->reading.kv_tokens = p->plan->work.decode_kv_tokens;
    alps->reading.n_steps = 0;
  } else alps->reading.n_steps++;
}

/* When a slice that is run before the items ends. It is as long as it is told to be, so what makes such a step late is its decodes: room is
 * kept for nearly the longest of the last ones, but not more than most of what there is. As many decodes as before take about as long as
 * before; only where their number changes the prediction may be off by more. The margin is for what a prediction alone bounds: it shortens
 * slices once it has fallen because steps were late. */
static double slice_before_us(const struct planner *p, double budget_us, double items_us)
{
  const struct alps *alps = p->alps;
  if (p->plan->n_decode == 0 || alps->options.itl_target_us == 0) return budget_us - items_us;
  const bool is_steady = p->plan->n_decode == alps->n_decode_before && alps->steady_excess.n >= STEADY_STEPS;
  const double sure = alps->options.tile_tokens > 0 ? SLICE_TILES_SURE : SLICE_SURE, whole_us = budget_us / alps->margin;
  double excess_us = alps_window_quantile(is_steady ? &alps->steady_excess : &alps->excess, sure);
  excess_us = fmin(excess_us, SLICE_SPARE * (whole_us - items_us));
  return whole_us * fmin(SLICE_LAST, alps->margin / ALPS_MARGIN_START) - items_us - excess_us;
}

/* The rest of the step's time goes to a chunk in slices. */
static void plan_slice(struct planner *p, int32_t id)
{
  const struct alps *alps = p->alps;
  const struct alps_entry *e = &alps->entries[id];
  struct alps_plan *plan = p->plan;
  if (!p->is_more) note_growth(p, e);
  int32_t n = alps->slice_n, left = e->request.n_known - e->n_computed;
  double budget_us = e->request.service_class > p->busiest ? p->budget_lower_us : p->budget_us;
  const double items_us = plan->n_items > 0 ? alps_cost_predict(&alps->cost, &plan->work) : 0;
  plan->slice_begins = id != alps->slice_id;
  if (plan->slice_begins) {
    const double used_us = p->is_more && plan->slice_is_behind ? (double)plan->sliced_us : 0;
    const int32_t longest = longest_sliced(alps, e, budget_us - items_us - used_us);
    n = room_for(p, e);
    if (n > longest) n = longest;
    int32_t need = page_need(alps, e, n);
    p->n_available -= need;
    plan->n_reserved_pages += need;
    plan->slice_pages = need;
  }
  plan->slice = (struct alps_item){.id = id, .n_tokens = n, .is_last = n == left};
  plan->slice_class = e->request.service_class;
  if (!p->is_more) plan->slice_is_behind = alps->options.slices_behind && plan->n_items > 0;
  if (plan->slice_is_behind) {
    double end_us = fmin(budget_us, SLICE_END * budget_us / alps->margin), least_us = slice_least_us(p, e);
    plan->slice_us = (int64_t)(least_us > p->floor_us ? fmax(end_us, alps->decode_us + least_us) : end_us);
    plan->slice_least_us = (int64_t)fmax(p->floor_us - (double)plan->sliced_us, 0);
  } else plan->slice_us = (int64_t)fmax(slice_before_us(p, budget_us, items_us), slice_least_us(p, e));
}

static void plan_chunk(struct planner *p, int32_t id, int32_t n_tokens)
{
  struct alps *alps = p->alps;
  const struct alps_entry *e = &alps->entries[id];
  bool is_last = n_tokens == e->request.n_known - e->n_computed;
  double before = alps_cost_predict(&alps->cost, &p->plan->work);
  alps_cost_add_chunk(&p->plan->work, n_tokens, e->n_computed);
  double cost = alps_cost_predict(&alps->cost, &p->plan->work) - before;
  int32_t need = page_need(alps, e, n_tokens);
  p->n_available -= need;
  p->plan->n_reserved_pages += need;
  p->rows_left -= e->request.wants_rows ? n_tokens : is_last;
  alps->classes[e->request.service_class].pass += cost / alps->options.class_weight[e->request.service_class];
  add_item(p, id, n_tokens, is_last);
}

/* The class's next prompt: running ones, then admissions, but a late one lets those go ahead that can still be in time; not within a chunk
 * in slices, which would keep theirs from being read so. */
static int32_t next_prompt(struct planner *p, int32_t c, alps_admit_fn admit, void *user)
{
  struct alps *alps = p->alps;
  bool has_running = p->prefill_at[c] < p->prefill_end[c];
  const int32_t first = has_running ? alps->prefill[p->prefill_at[c]] : -1;
  bool yields = has_running && first != alps->slice_id && alps->entries[first].is_late && alps->classes[c].timely_tokens > 0;
  int32_t id = has_running && !yields ? -1 : admit_next(p, c, admit, user);
  return id < 0 && has_running && !p->wants_victim ? alps->prefill[p->prefill_at[c]++] : id;
}

static int32_t least_pass(const struct alps *alps, const bool done[ALPS_CLASSES])
{
  int32_t best = -1;
  for (int c = 0; c < ALPS_CLASSES; c++) {
    if (!done[c] && (best < 0 || alps->classes[c].pass < alps->classes[best].pass)) best = c;
  }
  return best;
}

static void plan_prefill(struct planner *p, alps_admit_fn admit, void *user)
{
  struct alps *alps = p->alps;
  bool done[ALPS_CLASSES] = {false};
  for (;;) {
    int32_t c = least_pass(alps, done);
    if (c < 0 || p->tokens_left <= 0 || p->plan->n_items >= alps->options.max_seqs || p->wants_victim) return;
    if (chunk_by_time(p, c, 0, 1) == 0) {
      done[c] = true;
      continue;
    }
    int32_t id = next_prompt(p, c, admit, user);
    if (id < 0) {
      done[c] = true;
      continue;
    }
    if (alps->entries[id].is_coming) continue;
    int32_t n = id == alps->slice_id ? 0 : chunk_for(p, &alps->entries[id]);
    if (wants_slices(p, id, n)) {
      plan_slice(p, id);
      return;
    }
    if (n > 0) plan_chunk(p, id, n);
    else if (p->prefill_at[c] >= p->prefill_end[c]) done[c] = true;
  }
}

/* What each policy allows in this step. */
static void limits(struct planner *p)
{
  struct alps *alps = p->alps;
  const struct alps_options *o = &alps->options;
  p->may_admit = p->may_decode = true;
  p->budget_us = p->budget_lower_us = INFINITY;
  switch (o->policy) {
    case ALPS_BUDGET:
      if (alps->cost.n_observations == 0 && p->tokens_left > FIRST_TOKENS) p->tokens_left = FIRST_TOKENS;
      break;
    case ALPS_WHOLE: break;
    case ALPS_CHUNKED:
      if (p->tokens_left > o->chunk_tokens) p->tokens_left = o->chunk_tokens;
      break;
    case ALPS_STATIC:
      /* A batch takes requests until its prompts are read; then it decodes to the last token of its longest answer. */
      if (alps->n_running == 0) alps->is_filling = true;
      else if (alps->n_prefill == 0) alps->is_filling = false;
      p->may_admit = alps->is_filling;
      p->may_decode = !alps->is_filling;
      break;
  }
}

static bool has_several_classes(const struct alps *alps)
{
  int32_t n = 0;
  for (int c = 0; c < ALPS_CLASSES; c++) n += alps->classes[c].n_running + alps->classes[c].n_waiting > 0;
  return n > 1;
}

/* Time of a step with prompts, before the margin. is_lone: no tokens are held up by it; meet: several classes are about. */
static double step_target(const struct alps *alps, bool is_lone, bool meet)
{
  double target = (double)alps->options.itl_target_us;
  if (is_lone) return target == 0 ? LONE_PROMPT_US : fmax(SOFT_TARGET_US, QUIET_STEP * target);
  return target == 0 ? fmax(meet ? DEFAULT_SLICE_US : SOFT_TARGET_US, SOFT_TARGET_STEPS * alps->decode_us) : target;
}

/* Whether this step's tokens may come late so that first tokens do not: few do, and none of a class above that of the prompts. */
static bool may_stretch(const struct planner *p)
{
  const struct alps *alps = p->alps;
  if (alps->pressed_class == ALPS_CLASSES || p->plan->n_decode == 0 || alps->late_credit < p->plan->n_decode) return false;
  for (int32_t c = 0; c < alps->pressed_class; c++) {
    if (alps->classes[c].n_running > 0) return false;
  }
  return STRETCH * (double)alps->options.itl_target_us <= STRETCH_MOST * (double)alps->options.ttft_target_us;
}

/* The time that prompts may take in this step. Where somebody decodes, the inter-token target says it. Where classes meet, a step is
 * also the time that a newly come high-class prompt waits at most, so it stays short even when nobody decodes or no target is set. */
static void set_budget(struct planner *p)
{
  struct alps *alps = p->alps;
  const struct alps_options *o = &alps->options;
  bool meet = has_several_classes(alps), is_lone = p->plan->n_decode == 0 && !meet;
  double target = step_target(alps, is_lone, meet);
  if (o->policy != ALPS_BUDGET) return;
  p->floor_us = PREFILL_FLOOR * target;
  p->budget_lower_us = target * alps->margin;
  /* No high-class tokens are held up, and nobody comes before it. */
  if (!is_lone && p->n_decode_top == 0 && p->busiest == 0) target *= QUIET_STEP;
  p->plan->is_stretched = may_stretch(p);
  if (p->plan->is_stretched) target = fmax(target, STRETCH * (double)o->itl_target_us);
  p->budget_us = target * alps->margin;
  if (!meet) p->budget_lower_us = p->budget_us;
  p->plan->budget_us = (int64_t)p->budget_us;
}

void alps_decode_work(const struct alps *alps, struct alps_cost_work *work)
{
  *work = (struct alps_cost_work){0};
  for (int32_t i = 0; i < alps->n_running; i++) {
    const struct alps_entry *e = &alps->entries[alps->running[i]];
    if (!e->is_held && alps_is_decoding(e)) alps_cost_add_decode(work, e->request.n_known);
  }
}

double alps_reading_us(const struct alps *alps, const struct alps_cost_work *decodes, int64_t n_tokens)
{
  double target = step_target(alps, decodes->n_decode == 0, false);
  if (alps->cost.n_observations == 0) return 0;
  for (int32_t i = 0; i < alps->n_running; i++) {
    const struct alps_entry *e = &alps->entries[alps->running[i]];
    if (!alps_is_decoding(e)) n_tokens += e->request.n_known - e->n_computed;
  }
  for (int c = 0; c < ALPS_CLASSES; c++) n_tokens += alps->classes[c].waiting_tokens;
  int64_t most = alps->options.max_batch_tokens - decodes->n_decode;
  if (most > n_tokens) most = n_tokens;
  int32_t chunk = alps_cost_chunk(&alps->cost, decodes, target * alps->margin, PREFILL_FLOOR * target, 0, (int32_t)most);
  struct alps_cost_work step = *decodes;
  alps_cost_add_chunk(&step, chunk > 0 ? chunk : 1, 0);
  return alps_cost_predict(&alps->cost, &step) * (double)n_tokens / (chunk > 0 ? chunk : 1);
}

static void save_accounts(struct alps *alps)
{
  for (int c = 0; c < ALPS_CLASSES; c++) {
    alps->before.pass[c] = alps->classes[c].pass;
    alps->before.credit_us[c] = alps->classes[c].credit_us;
  }
}

void alps_drop_plan(struct alps *alps)
{
  for (int c = 0; c < ALPS_CLASSES; c++) {
    alps->classes[c].pass = alps->before.pass[c];
    alps->classes[c].credit_us = alps->before.credit_us[c];
  }
}

/* The slice goes on until it has ended; what alps_plan_more goes on from. */
static void note_planned_slice(const struct planner *p)
{
  struct alps *alps = p->alps;
  const struct alps_plan *plan = p->plan;
  if (plan->slice.id < 0) return;
  if (plan->slice_begins) {
    if (alps->slice_id >= 0) alps->classes[alps->entries[alps->slice_id].request.service_class].was_given_up = true;
    alps->slice_spent_us = 0;
    alps->slice_work = (struct alps_cost_work){0};
    alps_cost_add_chunk(&alps->slice_work, plan->slice.n_tokens, alps->entries[plan->slice.id].n_computed);
  }
  alps->slice_id = plan->slice.id;
  alps->slice_n = plan->slice.n_tokens;
  alps->rest.budget_us = p->budget_us;
  alps->rest.budget_lower_us = p->budget_lower_us;
  alps->rest.floor_us = p->floor_us;
  alps->rest.busiest = p->busiest;
  alps->rest.tokens_left = p->tokens_left;
  alps->rest.rows_left = p->rows_left;
}

/* The entry whose chunk has just ended decodes with the others. */
static void add_decode(struct planner *p, int32_t id)
{
  const struct alps *alps = p->alps;
  const struct alps_entry *e = &alps->entries[id];
  if (e->state != ALPS_RUNNING || e->is_held || !alps_is_decoding(e) || p->tokens_left <= 0 || p->rows_left <= 0 ||
      p->plan->n_items >= alps->options.max_seqs || page_need(alps, e, 1) > p->n_available)
    return;
  p->plan->n_reserved_pages += page_need(alps, e, 1);
  p->n_available -= page_need(alps, e, 1);
  p->rows_left--;
  if (p->plan->n_joined++ == 0) p->plan->joined_us = p->plan->sliced_us;
  p->plan->n_decode++;
  add_item(p, id, 1, true);
  alps_cost_add_decode(&p->plan->work, e->request.n_known);
}

/* Whose prompts have ended in a step without decodes wait for no more than the target from there on. */
static void hurry(struct planner *p)
{
  const struct alps *alps = p->alps;
  const double target_us = (double)alps->options.itl_target_us;
  if (target_us <= 0 || p->plan->n_joined == 0 || p->plan->n_joined < p->plan->n_decode) return;
  const double left_us = (double)(p->plan->joined_us - p->plan->sliced_us) + alps->margin * target_us;
  p->budget_us = fmin(p->budget_us, left_us);
  p->budget_lower_us = fmin(p->budget_lower_us, left_us);
}

/* Behind the items only the same prompt goes on: the others' tokens wait, and theirs would be of the next step anyway. */
static void plan_next_chunk(struct planner *p, int32_t id)
{
  const struct alps_entry *e = &p->alps->entries[id];
  if (e->state != ALPS_RUNNING || e->is_held || alps_is_decoding(e)) return;
  p->budget_us = p->alps->rest.budget_us, p->budget_lower_us = p->alps->rest.budget_lower_us, p->floor_us = p->alps->rest.floor_us;
  if (room_for(p, e) > 0) plan_slice(p, id);
}

bool alps_plan_more(struct alps *alps, int32_t n_available, bool has_time, alps_admit_fn admit, void *user, struct alps_plan *plan)
{
  if (!plan->slice_ended) return false;
  if (!plan->slice_is_behind && (!alps->options.slices_by_rate || plan->n_items != plan->n_decode)) return false;
  const int32_t ended = plan->slice.id;
  alps_note_slice(alps, plan, plan->sliced_us - plan->ended_us);
  plan->ended_us = plan->sliced_us;
  plan->ended_tokens += plan->slice.n_tokens;
  plan->n_reserved_pages -= plan->slice_pages;
  if (plan->slice_is_behind) plan->n_reserved_pages = 0; /* they have them */
  plan->slice_pages = 0;
  plan->slice.id = -1;
  plan->slice_begins = plan->slice_ended = false;
  struct planner p = {.alps = alps, .plan = plan, .n_available = n_available - plan->n_reserved_pages, .may_admit = true,
                      .may_decode = true, .is_more = true, .closed_below = ALPS_CLASSES, .busiest = alps->rest.busiest,
                      .tokens_left = alps->rest.tokens_left, .rows_left = alps->rest.rows_left,
                      .budget_us = alps->rest.budget_us - (double)plan->sliced_us,
                      .budget_lower_us = alps->rest.budget_lower_us - (double)plan->sliced_us};
  if (plan->slice_is_behind) {
    if (has_time) plan_next_chunk(&p, ended);
  } else {
    add_decode(&p, ended);
    hurry(&p);
    if (has_time) {
      gather_prefill(&p);
      plan_prefill(&p, admit, user);
    }
    if (plan->slice.id >= 0) plan->slice_us += plan->sliced_us; /* from the end of the step before, as ever */
  }
  p.budget_us = alps->rest.budget_us, p.budget_lower_us = alps->rest.budget_lower_us, p.floor_us = alps->rest.floor_us;
  note_planned_slice(&p);
  plan->predicted_us = (int64_t)alps_cost_predict(&alps->cost, &plan->work);
  return plan->slice.id >= 0;
}

enum sits_status alps_plan(struct alps *alps, int64_t now_us, int32_t n_available, alps_admit_fn admit, void *user, struct alps_plan *plan)
{
  alps->now_us = now_us;
  *plan = (struct alps_plan){.items = alps->items, .victims = alps->victims, .slice.id = -1};
  struct planner p = {.alps = alps, .plan = plan, .n_available = n_available, .tokens_left = alps->options.max_batch_tokens,
                      .rows_left = alps->options.max_rows, .closed_below = ALPS_CLASSES};
  for (int c = 0; c < ALPS_CLASSES; c++) {
    if (alps->classes[c].n_waiting == 0) alps->classes[c].admitted_us = now_us;
  }
  save_accounts(alps);
  gather_prefill(&p);
  if (alps->options.ttft_target_us > 0 && alps->options.policy == ALPS_BUDGET) alps_forgo(alps, p.prefill_tokens);
  limits(&p);
  bool has_pages = true;
  if (alps->options.policy == ALPS_WHOLE) {
    plan_prefill(&p, admit, user);
    if (plan->n_items == 0) has_pages = plan_decodes(&p);
  } else {
    if (p.may_decode) has_pages = plan_decodes(&p);
    plan->n_reserved_pages = n_available - p.n_available;
    set_budget(&p);
    if (has_pages) plan_prefill(&p, admit, user);
  }
  bool is_stuck = has_pages && plan->n_items == 0 && plan->slice.id < 0 && alps->n_running > 1 && alps->n_prefill > 0;
  if ((!has_pages || is_stuck) && alps->n_leaving > 0) {
    alps_drop_plan(alps);
    return SITS_AGAIN;
  }
  if ((p.wants_victim || !has_pages || is_stuck) && alps->n_again++ < 2 * alps->options.max_seqs) {
    int32_t victim = p.wants_victim ? choose_victim(alps, p.victim_above, -1) : choose_victim(alps, -1, best_running(alps));
    if (victim >= 0) {
      plan->victims[plan->n_victims++] = victim;
      alps_drop_plan(alps); /* the plan is dropped, and made again without the victim */
      return SITS_AGAIN;
    }
  }
  alps->n_again = 0;
  alps->spent_us = 0;
  note_planned_slice(&p);
  plan->predicted_us = (int64_t)alps_cost_predict(&alps->cost, &plan->work);
  return SITS_OK;
}
