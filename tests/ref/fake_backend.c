/* See fake_backend.h. */
#include "fake_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/mem.h"

enum { FAKE_MAX_DRAWN = 1024, FAKE_MAX_SENDS = 64, FAKE_MAX_CAPTURED = 64 };

struct backend_kv {
  struct fake_rig *rig;
  int32_t *ids;               /* [n_pages][columns][P], -1 = never written; the columns of a page hold the same, until blocks are copied */
  int32_t *written_by;        /* [n_pages][columns][P] batch that wrote it last, of the first column */
  int32_t n_columns, n_ids;   /* blocks and ids of a page */
  bool *is_expected;          /* [n_pages] by kv_expect, until it is sent */
  int32_t n_pages;
  struct { struct backend_kv *to; struct kv_copy copy; } sends[FAKE_MAX_SENDS]; /* begun, done in kv_sent or when there are many */
  int32_t n_sends;
};

struct backend_program {
  struct fake_rig *rig;
  float *logits;              /* [R][V] */
  int32_t n_rows;
  bool is_pending;
  bool is_sampled;            /* tokens were drawn */
  bool has_logits;            /* the logits are given out */
  int32_t drawn[FAKE_MAX_DRAWN];
  bool is_captured[FAKE_MAX_CAPTURED];
  struct backend_stats stats;
  struct backend_kv *kv;      /* of a lane, as what follows: the chunk, the tokens of it that are written, its number */
  const struct backend_batch *batch;
  int32_t n_written, step;
};

static void require(bool holds, const char *what)
{
  if (holds) return;
  fprintf(stderr, "fake backend: %s\n", what);
  abort();
}

static uint64_t fold(uint64_t h, int32_t token)
{
  return hash_mix(h, (uint64_t)(uint32_t)token + 1);
}

static void logits_of(uint64_t h, int32_t n_vocab, float *logits)
{
  for (int32_t v = 0; v < n_vocab; v++) logits[v] = (float)(hash_mix(h, (uint64_t)v + 77) >> 40) * 0x1p-24f * 12 - 6;
}

void fake_logits(int32_t n_vocab, const int32_t *tokens, int32_t n, float *logits)
{
  uint64_t h = 1;
  for (int32_t i = 0; i < n; i++) h = fold(h, tokens[i]);
  logits_of(h, n_vocab, logits);
}

int32_t fake_next(int32_t n_vocab, const int32_t *tokens, int32_t n)
{
  uint64_t h = 1;
  for (int32_t i = 0; i < n; i++) h = fold(h, tokens[i]);
  uint64_t best = 0;
  int32_t at = 0;
  for (int32_t v = 0; v < n_vocab; v++) {
    uint64_t x = hash_mix(h, (uint64_t)v + 77) >> 40;
    if (v == 0 || x > best) {
      best = x;
      at = v;
    }
  }
  return at;
}

uint64_t fake_given(int32_t token, int32_t position, int32_t page, int32_t column)
{
  return hash_mix(hash_mix((uint64_t)(uint32_t)token, (uint64_t)position), (uint64_t)page * 64 + (uint64_t)column) % 1000;
}

static uint64_t page_bytes(const struct kv_geometry *geometry)
{
  return KV_PAGE_TOKENS * sizeof(int32_t) * (uint64_t)(geometry->n_layers * geometry->n_kv_heads);
}

static enum sits_status copy_pages(struct backend_kv *kv, const struct kv_copy *copies, int32_t n)
{
  /* All sources are read before any target is written, as a parallel device may do. */
  for (int32_t i = 0; i < n; i++) {
    for (int32_t k = 0; k < n; k++) require(k == i || copies[k].to_page != copies[i].from_page, "a copy's source is another's target");
    memcpy(kv->ids + copies[i].to_page * kv->n_ids, kv->ids + copies[i].from_page * kv->n_ids, (size_t)kv->n_ids * sizeof(int32_t));
  }
  return SITS_OK;
}

