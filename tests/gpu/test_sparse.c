/* Sequences that have lost blocks (fp4-sparse) on the device.
 *
 * Kernels: attention over what is left of random pages, and what blocks are given, against the twin in double (ref_sparse.h) over the same
 * keys and values as gather has them. Tolerances: 2e-3 of the norm; of what a block is given 4e-3 (gathered keys are f16, the kernels' are
 * not) and a unit for each query head and token.
 * Backend: stories260K (SITS_SHARED_DATA; attn_any) and a random model with heads of 64 channels, both with the context that the budgets
 * want. Some sequences under a page budget, read in chunks and decoded, on the CPU and here with the same block tables, which follow from
 * what the CPU counts. Logits within 8 % as in test_backend.c. Of what blocks are given the sum of all differences is within 5 % of the
 * sum: the inputs of a layer differ that much.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/page_budget.h"
#include "engine/runner.h"
#include "model/arch.h"
#include "random_model.h"
#include "ref/ref_sparse.h"

enum { P = KV_PAGE_TOKENS };
static int32_t n_sm;

/* ---- kernels ---- */

enum { SEQS = 7, POOL = 40, ENTRIES = 24, N_LAYERS = 2, LAYER = 1, N_SLOTS = 2 * SEQS, NEAREST = 3 };
static const int32_t lengths[SEQS] = {20 * P + 1, 777, 11 * P + 40, 130, 3 * P + 70, 5, 22 * P};
static const int32_t news[SEQS] = {1, 1, 30, 130, 74, 5, 1}, singles[SEQS] = {1, 1, 1, 1, 1, 1, 1};

struct shape { int32_t heads, kv_heads, dim, window; const char *name; };

struct world {
  struct shape c;
  int32_t n_columns, n_tokens, start[SEQS + 1], *positions, *token_seq;
  int32_t table[SEQS][ENTRIES], *numbers, row0[SEQS], nearest[SEQS], open_slot[2 * SEQS];
  float *keys, *values, *q; /* [POOL][columns][P][D]; [T][H][D] */
  uint16_t *fresh, *open;   /* [T][G][D]; [slots][L][G][P][D] in the device's order */
  struct k_kv_view view;
  struct k_kv_blocks blocks;
  void *dev_q;
};

static int32_t below(int32_t n) { return (int32_t)(rand_u32() % (uint32_t)n); }

/* Where the device has a key of a slot (kernels/common/kv_tile.cuh). */
static size_t open_at(int32_t d, int32_t token, int32_t e)
{
  if (!k_kv_has_fragments(d)) return (size_t)(token * d + e);
  const int32_t tk = token & 15, lane = (tk & 7) * 4 + ((e & 15) >> 2);
  return (size_t)((token >> 4) * 16 * d + (e >> 4) * 256 + lane * 8 + ((e >> 1 & 1) * 2 + (tk >> 3)) * 2 + (e & 1));
}

/* Pages of any codes, with scales of an eighth to a quarter and small means. */
static void make_pages(struct world *w)
{
  const size_t d = (size_t)w->c.dim, tile = (size_t)k_kv_tile_bytes(K_KV_FP4, w->c.dim), n_tiles = (size_t)(POOL * w->n_columns);
  uint8_t *bytes = host_alloc(n_tiles * tile);
  const size_t scales = P * d, means = scales + P * ((d + 15) / 16) * 2;
  for (size_t i = 0; i < n_tiles * tile; i++) {
    const size_t at = i % tile;
    bytes[i] = (uint8_t)(at < scales ? rand_u32() >> 24 : 0xA0 | rand_u32() >> 28);
  }
  for (size_t i = 0; i < n_tiles; i++)
    for (size_t e = 0; e < d; e++) ((uint16_t *)(void *)(bytes + i * tile + means))[e] = half_bits(0.4F * rand_unit());
  w->view.page_bytes = (int64_t)(tile * (size_t)w->n_columns);
  w->view.pool = gpu_copy(bytes, n_tiles * tile);
}

