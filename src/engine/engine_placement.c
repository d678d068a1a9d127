/* See engine_placement.h. First the reader's side (its hooks and its events), then the loop's. */
#include "engine/engine_placement.h"

#include <string.h>

#include "alps/alps_split.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_internal.h"

enum { COPIES = 64, RESERVE_SHARE = 8 }; /* of the decode side's pages, one in so many is not given to prompts under way */

enum answer { ANSWER_NONE, ANSWER_GIVEN, ANSWER_REFUSED };

struct engine_handover {
  struct sits_request *request;   /* [loop] NULL: it has ended */
  struct sits_request *twin;      /* [init] of the reader: the whole pages of the prompt, and one token that nobody wants */
  struct engine_handover *next;   /* [mutex inbox] in the mail */
  int32_t n_pages;                /* [init] of the twin */
  int32_t n_tokens;               /* [loop] to be read, as far as this side knows */
  int32_t slot;                   /* [loop] holds the targets; -1 none */
  bool in_mail, is_over;          /* [mutex inbox] in the mail and not over: it asks */
  enum answer answer;             /* [mutex inbox] */
  int32_t first;                  /* [mutex inbox] with the answer: pages that the decode side has, and is not sent */
  const int32_t *targets;         /* [mutex inbox] with the answer: [n_pages] the slot's table, which stays as it is */
  bool has_asked;                 /* [reader] */
  int32_t n_sent;                 /* [reader] pages, those not to be sent included; [loop] once it is over */
  enum sits_status status;        /* [reader] how the twin ended; [loop] once it is over */
};

struct engine_placement {
  struct sits_engine *engine, *reader; /* [init] */
  struct alps_split split;        /* [loop] */
  int32_t n_away;                 /* [loop] hand-overs begun and not taken back */
  uint64_t query_tokens, hit_tokens; /* [loop] prefix look-ups of what came back */
  struct engine_handover *mail, *mail_last; /* [mutex inbox] oldest first */
  pthread_cond_t answered;        /* [mutex inbox] */
  bool has_unfinished_sends;      /* [reader] */
  enum sits_status status;        /* [reader] of sending; sticky */
  _Atomic uint64_t n_pages_sent;  /* [atomic] */
};

/* ---- the reader's side ---- */

/* Under the inbox mutex. */
static void post(struct engine_placement *p, struct engine_handover *h)
{
  if (!h->in_mail) {
    h->in_mail = true;
    h->next = NULL;
    if (p->mail) p->mail_last->next = h;
    else p->mail = h;
    p->mail_last = h;
  }
  if (p->engine->is_sleeping) pthread_cond_signal(&p->engine->inbox_cond);
}

/* Ask once; see what was answered. With the prompt complete, wait for it. */
static enum answer ask(struct engine_placement *p, struct engine_handover *h, bool is_complete)
{
  pthread_mutex_lock(&p->engine->inbox_mutex);
  if (!h->has_asked) {
    h->has_asked = true;
    post(p, h);
  }
  while (is_complete && h->answer == ANSWER_NONE) pthread_cond_wait(&p->answered, &p->engine->inbox_mutex);
  enum answer answer = h->answer;
  pthread_mutex_unlock(&p->engine->inbox_mutex);
  return answer;
}

static void send_pages(struct engine_placement *p, struct engine_handover *h, const int32_t *pages, int32_t end)
{
  const struct engine_options *o = &p->reader->options;
  struct kv_copy copies[COPIES];
  if (h->n_sent < h->first) h->n_sent = h->first;
  while (h->n_sent < end && p->status == SITS_OK) {
    int32_t n = end - h->n_sent < COPIES ? end - h->n_sent : COPIES;
    for (int32_t i = 0; i < n; i++)
      copies[i] = (struct kv_copy){.from_page = pages[h->n_sent + i], .to_page = h->targets[h->n_sent + i]};
    p->status = o->vtable->kv_send(o->kv, p->engine->options.kv, copies, n);
    p->has_unfinished_sends = true;
    h->n_sent += n;
    atomic_fetch_add(&p->n_pages_sent, (uint64_t)n);
  }
}