static enum sits_status copy_blocks(struct backend_kv *kv, const int32_t (*copies)[2], int32_t n)
{
  for (int32_t i = 0; i < n; i++) {
    for (int k = 0; k < 2; k++) require(copies[i][k] >= 0 && copies[i][k] < kv->n_pages * kv->n_columns, "no such block");
    memcpy(kv->ids + copies[i][1] * KV_PAGE_TOKENS, kv->ids + copies[i][0] * KV_PAGE_TOKENS, KV_PAGE_TOKENS * sizeof(int32_t));
  }
  return SITS_OK;
}

static bool page_fails(struct fake_rig *rig, atomic_int *n)
{
  atomic_fetch_add(n, 1);
  const int at = atomic_load(&rig->fail_at_page);
  return at > 0 && atomic_load(&rig->n_reads) + atomic_load(&rig->n_writes) == at;
}

static enum sits_status read_page(struct backend_kv *kv, int32_t page, void *host)
{
  if (page_fails(kv->rig, &kv->rig->n_reads)) return SITS_INTERNAL;
  memcpy(host, kv->ids + page * kv->n_ids, (size_t)kv->n_ids * sizeof(int32_t));
  return SITS_OK;
}

static enum sits_status write_page(struct backend_kv *kv, int32_t page, const void *host)
{
  if (page_fails(kv->rig, &kv->rig->n_writes)) return SITS_INTERNAL;
  memcpy(kv->ids + page * kv->n_ids, host, (size_t)kv->n_ids * sizeof(int32_t));
  return SITS_OK;
}

static void expect_pages(struct backend_kv *kv, const int32_t *pages, int32_t n)
{
  for (int32_t i = 0; i < n; i++) kv->is_expected[pages[i]] = true;
}

/* Late, so that a source given back too early or a target used too early shows. */
static enum sits_status finish_sends(struct backend_kv *from)
{
  for (int32_t i = 0; i < from->n_sends; i++)
    memcpy(from->sends[i].to->ids + from->sends[i].copy.to_page * from->n_ids, from->ids + from->sends[i].copy.from_page * from->n_ids,
           (size_t)from->n_ids * sizeof(int32_t));
  from->n_sends = 0;
  return SITS_OK;
}

static enum sits_status send_pages(struct backend_kv *from, struct backend_kv *to, const struct kv_copy *copies, int32_t n)
{
  for (int32_t i = 0; i < n; i++) {
    require(to->is_expected[copies[i].to_page], "a page is sent that nobody expects");
    to->is_expected[copies[i].to_page] = false;
    for (int32_t t = 0; t < to->n_ids; t++) to->ids[copies[i].to_page * to->n_ids + t] = -2;
    if (from->n_sends == FAKE_MAX_SENDS) (void)finish_sends(from);
    from->sends[from->n_sends].to = to;
    from->sends[from->n_sends++].copy = copies[i];
  }
  return SITS_OK;
}

static void check_batch(const struct fake_rig *rig, const struct backend_batch *b)
{
  require(b->n_tokens > 0 && b->n_tokens <= rig->options.max_batch_tokens, "T out of range");
  require(b->n_seqs > 0 && b->n_rows <= rig->options.max_rows, "S or R out of range");
  require(b->seq_start[0] == 0 && b->seq_start[b->n_seqs] == b->n_tokens, "seq_start does not cover the batch");
  for (int32_t s = 0; s < b->n_seqs; s++) {
    int32_t first = b->seq_start[s], end = b->seq_start[s + 1];
    require(end > first, "a sequence without tokens");
    require(b->kv_len[s] == b->positions[end - 1] + 1, "kv_len does not match the last position");
    for (int32_t t = first + 1; t < end; t++) require(b->positions[t] == b->positions[t - 1] + 1, "positions are not consecutive");
  }
  for (int32_t r = 1; r < b->n_rows; r++) require(b->row_token[r] > b->row_token[r - 1], "rows do not ascend");
}