/* All pages as one sequence, layer by layer, by the kernel that prefill reads pages with. */
static void read_pages(struct world *w)
{
  const int32_t d = w->c.dim, g = w->c.kv_heads, len = POOL * P, ends[2] = {0, 1}, slots[2] = {0, 0};
  const size_t n = (size_t)g * POOL * P * (size_t)d;
  int32_t identity[POOL];
  uint16_t *half = host_alloc(n * 2);
  for (int32_t i = 0; i < POOL; i++) identity[i] = i;
  struct k_kv_gather a = {.kv = w->view, .n_seqs = 1, .max_pages = POOL, .capacity = POOL * P, .k = gpu_alloc(n * 2), .v = gpu_alloc(n * 2),
                          .exact_capacity = k_kv_exact_rows(1, 1)};
  a.exact = gpu_alloc((size_t)a.exact_capacity * (size_t)(g * d) * 2);
  a.kv.n_seqs = a.kv.n_tokens = 1, a.kv.table_stride = POOL;
  a.kv.seq_start = gpu_copy(ends, sizeof ends), a.kv.kv_len = gpu_copy(&len, sizeof len);
  a.kv.block_table = gpu_copy(identity, sizeof identity), a.kv.open_slot = gpu_copy(slots, sizeof slots);
  a.kv.fresh = gpu_zeros((size_t)(g * d) * 2);
  for (a.kv.layer = 0; a.kv.layer < N_LAYERS; a.kv.layer++) {
    gpu_check_call(sits_k_kv_gather(&a, gpu_stream()), "sits_k_kv_gather");
    for (int is_value = 0; is_value < 2; is_value++) {
      gpu_read(half, is_value ? a.v : a.k, n * 2);
      for (size_t i = 0, block = (size_t)(P * d); i < n; i++) {
        const size_t page = i / block % POOL, column = (size_t)(a.kv.layer * g) + i / block / POOL;
        (is_value ? w->values : w->keys)[(page * (size_t)w->n_columns + column) * block + i % block] = half_value(half[i]);
      }
    }
  }
}

/* Sequences 0 to 2 and 6 have lost pages, of most of which each column has something; 4 is neither measured nor broken. */
static void make_tables(struct world *w, const int32_t *n_new)
{
  int32_t n_rows = 0;
  w->numbers = host_alloc((size_t)(SEQS * ENTRIES * w->n_columns) * sizeof(int32_t));
  for (int32_t s = 0; s < SEQS; s++) {
    const int32_t first_written = (lengths[s] - n_new[s]) / P;
    const bool may_break = s < 3 || s == 6;
    w->row0[s] = s == 4 ? -1 : n_rows;
    w->nearest[s] = s == 4 || s == 6 ? INT32_MAX : NEAREST + (s == 2);
    for (int32_t i = 0; i < ENTRIES; i++) {
      const bool is_broken = may_break && i > 0 && i < first_written && below(10) < 7;
      w->table[s][i] = is_broken ? KV_NO_PAGE : below(POOL);
      for (int32_t c = 0; c < w->n_columns; c++)
        w->numbers[(n_rows + i) * w->n_columns + c] = below(10) < 6 ? KV_NO_PAGE : below(POOL * w->n_columns);
    }
    if (s != 4) n_rows += ENTRIES;
    w->open_slot[2 * s] = 2 * s, w->open_slot[2 * s + 1] = 2 * s + 1;
  }
}

static uint16_t *random_halves(size_t n, float size)
{
  uint16_t *half = host_alloc(n * 2);
  for (size_t i = 0; i < n; i++) half[i] = half_bits(size * rand_unit());
  return half;
}

/* Where a sequence's page began in an earlier step, the step's keys of it lie in the slot too. */
static void put_in_slots(struct world *w)
{
  const size_t d = (size_t)w->c.dim, g = (size_t)w->c.kv_heads;
  for (int32_t t = 0; t < w->n_tokens; t++) {
    const int32_t s = w->token_seq[t], first_new = w->positions[w->start[s]], own = w->positions[t] / P * P;
    for (size_t head = 0; head < g && own < first_new; head++)
      for (size_t e = 0; e < d; e++)
        w->open[((size_t)(2 * s * N_LAYERS + LAYER) * g + head) * P * d + open_at((int32_t)d, w->positions[t] - own, (int32_t)e)] =
            w->fresh[((size_t)t * g + head) * d + e];
  }
}

