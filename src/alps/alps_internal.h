/* Inside of ALPS; only files in src/alps include it. alps.c: entries and their states. alps_queue.c: who is served next.
 * alps_deadline.c: whose first token can still come in time.
 * alps_plan.c: one step. alps_cost.c, alps_window.c, alps_heap.c: their headers say. */
#ifndef SITS_ALPS_ALPS_INTERNAL_H
#define SITS_ALPS_ALPS_INTERNAL_H

#include "alps/alps.h"
#include "alps/alps_heap.h"
#include "alps/alps_verify.h"
#include "alps/alps_window.h"

#define ALPS_LENGTHS 96 /* lists of prompts by length, four an octave */

enum alps_state { ALPS_FREE, ALPS_WAITING, ALPS_RUNNING, ALPS_LEAVING };

struct alps_entry {
  enum alps_state state;
  struct alps_request request;  /* as given; n_known kept current */
  int32_t tenant;               /* index of its alps_tenant */
  int32_t n_prompt;             /* n_known when it first came */
  int32_t n_computed, n_pages, copy_pages, n_draft;
  int32_t n_charged;            /* computed tokens that its tenant has been charged */
  int32_t run_at;               /* place in alps.running */
  uint64_t order;               /* of arrival, unique */
  uint64_t family;              /* the same for all that were forked from one */
  uint64_t admitted;            /* of admission, unique */
  const float *chance;          /* [n_draft] that a drafted token is right */
  bool is_held, was_preempted;
  bool is_coming;               /* running, but its pages are still being filled */
  bool is_late;                 /* waiting, and given up: its first token will not come in time */
  int32_t length_prev, length_next; /* timely waiting entries of about that length; -1 none */
};

/* One tenant in one class, while it has entries. */
struct alps_tenant {
  uint64_t key;
  int32_t service_class;
  int32_t waiting_root;         /* heap of its waiting entries that are not late */
  int32_t late_root;            /* heap of those that are */
  int32_t n_since_late;         /* entries taken since one of those was */
  int32_t n_waiting, n_running, n_parked;
  double served;                /* tokens served so far, from the class's virtual time at its first entry on */
  double unsorted;              /* served since it was last placed in the class's heap; folded in when it comes to the top */
  int32_t hash_next;            /* bucket chain; free list when unused */
};

struct alps_class {
  int32_t tenants_root;         /* heap of tenants with waiting entries, least served first */
  int32_t n_waiting, n_running;
  int64_t waiting_tokens;
  int64_t timely_tokens;        /* of those that have had no token yet and are not late; kept where there is a first-token target */
  int32_t timely[ALPS_LENGTHS]; /* lists of them by length, -1 empty */
  double virtual_served;        /* of the tenant served last: where a new tenant starts */
  double pass;                  /* stride scheduling: time received / weight */
  int64_t came_us;              /* when one came last; 0 = never */
  int64_t admitted_us;          /* when one was admitted last, or nobody waited */
  double credit_us;             /* time that its decodes may take while a higher class is short of time */
  bool was_active;
  bool was_given_up;            /* its chunk in slices, for a higher class; until one of its own is read, or it has nothing more */
};

/* What a plan books before it is known whether it will run: time received and time saved up. */
struct alps_accounts { double pass[ALPS_CLASSES], credit_us[ALPS_CLASSES]; };

#define ALPS_MARGIN_START 0.96