static int32_t *place(struct backend_kv *kv, const struct backend_batch *b, int32_t s, int32_t position)
{
  int32_t page = b->block_table[(int64_t)s * b->table_stride + position / KV_PAGE_TOKENS];
  require(position / KV_PAGE_TOKENS < b->table_stride && page >= 0 && page < kv->n_pages, "block table names no page");
  return kv->ids + (int64_t)page * kv->n_ids + position % KV_PAGE_TOKENS;
}

/* What a column has of a page of the sequence: P ids; NULL when it has lost them. */
static const int32_t *block_of(const struct fake_rig *rig, const struct backend_kv *kv, const struct backend_batch *b, int32_t s,
                               int32_t page, int32_t column)
{
  const int32_t id = b->block_table[(int64_t)s * b->table_stride + page];
  if (id != KV_NO_PAGE) return kv->ids + (int64_t)id * kv->n_ids + (int64_t)column * KV_PAGE_TOKENS;
  require(rig->geometry.codec == KV_FP4_SPARSE && page < b->positions[b->seq_start[s]] / KV_PAGE_TOKENS && b->blocks != NULL &&
              b->blocks[s].numbers != NULL, "a page is missing that may not");
  const int32_t number = b->blocks[s].numbers[page * kv->n_columns + column];
  require(number >= -1 && number < kv->n_pages * kv->n_columns, "no such block");
  return number < 0 ? NULL : kv->ids + (int64_t)number * KV_PAGE_TOKENS;
}

static void give(const struct fake_rig *rig, const struct backend_kv *kv, const struct backend_batch *b)
{
  for (int32_t s = 0; s < b->n_seqs && b->blocks; s++)
    for (int32_t t = b->seq_start[s]; t < b->seq_start[s + 1]; t++)
      for (int32_t page = 0; page <= b->positions[t] / KV_PAGE_TOKENS - b->blocks[s].nearest; page++)
        for (int32_t column = 0; column < kv->n_columns; column++)
          if (block_of(rig, kv, b, s, page, column))
            atomic_fetch_add(&b->blocks[s].given[page * kv->n_columns + column], fake_given(b->tokens[t], b->positions[t], page, column));
}

static void store_tokens(struct fake_rig *rig, struct backend_kv *kv, const struct backend_batch *b)
{
  int32_t step = atomic_load(&rig->n_steps);
  for (int32_t s = 0; s < b->n_seqs; s++) {
    for (int32_t t = b->seq_start[s]; t < b->seq_start[s + 1]; t++) {
      int32_t *at = place(kv, b, s, b->positions[t]);
      int32_t *mark = kv->written_by + (at - kv->ids);
      require(*mark != step, "two tokens of one batch are written to one place");
      *mark = step;
      for (int32_t column = 0; column < kv->n_columns; column++) at[column * KV_PAGE_TOKENS] = b->tokens[t];
    }
  }
}

static void compute_rows(struct backend_program *program, struct backend_kv *kv, const struct backend_batch *b)
{
  int32_t r = 0, n_vocab = program->rig->options.n_vocab;
  for (int32_t s = 0; s < b->n_seqs && r < b->n_rows; s++) {
    if (b->row_token[r] >= b->seq_start[s + 1]) continue;
    uint64_t h = 1;
    for (int32_t p = 0; p < b->kv_len[s]; p++) {
      for (int32_t column = 0; column < kv->n_columns; column++) {
        const int32_t *block = block_of(program->rig, kv, b, s, p / KV_PAGE_TOKENS, column);
        if (block) h = fold(h, block[p % KV_PAGE_TOKENS]);
      }
      int32_t t = b->seq_start[s] + p - b->positions[b->seq_start[s]];
      if (r >= b->n_rows || b->row_token[r] != t) continue;
      float *logits = program->logits + (int64_t)r++ * n_vocab;
      logits_of(h, n_vocab, logits);
      int32_t disagree = atomic_load(&program->rig->disagree);
      if (disagree > 0 && h % (uint64_t)disagree == 0) logits_of(h + 1, n_vocab, logits);
      int32_t period = atomic_load(&program->rig->period);
      if (period > 0 && p + 1 >= period && h % 8 != 0) logits[*place(kv, b, s, p + 1 - period)] += 9;
    }
  }
  require(r == b->n_rows, "a row names no token");
}