static struct world make_world(struct shape c, const int32_t *n_new)
{
  struct world w = {.c = c, .n_columns = N_LAYERS * c.kv_heads};
  for (int32_t s = 0; s < SEQS; s++) w.start[s + 1] = w.start[s] + n_new[s];
  w.n_tokens = w.start[SEQS];
  const size_t t = (size_t)w.n_tokens, n = (size_t)(POOL * w.n_columns * P * c.dim), n_q = t * (size_t)(c.heads * c.dim);
  w.keys = host_alloc(n * 4), w.values = host_alloc(n * 4), w.q = host_alloc(n_q * 4);
  w.positions = host_alloc(t * 4), w.token_seq = host_alloc(t * 4);
  for (int32_t s = 0; s < SEQS; s++)
    for (int32_t i = w.start[s]; i < w.start[s + 1]; i++) w.positions[i] = lengths[s] - (w.start[s + 1] - i), w.token_seq[i] = s;
  w.view = (struct k_kv_view){.codec = K_KV_FP4, .layer = LAYER, .n_layers = N_LAYERS, .n_heads = c.heads, .n_kv_heads = c.kv_heads,
                              .head_dim = c.dim, .window = c.window, .n_tokens = w.n_tokens, .n_seqs = SEQS, .table_stride = ENTRIES};
  const size_t n_fresh = t * (size_t)(c.kv_heads * c.dim), n_open = (size_t)(N_SLOTS * w.n_columns * P * c.dim);
  uint16_t *q = random_halves(n_q, 6);
  w.fresh = random_halves(n_fresh, 1), w.open = random_halves(n_open, 1);
  for (size_t i = 0; i < n_q; i++) w.q[i] = half_value(q[i]);
  w.dev_q = gpu_copy(q, n_q * 2);
  put_in_slots(&w);
  w.view.open = gpu_copy(w.open, n_open * 2);
  make_pages(&w);
  read_pages(&w);
  make_tables(&w, n_new);
  w.view.fresh = gpu_copy(w.fresh, n_fresh * 2), w.view.open_slot = gpu_copy(w.open_slot, sizeof w.open_slot);
  w.view.seq_start = gpu_copy(w.start, sizeof w.start), w.view.kv_len = gpu_copy(lengths, sizeof lengths);
  w.view.positions = gpu_copy(w.positions, t * 4), w.view.token_seq = gpu_copy(w.token_seq, t * 4);
  w.view.block_table = gpu_copy(w.table, sizeof w.table);
  w.blocks = (struct k_kv_blocks){.row0 = gpu_copy(w.row0, sizeof w.row0), .nearest = gpu_copy(w.nearest, sizeof w.nearest),
                                  .numbers = gpu_copy(w.numbers, (size_t)(SEQS * ENTRIES * w.n_columns) * 4)};
  return w;
}

static void hadamard(double *v, int32_t d)
{
  const int32_t block = d & -d;
  for (int32_t n = 1; n < block; n *= 2)
    for (int32_t i = 0; i < d; i++)
      if (!(i & n)) {
        const double x = v[i], y = v[i + n];
        v[i] = x + y, v[i + n] = x - y;
      }
  for (int32_t i = 0; i < d; i++) v[i] /= sqrt(block);
}

/* Keys of a token's own page, f32 [P][D]. */
static void own_keys(const struct world *w, int32_t s, int32_t own, int32_t head, float *out)
{
  const int32_t d = w->c.dim, n_new = w->start[s + 1] - w->start[s], first_new = lengths[s] - n_new;
  const uint16_t *slot = w->open + (size_t)((w->open_slot[2 * s] * N_LAYERS + LAYER) * w->c.kv_heads + head) * (size_t)(P * d);
  for (int32_t j = 0; j < P && own + j < lengths[s]; j++) {
    const size_t row = (size_t)((w->start[s] + own - first_new + j) * w->c.kv_heads + head);
    for (int32_t e = 0; e < d; e++)
      out[j * d + e] = half_value(own < first_new ? slot[open_at(d, j, e)] : w->fresh[row * (size_t)d + (size_t)e]);
  }
}

/* The twin: outputs [T][H][D], and counts [SEQS * ENTRIES][columns], how many may be rounded differently in most_off. */
static void reckon(const struct world *w, float *out, double *given, double *most_off)
{
  const int32_t d = w->c.dim, group = w->c.heads / w->c.kv_heads;
  static float own[P * 256];
  double x[256], squares[ENTRIES];
  for (int32_t t = 0; t < w->n_tokens; t++)
    for (int32_t h = 0; h < w->c.heads; h++) {
      const int32_t s = w->token_seq[t], position = w->positions[t], page = position / P, head = h / group;
      const int32_t column = LAYER * w->c.kv_heads + head;
      const int32_t lo = w->c.window > 0 && position >= w->c.window ? position - w->c.window + 1 : 0;
      struct ref_seen seen[ENTRIES] = {{0}};
      own_keys(w, s, page * P, head, own);
      for (int32_t i = lo / P; i <= page; i++) {
        const int32_t at = w->row0[s] < 0 ? 0 : (w->row0[s] + i) * w->n_columns + column;
        const int32_t number = w->table[s][i] >= 0 ? w->table[s][i] * w->n_columns + column : w->numbers[at];
        if (number < 0) continue;
        const size_t skip = (size_t)((i == lo / P ? lo % P : 0) * d), from = (size_t)number * (size_t)(P * d) + skip;
        seen[i] = (struct ref_seen){i == page ? own + skip : w->keys + from, w->values + from,
                                    (i == page ? position % P + 1 : P) - (int32_t)skip / d};
      }
      ref_attend_blocks(w->q + ((size_t)t * (size_t)w->c.heads + (size_t)h) * (size_t)d, d, seen, page + 1, x, squares);
      hadamard(x, d);
      for (int32_t e = 0; e < d; e++) out[((size_t)t * (size_t)w->c.heads + (size_t)h) * (size_t)d + (size_t)e] = (float)x[e];
      for (int32_t i = 0; w->nearest[s] < ENTRIES && i <= page - w->nearest[s]; i++) {
        const size_t at = (size_t)((w->row0[s] + i) * w->n_columns + column);
        given[at] += floor(squares[i] * K_GIVEN_ONE + 0.5);
        most_off[at] += seen[i].keys != NULL ? 1 + 4e-3 * squares[i] * K_GIVEN_ONE : 0;
      }
    }
}

