/* Lanes of the CUDA backend: a prompt's chunks that stop between layers while other batches run give the bits of the same chunks submitted
 * whole, and so do the others; a chunk that was given up leaves nothing behind.
 *
 * Model: synthetic:tiny, with expanded weights kept and not. Prompts are long enough that their expanded keys are kept (cuda_kept.c). And a
 * chunk of a few tokens with the layers' inputs rounded, which stops between layers too.
 */
#include <string.h>

#include "engine/runner.h"
#include "gpu_test.h"
#include "model/arch.h"

enum { LENGTH = 3000, CHUNK = 700, N_CHUNKS = (LENGTH + CHUNK - 1) / CHUNK, PAGES = (LENGTH + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
       POOL_PAGES = 600, DECODES = 60, MOST_VOCAB = 200000 };

static struct runner runner;
static int32_t n_ahead; /* slices that have begun behind a batch */
static float whole[N_CHUNKS][MOST_VOCAB], alone[DECODES][MOST_VOCAB], got[MOST_VOCAB];

/* Tokens from .. from + n - 1 of a text in pages from page0 on, as a batch that lives until the next call with the same place. */
struct part { int32_t tokens[LENGTH], positions[LENGTH], table[PAGES], start[2], kv_len, row; struct backend_batch batch; };

static void make_part(struct part *part, int32_t text, int32_t page0, int32_t from, int32_t n)
{
  const int32_t vocab = runner.model->config.n_vocab;
  for (int32_t i = 0; i < n; i++) {
    part->tokens[i] = (int32_t)(((uint32_t)(text * 7919 + from + i) * 2654435761U >> 7) % (uint32_t)vocab);
    part->positions[i] = from + i;
  }
  for (int32_t i = 0; i < PAGES; i++) part->table[i] = page0 + i;
  part->start[0] = 0, part->start[1] = n, part->kv_len = from + n, part->row = n - 1;
  part->batch = (struct backend_batch){.n_tokens = n, .n_seqs = 1, .n_rows = 1, .tokens = part->tokens, .positions = part->positions,
                                       .seq_start = part->start, .kv_len = &part->kv_len, .block_table = part->table, .table_stride = PAGES,
                                       .row_token = &part->row};
}

static int32_t length_of(int32_t chunk) { return LENGTH - chunk * CHUNK < CHUNK ? LENGTH - chunk * CHUNK : CHUNK; }

static enum sits_status take(struct backend_program *program, float *logits)
{
  struct backend_result r;
  const enum sits_status status = runner.vtable->wait(program, &r);
  if (!status) memcpy(logits, r.logits, (size_t)runner.model->config.n_vocab * sizeof *logits);
  return status;
}

/* lane: not NULL: its next slice begins behind the batch. */
static enum sits_status submit_before(struct backend_program *lane, int32_t text, int32_t page0, int32_t from, int32_t n, float *logits)
{
  static struct part part;
  bool has_begun = false;
  make_part(&part, text, page0, from, n);
  enum sits_status status = runner.vtable->submit(runner.compiled, runner.kv, &part.batch);
  if (!status && lane != NULL) status = runner.vtable->lane_ahead(lane, &has_begun);
  n_ahead += has_begun;
  return status ? status : take(runner.compiled, logits);
}

static enum sits_status submit(int32_t text, int32_t page0, int32_t from, int32_t n, float *logits)
{
  return submit_before(NULL, text, page0, from, n, logits);
}

static bool is_same(const float *a, const float *b) { return memcmp(a, b, (size_t)runner.model->config.n_vocab * sizeof *a) == 0; }

static bool go_on(void *user, int64_t end_us)
{
  (void)end_us;
  return (*(int32_t *)user)-- > 0;
}

/* The prompt's chunks on the lane, `patience` pieces a slice; between slices another sequence decodes, and now and then a third is read. */
static bool read_in_slices(struct backend_program *lane, int32_t page0, int32_t patience, bool gives_up, int32_t *n_stops)
{
  static struct part part;
  static float other[MOST_VOCAB];
  int32_t n_decoded = 0;
  int64_t end_us;
  bool ok = true;
  *n_stops = 0;
  for (int32_t c = 0; c < N_CHUNKS && ok; c++) {
    make_part(&part, 1, page0, c * CHUNK, length_of(c));
    ok = runner.vtable->lane_begin(lane, runner.kv, &part.batch) == SITS_OK;
    for (bool is_done = false, has_given_up = false; ok && !is_done;) {
      int32_t left = patience;
      ok = runner.vtable->lane_run(lane, go_on, &left, &is_done, &end_us) == SITS_OK;
      *n_stops += !is_done;
      if (ok && !is_done && n_decoded < DECODES) {
        ok = submit_before(lane, 2, 590, n_decoded, 1, other) == SITS_OK && is_same(other, alone[n_decoded]);
        n_decoded++;
      }
      if (ok && !is_done && *n_stops % 7 == 3) ok = submit(3, 300, 0, 1500, other) == SITS_OK;
      if (ok && !is_done && gives_up && !has_given_up) {
        has_given_up = true;
        if (c % 2 == 1) { /* and others have the kept keys before it begins again */
          runner.vtable->lane_drop(lane);
          ok = runner.vtable->lane_run(lane, go_on, &left, &is_done, &end_us) == SITS_INVALID_ARGUMENT;
          ok = ok && submit(3, 300, 0, 1500, other) == SITS_OK;
        }
        ok = ok && runner.vtable->lane_begin(lane, runner.kv, &part.batch) == SITS_OK;
      }
    }
    ok = ok && take(lane, got) == SITS_OK && is_same(got, whole[c]);
  }
  return ok;
}

static void run(const char *codec, const char *prefill_weights)
{
  struct sits_error err = {0};
  struct backend_program *lane = NULL;
  struct backend_result r;
  bool is_done, ok;
  int64_t end_us;
  int32_t left = 9, n_stops;
  n_ahead = 0;
  const struct runner_options options = {.model_path = "synthetic:tiny", .device = "cuda", .kv_codec = codec,
                                         .backend = {.max_batch_tokens = 4096, .max_seqs = 8, .prefill_weights = prefill_weights}};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, POOL_PAGES, &err);
  if (status || runner.model->config.n_vocab > MOST_VOCAB) {
    verdict(false, "open: %s", err.text);
    runner_close(&runner);
    return;
  }
  for (int32_t c = 0; c < N_CHUNKS && !status; c++) status = submit(1, 0, c * CHUNK, length_of(c), whole[c]);
  for (int32_t i = 0; i < DECODES && !status; i++) status = submit(2, 580, i, 1, alone[i]);
  verdict(status == SITS_OK, "%s pages, weights %s: chunks as batches: status %d", codec, prefill_weights, status);
  verdict(runner.vtable->lane_open(runner.compiled, runner.kv, 4097, &lane, &err) == SITS_UNSUPPORTED, "more tokens than a batch: refused");
  status = runner.vtable->lane_open(runner.compiled, runner.kv, CHUNK, &lane, &err);
  verdict(status == SITS_OK, "a lane: %s", status ? err.text : "open");
  if (status == SITS_OK) {
    verdict(runner.vtable->lane_run(lane, go_on, &left, &is_done, &end_us) == SITS_INVALID_ARGUMENT &&
                runner.vtable->wait(lane, &r) == SITS_INVALID_ARGUMENT,
            "nothing has begun: refused");
    ok = read_in_slices(lane, 100, 1, false, &n_stops);
    verdict(ok && n_stops >= N_CHUNKS && n_ahead > 0, "a piece at a time, other batches between, %d stops, %d slices begun behind a batch: "
            "the same bits", n_stops, n_ahead);
    ok = read_in_slices(lane, 200, 1, true, &n_stops);
    verdict(ok && n_stops >= N_CHUNKS, "each chunk given up once and begun again, %d stops: the same bits", n_stops);
    ok = read_in_slices(lane, 400, 1 << 30, false, &n_stops);
    verdict(ok && n_stops == 0, "without a stop: the same bits");
    runner.vtable->program_destroy(lane);
  }
  runner_close(&runner);
}

