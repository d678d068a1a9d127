/* The sampler against a plain double-precision reference that sorts everything, and its draws against their distribution. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_sample.h"

enum { MAX_VOCAB = 5000 };

static uint64_t random_state = 1;

static uint32_t draw_random(uint32_t n)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((random_state >> 33) % n);
}

static struct sits_sampling plain(void)
{
  return (struct sits_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 1000, .n_top_logprobs = -1};
}

static void random_logits(float *logits, int32_t n, float spread, bool with_ties)
{
  for (int32_t i = 0; i < n; i++) {
    float u = (float)draw_random(1 << 20) / (1 << 20) + (float)draw_random(1 << 20) / (1 << 20) - 1;
    logits[i] = u * spread;
    if (with_ties) logits[i] = roundf(logits[i] * 2) / 2;
  }
}

struct ranked { double p; float score; int32_t id; };

static int by_rank(const void *a, const void *b)
{
  const struct ranked *x = a, *y = b;
  if (x->score != y->score) return x->score < y->score ? 1 : -1;
  return x->id - y->id;
}

/* Reference: probabilities after penalties, temperature, min_p, top_k, top_p; in the sampler's documented order. */
static void reference(const float *logits, int32_t n, const struct engine_draw *d, double *p)
{
  static float scores[MAX_VOCAB];
  static struct ranked ranked[MAX_VOCAB];
  const struct sits_sampling *s = d->sampling;
  memcpy(scores, logits, (size_t)n * sizeof *scores);
  if (d->n_tokens - d->n_prompt < s->min_tokens) {
    for (int32_t i = 0; i < d->n_end_ids; i++) scores[d->end_ids[i]] = -INFINITY;
    for (int32_t i = 0; i < s->n_stop_ids; i++) scores[s->stop_ids[i]] = -INFINITY;
  }
  for (int32_t i = 0; i < s->n_bias; i++) scores[s->bias[i].token] += s->bias[i].bias;
  for (int32_t v = 0; v < n; v++) {
    int32_t n_all = 0, n_out = 0;
    for (int32_t i = 0; i < d->n_tokens; i++) {
      n_all += d->tokens[i] == v;
      n_out += i >= d->n_prompt && d->tokens[i] == v;
    }
    if (n_all && scores[v] > 0) scores[v] /= s->repetition_penalty;
    else if (n_all) scores[v] *= s->repetition_penalty;
    if (n_out) scores[v] -= s->frequency_penalty * (float)n_out + s->presence_penalty;
  }
  double max = -INFINITY, total = 0;
  for (int32_t v = 0; v < n; v++) max = fmax(max, scores[v]);
  for (int32_t v = 0; v < n; v++) {
    ranked[v] = (struct ranked){.p = exp((scores[v] - max) / s->temperature), .score = scores[v], .id = v};
    if (s->min_p > 0 && ranked[v].p < (double)s->min_p * (1 - 1e-6)) ranked[v].p = 0;
    p[v] = 0;
  }
  qsort(ranked, (size_t)n, sizeof *ranked, by_rank);
  int32_t kept = s->top_k > 0 && s->top_k < n ? s->top_k : n;
  for (int32_t i = 0; i < kept; i++) total += ranked[i].p;
  double sum = 0;
  if (s->top_p < 1) {
    int32_t i = 0;
    while (i < kept && sum < (double)s->top_p * total * (1 - 1e-7)) sum += ranked[i++].p;
    kept = i;
  } else {
    sum = total;
  }
  for (int32_t i = 0; i < kept; i++) p[ranked[i].id] = ranked[i].p / sum;
}

/* Draw often with different positions: the frequencies must fit (chi-square), and what has no probability must never come. */
static void expect_distribution(const float *logits, int32_t n, struct sits_sampling s, int32_t n_draws)
{
  static double p[MAX_VOCAB];
  static int32_t counts[MAX_VOCAB], tokens[40000];
  struct engine_sampler sampler;
  assert_int_equal(engine_sampler_init(&sampler, n), SITS_OK);
  for (int32_t i = 0; i < n_draws; i++) tokens[i] = i % 7;
  int32_t end = 3;
  struct engine_draw d = {.sampling = &s, .tokens = tokens, .n_tokens = 20, .n_prompt = 10, .end_ids = &end, .n_end_ids = 1};
  reference(logits, n, &d, p);
  memset(counts, 0, sizeof counts);
  for (int32_t i = 0; i < n_draws; i++) {
    s.seed = (uint64_t)i * 77 + 5;
    int32_t id = engine_sample(&sampler, logits, &d);
    assert_in_range(id, 0, n - 1);
    assert_true(p[id] > 0);
    counts[id]++;
  }
  double chi = 0, rest_p = 0, rest_n = 0;
  int32_t n_cells = 0;
  for (int32_t v = 0; v < n; v++) {
    double expect = p[v] * n_draws;
    if (expect < 8) {
      rest_p += expect;
      rest_n += counts[v];
      continue;
    }
    chi += (counts[v] - expect) * (counts[v] - expect) / expect;
    n_cells++;
  }
  if (rest_p >= 8) {
    chi += (rest_n - rest_p) * (rest_n - rest_p) / rest_p;
    n_cells++;
  }
  double freedom = n_cells - 1, limit = freedom + 5 * sqrt(2 * freedom + 1);
  if (chi > limit) print_error("chi-square %.1f over %.1f with %d cells\n", chi, limit, n_cells);
  assert_true(chi <= limit);
  engine_sampler_fini(&sampler);
}