/* Greedy, or by inverse distribution in id order over the whole vocabulary; no filters here. */
static int32_t draw_token(const float *logits, int32_t n, const struct backend_sample *s)
{
  int32_t best = 0;
  double total = 0, run = 0;
  for (int32_t i = 1; i < n; i++)
    if (logits[i] > logits[best]) best = i;
  if (s->temperature <= 0) return best;
  require(s->top_p >= 1 && s->min_p <= 0 && s->top_k <= 0, "filters are not drawn here");
  for (int32_t i = 0; i < n; i++) total += exp(((double)logits[i] - logits[best]) / s->temperature);
  for (int32_t i = 0; i < n; i++) {
    run += exp(((double)logits[i] - logits[best]) / s->temperature);
    if (run > total * s->u) return i;
  }
  return n - 1;
}

static void capture(struct backend_program *program, const struct backend_batch *b)
{
  const int delay_us = atomic_load(&program->rig->capture_delay_us);
  if (delay_us == 0 || b->n_tokens != b->n_seqs || b->n_seqs >= FAKE_MAX_CAPTURED || program->is_captured[b->n_seqs]) return;
  program->is_captured[b->n_seqs] = true;
  program->stats.n_graphs++;
  program->stats.capture_us += delay_us;
  usleep((useconds_t)delay_us);
}

static void stats_of(const struct backend_program *program, struct backend_stats *out)
{
  *out = program->stats;
}

static void sleep_until(int64_t until_us)
{
  const int64_t left_us = until_us - clock_monotonic_us();
  if (left_us > 0) usleep((useconds_t)left_us);
}

static enum sits_status submit(struct backend_program *program, struct backend_kv *kv, const struct backend_batch *b)
{
  struct fake_rig *rig = program->rig;
  int step = atomic_fetch_add(&rig->n_steps, 1) + 1, fail_at = atomic_load(&rig->fail_at_step);
  if (fail_at > 0 && step >= fail_at) return SITS_DEVICE;
  require(!program->is_pending, "a batch is in flight");
  check_batch(rig, b);
  store_tokens(rig, kv, b);
  give(rig, kv, b);
  compute_rows(program, kv, b);
  program->is_sampled = b->sample != NULL;
  program->has_logits = !program->is_sampled || b->wants_logits;
  require(!program->is_sampled || b->n_rows <= FAKE_MAX_DRAWN, "too many rows to draw");
  for (int32_t r = 0; program->is_sampled && r < b->n_rows; r++)
    program->drawn[r] = draw_token(program->logits + (int64_t)r * rig->options.n_vocab, rig->options.n_vocab, &b->sample[r]);
  if (program->is_sampled) atomic_fetch_add(&rig->n_sampled, 1);
  program->is_pending = true;
  atomic_fetch_add(&rig->n_tokens, b->n_tokens);
  if (b->n_tokens > atomic_load(&rig->largest_batch)) atomic_store(&rig->largest_batch, b->n_tokens);
  if (b->n_seqs > atomic_load(&rig->largest_seqs)) atomic_store(&rig->largest_seqs, b->n_seqs);
  sleep_until(rig->busy_until_us);
  int delay_us = atomic_load(&rig->step_delay_us) + atomic_load(&rig->token_delay_us) * b->n_tokens;
  if (delay_us > 0) usleep((useconds_t)delay_us);
  while (atomic_load(&rig->hold_at_step) == step) usleep(200);
  capture(program, b);
  return SITS_OK;
}

static enum sits_status wait_batch(struct backend_program *program, struct backend_result *result)
{
  require(program->is_pending, "no batch is in flight");
  program->is_pending = false;
  *result = (struct backend_result){.tokens = program->is_sampled ? program->drawn : NULL,
                                    .logits = program->has_logits ? program->logits : NULL};
  return SITS_OK;
}