/* engine_pages_watch.filled */
static void filled(void *user, struct sits_request *twin, const int32_t *pages, int32_t n_whole)
{
  struct engine_placement *p = user;
  struct engine_handover *h = twin->params.user;
  if (n_whole > h->n_pages) n_whole = h->n_pages;
  if (ask(p, h, n_whole == h->n_pages) == ANSWER_GIVEN) send_pages(p, h, pages, n_whole);
}

/* engine_pages_watch.closing: the sources are about to be given back. */
static void closing(void *user)
{
  struct engine_placement *p = user;
  if (!p->has_unfinished_sends) return;
  const struct engine_options *o = &p->reader->options;
  if (p->status == SITS_OK) p->status = o->vtable->kv_sent(o->kv);
  p->has_unfinished_sends = false;
}

/* engine_options.on_events of the reader */
static void read_events(void *user, struct sits_request *const *twins, int32_t n)
{
  struct engine_placement *p = user;
  for (int32_t i = 0; i < n; i++) {
    struct engine_handover *h = twins[i]->params.user;
    struct sits_event e;
    while (sits_request_poll(twins[i], &e) == SITS_OK) {
      if (e.kind != SITS_EVENT_FINISH) continue;
      pthread_mutex_lock(&p->engine->inbox_mutex);
      h->status = p->status != SITS_OK ? p->status : e.status;
      h->is_over = true;
      post(p, h);
      pthread_mutex_unlock(&p->engine->inbox_mutex);
      break; /* it is the loop's now */
    }
  }
}

/* ---- life ---- */

static enum sits_status check_pair(const struct engine_options *o, struct sits_error *err)
{
  const struct engine_options *r = o->reader;
  if (!o->vtable->kv_send || o->vtable != r->vtable)
    return sits_fail_param(err, SITS_UNSUPPORTED, "placement", "placement: this backend does not send pages to another device");
  if (!o->prefix_caching)
    return sits_fail_param(err, SITS_CONFIG, "placement", "placement needs enable-prefix-caching: pages arrive as cached ones");
  if (o->draft.program)
    return sits_fail_param(err, SITS_UNSUPPORTED, "placement", "placement does not go with draft-model, which reads prompts itself");
  if (o->page_budget > 0)
    return sits_fail_param(err, SITS_UNSUPPORTED, "placement", "placement does not go with kv-cache-dtype fp4-sparse");
  if (o->geometry.codec != r->geometry.codec || o->vtable->kv_page_bytes(&o->geometry) != o->vtable->kv_page_bytes(&r->geometry))
    return sits_fail(err, SITS_INVALID_ARGUMENT, "engine: pages of the two devices differ");
  return SITS_OK;
}

enum sits_status engine_placement_create(struct sits_engine *engine, const struct engine_options *options, struct engine_placement **out,
                                         struct sits_error *err)
{
  enum sits_status status = check_pair(options, err);
  if (status != SITS_OK) return status;
  struct engine_placement *p = mem_calloc(1, sizeof *p);
  if (!p) return sits_fail(err, SITS_NOMEM, "engine: out of memory");
  pthread_cond_init(&p->answered, NULL);
  p->engine = engine;
  p->split.ttft_target_us = options->ttft_target_us;
  p->split.always = options->always_hand_over;
  struct engine_options reader = *options->reader;
  reader.reader = NULL;
  reader.pages = (struct engine_pages_watch){.filled = filled, .closing = closing, .user = p};
  reader.on_events = read_events;
  reader.events_user = p;
  status = engine_create(&reader, &p->reader, err);
  if (status != SITS_OK) {
    engine_placement_destroy(p);
    return status;
  }
  *out = p;
  return SITS_OK;
}

enum sits_status engine_placement_start(struct engine_placement *placement, struct sits_error *err)
{
  return engine_start(placement->reader, err);
}

/* With its slot, which this frees or gives to the cache: n_done pages hold what they should. */
static void take_back(struct engine_placement *p, struct engine_handover *h, int32_t n_done)
{
  struct kv *pages = p->engine->pages;
  if (h->slot >= 0) {
    int32_t n_known = kv_tokens(pages, h->slot);
    if (n_done * KV_TOKENS < n_known) n_done = n_known / KV_TOKENS;
    kv_commit(pages, h->slot, h->twin->params.prompt + n_known, n_done * KV_TOKENS - n_known);
    kv_close(pages, h->slot);
  }
  sits_request_release(h->twin);
  mem_free(h);
  p->n_away--;
}

