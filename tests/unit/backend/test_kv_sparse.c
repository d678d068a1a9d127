/* Sequences that have lost blocks: attention without them is the reference's with those positions hidden in that layer and head, what
 * blocks were given is what the reference gave them, and neither depends on how tokens were batched, work was split or where blocks lie.
 * While all pages are whole fp4-sparse is fp4, bit for bit. */
#include "rig.h"
#include "synth.h"

#include "backend/cpu/cpu_kv.h"
#include "ref/ref_program.h"

#define P KV_PAGE_TOKENS

enum { N_PAGES = 12, V = 50, N = (N_PAGES - 1) * P + 9, DROP_AT = 9 * P, L = 2, G = 2, COLUMNS = L * G, N_MIXED = 4, NEAREST = 3 };

static const struct synth_shape plain_shape = {"sparse", L, 64, 6, G, 32, 64, V, 0, 0, false, false, false, true};
static const struct synth_shape window_shape = {"sparse, window", L, 64, 6, G, 32, 64, V, 6 * P + 5, 0, false, false, false, true};
static const int32_t broken[] = {1, 2, 4, 5, 6, 7}; /* pages: parts of a chunk, and a whole one */
enum { N_BROKEN = sizeof broken / sizeof *broken };

static int32_t ids[N];
static const int32_t whole_table[N_PAGES] = {11, 0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5};

struct result { float logits[N * V]; uint64_t given[N_PAGES][COLUMNS]; };

static void make_ids(void)
{
  for (int32_t i = 0; i < N; i++) ids[i] = (i * 29 + i * i % 11) % V;
}

/* Page 4 is gone in all heads; of the others each head loses one in three, its own. */
static bool is_gone(int32_t entry, int32_t column)
{
  bool is_broken = false;
  for (int32_t i = 0; i < N_BROKEN; i++) is_broken |= broken[i] == entry;
  return is_broken && (entry == 4 || (entry + column) % 3 == 0);
}

/* Blocks that stay move to the pages behind the others, to any column; what they leave is spoilt. */
static void break_up(struct rig *rig, int32_t *table, int32_t *numbers)
{
  const struct kv_geometry geometry = {.n_layers = L, .n_kv_heads = G, .head_dim = 32, .codec = rig->kv->geometry.codec};
  void *spoilt = mem_alloc((size_t)rig->vt->kv_page_bytes(&geometry));
  int32_t n = 0, copies[N_BROKEN * COLUMNS][2];
  memset(spoilt, 0xff, (size_t)rig->vt->kv_page_bytes(&geometry));
  for (int32_t i = 0; i < N_BROKEN; i++)
    for (int32_t c = 0; c < COLUMNS; c++) {
      numbers[broken[i] * COLUMNS + c] = -1;
      if (is_gone(broken[i], c)) continue;
      copies[n][0] = table[broken[i]] * COLUMNS + c;
      copies[n][1] = numbers[broken[i] * COLUMNS + c] = N_PAGES * COLUMNS + (n * 5 + 3) % (N_MIXED * COLUMNS);
      n++;
    }
  assert_true(n <= N_MIXED * COLUMNS);
  assert_int_equal(rig->vt->kv_copy_blocks(rig->kv, (const int32_t(*)[2])copies, n), SITS_OK);
  for (int32_t i = 0; i < N_BROKEN; i++) {
    assert_int_equal(rig->vt->kv_write_page(rig->kv, table[broken[i]], spoilt), SITS_OK);
    table[broken[i]] = KV_NO_PAGE;
  }
  mem_free(spoilt);
}

/* Read the text in steps of `piece`, breaking pages up at DROP_AT; piece 0: everything up to there, then the rest. */
static void run(struct rig *rig, int32_t piece, bool drops, struct result *out)
{
  static _Atomic uint64_t given[N_PAGES][COLUMNS];
  int32_t table[N_PAGES], numbers[N_PAGES * COLUMNS];
  struct backend_blocks blocks = {.given = given[0], .nearest = NEAREST};
  memcpy(table, whole_table, sizeof table);
  memset(out, 0, sizeof *out);
  memset((void *)given, 0, sizeof given);
  rig->blocks = rig->kv->codec->is_sparse ? &blocks : NULL;
  for (int32_t t = 0, n; t < N; t += n) {
    if (t == DROP_AT && drops) {
      break_up(rig, table, numbers);
      blocks.numbers = numbers;
    }
    n = piece == 0 ? N : piece;
    if (t < DROP_AT && n > DROP_AT - t) n = DROP_AT - t;
    if (n > N - t) n = N - t;
    const float *logits = rig_step(rig, &(struct rig_part){ids + t, n, t, table}, 1, true);
    memcpy(out->logits + (int64_t)t * V, logits, (size_t)n * V * sizeof *logits);
  }
  memcpy(out->given, (const void *)given, sizeof given);
}

