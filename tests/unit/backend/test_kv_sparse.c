/* Sequences that have dropped pages: attention without them is the reference's without those positions, what pages were given is what the
 * reference gave them, and neither depends on how tokens were batched or work was split. Without drops fp4-sparse is fp4, bit for bit. */
#include "rig.h"
#include "synth.h"

#include "backend/cpu/cpu_kv.h"
#include "ref/ref_program.h"

#define P KV_PAGE_TOKENS

enum { N_PAGES = 12, V = 50, N = (N_PAGES - 1) * P + 9, DROP_AT = 9 * P };

static const struct synth_shape plain_shape = {"sparse", 2, 64, 6, 2, 32, 64, V, 0, 0, false, false, false, true};
static const struct synth_shape window_shape = {"sparse, window", 2, 64, 6, 2, 32, 64, V, 6 * P + 5, 0, false, false, false, true};
static const int32_t dropped[] = {1, 2, 4, 5, 6, 7}; /* parts of a chunk, and a whole one */
enum { N_DROPPED = sizeof dropped / sizeof *dropped };

static int32_t ids[N];
static const int32_t whole_table[N_PAGES] = {11, 0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5};

struct result { float logits[N * V]; uint64_t mass[N_PAGES]; };

static void make_ids(void)
{
  for (int32_t i = 0; i < N; i++) ids[i] = (i * 29 + i * i % 11) % V;
}

/* Read the text in steps of `piece`, dropping pages at DROP_AT; piece 0: everything up to there, then the rest. */
static void run(struct rig *rig, int32_t piece, bool drops, struct result *out)
{
  static _Atomic uint64_t mass[RIG_STRIDE];
  int32_t table[N_PAGES];
  memcpy(table, whole_table, sizeof table);
  memset(out, 0, sizeof *out);
  rig->mass = mass;
  for (int32_t t = 0, n; t < N; t += n) {
    if (t == DROP_AT && drops)
      for (int32_t i = 0; i < N_DROPPED; i++) table[dropped[i]] = KV_NO_PAGE;
    n = piece == 0 ? N : piece;
    if (t < DROP_AT && n > DROP_AT - t) n = DROP_AT - t;
    if (n > N - t) n = N - t;
    memset((void *)mass, 0, sizeof mass);
    const float *logits = rig_step(rig, &(struct rig_part){ids + t, n, t, table}, 1, true);
    memcpy(out->logits + (int64_t)t * V, logits, (size_t)n * V * sizeof *logits);
    for (int32_t i = 0; i < N_PAGES; i++) out->mass[i] += mass[i];
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
  for (int32_t t = 0; t < N; t++) {
    for (int32_t i = 0; t == DROP_AT && i < N_DROPPED; i++) ref_sequence_hide(sequence, dropped[i] * P, P);
    ref_program_step(sequence, ids[t], want);
    for (int32_t v = 0; v < V; v++) {
      worst = fmax(worst, fabs(want[v] - got->logits[(int64_t)t * V + v]));
      scale = fmax(scale, fabs(want[v]));
    }
  }
  if (!(worst <= 4e-6 * scale)) fail_msg("logits differ by %.2e of the largest", worst / scale);
  const double rows = 2.0 * 6 * N; /* a rounding of half a unit for each layer, head and token that saw the page; f32 below it */
  for (int32_t i = 0; i < N_PAGES; i++) {
    double given = 0;
    for (int32_t j = i * P; j < (i + 1) * P && j < N; j++) given += ref_sequence_given(sequence)[j];
    const double difference = fabs((double)got->mass[i] / KV_MASS_ONE - given);
    if (!(given > 0 && difference <= 1e-5 * given + 0.5 * rows / KV_MASS_ONE))
      fail_msg("page %d was given %.4f, counted %.4f", (int)i, given, (double)got->mass[i] / KV_MASS_ONE);
  }
  ref_sequence_destroy(sequence);
  program_destroy(plain);
}

/* The exact cache with pages missing, against the reference. */
static void check_dropped(const struct synth_shape *shape)
{
  static struct result first, again;
  struct synth synth;
  struct cpu_kv_codec codec = cpu_kv_f32;
  codec.is_sparse = true;
  make_ids();
  synth_init(&synth, shape, 5);
  for (int32_t n_threads = 1; n_threads <= 3; n_threads += 2) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = n_threads, .max_batch_tokens = 1024, .max_seqs = 1024,
                                                                    .n_pages = N_PAGES, .fusions = ~0u, .codec = KV_F32});
    rig.kv->codec = &codec;
    run(&rig, 0, true, n_threads == 1 ? &first : &again);
    if (n_threads > 1) assert_memory_equal(&again, &first, sizeof first);
    static const int32_t pieces[] = {1, 37};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
      run(&rig, pieces[i], true, &again);
      assert_memory_equal(again.logits, first.logits, sizeof first.logits);
      assert_memory_equal(again.mass, first.mass, sizeof first.mass);
    }
    rig_close(&rig);
  }
  compare_with_reference(&synth, &first);
  synth_fini(&synth);
}

static void test_dropped_pages(void **state)
{
  (void)state;
  check_dropped(&plain_shape);
  check_dropped(&window_shape);
}

static void test_without_drops_it_is_fp4(void **state)
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
    if (sparse_too) {
      uint64_t total = 0;
      for (int32_t i = 0; i < N_PAGES; i++) total += sparse.mass[i];
      assert_true(fabs((double)total / KV_MASS_ONE - 2.0 * 6 * N) < 0.5 * 2 * 6 * N * N_PAGES / KV_MASS_ONE + 1);
    } else {
      for (int32_t i = 0; i < N_PAGES; i++) assert_true(fp4.mass[i] == 0); /* only sparse codecs measure */
    }
    rig_close(&rig);
  }
  assert_memory_equal(sparse.logits, fp4.logits, sizeof fp4.logits);
  synth_fini(&synth);
}

/* Missing pages are refused where they make no sense: under other codecs, and where this step writes. */
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
    const struct backend_batch batch = {.n_tokens = 2, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                        .seq_start = starts, .kv_len = &len, .block_table = table, .table_stride = 3, .row_token = &row};
    rig_step(&rig, &(struct rig_part){ids, 2 * P - 1, 0, table}, 1, false);
    for (int32_t missing = 0; missing < 3; missing++) {
      const int32_t kept = table[missing];
      table[missing] = KV_NO_PAGE;
      assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), sparse && missing == 0 ? SITS_OK : SITS_INVALID_ARGUMENT);
      table[missing] = kept;
    }
    rig_close(&rig);
  }
  synth_fini(&synth);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_dropped_pages), cmocka_unit_test(test_without_drops_it_is_fp4),
                                     cmocka_unit_test(test_refusals)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