/* Counts that are further off than they may; *sum: of all. */
static int32_t wrong_counts(const struct world *w, const unsigned long long *dev, const double *want, const double *most_off, double *sum)
{
  const size_t n = (size_t)(SEQS * ENTRIES * w->n_columns);
  unsigned long long *got = host_alloc(n * sizeof *got);
  int32_t n_wrong = 0;
  *sum = 0;
  gpu_read(got, dev, n * sizeof *got);
  for (size_t i = 0; i < n; i++) {
    n_wrong += !(fabs((double)got[i] - want[i]) <= most_off[i]);
    *sum += want[i];
  }
  return n_wrong;
}

static double output_error(const struct world *w, const void *dev, size_t bytes, int32_t frag_m, const float *want)
{
  const int32_t width = w->c.heads * w->c.dim;
  uint16_t *half = host_alloc(bytes);
  float *got = host_alloc((size_t)(w->n_tokens * width) * 4);
  gpu_read(half, dev, bytes);
  for (int32_t t = 0; t < w->n_tokens; t++)
    for (int32_t i = 0; i < width; i++)
      got[(size_t)t * (size_t)width + (size_t)i] = half_value(half[frag_m ? k_frag_index(frag_m, i, t) : t * width + i]);
  return relative_error(got, want, (size_t)(w->n_tokens * width));
}

static void check_kernel(struct world *w, int32_t sms, int32_t frag_m, bool is_any, const float *want, const double *given,
                         const double *most_off)
{
  const int32_t width = w->c.heads * w->c.dim;
  const size_t bytes = frag_m ? (size_t)(k_blocks(width) * 128 * frag_m * 2) : (size_t)(w->n_tokens * width * 2);
  void *out = gpu_alloc(bytes);
  double sum;
  w->blocks.given = gpu_zeros((size_t)(SEQS * ENTRIES * w->n_columns) * sizeof(uint64_t));
  const struct k_attn_any any = {w->view, w->dev_q, out, w->blocks};
  const struct k_attn_sparse fast = {w->view, w->blocks, w->dev_q, out, frag_m,
                                     gpu_alloc(k_attn_sparse_workspace_bytes(sms, w->c.kv_heads, ENTRIES)), ENTRIES};
  if (is_any)
    gpu_check_call(sits_k_attn_any(&any, gpu_stream()), "sits_k_attn_any");
  else
    gpu_check_call(sits_k_attn_sparse(&fast, sms, gpu_stream()), "sits_k_attn_sparse");
  const double error = output_error(w, out, bytes, frag_m, want);
  const int32_t n_wrong = wrong_counts(w, w->blocks.given, given, most_off, &sum);
  verdict(error < 2e-3 && n_wrong == 0 && sum > 0, "%s, %d tokens, %s on %d SMs: output %.2e, %d wrong counts, %.0f units in all",
          w->c.name, w->n_tokens, is_any ? "any" : frag_m ? "fragments" : "rows", sms, error, n_wrong, sum);
}

static void run_kernels(struct shape c)
{
  for (int is_decode = 0; is_decode < 2; is_decode++) {
    struct world w = make_world(c, is_decode ? singles : news);
    const size_t n = (size_t)(SEQS * ENTRIES * w.n_columns) * sizeof(double);
    float *want = host_alloc((size_t)(w.n_tokens * c.heads * c.dim) * 4);
    double *given = host_alloc(n), *most_off = host_alloc(n);
    memset(given, 0, n);
    memset(most_off, 0, n);
    reckon(&w, want, given, most_off);
    check_kernel(&w, n_sm, 0, true, want, given, most_off);
    if (k_attn_sparse_takes(c.dim, c.heads, c.kv_heads)) {
      check_kernel(&w, n_sm, 0, false, want, given, most_off);
      check_kernel(&w, 3, is_decode ? 8 : 0, false, want, given, most_off);
    }
    gpu_release_all();
  }
}