struct alps {
  struct alps_options options;
  struct alps_entry *entries;   /* [max_entries] */
  struct alps_link *entry_links;
  struct alps_tenant *tenants;  /* [max_entries] */
  struct alps_link *tenant_links;
  int32_t *tenant_buckets;
  uint32_t n_buckets;           /* a power of two */
  int32_t tenant_free;
  struct alps_class classes[ALPS_CLASSES];
  int32_t *running;             /* [max_seqs], unordered */
  int32_t n_running;
  int32_t n_parked;             /* waiting entries that are held, and leaving ones */
  int32_t n_again;              /* plans in a row that asked for a victim */
  int32_t n_unborn;             /* sequences that running entries will fork into */
  int32_t n_leaving;            /* entries that still hold a slot and pages */
  int64_t spent_us;             /* of the next step's time, before it is planned */
  int32_t *prefill;             /* [max_seqs] scratch: running entries in prefill, in order of service */
  int32_t n_prefill;
  int32_t slice_id;             /* entry whose chunk is being read in slices, -1 none */
  int32_t slice_n;              /* its tokens */
  struct alps_cost_work slice_work; /* the chunk alone, */
  int64_t slice_spent_us;       /* and the time that it has taken so far */
  struct { uint64_t admitted; int64_t kv_tokens; int32_t n_steps; } reading; /* prompt in slices: decodes' contexts at its first; steps */
  double slice_token_us;        /* of the last chunk that was read in slices, by the token; 0 before the first */
  double slice_ratio;           /* what chunks in slices took, by what the cost model predicts for them alone */
  struct { double budget_us, budget_lower_us, floor_us; int32_t busiest, tokens_left, rows_left; } rest; /* of the plan with a slice */
  struct alps_item *items;
  int32_t *victims;             /* [max_seqs] of the plan; scratch before */
  uint64_t next_order;
  struct alps_cost cost;
  struct alps_window window;
  struct alps_window excess;    /* by how much steps with decodes took longer than predicted and planned */
  struct alps_window steady_excess; /* the same of steps with as many decodes as the one before */
  int32_t n_decode_before;      /* of the newest step */
  double margin;                /* share of the target that a step may plan for */
  double sequence_cap;          /* dynamic batch size */
  double late_credit;           /* tokens that may come late so that first tokens do not */
  int32_t pressed_class;        /* the highest one whose first tokens are about to come late; ALPS_CLASSES: none */
  double decode_us;             /* recent time of steps without prompts */
  struct alps_verify verify;    /* time of steps without prompts by their tokens, drafts included */
  double read_us, read_tokens;  /* recent steps with prompts: their time, their prompt tokens */
  int64_t now_us;               /* of the plan being made */
  struct alps_accounts before;  /* the newest plan */
  int32_t reports_since_control;
  double output_mean;           /* tokens that finished sequences made, moving average; 0 = none seen */
  bool is_filling;              /* ALPS_STATIC: the batch takes more requests */
};

void alps_start_running(struct alps *alps, int32_t id); /* from WAITING (taken off its queue) or newly forked */

void alps_queue_add(struct alps *alps, int32_t id);
void alps_queue_remove(struct alps *alps, int32_t id);
void alps_queue_give_up(struct alps *alps, int32_t id); /* a timely waiting entry becomes a late one */
/* The entry that would be served next in a class, -1 when none waits. */
int32_t alps_queue_top(struct alps *alps, int32_t service_class);
int32_t alps_tenant_acquire(struct alps *alps, uint64_t key, int32_t service_class); /* there is always room: one per entry */
void alps_tenant_release(struct alps *alps, int32_t tenant);                         /* once it has no entries */
void alps_tenant_charge(struct alps *alps, int32_t tenant, double n_tokens);

void alps_timely_add(struct alps *alps, int32_t id);
void alps_timely_remove(struct alps *alps, int32_t id);
/* Give up the longest waiting prompts until the rest, and running_tokens before them, can be read within the target. */
void alps_forgo(struct alps *alps, int64_t running_tokens);
bool alps_is_hopeless(const struct alps *alps, int32_t id);
void alps_note_slice(struct alps *alps, const struct alps_plan *plan, int64_t own_us); /* the plan's slice took own_us */
void alps_note_reading(struct alps *alps, int32_t n_tokens, double step_us);

/* Time that decodes may take together for one more to be admitted, or for as many to run, where each holds about n_known tokens: the target
 * times the margin, if anybody keeps it. */
double alps_admission_us(const struct alps *alps, int32_t n_known);

/* Tokens that a waiting entry will have to compute, as far as is known. */
static inline int32_t alps_to_read(const struct alps_entry *entry)
{
  int32_t n = entry->request.n_known - entry->request.n_ready;
  return n > 1 ? n : 1;
}

static inline bool alps_is_decoding(const struct alps_entry *entry)
{
  return entry->request.n_known - entry->n_computed == 1 && entry->request.n_known > entry->n_prompt && !entry->is_coming;
}

#endif