static void compare_given(const struct ref_sequence *sequence, const struct result *got)
{
  const double rows = 3.0 * N; /* a rounding of half a unit for each query head of a kv head and token that saw the page; f32 below it */
  for (int32_t i = 0; i < N_PAGES; i++)
    for (int32_t c = 0; c < COLUMNS; c++) {
      double given = 0;
      for (int32_t j = i * P; j < (i + 1) * P && j < N; j++)
        given += ref_sequence_given(sequence)[((int64_t)(c / G) * N + j) * G + c % G];
      const double counted = (double)got->given[i][c] / KV_GIVEN_ONE;
      const int32_t last = (is_gone(i, c) ? DROP_AT - 1 : N - 1) / P; /* page of queries that could see it */
      if (!(fabs(counted - given) <= 2e-5 * given + 0.5 * rows / KV_GIVEN_ONE) || (given > 0) != (i + NEAREST <= last))
        fail_msg("page %d, column %d was given %.4f, counted %.4f", (int)i, (int)c, given, counted);
    }
}

static void compare_with_reference(const struct synth *synth, const struct result *got)
{
  struct program *plain = NULL;
  struct sits_error err;
  static double want[V];
  double worst = 0, scale = 1e-9;
  RIG_OK(program_from_model_with(&synth->model, 0, &plain, &err), err);
  struct ref_sequence *sequence = ref_sequence_create(plain, N, NULL);
  ref_sequence_measure(sequence, NEAREST);
  for (int32_t t = 0; t < N; t++) {
    for (int32_t i = 0; t == DROP_AT && i < N_BROKEN; i++)
      for (int32_t c = 0; c < COLUMNS; c++)
        if (is_gone(broken[i], c)) ref_sequence_hide(sequence, c / G, c % G, broken[i] * P, P);
    ref_program_step(sequence, ids[t], want);
    for (int32_t v = 0; v < V; v++) {
      worst = fmax(worst, fabs(want[v] - got->logits[(int64_t)t * V + v]));
      scale = fmax(scale, fabs(want[v]));
    }
  }
  if (!(worst <= 4e-6 * scale)) fail_msg("logits differ by %.2e of the largest", worst / scale);
  compare_given(sequence, got);
  ref_sequence_destroy(sequence);
  program_destroy(plain);
}

/* The exact cache with blocks missing, against the reference. */
static void check_broken(const struct synth_shape *shape)
{
  static struct result first, again;
  struct synth synth;
  struct cpu_kv_codec codec = cpu_kv_f32;
  codec.is_sparse = true;
  make_ids();
  synth_init(&synth, shape, 5);
  for (int32_t n_threads = 1; n_threads <= 3; n_threads += 2) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = n_threads, .max_batch_tokens = 1024, .max_seqs = 1024,
                                                                    .n_pages = N_PAGES + N_MIXED, .fusions = ~0u, .codec = KV_F32});
    rig.kv->codec = &codec;
    run(&rig, 0, true, n_threads == 1 ? &first : &again);
    if (n_threads > 1) assert_memory_equal(&again, &first, sizeof first);
    static const int32_t pieces[] = {1, 37};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
      run(&rig, pieces[i], true, &again);
      assert_memory_equal(again.logits, first.logits, sizeof first.logits);
      assert_memory_equal(again.given, first.given, sizeof first.given);
    }
    rig_close(&rig);
  }
  compare_with_reference(&synth, &first);
  synth_fini(&synth);
}

static void test_broken_pages(void **state)
{
  (void)state;
  check_broken(&plain_shape);
  check_broken(&window_shape);
}

static void test_whole_pages_are_fp4s(void **state)
{
  (void)state;
  static struct result fp4, sparse;
  struct synth synth;
  make_ids();
  synth_init(&synth, &plain_shape, 6);
  for (int sparse_too = 0; sparse_too < 2; sparse_too++) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 2, .max_batch_tokens = 1024, .max_seqs = 1024,
                                .n_pages = N_PAGES, .fusions = ~0u, .codec = sparse_too ? KV_FP4_SPARSE : KV_FP4});
    run(&rig, 100, false, sparse_too ? &sparse : &fp4);
    rig_close(&rig);
  }
  assert_memory_equal(sparse.logits, fp4.logits, sizeof fp4.logits);
  assert_true(sparse.given[0][0] > 0);
  synth_fini(&synth);
}