/* The reader has ended everything it had; what the loop has not fetched any more lies in the mail. */
void engine_placement_destroy(struct engine_placement *placement)
{
  if (!placement) return;
  if (placement->reader) engine_stop(placement->reader, 0);
  while (placement->mail) {
    struct engine_handover *h = placement->mail;
    placement->mail = h->next;
    take_back(placement, h, 0);
  }
  engine_destroy(placement->reader);
  pthread_cond_destroy(&placement->answered);
  mem_free(placement);
}

/* ---- submitting ---- */

enum sits_status engine_handover_create(struct sits_engine *engine, struct sits_request *request)
{
  const struct sits_request_params *p = &request->params;
  int32_t n_pages = (p->n_prompt - 1) / KV_TOKENS; /* a token is left to draw from */
  struct sits_engine *reader = engine->placement->reader;
  if (n_pages == 0 || p->sampling.n_prompt_logprobs >= 0 || n_pages * KV_TOKENS + 1 > reader->options.max_model_len) return SITS_OK;
  struct engine_handover *h = mem_calloc(1, sizeof *h);
  if (!h) return SITS_NOMEM;
  struct sits_request_params twin = *p;
  twin.n_prompt = n_pages * KV_TOKENS;
  twin.n_choices = 1;
  twin.sampling = (struct sits_sampling){.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .ignore_eos = true, .n_top_logprobs = -1,
                                         .n_prompt_logprobs = -1};
  twin.deadline_us = 0; /* the request's own ends it */
  twin.user = h;
  *h = (struct engine_handover){.request = request, .n_pages = n_pages, .slot = -1, .twin = engine_request_create(reader, &twin)};
  if (!h->twin) {
    mem_free(h);
    return SITS_NOMEM;
  }
  request->handover = h;
  return SITS_OK;
}

void engine_handover_destroy(struct sits_request *request)
{
  if (!request->handover) return;
  engine_request_free(request->handover->twin);
  mem_free(request->handover);
  request->handover = NULL;
}

/* ---- the loop's side ---- */

static struct kv_owner owner_of(const struct sits_request *request)
{
  return (struct kv_owner){.tenant = request->params.tenant, .salt = request->params.cache_salt};
}

bool engine_handover_begin(struct sits_engine *engine, struct sits_request *request)
{
  struct engine_placement *p = engine->placement;
  struct engine_handover *h = request->handover;
  if (!h) return false;
  const struct sits_request_params *params = &request->params;
  int64_t now_us = clock_monotonic_us(), arrival_us = atomic_load(&request->times[TIME_SUBMITTED]);
  int32_t n_here = kv_match(engine->pages, owner_of(request), params->prompt, params->n_prompt), n_all = h->n_pages * KV_TOKENS;
  h->n_tokens = n_all - n_here;
  atomic_store(&h->twin->times[TIME_SUBMITTED], arrival_us);
  struct sits_error err;
  if (atomic_load(&engine->state) == ENGINE_FAILED ||
      !alps_split_pays(&p->split, engine->alps, h->n_tokens, params->n_prompt - n_all, arrival_us, now_us) ||
      engine_request_enter(p->reader, h->twin, &err) != SITS_OK) {
    p->split.n_declined++;
    engine_handover_destroy(request);
    return false;
  }
  alps_split_sent(&p->split, h->n_tokens, now_us);
  p->n_away++;
  return true;
}

void engine_handover_abandon(struct sits_request *request)
{
  if (!request->handover) return;
  request->handover->request = NULL;
  sits_request_cancel(request->handover->twin, -1);
  request->handover = NULL;
}

