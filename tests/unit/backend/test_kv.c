/* The CPU's KV codecs and page memory: what is stored comes back as the naive twins say, attention over every codec matches attention over
 * those numbers, results do not depend on how tokens were batched, and pages copied, swapped or recycled keep their contents. */
#include <stdatomic.h>

#include "rig.h"
#include "synth.h"

#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_kv_code.h"
#include "ref/ref_kv.h"
#include "tensor/dequant.h"

#define P KV_PAGE_TOKENS

static const enum kv_codec codecs[] = {KV_F32, KV_F16, KV_INT8, KV_INT4, KV_FP4, KV_FP4_SPARSE};
enum { N_CODECS = sizeof codecs / sizeof *codecs };

static uint64_t random_state = 7;
static float uniform(float size)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return size * (float)((double)(int32_t)(random_state >> 32) / 2147483648.0);
}

static struct backend_kv *make_kv(enum kv_codec codec, enum cpu_isa isa, int32_t head_dim)
{
  struct backend_kv *kv = NULL;
  struct sits_error err;
  const struct kv_geometry g = {.n_layers = 1, .n_kv_heads = 1, .head_dim = head_dim, .n_pages = 2, .codec = codec};
  RIG_OK(cpu_kv_create(&g, cpu_ops_for(isa), 256, 4, &kv, &err), err);
  return kv;
}

static bool is_fp4(enum kv_codec codec) { return codec == KV_FP4 || codec == KV_FP4_SPARSE; }

/* The naive twin's squared error for a group. */
static double twin_error(enum kv_codec codec, const double *x, int32_t n, double nudge)
{
  double twin[256], error = 0;
  memcpy(twin, x, (size_t)n * sizeof *x);
  if (codec == KV_INT8) ref_kv_int8(twin, n);
  if (codec == KV_INT4) ref_kv_u4(twin, n, nudge);
  if (is_fp4(codec)) ref_kv_fp4(twin, n, nudge);
  for (int32_t i = 0; i < n; i++) {
    if (codec == KV_F16) twin[i] = half_to_float(float_to_half((float)x[i]));
    error += (twin[i] - x[i]) * (twin[i] - x[i]);
  }
  return error;
}

/* A group of numbers x that came back as got: as near to x as the naive twin, which tries every choice that the format has. Numbers that
 * lie exactly between two values of the format, scales of equal error and sizes exactly between two scales may fall either way (f16 keys
 * meet such borders often: about one number in a hundred of fp4), but never farther: so errors are compared, not values. */
static void check_group(enum kv_codec codec, const double *x, const double *got, int32_t n, const char *what)
{
  const double best = fmax(twin_error(codec, x, n, -1e-6), twin_error(codec, x, n, 1e-6));
  double error = 0, size = 0;
  for (int32_t i = 0; i < n; i++) {
    error += (got[i] - x[i]) * (got[i] - x[i]);
    size += x[i] * x[i];
  }
  if (!(error <= best * (1 + 1e-4) + size * 1e-12)) /* f32 in the expansion and in the choice */
    fail_msg("%s of %s: squared error %.9g, the format allows %.9g", what, kv_codec_name(codec), error, best);
}

/* What came back of a page of keys, [P][D], against those that the codec was given: in groups of the codec's own shape. */
static void check_keys(enum kv_codec codec, double *k, double *got, int32_t D)
{
  double x[64], y[64];
  for (int32_t d = 0; d < D && is_fp4(codec); d++) { /* the mean key is the page's, rounded to f16 */
    double sum = 0;
    for (int32_t j = 0; j < P; j++) sum += k[(int64_t)j * D + d];
    const double mean = half_to_float(float_to_half((float)(sum / P)));
    for (int32_t j = 0; j < P; j++) k[(int64_t)j * D + d] -= mean, got[(int64_t)j * D + d] -= mean;
  }
  for (int32_t d = 0; d < D && codec == KV_INT4; d++)
    for (int32_t g = 0; g < P; g += 32) {
      for (int32_t j = 0; j < 32; j++) x[j] = k[(int64_t)(g + j) * D + d], y[j] = got[(int64_t)(g + j) * D + d];
      check_group(codec, x, y, 32, "keys");
    }
  for (int32_t j = 0; j < P && codec != KV_INT4; j++)
    for (int32_t d = 0, group = is_fp4(codec) ? 16 : D; d < D; d += group)
      check_group(codec, k + (int64_t)j * D + d, got + (int64_t)j * D + d, D - d < group ? D - d : group, "keys");
}