/* Where all scores lie far below zero, a query gives nothing to what it does not see, however it was batched. */
static void test_scores_far_below_zero(void **state)
{
  (void)state;
  static const struct synth_shape shape = {"sparse, biased", L, 64, 6, G, 32, 64, V, 4 * P + 5, 0, false, true, false, true};
  static struct result first, again;
  struct synth synth;
  make_ids();
  synth_init(&synth, &shape, 9);
  for (int32_t layer = 0; layer < L; layer++) {
    for (int32_t i = 0; i < 6 * 32; i++) ((float *)(uintptr_t)synth.model.layers[layer].bq->data)[i] = 20;
    for (int32_t i = 0; i < G * 32; i++) ((float *)(uintptr_t)synth.model.layers[layer].bk->data)[i] = -20;
  }
  struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 2, .max_batch_tokens = 1024, .max_seqs = 1024,
                              .n_pages = N_PAGES + N_MIXED, .fusions = ~0u, .codec = KV_FP4_SPARSE});
  run(&rig, 1, true, &first);
  run(&rig, 0, true, &again);
  for (int32_t i = 0; i < N_PAGES * COLUMNS; i++) assert_true(first.given[i / COLUMNS][i % COLUMNS] <= (uint64_t)3 * N * KV_GIVEN_ONE);
  assert_memory_equal(again.given, first.given, sizeof first.given);
  rig_close(&rig);
  synth_fini(&synth);
}

/* Missing pages are refused where they make no sense: under other codecs, without blocks, with blocks that are none, and where this step
 * writes; so are copies of blocks that are none. */
static void test_refusals(void **state)
{
  (void)state;
  struct synth synth;
  make_ids();
  synth_init(&synth, &plain_shape, 7);
  for (int sparse = 0; sparse < 2; sparse++) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 256, .max_seqs = 8,
                                .n_pages = N_PAGES, .fusions = ~0u, .codec = sparse ? KV_FP4_SPARSE : KV_FP4});
    int32_t table[3] = {0, 1, 2}, tokens[2] = {1, 2}, positions[2] = {2 * P - 1, 2 * P}, starts[2] = {0, 2}, len = 2 * P + 1, row = 1;
    int32_t numbers[3 * COLUMNS] = {0, -1, N_PAGES * COLUMNS - 1, 2};
    struct backend_blocks blocks = {.numbers = numbers, .nearest = 1};
    struct backend_batch batch = {.n_tokens = 2, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions, .seq_start = starts,
                                  .kv_len = &len, .block_table = table, .table_stride = 3, .row_token = &row, .blocks = &blocks};
    rig_step(&rig, &(struct rig_part){ids, 2 * P - 1, 0, table}, 1, false);
    for (int32_t missing = 0; missing < 3; missing++) {
      const int32_t kept = table[missing];
      table[missing] = KV_NO_PAGE;
      assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), sparse && missing == 0 ? SITS_OK : SITS_INVALID_ARGUMENT);
      table[missing] = kept;
    }
    table[0] = KV_NO_PAGE;
    numbers[2]++;
    assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), SITS_INVALID_ARGUMENT);
    batch.blocks = NULL;
    assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), SITS_INVALID_ARGUMENT);
    const int32_t copy[1][2] = {{0, N_PAGES * COLUMNS}};
    assert_int_equal(rig.vt->kv_copy_blocks(rig.kv, copy, 1), SITS_INVALID_ARGUMENT);
    rig_close(&rig);
  }
  synth_fini(&synth);
}

/* A page whose last owner left it with an open group takes a whole page's blocks: nothing of that group comes back. */
static void test_blocks_over_an_open_group(void **state)
{
  (void)state;
  struct synth synth;
  make_ids();
  synth_init(&synth, &plain_shape, 8);
  struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 256, .max_seqs = 8,
                              .n_pages = 2, .fusions = ~0u, .codec = KV_FP4_SPARSE});
  static unsigned char bytes[2][1 << 16];
  int32_t copies[COLUMNS][2];
  assert_true(rig.kv->page_bytes <= sizeof bytes[0]);
  rig_step(&rig, &(struct rig_part){ids, 5, 0, (const int32_t[]){0}}, 1, false);
  rig_step(&rig, &(struct rig_part){ids + 5, P, 0, (const int32_t[]){1}}, 1, false);
  for (int32_t c = 0; c < COLUMNS; c++) copies[c][0] = COLUMNS + c, copies[c][1] = c;
  assert_int_equal(rig.vt->kv_copy_blocks(rig.kv, (const int32_t(*)[2])copies, COLUMNS), SITS_OK);
  for (int32_t page = 0; page < 2; page++) assert_int_equal(rig.vt->kv_read_page(rig.kv, page, bytes[page]), SITS_OK);
  assert_memory_equal(bytes[0], bytes[1], rig.kv->page_bytes);
  rig_close(&rig);
  synth_fini(&synth);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_broken_pages), cmocka_unit_test(test_whole_pages_are_fp4s),
                                     cmocka_unit_test(test_scores_far_below_zero),
                                     cmocka_unit_test(test_refusals), cmocka_unit_test(test_blocks_over_an_open_group)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