/* The program again, every layer's inputs rounded, as an engine file may have it: few tokens take the way of many then. */
static enum sits_status round_inputs(struct sits_error *err)
{
  const struct backend_vtable *vtable = runner.vtable;
  vtable->program_destroy(runner.compiled);
  program_destroy(runner.program);
  runner.compiled = NULL, runner.program = NULL;
  for (int32_t l = 0; l < runner.model->config.n_layers; l++)
    for (int site = 0; site < MODEL_SITES; site++) runner.model->layers[l].act[site].kind = ACT_INT8;
  const enum sits_status status = program_for_ranks(runner.model, vtable->fusions, NULL, 1, &runner.program, err);
  return status ? status : vtable->compile(runner.backend, runner.program, &runner.compiled, err);
}

/* Nine tokens behind a hundred, a piece at a time; between slices twelve of another sequence go through the memory in which fragments of so
 * few tokens lie. */
static bool read_few_in_slices(struct backend_program *lane, const float *want, const float *want_other, int32_t *n_stops)
{
  static struct part part;
  static float other[MOST_VOCAB];
  int64_t end_us;
  bool is_done = false;
  make_part(&part, 1, 100, 100, 9);
  bool ok = submit(1, 100, 0, 100, other) == SITS_OK && runner.vtable->lane_begin(lane, runner.kv, &part.batch) == SITS_OK;
  for (*n_stops = 0; ok && !is_done; *n_stops += !is_done) {
    int32_t left = 1;
    ok = runner.vtable->lane_run(lane, go_on, &left, &is_done, &end_us) == SITS_OK;
    if (ok && !is_done) ok = submit(2, 50, 20, 12, other) == SITS_OK && is_same(other, want_other);
  }
  return ok && take(lane, got) == SITS_OK && is_same(got, want);
}

static void run_few(void)
{
  struct sits_error err = {0};
  struct backend_program *lane = NULL;
  int32_t n_stops = 0;
  const struct runner_options options = {.model_path = "synthetic:tiny", .device = "cuda", .kv_codec = "f16",
                                         .backend = {.max_batch_tokens = 4096, .max_seqs = 8, .prefill_weights = "resident"}};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = round_inputs(&err);
  if (!status) status = runner_kv_create(&runner, POOL_PAGES, &err);
  if (!status) status = submit(1, 0, 0, 100, got);
  if (!status) status = submit(1, 0, 100, 9, whole[0]);
  if (!status) status = submit(2, 50, 0, 20, got);
  if (!status) status = submit(2, 50, 20, 12, alone[0]);
  if (!status) status = runner.vtable->lane_open(runner.compiled, runner.kv, CHUNK, &lane, &err);
  verdict(status == SITS_OK, "rounded inputs: %s", status ? err.text : "open");
  if (status == SITS_OK) {
    const bool ok = read_few_in_slices(lane, whole[0], alone[0], &n_stops);
    verdict(ok && n_stops >= 3, "rounded inputs: nine tokens, others between, %d stops: the same bits", n_stops);
    runner.vtable->program_destroy(lane);
  }
  runner_close(&runner);
}

int main(void)
{
  gpu_open();
  run("int4", "resident");
  run("f16", "expand");
  run_few();
  return gpu_finish();
}
