/* Whole models against reference logits made by independent implementations, at every instruction-set level, fused and plain. */
#include "rig.h"

#include <math.h>

#include "backend/cpu/cpu_isa.h"

static const char *const levels[] = {"scalar", "avx2", "avx512"};

static json_t *load_reference(const char *path)
{
  json_t *reference = NULL;
  struct sits_error err;
  if (access(path, R_OK) != 0) skip();
  RIG_OK(json_parse_file(path, &json_limits_file, &reference, &err), err);
  return reference;
}

static int32_t read_ids(const json_t *array, int32_t *out, int32_t max)
{
  const int32_t n = (int32_t)json_array_size(array);
  assert_true(n <= max);
  for (int32_t i = 0; i < n; i++) out[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
  return n;
}

static double number(const json_t *array, size_t i) { return json_number_value(json_array_get(array, i)); }

static void iota(int32_t *table, int32_t n, int32_t first)
{
  for (int32_t i = 0; i < n; i++) table[i] = first + i;
}

/* Largest absolute difference of the reference's top-8 logits over all forced positions. */
static double forced_error(struct rig *rig, const json_t *forced)
{
  int32_t ids[64], table[16];
  const int32_t n = read_ids(json_object_get(forced, "ids"), ids, 64), V = rig->model->config.n_vocab;
  iota(table, 16, 0);
  const float *logits = rig_step(rig, &(struct rig_part){ids, n, 0, table}, 1, true);
  double worst = 0;
  for (int32_t t = 0; t < n; t++)
    for (size_t k = 0; k < 8; k++) {
      const int32_t id = (int32_t)number(json_array_get(json_object_get(forced, "top8_ids"), (size_t)t), k);
      const double want = number(json_array_get(json_object_get(forced, "top8_logits"), (size_t)t), k);
      worst = fmax(worst, fabs(logits[(int64_t)t * V + id] - want));
    }
  for (int32_t v = 0; v < V; v++)
    worst = fmax(worst, fabs(logits[(int64_t)(n - 1) * V + v] - number(json_object_get(forced, "last_logits"), (size_t)v)));
  return worst;
}

static void check_greedy(struct rig *rig, const json_t *items)
{
  for (size_t i = 0; i < json_array_size(items); i++) {
    const json_t *item = json_array_get(items, i);
    int32_t ids[512], want[512], table[16];
    int32_t n = read_ids(json_object_get(item, "prompt_ids"), ids, 256);
    const int32_t n_want = read_ids(json_object_get(item, "greedy_ids"), want, 256), V = rig->model->config.n_vocab;
    iota(table, 16, 0);
    const float *logits = rig_step(rig, &(struct rig_part){ids, n, 0, table}, 1, false);
    for (int32_t k = 0; k < n_want; k++) {
      const int32_t next = rig_argmax(logits, V);
      if (next != want[k]) fail_msg("greedy %zu parts at token %d: %d, wanted %d", i, (int)k, (int)next, (int)want[k]);
      if (n + k >= rig->model->config.max_context) break;
      logits = rig_step(rig, &(struct rig_part){&next, 1, n + k, table}, 1, false);
    }
  }
}

static void stories(const char *file, bool wants_greedy)
{
  json_t *reference = load_reference(rig_shared("models/stories260K/reference.json"));
  for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
    if ((enum cpu_isa)i > cpu_isa_best()) continue;
    for (int fused = 0; fused < 2; fused++) {
      struct rig rig = rig_open(rig_shared(file), &(struct rig_options){.isa = levels[i], .n_threads = fused ? 2 : 1,
                                .max_batch_tokens = 256, .max_seqs = 64, .n_pages = 16, .fusions = fused ? ~0u : 0, .codec = KV_F32});
      const double worst = forced_error(&rig, json_object_get(reference, "teacher_forced"));
      print_message("%s %s %s: worst logit error %.2e\n", file, levels[i], fused ? "fused" : "plain", worst);
      assert_true(worst < 1e-3);
      if (wants_greedy && fused && (enum cpu_isa)i == cpu_isa_best()) check_greedy(&rig, json_object_get(reference, "greedy"));
      rig_close(&rig);
    }
  }
  json_decref(reference);
}

static void test_stories_gguf(void **state) { (void)state; stories("models/stories260K/stories260K.gguf", true); }
static void test_stories_hf(void **state) { (void)state; stories("models/stories260K/hf", false); }

