/* Models cut over several ranks of the CPU backend: logits against the reference backend and against one rank, pages, refusals, a rank
 * that is long in its compile, and a rank that hangs. Linked with --wrap for cpu_compile and clock_monotonic_us (test_late_compile). */
#include "rig.h"
#include "synth.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "backend/cpu/cpu_program.h"
#include "backend/group.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/runner.h"
#include "ref/ref_ops.h"
#include "ref/ref_program.h"

#define P KV_PAGE_TOKENS

static const struct { struct synth_shape shape; int32_t n_ranks; } cases[] = {
    /* name                           L   E   H  G   D    F   V  window rope interl bias qknorm tied */
    {{"2 ranks, gqa 2",               2, 64,  4, 2,  16, 96, 50,   0,   0, true,  false, false, true}, 2},
    {{"2 ranks, bias, one KV head",   2, 64,  4, 1,  16, 64, 50,   0,   0, false, true,  false, false}, 2},
    {{"4 ranks, 2 KV heads, qk norm", 1, 64,  8, 2,  32, 64, 52,   0,   0, false, true,  true,  false}, 4},
    {{"3 ranks, window",              2, 96,  9, 3,   8, 48, 51,  17,   0, false, false, false, true}, 3},
    {{"8 ranks",                      1, 64,  8, 8,  16, 64, 64,   0,   8, true,  false, false, false}, 8},
};

enum { N_SEQS = 3, MAX_LEN = P + 9 };
static const int32_t lengths[N_SEQS] = {1, 20, MAX_LEN};
static int32_t token_at(int32_t seq, int32_t t, int32_t V) { return (seq * 31 + t * 17 + t * t % 7) % V; }

/* All sequences to their ends, at most `piece` tokens of each a step: [seq][t][V]. */
static void read_all(struct rig *rig, int32_t piece, float *out)
{
  const int32_t V = rig->model->config.n_vocab;
  int32_t ids[N_SEQS][MAX_LEN], tables[N_SEQS][2], done[N_SEQS] = {0};
  for (int32_t s = 0; s < N_SEQS; s++) {
    for (int32_t t = 0; t < lengths[s]; t++) ids[s][t] = token_at(s, t, V);
    for (int32_t i = 0; i < 2; i++) tables[s][i] = i * N_SEQS + (s + i) % N_SEQS;
  }
  for (;;) {
    struct rig_part parts[N_SEQS];
    int32_t seqs[N_SEQS], n_parts = 0, row = 0;
    for (int32_t s = 0; s < N_SEQS; s++) {
      const int32_t left = lengths[s] - done[s], n = left < piece ? left : piece;
      if (n == 0) continue;
      parts[n_parts] = (struct rig_part){ids[s] + done[s], n, done[s], tables[s]};
      seqs[n_parts++] = s;
    }
    if (n_parts == 0) return;
    const float *logits = rig_step(rig, parts, n_parts, true);
    for (int32_t i = 0; i < n_parts; i++, done[seqs[i - 1]] += parts[i - 1].n)
      for (int32_t t = 0; t < parts[i].n; t++, row++)
        memcpy(out + ((int64_t)seqs[i] * MAX_LEN + parts[i].p0 + t) * V, logits + (int64_t)row * V, (size_t)V * sizeof *out);
  }
}