static void check_value(enum kv_codec codec, const double *v, const double *got, int32_t D)
{
  const int32_t group = codec == KV_INT4 ? 32 : is_fp4(codec) ? 16 : D;
  for (int32_t d = 0; d < D; d += group) check_group(codec, v + d, got + d, D - d < group ? D - d : group, "values");
}

/* Keys that a tile of f16 holds are what the codec was given: what the twin's own rotation says, to an f16 step. */
static void take_tile(const uint16_t *tile, int32_t tokens, int32_t first, double *k, int32_t D)
{
  for (int32_t j = 0; j < tokens; j++)
    for (int32_t d = 0; d < D; d++) {
      double *x = &k[(int64_t)(first + j) * D + d];
      const double held = half_to_float(tile[d * tokens + j]);
      assert_true(fabs(held - *x) <= fabs(*x) * 0x1p-10 + 1e-6);
      *x = held;
    }
}

static void rotate(const struct backend_kv *kv, float *x, int32_t D)
{
  for (int32_t b = D & -D, i = 0; i < D; i += b) kv->ops->hadamard(x + i, b);
}

/* Store a page and read it back through attend_k and attend_v with unit vectors. */
static void check_round_trip(enum kv_codec codec, enum cpu_isa isa, int32_t D)
{
  struct backend_kv *kv = make_kv(codec, isa, D);
  const int32_t open = kv->codec->open_tokens;
  float *scratch = mem_aligned(64, CPU_KV_SCRATCH_FLOATS(D) * sizeof *scratch);
  uint16_t *tile = mem_calloc((size_t)D * P, sizeof *tile);
  double *k = mem_alloc(sizeof(double) * P * (size_t)D), *v = mem_alloc(sizeof(double) * P * (size_t)D);
  double *got = mem_alloc(sizeof(double) * P * (size_t)D);
  assert_true(scratch != NULL && tile != NULL && k != NULL && v != NULL && got != NULL);
  void *block = cpu_kv_block(kv, 1, 0, 0);
  for (int32_t j = 0; j < P; j++) {
    float x[256], y[256];
    for (int32_t d = 0; d < D; d++) {
      k[(int64_t)j * D + d] = x[d] = uniform(2) + (d % 5 == 0 ? 9 : 0); /* constant offsets, as real keys have */
      y[d] = uniform(d % 7 == 0 ? 0.01f : 1);
    }
    if (kv->codec->rotates_k) rotate(kv, x, D), ref_kv_rotate(k + (int64_t)j * D, D);
    if (kv->codec->rotates_v) rotate(kv, y, D);
    for (int32_t d = 0; d < D; d++) {
      if (open == 0) k[(int64_t)j * D + d] = x[d];
      v[(int64_t)j * D + d] = y[d];
    }
    kv->codec->append_k(kv, block, j, x, tile);
    kv->codec->append_v(kv, block, j, y);
    if (open > 0 && j % open == open - 1) take_tile(tile, open, j + 1 - open, k, D);
  }
  for (int32_t d = 0; d < D; d++) {
    float q[256] = {0}, scores[P];
    q[d] = 1;
    kv->codec->attend_k(kv, block, q, D, 1, P, scores, P, scratch, NULL);
    for (int32_t j = 0; j < P; j++) got[(int64_t)j * D + d] = scores[j];
  }
  check_keys(codec, k, got, D);
  for (int32_t j = 0; j < P; j++) {
    float p[P] = {0}, acc[256] = {0};
    double value[256];
    p[j] = 1;
    kv->codec->attend_v(kv, block, p, P, 1, P, acc, scratch, NULL);
    for (int32_t d = 0; d < D; d++) value[d] = acc[d];
    check_value(codec, v + (int64_t)j * D, value, D);
  }
  mem_free(scratch);
  mem_free(tile);
  mem_free(k);
  mem_free(v);
  mem_free(got);
  cpu_kv_destroy(kv);
}