/* ---- backend ---- */

enum { TEXTS = 3, LONGEST = 18 * P, MOST_ENTRIES = LONGEST / P, MOST_TOKENS = 1024, MOST_COLUMNS = 64, MOST_VOCAB = 2048, STEPS = 400 };

struct side { struct runner runner; };

static int32_t token_of(int32_t text, int32_t at, int32_t n_vocab)
{
  return (int32_t)(((uint32_t)(text * 7919 + at) * 2654435761U >> 7) % (uint32_t)n_vocab);
}

/* The program again, for a longer context. */
static enum sits_status lengthen(struct runner *runner, struct sits_error *err)
{
  const struct backend_vtable *vtable = runner->vtable;
  vtable->program_destroy(runner->compiled);
  program_destroy(runner->program);
  runner->compiled = NULL, runner->program = NULL;
  runner->model->config.max_context = LONGEST;
  const enum sits_status status = program_for_ranks(runner->model, vtable->fusions, NULL, 1, &runner->program, err);
  return status ? status : vtable->compile(runner->backend, runner->program, &runner->compiled, err);
}

static bool open_runner(struct runner *runner, const char *path, const char *device, const char *codec, int32_t n_pages, bool no_graphs)
{
  struct sits_error err = {0};
  const struct runner_options options = {.model_path = path, .device = device, .kv_codec = codec,
                                         .backend = {.max_batch_tokens = MOST_TOKENS, .max_seqs = 8, .no_graphs = no_graphs}};
  enum sits_status status = runner_open(runner, &options, &err);
  if (!status) status = lengthen(runner, &err);
  if (!status) status = runner_kv_create(runner, n_pages, &err);
  if (status) printf("      %s %s %s: %s\n", path, device, codec, err.text);
  return status == SITS_OK;
}

/* Sequences under one budget, whose pages both sides hold alike. */
struct run {
  struct runner cpu, cuda;
  struct kv *pages;
  int32_t budget, slots[TEXTS], at[TEXTS], n_columns, n_vocab;
  int32_t tokens[MOST_TOKENS], positions[MOST_TOKENS];
  int32_t start[TEXTS + 1], kv_len[TEXTS], rows[TEXTS], table[TEXTS][MOST_ENTRIES], text[TEXTS];
  struct backend_blocks blocks[TEXTS];
  struct backend_batch batch;
  _Atomic uint64_t given[TEXTS][MOST_ENTRIES * MOST_COLUMNS]; /* what CUDA counts; pages begin with nothing */
  float want[TEXTS * MOST_VOCAB];
};
static struct run run;

/* n tokens more of each text (0: none), as many as the budget lets it have at once: pages, copies on both sides, the batch's arrays. */
static enum sits_status plan(const int32_t *n)
{
  struct backend_batch *b = &run.batch;
  enum sits_status status = SITS_OK;
  *b = (struct backend_batch){.tokens = run.tokens, .positions = run.positions, .seq_start = run.start, .kv_len = run.kv_len,
                              .block_table = run.table[0], .table_stride = MOST_ENTRIES, .row_token = run.rows, .blocks = run.blocks};
  for (int32_t i = 0; i < TEXTS && !status; i++) {
    const int32_t room = (int32_t)(kv_sparse_limit(run.budget, P, run.at[i]) - run.at[i]), n_new = n[i] < room ? n[i] : room;
    struct kv_move move;
    int32_t n_moves = 0, s = b->n_seqs;
    const int32_t *pages;
    if (n_new == 0) continue;
    status = kv_reserve(run.pages, run.slots[i], run.at[i] + n_new, &move, &n_moves);
    if (!status) status = page_budget_copy(run.pages, run.slots[i], run.cpu.vtable, run.cpu.kv);
    if (!status) status = page_budget_copy(run.pages, run.slots[i], run.cuda.vtable, run.cuda.kv);
    for (int32_t k = 0; k < n_new; k++, b->n_tokens++) {
      run.tokens[b->n_tokens] = token_of(i, run.at[i] + k, run.n_vocab);
      run.positions[b->n_tokens] = run.at[i] + k;
    }
    run.at[i] += n_new;
    run.start[s + 1] = b->n_tokens, run.kv_len[s] = run.at[i], run.rows[s] = b->n_tokens - 1, run.text[s] = i;
    const int32_t n_pages = kv_pages(run.pages, run.slots[i], &pages);
    memcpy(run.table[s], pages, (size_t)n_pages * sizeof *pages);
    run.blocks[s] = page_budget_blocks(run.pages, run.slots[i]);
    b->n_rows = ++b->n_seqs;
  }
  return status;
}