static void test_logits(void **state)
{
  (void)state;
  static const uint32_t fusions[] = {~0u, 0};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    struct synth synth;
    struct sits_error err;
    struct program *plain = NULL;
    synth_init(&synth, &cases[c].shape, 99 + c);
    RIG_OK(program_from_model_with(&synth.model, 0, &plain, &err), err);
    const int32_t V = plain->dims.n_vocab;
    float *got = mem_calloc((size_t)N_SEQS * MAX_LEN * (size_t)V, sizeof *got);
    double *want = mem_calloc((size_t)MAX_LEN * (size_t)V, sizeof *want);
    assert_true(got != NULL && want != NULL);
    for (size_t f = 0; f < 2; f++) {
      struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = (int32_t)f + 1, .max_batch_tokens = 256, .max_seqs = 256,
                                  .n_pages = 8, .fusions = fusions[f], .codec = KV_F32, .n_ranks = cases[c].n_ranks, .timeout_ms = 60000});
      read_all(&rig, f == 0 ? MAX_LEN : 7, got);
      rig_close(&rig);
      double worst = 0, scale = 1e-9;
      for (int32_t s = 0; s < N_SEQS; s++) {
        struct ref_sequence *sequence = ref_sequence_create(plain, lengths[s], NULL);
        for (int32_t t = 0; t < lengths[s]; t++) {
          ref_program_step(sequence, token_at(s, t, V), want);
          for (int32_t v = 0; v < V; v++) {
            worst = fmax(worst, fabs(got[((int64_t)s * MAX_LEN + t) * V + v] - want[v]));
            scale = fmax(scale, fabs(want[v]));
          }
        }
        ref_sequence_destroy(sequence);
      }
      if (!(worst / scale <= 2e-6))
        fail_msg("%s, fusions %x: relative error %.2e", cases[c].shape.name, (unsigned)fusions[f], worst / scale);
    }
    mem_free(got);
    mem_free(want);
    program_destroy(plain);
    synth_fini(&synth);
  }
}

/* Compressed shares: the rounding is its twin's, but for codes at a tie; only steps of many tokens are touched, and little. */
static void test_compressed(void **state)
{
  (void)state;
  enum { N = 300, WIDTH = 300 };
  float x[WIDTH];
  double want[WIDTH], given[WIDTH], step[WIDTH];
  for (int32_t i = 0; i < WIDTH; i++) given[i] = x[i] = (float)((i * 37 % 101 - 50) * (i < 128 ? 1e-3 : i < 256 ? 0 : 1e4));
  cpu_round_shares(x, 1, WIDTH);
  ref_round_share(given, WIDTH, BACKEND_COMPRESS_GROUP, want, step);
  for (int32_t i = 0; i < WIDTH; i++) {
    const bool is_tie = step[i] > 0 && fabs(fabs(given[i] / step[i] - floor(given[i] / step[i])) - 0.5) < 1e-4;
    if (fabs(x[i] - want[i]) > (is_tie ? 1.001 : 1e-4) * step[i]) fail_msg("column %d: %g, not %g", i, x[i], want[i]);
  }
  struct synth synth;
  synth_init(&synth, &cases[0].shape, 5);
  const int32_t V = synth.model.config.n_vocab, table[5] = {0, 1, 2, 3, 4};
  int32_t ids[N];
  float *logits[2][2]; /* [compressed][few, many tokens a step] */
  for (int32_t t = 0; t < N; t++) ids[t] = token_at(1, t, V);
  for (int32_t c = 0; c < 2; c++) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = N, .max_seqs = N, .n_pages = 5,
                                .fusions = ~(uint32_t)PROGRAM_MOVE_SELECT, .codec = KV_F32, .n_ranks = 2, .timeout_ms = 60000,
                                .compress = c == 1});
    for (int32_t i = 0; i < 2; i++) {
      const int32_t n = i == 0 ? BACKEND_COMPRESS_TOKENS : N;
      logits[c][i] = mem_calloc((size_t)n * (size_t)V, sizeof(float));
      assert_non_null(logits[c][i]);
      memcpy(logits[c][i], rig_step(&rig, &(struct rig_part){ids, n, 0, table}, 1, true), (size_t)n * (size_t)V * sizeof(float));
    }
    rig_close(&rig);
  }
  assert_memory_equal(logits[1][0], logits[0][0], (size_t)BACKEND_COMPRESS_TOKENS * (size_t)V * sizeof(float));
  double difference = 0, all = 0;
  for (int32_t i = 0; i < N * V; i++) {
    difference += pow((double)logits[1][1][i] - logits[0][1][i], 2);
    all += pow(logits[0][1][i], 2);
  }
  if (!(difference > 0 && sqrt(difference / all) < 0.02)) fail_msg("relative change of the logits: %.3e", sqrt(difference / all));
  for (int32_t i = 0; i < 4; i++) mem_free(logits[i / 2][i % 2]);
  synth_fini(&synth);
}