static void test_distributions(void **state)
{
  static float logits[MAX_VOCAB];
  static const struct sits_logit_bias bias[2] = {{4, 3.5f}, {5, -100}};
  static const int32_t stops[1] = {9};
  for (int round = 0; round < 40; round++) {
    int32_t n = round % 4 == 0 ? 13 : 50 + (int32_t)draw_random(1000);
    struct sits_sampling s = plain();
    random_logits(logits, n, 2 + (float)(round % 5) * 3, round % 3 == 0);
    s.temperature = 0.3f + (float)draw_random(20) / 10;
    if (draw_random(2)) s.top_k = 1 + (int32_t)draw_random(60);
    if (draw_random(2)) s.top_p = 0.05f + (float)draw_random(90) / 100;
    if (draw_random(3) == 0) s.min_p = (float)draw_random(50) / 100;
    if (draw_random(3) == 0) s.repetition_penalty = 0.5f + (float)draw_random(20) / 10;
    if (draw_random(3) == 0) s.presence_penalty = (float)draw_random(40) / 10 - 2;
    if (draw_random(3) == 0) s.frequency_penalty = (float)draw_random(40) / 10 - 2;
    if (draw_random(3) == 0) s.bias = bias, s.n_bias = 2;
    if (draw_random(3) == 0) s.min_tokens = 15, s.stop_ids = stops, s.n_stop_ids = 1;
    expect_distribution(logits, n, s, 6000);
  }
}

static void test_many_draws(void **state)
{
  static float logits[MAX_VOCAB];
  struct sits_sampling s = plain();
  random_logits(logits, 5000, 6, false);
  expect_distribution(logits, 5000, s, 20000);
  s.top_p = 0.9f;
  s.temperature = 0.7f;
  expect_distribution(logits, 5000, s, 20000);
}

static void test_greedy_takes_lowest_of_equals(void **state)
{
  struct engine_sampler sampler;
  float logits[23];
  struct sits_sampling s = plain();
  s.temperature = 0;
  struct engine_draw d = {.sampling = &s};
  assert_int_equal(engine_sampler_init(&sampler, 23), SITS_OK);
  for (int at = 0; at < 23; at++) {
    for (int i = 0; i < 23; i++) logits[i] = i == at || i == 22 ? 3 : -1;
    assert_int_equal(engine_sample(&sampler, logits, &d), at);
  }
  for (int i = 0; i < 23; i++) logits[i] = NAN;
  logits[11] = -5;
  assert_int_equal(engine_sample(&sampler, logits, &d), 11);
  s.temperature = 1;
  assert_int_equal(engine_sample(&sampler, logits, &d), 11);
  logits[11] = NAN;
  assert_in_range(engine_sample(&sampler, logits, &d), 0, 22);
  logits[4] = logits[9] = INFINITY;
  assert_int_equal(engine_sample(&sampler, logits, &d), 4);
  for (int i = 0; i < 23; i++) logits[i] = -INFINITY;
  assert_int_equal(engine_sample(&sampler, logits, &d), 0);
  s.temperature = 1e-40f; /* its inverse is not a float */
  for (int i = 7; i < 23; i++) logits[i] = 2;
  assert_int_equal(engine_sample(&sampler, logits, &d), 7);
  s.top_p = 0.9f;
  assert_int_equal(engine_sample(&sampler, logits, &d), 7);
  engine_sampler_fini(&sampler);
}

static void test_top_k_one_is_greedy(void **state)
{
  static float logits[3000];
  struct engine_sampler sampler;
  struct sits_sampling s = plain(), g = plain();
  struct engine_draw d = {.sampling = &s}, e = {.sampling = &g};
  g.temperature = 0;
  assert_int_equal(engine_sampler_init(&sampler, 3000), SITS_OK);
  for (int i = 0; i < 50; i++) {
    random_logits(logits, 3000, 10, i % 2);
    s.top_k = 1;
    s.top_p = 1;
    assert_int_equal(engine_sample(&sampler, logits, &d), engine_sample(&sampler, logits, &e));
    s.top_k = 0;
    s.top_p = 1e-6f;
    assert_int_equal(engine_sample(&sampler, logits, &d), engine_sample(&sampler, logits, &e));
  }
  engine_sampler_fini(&sampler);
}

