/* Waiting entries: per class a heap of tenants, least served first; per tenant a heap of entries, pre-empted ones first, then by
 * priority, then by arrival; and one of those whose first token is late already (alps_deadline.c), which come after them.
 *
 * Fairness between tenants is deficit round robin in its continuous form: each tenant is charged the tokens it was really served
 * (prompt tokens when computed, output tokens when drawn), and the next admission goes to the one with the smallest account. A tenant
 * that comes anew starts at the account of the one served last, so nobody saves up credit by staying away (Sheng et al., "Fairness in
 * Serving Large Language Models", OSDI 2024). Charges do not touch the heap: they are added when the tenant reaches its top, which is
 * correct because accounts only grow.
 */
#include <assert.h>

#include "alps/alps_internal.h"
#include "base/hash.h"

enum { LATE_EVERY = 256 };

static bool entry_before(const void *user, int32_t a, int32_t b)
{
  const struct alps_entry *x = &((const struct alps *)user)->entries[a], *y = &((const struct alps *)user)->entries[b];
  if (x->was_preempted != y->was_preempted) return x->was_preempted;
  if (x->request.priority != y->request.priority) return x->request.priority < y->request.priority;
  if (x->request.arrival_us != y->request.arrival_us) return x->request.arrival_us < y->request.arrival_us;
  return x->order < y->order;
}

static bool tenant_before(const void *user, int32_t a, int32_t b)
{
  const struct alps_tenant *x = &((const struct alps *)user)->tenants[a], *y = &((const struct alps *)user)->tenants[b];
  return x->served != y->served ? x->served < y->served : a < b;
}

static struct alps_order entry_order(const struct alps *alps)
{
  return (struct alps_order){entry_before, alps, alps->entry_links};
}

static struct alps_order tenant_order(const struct alps *alps)
{
  return (struct alps_order){tenant_before, alps, alps->tenant_links};
}

static uint32_t bucket_of(const struct alps *alps, uint64_t key, int32_t service_class)
{
  return (uint32_t)(hash_mix(key, (uint64_t)service_class) & (alps->n_buckets - 1));
}

int32_t alps_tenant_acquire(struct alps *alps, uint64_t key, int32_t service_class)
{
  uint32_t bucket = bucket_of(alps, key, service_class);
  for (int32_t t = alps->tenant_buckets[bucket]; t >= 0; t = alps->tenants[t].hash_next) {
    if (alps->tenants[t].key == key && alps->tenants[t].service_class == service_class) return t;
  }
  int32_t t = alps->tenant_free;
  assert(t >= 0);
  alps->tenant_free = alps->tenants[t].hash_next;
  alps->tenants[t] = (struct alps_tenant){.key = key, .service_class = service_class, .waiting_root = -1, .late_root = -1,
                                          .served = alps->classes[service_class].virtual_served,
                                          .hash_next = alps->tenant_buckets[bucket]};
  alps->tenant_buckets[bucket] = t;
  return t;
}

void alps_tenant_release(struct alps *alps, int32_t tenant)
{
  struct alps_tenant *t = &alps->tenants[tenant];
  if (t->n_waiting > 0 || t->n_running > 0 || t->n_parked > 0) return;
  int32_t *link = &alps->tenant_buckets[bucket_of(alps, t->key, t->service_class)];
  while (*link != tenant) link = &alps->tenants[*link].hash_next;
  *link = t->hash_next;
  t->hash_next = alps->tenant_free;
  alps->tenant_free = tenant;
}

void alps_tenant_charge(struct alps *alps, int32_t tenant, double n_tokens)
{
  alps->tenants[tenant].unsorted += n_tokens;
}

/* A heap of one or more keeps its order only when keys do not change under it: account and place are renewed together. */
static void place_tenant(struct alps *alps, int32_t tenant)
{
  struct alps_tenant *t = &alps->tenants[tenant];
  struct alps_order order = tenant_order(alps);
  t->served += t->unsorted;
  t->unsorted = 0;
  struct alps_class *c = &alps->classes[t->service_class];
  c->tenants_root = alps_heap_insert(&order, c->tenants_root, tenant);
}

/* Whether the entry's first token is still to come and has a target. */
static bool is_timed(const struct alps *alps, const struct alps_entry *e)
{
  return alps->options.ttft_target_us > 0 && !e->was_preempted;
}

void alps_queue_add(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  struct alps_tenant *t = &alps->tenants[e->tenant];
  struct alps_class *c = &alps->classes[t->service_class];
  struct alps_order order = entry_order(alps);
  t->waiting_root = alps_heap_insert(&order, t->waiting_root, id);
  e->is_late = false;
  if (is_timed(alps, e)) alps_timely_add(alps, id);
  if (t->n_waiting++ == 0) place_tenant(alps, e->tenant);
  c->n_waiting++;
  c->waiting_tokens += alps_to_read(e);
}

void alps_queue_remove(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  struct alps_tenant *t = &alps->tenants[e->tenant];
  struct alps_class *c = &alps->classes[t->service_class];
  struct alps_order order = entry_order(alps), tenants = tenant_order(alps);
  if (e->is_late) t->late_root = alps_heap_remove(&order, t->late_root, id);
  else t->waiting_root = alps_heap_remove(&order, t->waiting_root, id);
  if (!e->is_late && is_timed(alps, e)) alps_timely_remove(alps, id);
  t->n_since_late = e->is_late ? 0 : t->n_since_late + 1;
  if (--t->n_waiting == 0) c->tenants_root = alps_heap_remove(&tenants, c->tenants_root, e->tenant);
  c->n_waiting--;
  c->waiting_tokens -= alps_to_read(e);
}

void alps_queue_give_up(struct alps *alps, int32_t id)
{
  struct alps_entry *e = &alps->entries[id];
  struct alps_tenant *t = &alps->tenants[e->tenant];
  struct alps_order order = entry_order(alps);
  alps_timely_remove(alps, id);
  e->is_late = true;
  t->waiting_root = alps_heap_remove(&order, t->waiting_root, id);
  t->late_root = alps_heap_insert(&order, t->late_root, id);
}

/* The tenant's next entry: timely ones before late ones of the same priority, but for every LATE_EVERYth. */
static int32_t tenant_top(struct alps *alps, struct alps_tenant *t)
{
  while (t->waiting_root >= 0 && is_timed(alps, &alps->entries[t->waiting_root]) && alps_is_hopeless(alps, t->waiting_root)) {
    alps_queue_give_up(alps, t->waiting_root);
  }
  if (t->waiting_root < 0) return t->late_root;
  if (t->late_root < 0 || alps->entries[t->waiting_root].was_preempted) return t->waiting_root;
  int32_t timely = alps->entries[t->waiting_root].request.priority, late = alps->entries[t->late_root].request.priority;
  return late < timely || (late == timely && t->n_since_late >= LATE_EVERY) ? t->late_root : t->waiting_root;
}

int32_t alps_queue_top(struct alps *alps, int32_t service_class)
{
  struct alps_class *c = &alps->classes[service_class];
  while (c->tenants_root >= 0) {
    int32_t tenant = c->tenants_root;
    struct alps_tenant *t = &alps->tenants[tenant];
    if (t->unsorted == 0) {
      if (t->served > c->virtual_served) c->virtual_served = t->served;
      return tenant_top(alps, t);
    }
    struct alps_order order = tenant_order(alps);
    c->tenants_root = alps_heap_remove(&order, c->tenants_root, tenant);
    place_tenant(alps, tenant);
  }
  return -1;
}