/* A slot with pages for the prompt: what is cached here, and room for the rest. */
static bool give_pages(struct sits_engine *engine, struct engine_handover *h)
{
  struct kv *pages = engine->pages;
  struct kv_move none;
  int32_t n_moves = 0, n_tokens = h->n_pages * KV_TOKENS;
  if (!h->request || kv_open(pages, owner_of(h->request), &h->slot) != SITS_OK) return false;
  int32_t first = kv_attach_uncounted(pages, h->slot, h->request->params.prompt, n_tokens + 1) / KV_TOKENS;
  if (kv_available(pages) - (h->n_pages - first) < engine->options.geometry.n_pages / RESERVE_SHARE ||
      kv_reserve(pages, h->slot, n_tokens, &none, &n_moves) != SITS_OK) {
    kv_close(pages, h->slot);
    h->slot = -1;
    return false;
  }
  const int32_t *table;
  kv_pages(pages, h->slot, &table);
  engine->options.vtable->kv_expect(engine->options.kv, table + first, h->n_pages - first);
  h->first = first;
  h->targets = table;
  return true;
}

static void answer(struct engine_placement *p, struct engine_handover *h)
{
  bool is_given = give_pages(p->engine, h);
  pthread_mutex_lock(&p->engine->inbox_mutex);
  h->answer = is_given ? ANSWER_GIVEN : ANSWER_REFUSED;
  pthread_cond_broadcast(&p->answered);
  pthread_mutex_unlock(&p->engine->inbox_mutex);
  if (!is_given) sits_request_cancel(h->twin, -1); /* the loop releases it, so it is there */
}

/* What the reader's time was spent on becomes the request's. */
static void note_reading(struct engine_placement *p, struct engine_handover *h)
{
  struct sits_request *request = h->request;
  struct sits_request_timing t;
  sits_request_timing(h->twin, &t);
  int32_t n_cached = t.n_cached_tokens > h->first * KV_TOKENS ? t.n_cached_tokens : h->first * KV_TOKENS;
  request->read_elsewhere = (struct engine_read_elsewhere){.scheduled_us = t.first_scheduled_us, .n_cached = n_cached};
  atomic_fetch_add(&request->times[TIME_COMPUTED], t.prefill_us);
  p->engine->stats.prompt_tokens_computed += (uint64_t)(h->n_pages * KV_TOKENS - t.n_cached_tokens);
  p->query_tokens += (uint64_t)request->params.n_prompt;
  p->hit_tokens += (uint64_t)n_cached;
}

static void end(struct engine_placement *p, struct engine_handover *h)
{
  struct sits_engine *engine = p->engine;
  struct sits_request *request = h->request;
  enum sits_status status = h->status;
  int32_t n_done = h->answer == ANSWER_GIVEN && (status == SITS_OK || status == SITS_CANCELLED) ? h->n_sent : 0;
  bool is_read = n_done == h->n_pages;
  alps_split_back(&p->split, h->n_tokens, is_read, clock_monotonic_us());
  if (request) {
    request->handover = NULL;
    if (is_read) note_reading(p, h);
  }
  take_back(p, h, n_done);
  if (request) engine_enqueue(engine, request, n_done * KV_TOKENS);
  if (status == SITS_OK || status == SITS_CANCELLED || atomic_load(&engine->state) == ENGINE_FAILED) return;
  log_error("engine", "the prefill device failed");
  engine_fail(engine, status);
}

void engine_placement_turn(struct sits_engine *engine)
{
  struct engine_placement *p = engine->placement;
  for (;;) {
    pthread_mutex_lock(&engine->inbox_mutex);
    struct engine_handover *h = p->mail;
    bool is_over = h && h->is_over;
    if (h) {
      p->mail = h->next;
      h->in_mail = false;
    }
    pthread_mutex_unlock(&engine->inbox_mutex);
    if (!h) return;
    if (is_over) end(p, h); /* nobody asks any more, and nobody else knows it */
    else answer(p, h);
  }
}

bool engine_placement_is_busy(const struct engine_placement *placement)
{
  return placement && placement->n_away > 0;
}

bool engine_placement_has_mail(const struct engine_placement *placement)
{
  return placement && placement->mail;
}

int64_t engine_placement_heartbeat_us(const struct engine_placement *placement)
{
  return placement ? engine_heartbeat_us(placement->reader) : INT64_MAX;
}

void engine_placement_stats(const struct engine_placement *placement, struct engine_stats *out)
{
  if (!placement) return;
  out->placement_sent = placement->split.n_sent;
  out->placement_declined = placement->split.n_declined;
  out->placement_pages = atomic_load(&placement->n_pages_sent);
  out->prefix_query_tokens += placement->query_tokens;
  out->prefix_hit_tokens += placement->hit_tokens;
}