static void test_round_trips(void **state)
{
  (void)state;
  static const int32_t head_dims[] = {8, 64, 80, 96, 128};
  for (int isa = 0; isa <= (int)cpu_isa_best(); isa++)
    for (size_t c = 0; c < N_CODECS; c++)
      for (size_t d = 0; d < 5; d++) check_round_trip(codecs[c], (enum cpu_isa)isa, head_dims[d]);
}

static void test_page_bytes(void **state)
{
  (void)state;
  struct kv_geometry g = {.n_layers = 30, .n_kv_heads = 3, .head_dim = 64, .n_pages = 1, .codec = KV_F16};
  const double f16 = (double)backend_find("cpu")->kv_page_bytes(&g);
  assert_true(f16 == 30.0 * 3 * 64 * 64 * 2 * 2);
  g.codec = KV_INT8;
  assert_true(backend_find("cpu")->kv_page_bytes(&g) / f16 <= 0.54);
  g.codec = KV_INT4;
  assert_true(backend_find("cpu")->kv_page_bytes(&g) / f16 <= 0.285);
  g.codec = KV_FP4;
  assert_true(backend_find("cpu")->kv_page_bytes(&g) / f16 <= 0.29);
  g.head_dim = 100000;
  assert_true(backend_find("cpu")->kv_page_bytes(&g) == 0);
}

static const struct synth_shape shape = {"kv", 2, 64, 6, 2, 32, 64, 50, 0, 0, false, false, false, true};

static struct rig open_rig(struct synth *synth, enum kv_codec codec, int32_t n_threads)
{
  return rig_attach(&synth->model, &(struct rig_options){.n_threads = n_threads, .max_batch_tokens = 512, .max_seqs = 512, .n_pages = 12,
                                                         .fusions = ~0u, .codec = codec});
}

enum { N = 3 * P + 9, V = 50 };

static void make_ids(int32_t *ids, int32_t seed)
{
  for (int32_t i = 0; i < N; i++) ids[i] = (i * 29 + i * i % 11 + seed * 13) % V;
}

/* The same bits from one step, odd pieces, and single tokens; and a rollback (as after a refused draft) changes nothing. */
static void test_batching_does_not_matter(void **state)
{
  (void)state;
  static float want[N * V];
  struct synth synth;
  int32_t ids[N], junk[8] = {1, 2, 3, 4, 5, 6, 7, 8}, table[4] = {5, 3, 11, 0};
  make_ids(ids, 1);
  synth_init(&synth, &shape, 5);
  for (size_t c = 0; c < N_CODECS; c++) {
    struct rig rig = open_rig(&synth, codecs[c], 2);
    memcpy(want, rig_step(&rig, &(struct rig_part){ids, N, 0, table}, 1, true), sizeof want);
    for (int way = 0; way < 3; way++)
      for (int32_t t = 0, n; t < N; t += n) {
        n = way == 0 ? 1 : way == 1 ? 1 + t % 23 : 5;
        if (n > N - t) n = N - t;
        if (way == 2 && t + 8 < N) rig_step(&rig, &(struct rig_part){junk, 8, t, table}, 1, true); /* drafted, then refused */
        const float *logits = rig_step(&rig, &(struct rig_part){ids + t, n, t, table}, 1, true);
        if (memcmp(logits, want + (int64_t)t * V, (size_t)n * V * sizeof *want) != 0)
          fail_msg("%s: other bits at token %d, way %d", kv_codec_name(codecs[c]), (int)t, way);
      }
    rig_close(&rig);
  }
  synth_fini(&synth);
}