/* Copies, and pages taken out and brought back, are the same tokens for all ranks. */
static void test_pages(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &cases[0].shape, 5);
  struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 128, .max_seqs = 128, .n_pages = 4,
                              .fusions = ~0u, .codec = KV_F16, .n_ranks = 2, .timeout_ms = 60000});
  const int32_t V = synth.model.config.n_vocab, ids[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const int32_t first[1] = {0}, second[1] = {1}, third[1] = {2};
  const struct kv_geometry geometry = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 16, .codec = KV_F16, .n_ranks = 2};
  struct kv_geometry one = geometry;
  one.n_ranks = 1;
  assert_int_equal(rig.vt->kv_page_bytes(&geometry), backend_find("cpu")->kv_page_bytes(&one));
  const size_t n = (size_t)rig.vt->kv_page_bytes(&geometry);
  uint8_t *page = mem_calloc(1, n);
  float *want = mem_calloc((size_t)V, sizeof *want);
  assert_true(page != NULL && want != NULL);
  (void)rig_step(&rig, &(struct rig_part){ids, 11, 0, first}, 1, false);
  assert_int_equal(rig.vt->kv_copy_pages(rig.kv, &(struct kv_copy){0, 1}, 1), SITS_OK);
  assert_int_equal(rig.vt->kv_read_page(rig.kv, 1, page), SITS_OK);
  memcpy(want, rig_step(&rig, &(struct rig_part){ids + 11, 1, 11, first}, 1, false), (size_t)V * sizeof *want);
  assert_memory_equal(rig_step(&rig, &(struct rig_part){ids + 11, 1, 11, second}, 1, false), want, (size_t)V * sizeof *want);
  assert_int_equal(rig.vt->kv_write_page(rig.kv, 2, page), SITS_OK);
  assert_memory_equal(rig_step(&rig, &(struct rig_part){ids + 11, 1, 11, third}, 1, false), want, (size_t)V * sizeof *want);
  mem_free(page);
  mem_free(want);
  rig_close(&rig);
  synth_fini(&synth);
}