static const struct backend_vtable FAKE = {
    .abi = BACKEND_ABI, .name = "fake", .kv_page_bytes = page_bytes, .kv_copy_pages = copy_pages, .kv_copy_blocks = copy_blocks,
    .kv_read_page = read_page, .kv_write_page = write_page, .kv_expect = expect_pages, .kv_send = send_pages, .kv_sent = finish_sends,
    .submit = submit, .wait = wait_batch, .stats = stats_of,
};

const struct backend_vtable *fake_vtable(void)
{
  return &FAKE;
}

static enum sits_status lane_open(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                  struct backend_program **out, struct sits_error *err)
{
  (void)kv;
  require(max_tokens > 0 && max_tokens <= program->rig->options.max_batch_tokens, "a lane for more tokens than a batch");
  struct backend_program *lane = mem_calloc(1, sizeof *lane);
  float *logits = mem_calloc((size_t)program->rig->options.n_vocab, sizeof *logits);
  if (!lane || !logits) {
    mem_free(lane);
    mem_free(logits);
    return sits_fail(err, SITS_NOMEM, "out of memory");
  }
  lane->rig = program->rig;
  lane->logits = logits;
  *out = lane;
  return SITS_OK;
}

static void lane_destroy(struct backend_program *lane)
{
  mem_free(lane->logits);
  mem_free(lane);
}

static enum sits_status lane_begin(struct backend_program *lane, struct backend_kv *kv, const struct backend_batch *b)
{
  int step = atomic_fetch_add(&lane->rig->n_steps, 1) + 1, fail_at = atomic_load(&lane->rig->fail_at_step);
  if ((fail_at > 0 && step >= fail_at) || atomic_load(&lane->rig->refuses_lanes)) return SITS_DEVICE;
  check_batch(lane->rig, b);
  require(b->n_seqs == 1 && b->n_rows <= 1, "a lane takes one sequence and one row");
  lane->kv = kv;
  lane->batch = b;
  lane->n_written = 0;
  lane->step = step;
  atomic_fetch_add(&lane->rig->n_lanes_begun, 1);
  return SITS_OK;
}

/* One token; with tells_ends it is left to run, behind the one before it. */
static void lane_token(struct backend_program *lane)
{
  const struct backend_batch *b = lane->batch;
  struct fake_rig *rig = lane->rig;
  const int delay_us = atomic_load(&rig->token_delay_us);
  *place(lane->kv, b, 0, b->positions[lane->n_written]) = b->tokens[lane->n_written]; /* lanes have one column */
  lane->n_written++;
  if (!atomic_load(&rig->tells_ends)) {
    if (delay_us > 0) usleep((useconds_t)delay_us);
    return;
  }
  sleep_until(rig->busy_until_us);
  rig->busy_until_us = clock_monotonic_us() + delay_us;
}

static enum sits_status lane_run(struct backend_program *lane, backend_go_on *go_on, void *user, bool *is_done, int64_t *end_us)
{
  const struct backend_batch *b = lane->batch;
  struct fake_rig *rig = lane->rig;
  int fail_at = atomic_load(&rig->fail_at_step);
  const bool tells = atomic_load(&rig->tells_ends);
  *end_us = 0;
  if (fail_at > 0 && atomic_load(&rig->n_steps) >= fail_at) return SITS_DEVICE;
  require(b != NULL, "nothing was begun in the lane");
  *is_done = false;
  while (lane->n_written < b->n_tokens) {
    const int64_t now_us = clock_monotonic_us(), from_us = now_us > rig->busy_until_us ? now_us : rig->busy_until_us;
    if (rig->during_slice) rig->during_slice(rig->during_user);
    if (!go_on(user, tells ? from_us + atomic_load(&rig->token_delay_us) : 0)) {
      atomic_fetch_add(&rig->n_slices, 1);
      *end_us = rig->busy_until_us;
      return SITS_OK;
    }
    lane_token(lane);
  }
  sleep_until(rig->busy_until_us);
  compute_rows(lane, lane->kv, b);
  lane->has_logits = lane->is_pending = true;
  lane->batch = NULL;
  atomic_fetch_add(&rig->n_tokens, b->n_tokens);
  *is_done = true;
  return SITS_OK;
}