/* A sequence forked in the middle of a page goes on as its parent would, and both stay apart. */
static void test_copied_pages(void **state)
{
  (void)state;
  static float want[N * V], want_b[N * V];
  struct synth synth;
  int32_t ids[N], other[N], table[4] = {0, 1, 2, 3}, fork[4] = {0, 7, 8, 9};
  make_ids(ids, 1);
  make_ids(other, 2);
  const int32_t cut = P + 41;
  memcpy(other, ids, (size_t)cut * sizeof *ids);
  synth_init(&synth, &shape, 6);
  for (size_t c = 0; c < N_CODECS; c++) {
    struct rig rig = open_rig(&synth, codecs[c], 2);
    memcpy(want_b, rig_step(&rig, &(struct rig_part){other, N, 0, table}, 1, true), sizeof want);
    memcpy(want, rig_step(&rig, &(struct rig_part){ids, N, 0, table}, 1, true), sizeof want);
    rig_step(&rig, &(struct rig_part){ids, cut, 0, table}, 1, true);
    assert_int_equal(rig.vt->kv_copy_pages(rig.kv, &(struct kv_copy){1, 7}, 1), SITS_OK);
    const struct rig_part parts[2] = {{ids + cut, N - cut, cut, table}, {other + cut, N - cut, cut, fork}};
    const float *logits = rig_step(&rig, parts, 2, true);
    assert_memory_equal(logits, want + (int64_t)cut * V, (size_t)(N - cut) * V * sizeof *want);
    assert_memory_equal(logits + (int64_t)(N - cut) * V, want_b + (int64_t)cut * V, (size_t)(N - cut) * V * sizeof *want);
    rig_close(&rig);
  }
  synth_fini(&synth);
}

static double distance(const float *a, const float *b, int32_t n)
{
  double sum = 0;
  for (int32_t i = 0; i < n; i++) sum += (double)(a[i] - b[i]) * (a[i] - b[i]);
  return sqrt(sum / n);
}

/* Pages swapped out and in elsewhere: bit for bit for complete groups; where an open group had to be folded, about as near to the exact
 * cache's logits as the codec is anyway. */
static void test_swapped_pages(void **state)
{
  (void)state;
  static float want[N * V], exact[N * V];
  struct synth synth;
  int32_t ids[N], table[4] = {0, 1, 2, 3}, moved[4] = {8, 9, 10, 11};
  make_ids(ids, 3);
  synth_init(&synth, &shape, 8);
  for (size_t c = 0; c < N_CODECS; c++)
    for (int open = 0; open < 2; open++) {
      const int32_t cut = open ? P + 41 : 2 * P;
      struct rig rig = open_rig(&synth, codecs[c], 1);
      const struct kv_geometry g = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 32, .n_pages = 12, .codec = codecs[c]};
      unsigned char *image = mem_alloc(rig.vt->kv_page_bytes(&g));
      assert_non_null(image);
      memcpy(want, rig_step(&rig, &(struct rig_part){ids, N, 0, table}, 1, true), sizeof want);
      if (codecs[c] == KV_F32) memcpy(exact, want, sizeof want);
      rig_step(&rig, &(struct rig_part){ids, cut, 0, table}, 1, true);
      for (int i = 0; i < 2; i++) {
        assert_int_equal(rig.vt->kv_read_page(rig.kv, table[i], image), SITS_OK);
        assert_int_equal(rig.vt->kv_write_page(rig.kv, moved[i], image), SITS_OK);
      }
      const float *logits = rig_step(&rig, &(struct rig_part){ids + cut, N - cut, cut, moved}, 1, true);
      const int32_t n = (N - cut) * V;
      if (open && codecs[c] >= KV_INT4 && codecs[c] <= KV_FP4_SPARSE)
        assert_true(distance(logits, exact + cut * V, n) < 1.5 * distance(want + cut * V, exact + cut * V, n));
      else
        assert_memory_equal(logits, want + cut * V, (size_t)n * sizeof *want);
      mem_free(image);
      rig_close(&rig);
    }
  synth_fini(&synth);
}