/* A token's logits are bit for bit the same read in one step, token by token, in odd chunks beside another sequence, on any threads. */
static void test_same_bits_however_batched(void **state)
{
  (void)state;
  const char *path = rig_shared("models/stories260K/stories260K.gguf");
  if (access(path, R_OK) != 0) skip();
  enum { N = 300, V = 512 };
  static float want[N * V];
  int32_t ids[N], other[N], table[8], table_b[8];
  for (int32_t i = 0; i < N; i++) ids[i] = (i * 37 + 11) % V, other[i] = (i * 91 + 5) % V;
  iota(table, 8, 0);
  iota(table_b, 8, 8);
  static const int32_t n_threads[] = {1, 2, 7}; /* the last more than there are cores: workers come late, or not at all */
  for (size_t setup = 0; setup < sizeof n_threads / sizeof *n_threads; setup++) {
    struct rig rig = rig_open(path, &(struct rig_options){.n_threads = n_threads[setup], .max_batch_tokens = 600, .max_seqs = 600,
                                                          .n_pages = 16, .fusions = ~0u});
    const float *logits = rig_step(&rig, &(struct rig_part){ids, N, 0, table}, 1, true);
    if (setup == 0) memcpy(want, logits, sizeof want);
    assert_memory_equal(logits, want, sizeof want);
    for (int32_t t = 0, step = 1; t < N; t += step, step = t % 7 == 0 ? 1 : t % 7 * 9) { /* mixed chunks beside another sequence */
      const int32_t n = t + step > N ? N - t : step;
      const struct rig_part parts[2] = {{other, 1 + t % 5, 0, table_b}, {ids + t, n, t, table}};
      logits = rig_step(&rig, parts, 2, true);
      assert_memory_equal(logits + (int64_t)(1 + t % 5) * V, want + (int64_t)t * V, (size_t)n * V * sizeof *want);
    }
    for (int32_t t = 0; t < N; t++) {
      logits = rig_step(&rig, &(struct rig_part){ids + t, 1, t, table}, 1, true);
      assert_memory_equal(logits, want + (int64_t)t * V, V * sizeof *want);
    }
    rig_close(&rig);
  }
}

/* The real model: teacher-forced logits within the published error of 8-bit activations, top-1 equal where the reference is sure. */
static void test_real_model(void **state)
{
  (void)state;
  const char *path = rig_real_model();
  if (path == NULL) skip();
  json_t *reference = load_reference(rig_shared("models/smollm2/reference.json"));
  const json_t *forced = json_object_get(reference, "forced");
  struct rig rig = rig_open(path, &(struct rig_options){.max_batch_tokens = 256, .max_seqs = 256, .n_pages = 16, .fusions = ~0u});
  int32_t ids[256], table[16];
  const int32_t n = read_ids(json_object_get(forced, "ids"), ids, 256), V = rig.model->config.n_vocab;
  iota(table, 16, 0);
  const float *logits = rig_step(&rig, &(struct rig_part){ids, n, 0, table}, 1, true);
  double sum = 0;
  int32_t n_flips = 0;
  for (int32_t t = 0; t < n; t++) {
    const json_t *top_ids = json_array_get(json_object_get(forced, "top8_ids"), (size_t)t);
    const json_t *top = json_array_get(json_object_get(forced, "top8_logits"), (size_t)t);
    const float *row = logits + (int64_t)t * V;
    for (size_t k = 0; k < 8; k++) sum += fabs(row[(int32_t)number(top_ids, k)] - number(top, k));
    if (rig_argmax(row, V) == (int32_t)number(top_ids, 0)) continue;
    n_flips++;
    const double gap = number(top, 0) - number(top, 1);
    if (gap > 0.25) fail_msg("position %d: another top-1 across a gap of %f", (int)t, gap);
  }
  print_message("mean absolute logit error %.4f, %d top-1 flips of %d\n", sum / (8.0 * n), (int)n_flips, (int)n);
  assert_true(sum / (8.0 * n) <= 0.14);
  rig_close(&rig);
  json_decref(reference);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_stories_gguf), cmocka_unit_test(test_stories_hf),
                                     cmocka_unit_test(test_same_bits_however_batched), cmocka_unit_test(test_real_model)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