static enum sits_status step_on(struct runner *runner, struct backend_result *r)
{
  const enum sits_status status = runner->vtable->submit(runner->compiled, runner->kv, &run.batch);
  return status ? status : runner->vtable->wait(runner->compiled, r);
}

/* The planned batch on both sides. *error: of the logits. */
static enum sits_status step(double *error)
{
  struct backend_result r;
  const size_t n = (size_t)(run.batch.n_rows * run.n_vocab);
  enum sits_status status = step_on(&run.cpu, &r);
  if (!status) memcpy(run.want, r.logits, n * sizeof *run.want);
  for (int32_t s = 0; s < run.batch.n_seqs; s++) run.blocks[s].given = run.given[run.text[s]];
  if (!status) status = step_on(&run.cuda, &r);
  if (!status) *error = relative_error(r.logits, run.want, n);
  for (int32_t s = 0; s < run.batch.n_seqs && !status; s++)
    kv_commit(run.pages, run.slots[run.text[s]], run.tokens + run.start[s], run.start[s + 1] - run.start[s]);
  return status;
}

/* The sum of differences of what both sides count, of that of the CPU's; *n_counts: that are not 0. */
static double count_error(int32_t *n_counts)
{
  double off = 0, sum = 0;
  *n_counts = 0;
  for (int32_t i = 0; i < TEXTS; i++) {
    struct kv_blocks blocks;
    kv_blocks(run.pages, run.slots[i], &blocks);
    for (int32_t k = 0; k < run.at[i] / P * run.n_columns; k++) {
      off += fabs((double)blocks.given[k] - (double)run.given[i][k]);
      sum += (double)blocks.given[k];
      *n_counts += blocks.given[k] > 0;
    }
  }
  return off / sum;
}

/* Prompts in chunks beside each other, then all decode; the third one joins later. */
static void read_all(const char *name)
{
  static const int32_t chunks[TEXTS] = {300, 64, 97}, ends[TEXTS] = {17 * P + 5, 15 * P, 13 * P + 40};
  double worst = 0, worst_decode = 0, error = 0;
  enum sits_status status = SITS_OK;
  struct kv_counts counts;
  int32_t n_counts, n_steps = 0;
  for (bool is_done = false; !is_done && !status; n_steps++) {
    int32_t n[TEXTS];
    is_done = true;
    for (int32_t i = 0; i < TEXTS; i++) {
      const int32_t left = ends[i] - 70 - run.at[i];
      n[i] = i == 2 && n_steps < 3 ? 0 : left <= 0 ? 1 : left < chunks[i] ? left : chunks[i];
      is_done = is_done && left <= 0;
    }
    status = plan(n);
    if (!status) status = step(&error);
    if (error > worst) worst = error;
  }
  for (int32_t k = 0; k < 66 && !status; k++, n_steps++) {
    status = plan((const int32_t[TEXTS]){1, 1, 1});
    if (!status) status = step(&error);
    if (error > worst_decode) worst_decode = error;
  }
  kv_counts(run.pages, &counts);
  const double off = count_error(&n_counts);
  verdict(!status && counts.n_dropped >= 10, "%s: %d steps, %d pages dropped: status %d", name, n_steps, (int)counts.n_dropped, status);
  verdict(!status && worst < 0.08 && worst_decode < 0.08, "%s: logits within %.4f, of decodes %.4f", name, worst, worst_decode);
  verdict(!status && off < 0.05 && n_counts > 100, "%s: what %d blocks are given is %.4f off", name, n_counts, off);
}