/* More abandoned sequences than open slots: recycling must not disturb the one that goes on. */
static void test_recycled_slots(void **state)
{
  (void)state;
  static float want[N * V];
  struct synth synth;
  int32_t ids[N], table[4] = {0, 1, 2, 3};
  make_ids(ids, 4);
  synth_init(&synth, &shape, 9);
  for (size_t c = 0; c < N_CODECS; c++) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 256, .max_seqs = 256, .n_pages = 12,
                                                                    .fusions = ~0u, .codec = codecs[c]});
    memcpy(want, rig_step(&rig, &(struct rig_part){ids, N, 0, table}, 1, true), sizeof want);
    rig_close(&rig);
    rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 256, .max_seqs = 1, .n_pages = 64,
                                                         .fusions = ~0u, .codec = codecs[c]});
    for (int32_t t = 0; t < N; t++) {
      const float *logits = rig_step(&rig, &(struct rig_part){ids + t, 1, t, table}, 1, false);
      assert_memory_equal(logits, want + (int64_t)t * V, V * sizeof *want);
      const int32_t abandoned = 4 + t % 60;
      rig_step(&rig, &(struct rig_part){ids, 1 + t % 40, 0, &abandoned}, 1, false);
    }
    rig_close(&rig);
  }
  synth_fini(&synth);
}

/* A chunk that completes one open group and begins the next needs two slots; here every sequence of a full batch has such a chunk. */
static void test_two_groups_each(void **state)
{
  enum { S = 16, CUT = P - 4, END = P + 6 };
  (void)state;
  static float want[S * V];
  static int32_t ids[S][N], tables[S][2];
  struct synth synth;
  synth_init(&synth, &shape, 11);
  for (size_t c = 0; c < N_CODECS; c++) {
    struct rig rig = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = 256, .max_seqs = S,
                                                                    .n_pages = 2 * S, .fusions = ~0u, .codec = codecs[c]});
    struct rig_part parts[S];
    for (int32_t s = 0; s < S; s++) {
      make_ids(ids[s], s);
      tables[s][0] = 2 * s;
      tables[s][1] = 2 * s + 1;
      memcpy(want + s * V, rig_step(&rig, &(struct rig_part){ids[s], END, 0, tables[s]}, 1, false), V * sizeof *want);
      parts[s] = (struct rig_part){ids[s] + CUT, END - CUT, CUT, tables[s]};
    }
    for (int32_t s = 0; s < S; s++) rig_step(&rig, &(struct rig_part){ids[s], CUT, 0, tables[s]}, 1, false);
    assert_memory_equal(rig_step(&rig, parts, S, false), want, sizeof want);
    rig_close(&rig);
  }
  synth_fini(&synth);
}

static void count_call(void *user) { atomic_fetch_add((atomic_int *)user, 1); }

/* A long batch shows that it lives: several calls a layer, all before it is over. */
static void test_progress(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &shape, 10);
  for (int threads = 1; threads <= 2; threads++) {
    struct rig rig = open_rig(&synth, KV_F16, threads);
    int32_t tokens[2] = {1, 2}, positions[2] = {0, 1}, starts[2] = {0, 2}, len = 2, table = 0, row = 1;
    atomic_int n_calls = 0;
    const struct backend_batch batch = {.n_tokens = 2, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                        .seq_start = starts, .kv_len = &len, .block_table = &table, .table_stride = 1, .row_token = &row,
                                        .progress = count_call, .progress_user = &n_calls};
    struct backend_result result;
    assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), SITS_OK);
    assert_int_equal(rig.vt->wait(rig.compiled, &result), SITS_OK);
    assert_true(atomic_load(&n_calls) >= 4);
    rig_close(&rig);
  }
  synth_fini(&synth);
}