static void test_refusals(void **state)
{
  (void)state;
  static const struct { struct synth_shape shape; int32_t n_ranks; const char *text; } bad[] = {
      {{"heads", 1, 48, 3, 3, 16, 64, 50, 0, 0, false, false, false, true}, 2, "3 heads"},
      {{"kv", 1, 96, 12, 3, 8, 64, 50, 0, 0, false, false, false, true}, 2, "3 KV heads"},
      {{"ff", 1, 64, 4, 2, 16, 63, 50, 0, 0, false, false, false, true}, 2, "width 63"},
      {{"vocabulary", 1, 64, 4, 2, 16, 64, 51, 0, 0, false, false, false, true}, 2, "vocabulary of 51"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct synth synth;
    struct program *program = NULL;
    struct sits_error err = {0};
    synth_init(&synth, &bad[i].shape, 1);
    assert_int_equal(program_for_ranks(&synth.model, 0, NULL, bad[i].n_ranks, &program, &err), SITS_CONFIG);
    if (strstr(err.text, bad[i].text) == NULL || strstr(err.text, "tensor-parallel-size 2") == NULL) fail_msg("'%s'", err.text);
    synth_fini(&synth);
  }
  const struct backend_options options = {.n_ranks = BACKEND_MAX_RANKS + 1, .max_batch_tokens = 8, .max_seqs = 8};
  struct backend *backend = NULL;
  struct sits_error err = {0};
  assert_int_equal(backend_ranks(backend_find("cpu"))->open(&options, &backend, &err), SITS_CONFIG);
}

/* A model, its programs for two ranks, and a backend of two ranks that has compiled nothing. */
static void open_two(struct synth *synth, struct program **program, struct backend **backend)
{
  const struct backend_options options = {.n_threads = 1, .max_batch_tokens = 8, .max_seqs = 8, .n_ranks = 2};
  struct sits_error err = {0};
  synth_init(synth, &cases[0].shape, 5);
  RIG_OK(program_for_ranks(&synth->model, 0, NULL, 2, program, &err), err);
  RIG_OK(backend_ranks(backend_find("cpu"))->open(&options, backend, &err), err);
}

/* One rank refuses its program: it is named, and the group is aborted, so that no other rank waits for it in a meeting of compile. */
static void test_refused_by_one(void **state)
{
  (void)state;
  const struct backend_vtable *vt = backend_ranks(backend_find("cpu"));
  struct backend *backend;
  struct backend_program *compiled = NULL;
  struct program *program;
  struct sits_error err = {0};
  struct synth synth;
  open_two(&synth, &program, &backend);
  const int32_t dims = program->next_rank->rope.dims;
  program->next_rank->rope.dims = 3;
  assert_false(vt->is_lost(backend));
  assert_int_equal(vt->compile(backend, program, &compiled, &err), SITS_INVALID_ARGUMENT);
  assert_non_null(strstr(err.text, "rotary"));
  assert_true(vt->is_lost(backend));
  program->next_rank->rope.dims = dims;
  assert_int_equal(vt->compile(backend, program, &compiled, &err), SITS_DEVICE); /* for good */
  vt->close(backend);
  program_destroy(program);
  synth_fini(&synth);
}

/* Rank 1 is held in its compile until the caller has looked at the clock LATE_LOOKS times after the group was aborted, and each look finds
 * an hour gone: more than any time that a caller grants. */
enum { LATE_LOOKS = 8, NO_LOOK = -1 };
static const int64_t HOUR_US = 3600000000;
static struct {
  _Atomic bool is_armed, has_returned; /* has_returned: rank 1, from its compile */
  _Atomic int32_t looks;               /* NO_LOOK until the abort */
  pthread_t caller;
} late = {.looks = NO_LOOK};

int64_t __real_clock_monotonic_us(void);
int64_t __wrap_clock_monotonic_us(void);
int64_t __wrap_clock_monotonic_us(void)
{
  const int64_t now_us = __real_clock_monotonic_us();
  if (!late.is_armed || late.looks == NO_LOOK || !pthread_equal(pthread_self(), late.caller)) return now_us;
  return now_us + ++late.looks * HOUR_US;
}

enum sits_status __real_cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out,
                                    struct sits_error *err);
enum sits_status __wrap_cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out,
                                    struct sits_error *err);