static void run_budget(const char *path, const char *model, int32_t budget, bool no_graphs)
{
  char name[96];
  memset(&run, 0, sizeof run);
  run.budget = budget;
  snprintf(name, sizeof name, "%s, %d pages%s", model, budget, no_graphs ? ", no graphs" : "");
  const int32_t n_pages = TEXTS * budget + 2;
  bool ok = open_runner(&run.cpu, path, "cpu", "fp4-sparse", n_pages, false) &&
            open_runner(&run.cuda, path, "cuda", "fp4-sparse", n_pages, no_graphs);
  if (ok) {
    run.n_columns = run.cpu.geometry.n_layers * run.cpu.geometry.n_kv_heads;
    run.n_vocab = run.cpu.model->config.n_vocab;
    const struct kv_options options = {.n_pages = n_pages, .n_slots = TEXTS, .max_pages = MOST_ENTRIES, .page_budget = budget,
                                       .n_columns = run.n_columns};
    ok = run.n_columns <= MOST_COLUMNS && run.n_vocab <= MOST_VOCAB && kv_create(&options, &run.pages) == SITS_OK;
  }
  for (int32_t i = 0; i < TEXTS && ok; i++) ok = kv_open(run.pages, (struct kv_owner){0}, &run.slots[i]) == SITS_OK;
  verdict(ok, "%s: open", name);
  if (ok) read_all(name);
  kv_destroy(run.pages);
  runner_close(&run.cpu);
  runner_close(&run.cuda);
}

enum { WHOLE_STEPS = 9 };
static const int32_t whole_steps[WHOLE_STEPS] = {100, 27, 1, 1, 120, 1, 400, 1, 1}; /* measured from 257 tokens on */

/* A text in whole pages: logits of each step's last token; *sum: of what blocks are given, of fp4-sparse. */
static bool read_whole(const char *path, bool is_sparse, float (*logits)[MOST_VOCAB], uint64_t *sum)
{
  static _Atomic uint64_t given[MOST_ENTRIES * MOST_COLUMNS];
  static int32_t table[MOST_ENTRIES], tokens[MOST_TOKENS], positions[MOST_TOKENS];
  struct runner runner = {0};
  bool ok = open_runner(&runner, path, "cuda", is_sparse ? "fp4-sparse" : "fp4", MOST_ENTRIES, false);
  memset((void *)given, 0, sizeof given);
  for (int32_t i = 0; i < MOST_ENTRIES; i++) table[i] = MOST_ENTRIES - 1 - i;
  for (int32_t i = 0, at = 0; i < WHOLE_STEPS && ok; at += whole_steps[i++]) {
    const int32_t n = whole_steps[i], start[2] = {0, n}, len = at + n, row = n - 1;
    const struct backend_blocks blocks = {.given = given, .nearest = 4};
    struct backend_result r;
    for (int32_t t = 0; t < n; t++) tokens[t] = token_of(1, at + t, runner.model->config.n_vocab), positions[t] = at + t;
    const struct backend_batch batch = {.n_tokens = n, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                        .seq_start = start, .kv_len = &len, .block_table = table, .table_stride = MOST_ENTRIES,
                                        .row_token = &row, .blocks = is_sparse ? &blocks : NULL};
    ok = runner.vtable->submit(runner.compiled, runner.kv, &batch) == SITS_OK && runner.vtable->wait(runner.compiled, &r) == SITS_OK;
    if (ok) memcpy(logits[i], r.logits, (size_t)runner.model->config.n_vocab * sizeof(float));
  }
  *sum = 0;
  for (int32_t i = 0; i < MOST_ENTRIES * MOST_COLUMNS; i++) *sum += given[i];
  runner_close(&runner);
  return ok;
}

/* While nothing is lost or measured fp4-sparse is fp4, bit for bit; then sequences of whole pages give what fp4's give. */
static void run_whole(const char *path, const char *model)
{
  static float want[WHOLE_STEPS][MOST_VOCAB], got[WHOLE_STEPS][MOST_VOCAB];
  uint64_t sum = 0;
  double worst = 0;
  int32_t n_same = 0;
  const bool ok = read_whole(path, false, want, &sum) && read_whole(path, true, got, &sum);
  for (int32_t i = 0; i < WHOLE_STEPS && ok; i++) {
    n_same += n_same == i && memcmp(got[i], want[i], sizeof got[i]) == 0;
    worst = fmax(worst, relative_error(got[i], want[i], MOST_VOCAB)); /* zeros beyond the vocabulary */
  }
  verdict(ok && n_same >= 6 && worst < 0.02 && sum > 0, "%s: whole pages: the first %d of %d steps have fp4's bits, all are within %.5f",
          model, n_same, (int)WHOLE_STEPS, worst);
}