static void test_refusals(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &shape, 10);
  struct rig rig = open_rig(&synth, KV_F16, 1);
  int32_t tokens[2] = {1, 2}, positions[2] = {0, 1}, starts[2] = {0, 2}, len = 2, table = 0, row = 1;
  const struct backend_batch good = {.n_tokens = 2, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                     .seq_start = starts, .kv_len = &len, .block_table = &table, .table_stride = 1, .row_token = &row};
  struct backend_result result;
  assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &good), SITS_OK);
  struct { int32_t *at, bad; } spoils[] = {{tokens, -1}, {tokens, V}, {positions, 1}, {starts, 1}, {starts + 1, 1}, {&len, 3},
                                           {&table, 12}, {&table, -1}, {&row, 2}, {&row, -1}};
  for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++) {
    const int32_t kept = *spoils[i].at;
    *spoils[i].at = spoils[i].bad;
    assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &good), SITS_INVALID_ARGUMENT);
    assert_int_equal(rig.vt->wait(rig.compiled, &result), SITS_INVALID_ARGUMENT);
    *spoils[i].at = kept;
  }
  struct backend_batch bad = good;
  bad.n_tokens = 0;
  assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &bad), SITS_INVALID_ARGUMENT);
  bad = good;
  bad.n_rows = 513;
  assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &bad), SITS_INVALID_ARGUMENT);
  bad = good;
  bad.n_rows = 0; /* no logits wanted: fine */
  assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &bad), SITS_OK);
  assert_int_equal(rig.vt->kv_copy_pages(rig.kv, &(struct kv_copy){0, 12}, 1), SITS_INVALID_ARGUMENT);
  assert_int_equal(rig.vt->kv_read_page(rig.kv, -1, NULL), SITS_INVALID_ARGUMENT);
  assert_int_equal(rig.vt->kv_write_page(rig.kv, 12, NULL), SITS_INVALID_ARGUMENT);
  rig_close(&rig);
  synth_fini(&synth);
}

/* Every allocation of opening, compiling and creating pages fails once: the right status, no leak. */
static void test_out_of_memory(void **state)
{
  (void)state;
  const struct backend_vtable *vt = backend_find("cpu");
  struct synth synth;
  struct program *program = NULL;
  synth_init(&synth, &shape, 11);
  assert_int_equal(program_from_model(&synth.model, vt, &program, NULL), SITS_OK);
  const int64_t live = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct backend *backend = NULL;
    struct backend_program *compiled = NULL;
    struct backend_kv *kv = NULL;
    const struct backend_options options = {.n_threads = 2, .max_batch_tokens = 64, .max_seqs = 8};
    const struct kv_geometry g = {.n_layers = 2, .n_kv_heads = 2, .head_dim = 32, .n_pages = 4, .codec = KV_INT4};
    mem_fault_arm(n);
    enum sits_status status = vt->open(&options, &backend, NULL);
    if (status == SITS_OK) status = vt->compile(backend, program, &compiled, NULL);
    if (status == SITS_OK) status = vt->kv_create(backend, &g, &kv, NULL);
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    assert_int_equal(status, fired ? SITS_NOMEM : SITS_OK);
    vt->kv_destroy(kv);
    vt->program_destroy(compiled);
    vt->close(backend);
    assert_int_equal(mem_live_blocks(), live);
    if (!fired) break;
  }
  program_destroy(program);
  synth_fini(&synth);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trips), cmocka_unit_test(test_page_bytes),
                                     cmocka_unit_test(test_batching_does_not_matter), cmocka_unit_test(test_copied_pages),
                                     cmocka_unit_test(test_swapped_pages), cmocka_unit_test(test_recycled_slots),
                                     cmocka_unit_test(test_two_groups_each), cmocka_unit_test(test_progress),
                                     cmocka_unit_test(test_refusals),
                                     cmocka_unit_test(test_out_of_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