enum sits_status __wrap_cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out,
                                    struct sits_error *err)
{
  const bool is_late = late.is_armed && program->dims.rank == 1;
  if (is_late) {
    while (!group_is_aborted(backend->options.group)) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    late.looks = 0;
    while (late.looks < LATE_LOOKS) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  const enum sits_status status = __real_cpu_compile(backend, program, out, err);
  if (is_late) late.has_returned = true;
  return status;
}

/* Rank 0 refuses at once and rank 1 is far from its end: compile returns when nobody reads the program any more, and what rank 1 has made
 * is given back. */
static void test_late_compile(void **state)
{
  (void)state;
  const struct backend_vtable *vt = backend_ranks(backend_find("cpu"));
  struct backend *backend;
  struct backend_program *compiled = NULL;
  struct program *program;
  struct sits_error err = {0};
  struct synth synth;
  const int64_t n_blocks = mem_live_blocks();
  open_two(&synth, &program, &backend);
  program->rope.dims = 3;
  late.caller = pthread_self();
  late.is_armed = true;
  const enum sits_status status = vt->compile(backend, program, &compiled, &err);
  const bool has_all = late.has_returned;
  late.is_armed = false;
  late.looks = LATE_LOOKS; /* rank 1 goes on in any case */
  assert_true(has_all);
  assert_int_equal(status, SITS_INVALID_ARGUMENT);
  assert_non_null(strstr(err.text, "rotary"));
  assert_null(compiled);
  program_destroy(program);
  synth_fini(&synth);
  vt->close(backend);
  assert_int_equal(mem_live_blocks(), n_blocks);
}

/* A hung rank: the step ends with DEVICE soon after the time allowed, and so does everything after it; closing works. */
static void test_hung_rank(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &cases[0].shape, 5);
  log_set_level(LOG_OFF);
  assert_int_equal(setenv("SITS_RANK_FAULT", "1:2", 1), 0);
  struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 128, .max_seqs = 128, .n_pages = 4,
                              .fusions = ~0u, .codec = KV_F16, .n_ranks = 2, .timeout_ms = 300});
  const int32_t ids[2] = {1, 2}, table[1] = {0}, zero[2] = {0, 1}, position[1] = {1}, len[1] = {2};
  (void)rig_step(&rig, &(struct rig_part){ids, 1, 0, table}, 1, false);
  const struct backend_batch batch = {.n_tokens = 1, .n_seqs = 1, .n_rows = 1, .tokens = ids + 1, .positions = position, .seq_start = zero,
                                      .kv_len = len, .block_table = table, .table_stride = 1, .row_token = zero};
  const int64_t start_us = clock_monotonic_us();
  struct backend_result result;
  enum sits_status status = rig.vt->submit(rig.compiled, rig.kv, &batch);
  if (status == SITS_OK) status = rig.vt->wait(rig.compiled, &result);
  assert_int_equal(status, SITS_DEVICE);
  if (clock_monotonic_us() - start_us > 10000000) fail_msg("it took %lld us", (long long)(clock_monotonic_us() - start_us));
  assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), SITS_DEVICE);
  assert_int_equal(rig.vt->kv_copy_pages(rig.kv, &(struct kv_copy){0, 1}, 1), SITS_DEVICE);
  assert_int_equal(unsetenv("SITS_RANK_FAULT"), 0);
  rig_close(&rig);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

/* A model file through the runner: greedy ids of one, two and four ranks. */
static void test_stories(void **state)
{
  (void)state;
  enum { N = 40 };
  const char *path = rig_shared("models/stories260K/stories260K.gguf");
  if (access(path, R_OK) != 0) skip();
  int32_t ids[3][N];
  for (int32_t turn = 0; turn < 3; turn++) {
    const struct runner_options options = {.model_path = path, .device = "cpu",
                                           .backend = {.n_threads = 2, .max_batch_tokens = 64, .max_seqs = 64, .n_ranks = 1 << turn,
                                                       .collective_timeout_ms = 60000}};
    struct runner runner;
    struct sits_error err = {0};
    RIG_OK(runner_open(&runner, &options, &err), err);
    RIG_OK(runner_kv_create(&runner, 2, &err), err);
    struct rig rig = {.vt = runner.vtable, .model = runner.model, .compiled = runner.compiled, .kv = runner.kv};
    const int32_t table[2] = {1, 0};
    int32_t token = 1;
    for (int32_t t = 0; t < N; t++) {
      token = rig_argmax(rig_step(&rig, &(struct rig_part){&token, 1, t, table}, 1, false), runner.model->config.n_vocab);
      ids[turn][t] = token;
    }
    runner_close(&runner);
  }
  assert_memory_equal(ids[1], ids[0], sizeof ids[0]);
  assert_memory_equal(ids[2], ids[0], sizeof ids[0]);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_logits), cmocka_unit_test(test_compressed), cmocka_unit_test(test_pages),
                                     cmocka_unit_test(test_refusals), cmocka_unit_test(test_refused_by_one),
                                     cmocka_unit_test(test_late_compile), cmocka_unit_test(test_hung_rank), cmocka_unit_test(test_stories)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