/* What makes no sense is refused, and a chain of copies runs in its order. */
static void run_refusals(const char *path)
{
  struct runner runner = {0};
  static unsigned char bytes[2][1 << 16];
  int32_t table[3] = {0, 1, 2}, tokens[2] = {1, 2}, positions[2] = {2 * P - 1, 2 * P}, starts[2] = {0, 2}, len = 2 * P + 1, row = 1;
  static int32_t numbers[3 * MOST_COLUMNS], copies[3 * MOST_COLUMNS][2];
  bool ok = open_runner(&runner, path, "cuda", "fp4-sparse", 6, false);
  const struct backend_vtable *v = runner.vtable;
  if (!ok) {
    verdict(false, "refusals: open");
    return;
  }
  const int32_t n_columns = runner.geometry.n_layers * runner.geometry.n_kv_heads;
  struct backend_blocks blocks = {.numbers = numbers, .nearest = 1};
  struct backend_batch batch = {.n_tokens = 2, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions, .seq_start = starts,
                                .kv_len = &len, .block_table = table, .table_stride = 3, .row_token = &row, .blocks = &blocks};
  struct backend_result r;
  for (int32_t missing = 0; missing < 3 && ok; missing++) {
    const int32_t kept = table[missing];
    table[missing] = KV_NO_PAGE;
    ok = v->submit(runner.compiled, runner.kv, &batch) == (missing == 0 ? SITS_OK : SITS_INVALID_ARGUMENT);
    if (ok && missing == 0) ok = v->wait(runner.compiled, &r) == SITS_OK;
    table[missing] = kept;
  }
  table[0] = KV_NO_PAGE;
  numbers[1] = 6 * n_columns;
  ok = ok && v->submit(runner.compiled, runner.kv, &batch) == SITS_INVALID_ARGUMENT;
  numbers[1] = 0, blocks.nearest = 0;
  ok = ok && v->submit(runner.compiled, runner.kv, &batch) == SITS_INVALID_ARGUMENT;
  batch.blocks = NULL;
  ok = ok && v->submit(runner.compiled, runner.kv, &batch) == SITS_INVALID_ARGUMENT;
  const int32_t bad[1][2] = {{0, 6 * n_columns}};
  ok = ok && v->kv_copy_blocks(runner.kv, bad, 1) == SITS_INVALID_ARGUMENT;
  verdict(ok, "missing pages and blocks that are none: refused");
  for (size_t i = 0; i < sizeof bytes[0]; i++) bytes[0][i] = (unsigned char)(rand_u32() >> 24);
  ok = (size_t)runner.page_bytes <= sizeof bytes[0] && v->kv_write_page(runner.kv, 3, bytes[0]) == SITS_OK;
  for (int32_t c = 0; c < n_columns; c++) { /* page 3 to 4 by way of 5, each block handed on before the next */
    copies[2 * c][0] = 3 * n_columns + c, copies[2 * c][1] = copies[2 * c + 1][0] = 5 * n_columns;
    copies[2 * c + 1][1] = 4 * n_columns + c;
  }
  ok = ok && v->kv_copy_blocks(runner.kv, (const int32_t(*)[2])copies, 2 * n_columns) == SITS_OK &&
       v->kv_read_page(runner.kv, 4, bytes[1]) == SITS_OK && memcmp(bytes[0], bytes[1], (size_t)runner.page_bytes) == 0;
  verdict(ok, "copies of %d blocks, one after the other", 2 * n_columns);
  runner_close(&runner);
}

static void run_model(const char *path, const char *name)
{
  run_whole(path, name);
  run_budget(path, name, 8, false);
  if (!gpu_is_small()) run_budget(path, name, 10, true);
  run_refusals(path);
}

int main(void)
{
  char path[1024];
  const char *root = getenv("SITS_SHARED_DATA");
  n_sm = gpu_open();
  gpu_check_call(sits_k_attn_sparse_init(), "init");
  run_kernels((struct shape){32, 8, 128, 0, "32/8 x128"});
  run_kernels((struct shape){9, 3, 64, 0, "9/3 x64"});
  run_kernels((struct shape){16, 2, 128, 300, "16/2 x128, window 300"});
  run_kernels((struct shape){4, 4, 64, 260, "4/4 x64, window 260"});
  run_kernels((struct shape){5, 1, 64, 0, "5/1 x64"});
  run_kernels((struct shape){8, 4, 8, 0, "8/4 x8"});
  run_kernels((struct shape){4, 2, 48, 0, "4/2 x48"});
  snprintf(path, sizeof path, "/tmp/sparse_%d.gguf", (int)getpid());
  if (write_gguf(path)) run_model(path, "random");
  else verdict(false, "a model file");
  unlink(path);
  snprintf(path, sizeof path, "%s/models/stories260K/stories260K.gguf", root != NULL ? root : "../shared/data");
  if (access(path, R_OK) == 0) run_model(path, "stories260K");
  else printf("      stories260K is absent\n");
  return gpu_finish();
}