static void test_logprobs(void **state)
{
  static float logits[4097];
  struct engine_sampler sampler;
  assert_int_equal(engine_sampler_init(&sampler, 4097), SITS_OK);
  for (int round = 0; round < 10; round++) {
    random_logits(logits, 4097, 12, round % 2);
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < 4097; i++) max = fmax(max, logits[i]);
    for (int i = 0; i < 4097; i++) sum += exp(logits[i] - max);
    struct engine_logprobs out = {0};
    engine_logprobs(&sampler, logits, 1234, 20, &out);
    assert_true(fabs(out.logprob - (logits[1234] - max - log(sum))) < 2e-5);
    assert_int_equal(out.n_top, 20);
    for (int k = 0; k < 20; k++) {
      int n_above = 0;
      for (int i = 0; i < 4097; i++) {
        n_above += logits[i] > logits[out.top_token[k]] || (logits[i] == logits[out.top_token[k]] && i < out.top_token[k]);
      }
      assert_int_equal(n_above, k);
      assert_true(fabs(out.top_logprob[k] - (logits[out.top_token[k]] - max - log(sum))) < 2e-5);
    }
  }
  logits[7] = -INFINITY;
  logits[8] = NAN;
  struct engine_logprobs out = {0};
  engine_logprobs(&sampler, logits, 7, 0, &out);
  assert_true(out.logprob == SITS_LOGPROB_FLOOR);
  assert_int_equal(out.n_top, 0);
  engine_logprobs(&sampler, logits, 8, 0, &out);
  assert_true(out.logprob == SITS_LOGPROB_FLOOR);
  engine_sampler_fini(&sampler);
}

/* Known answers of Philox4x32-10 (Random123's kat_vectors): counter and key all zero give 6627e8d5 e169c58d ...; so does the first draw of
 * stream (0, 0), whose 53 bits are checked here. */
static void test_uniform_is_philox(void **state)
{
  uint64_t bits = (uint64_t)0x6627e8d5u << 32 | 0xe169c58du;
  assert_true(engine_uniform(0, 0, 0, 0) == (double)(bits >> 11) * 0x1p-53);
  double sum = 0;
  for (int i = 0; i < 100000; i++) {
    double u = engine_uniform(9, i % 3, i / 3, 0);
    assert_true(u >= 0 && u < 1);
    sum += u;
  }
  assert_true(fabs(sum / 100000 - 0.5) < 0.005);
}

/* Every compiled variant gives the same bits, for lengths that end anywhere in a vector and a block. */
static void test_variants_agree(void **state)
{
  static const char *const names[] = {"avx2", "avx512"};
  static float x[MAX_VOCAB], a[MAX_VOCAB], b[MAX_VOCAB];
  static double sums_a[8], sums_b[8];
  static int32_t ids_a[MAX_VOCAB + 1], ids_b[MAX_VOCAB + 1];
  int n_found = 0;
  for (int k = 0; k < 2; k++) {
    const struct engine_vec *base = engine_vec_find("base"), *other = engine_vec_find(names[k]);
    if (!other) continue;
    n_found++;
    for (int round = 0; round < 60; round++) {
      int32_t n = round < 40 ? 1 + round : 900 + (int32_t)draw_random(4000);
      random_logits(x, n, 9, false);
      if (round % 4 == 0) x[draw_random((uint32_t)n)] = NAN;
      if (round % 5 == 0 && n > 2) x[draw_random((uint32_t)n)] = -INFINITY;
      float max = base->max(x, n);
      if (!isfinite(max)) continue;
      double brute = 0;
      for (int32_t i = 0; i < n; i++) brute += x[i] == x[i] ? exp(((double)x[i] - max) * 0.7) : 0;
      assert_true(other->max(x, n) == max);
      double sum = base->exp_sum(x, n, max, 0.7f, a, sums_a);
      assert_true(fabs(sum - brute) <= 2e-6 * brute);
      assert_true(other->exp_sum(x, n, max, 0.7f, b, sums_b) == sum);
      assert_memory_equal(a, b, (size_t)n * sizeof *a);
      assert_memory_equal(sums_a, sums_b, (size_t)((n + ENGINE_VEC_BLOCK - 1) / ENGINE_VEC_BLOCK) * sizeof *sums_a);
      int32_t n_ids = base->collect(x, n, max - 5, ids_a), n_over = 0;
      for (int32_t i = 0; i < n; i++) n_over += x[i] >= max - 5;
      assert_int_equal(n_ids, n_over);
      assert_int_equal(other->collect(x, n, max - 5, ids_b), n_ids);
      assert_memory_equal(ids_a, ids_b, (size_t)n_ids * sizeof *ids_a);
    }
  }
  if (n_found == 0) skip();
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_distributions), cmocka_unit_test(test_many_draws), cmocka_unit_test(test_greedy_takes_lowest_of_equals),
      cmocka_unit_test(test_top_k_one_is_greedy), cmocka_unit_test(test_logprobs), cmocka_unit_test(test_uniform_is_philox),
      cmocka_unit_test(test_variants_agree),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