static enum sits_status lane_ahead(struct backend_program *lane, bool *has_begun)
{
  const struct backend_batch *b = lane->batch;
  *has_begun = false;
  if (!atomic_load(&lane->rig->tells_ends) || b == NULL || lane->n_written == 0 || lane->n_written + 1 >= b->n_tokens) return SITS_OK;
  *has_begun = true;
  lane_token(lane);
  atomic_fetch_add(&lane->rig->n_ahead, 1);
  return SITS_OK;
}

static void lane_drop(struct backend_program *lane)
{
  if (lane->batch != NULL) atomic_fetch_add(&lane->rig->n_lanes_dropped, 1);
  lane->batch = NULL;
}

const struct backend_vtable *fake_slicing_vtable(void)
{
  static const struct backend_vtable slicing = {
      .abi = BACKEND_ABI, .name = "fake", .kv_page_bytes = page_bytes, .kv_copy_pages = copy_pages, .kv_read_page = read_page,
      .kv_write_page = write_page, .submit = submit, .wait = wait_batch, .lane_open = lane_open, .lane_begin = lane_begin,
      .lane_run = lane_run, .lane_ahead = lane_ahead, .lane_drop = lane_drop, .program_destroy = lane_destroy,
  };
  return &slicing;
}

const struct backend_vtable *fake_sampling_vtable(void)
{
  static const struct backend_vtable sampling = {
      .abi = BACKEND_ABI, .name = "fake", .can_sample = true, .kv_page_bytes = page_bytes, .kv_copy_pages = copy_pages,
      .kv_read_page = read_page, .kv_write_page = write_page, .submit = submit, .wait = wait_batch,
  };
  return &sampling;
}

int fake_rig_init(struct fake_rig *rig, const struct fake_options *options)
{
  memset(rig, 0, sizeof *rig);
  rig->options = *options;
  const int32_t n_columns = options->n_columns > 0 ? options->n_columns : 1;
  rig->geometry = (struct kv_geometry){.n_layers = 1, .n_kv_heads = n_columns, .head_dim = 1, .n_pages = options->n_pages, .codec = KV_F16};
  size_t n = (size_t)options->n_pages * KV_PAGE_TOKENS * (size_t)n_columns;
  rig->program = mem_calloc(1, sizeof *rig->program);
  rig->kv = mem_calloc(1, sizeof *rig->kv);
  if (!rig->program || !rig->kv) return -1;
  rig->kv->rig = rig;
  rig->program->rig = rig;
  rig->program->logits = mem_calloc((size_t)options->max_rows * (size_t)options->n_vocab, sizeof(float));
  rig->kv->n_pages = options->n_pages;
  rig->kv->n_columns = n_columns;
  rig->kv->n_ids = n_columns * KV_PAGE_TOKENS;
  rig->kv->ids = mem_alloc(n * sizeof(int32_t));
  rig->kv->written_by = mem_calloc(n, sizeof(int32_t));
  rig->kv->is_expected = mem_calloc((size_t)options->n_pages, sizeof(bool));
  if (!rig->program->logits || !rig->kv->ids || !rig->kv->written_by || !rig->kv->is_expected) return -1;
  memset(rig->kv->ids, 0xff, n * sizeof(int32_t));
  return 0;
}

void fake_rig_fini(struct fake_rig *rig)
{
  if (rig->program) mem_free(rig->program->logits);
  mem_free(rig->program);
  if (rig->kv) {
    mem_free(rig->kv->ids);
    mem_free(rig->kv->written_by);
    mem_free(rig->kv->is_expected);
  }
  mem_free(rig->kv);
}
