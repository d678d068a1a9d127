/* See engine_sample.h. Passes over the vocabulary are written on 4-float vectors, which every x86-64 has. */
#include "engine/engine_sample.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/mem.h"

enum { N_BUCKETS = ENGINE_SAMPLE_BUCKETS, PURPOSE_DRAW = 0 };
static const float BUCKET_RANGE = 32; /* exp(-32) of the best: what lies beyond shares the last bucket */

/* GCC vectors: a plain array of four floats with elementwise operators. */
#define LANES 4
typedef float vec __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(16), aligned(4), may_alias));

/* What a draw is made from: p(id) = weight / total for ids with score > cut and the n_ties lowest ids with score == cut. */
struct kept {
  float cut, max;
  int32_t n_ties;
  double total;
};

static void philox(uint32_t counter[4], uint32_t key0, uint32_t key1)
{
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * counter[0], b = (uint64_t)0xCD9E8D57u * counter[2];
    uint32_t c1 = counter[1], c3 = counter[3];
    counter[0] = (uint32_t)(b >> 32) ^ c1 ^ key0;
    counter[1] = (uint32_t)b;
    counter[2] = (uint32_t)(a >> 32) ^ c3 ^ key1;
    counter[3] = (uint32_t)a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

double engine_uniform(uint64_t seed, int32_t choice, int32_t position, uint32_t purpose)
{
  uint32_t counter[4] = {(uint32_t)position, (uint32_t)choice, purpose, 0};
  philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
  uint64_t bits = (uint64_t)counter[0] << 32 | counter[1];
  return (double)(bits >> 11) * 0x1p-53;
}

enum sits_status engine_sampler_init(struct engine_sampler *sampler, int32_t n_vocab)
{
  size_t n = (size_t)n_vocab;
  *sampler = (struct engine_sampler){.n_vocab = n_vocab};
  sampler->scores = mem_aligned(64, n * sizeof(float));
  sampler->weights = mem_aligned(64, n * sizeof(float));
  sampler->counts = mem_calloc(n, sizeof(int32_t));
  sampler->ranked = mem_alloc(n * sizeof *sampler->ranked);
  if (sampler->scores && sampler->weights && sampler->counts && sampler->ranked) return SITS_OK;
  engine_sampler_fini(sampler);
  return SITS_NOMEM;
}

void engine_sampler_fini(struct engine_sampler *sampler)
{
  mem_free(sampler->scores);
  mem_free(sampler->weights);
  mem_free(sampler->counts);
  mem_free(sampler->ranked);
  *sampler = (struct engine_sampler){0};
}

/* Largest value; NaN counts as -infinity because every comparison with it is false. */
static float max_of(const float *x, int32_t n)
{
  float best = -INFINITY;
  int32_t i = 0;
  if (n >= LANES * 2) {
    vec a = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, b = a;
    for (; i + LANES * 2 <= n; i += LANES * 2) {
      vec p = *(const vec *)(x + i), q = *(const vec *)(x + i + LANES);
      ivec keep_p = p > a, keep_q = q > b;
      a = (vec)(((ivec)p & keep_p) | ((ivec)a & ~keep_p));
      b = (vec)(((ivec)q & keep_q) | ((ivec)b & ~keep_q));
    }
    for (int lane = 0; lane < LANES; lane++) {
      if (a[lane] > best) best = a[lane];
      if (b[lane] > best) best = b[lane];
    }
  }
  for (; i < n; i++) {
    if (x[i] > best) best = x[i];
  }
  return best;
}

static int32_t argmax(const float *x, int32_t n)
{
  float best = max_of(x, n);
  for (int32_t i = 0; i < n; i++) {
    if (x[i] == best) return i;
  }
  return 0; /* all NaN */
}

/* exp for x <= 0: 2^k * p(r), Cephes' degree-5 polynomial, relative error under 2e-7; below -87 it is 0. */
static inline vec exp_vec(vec x)
{
  const vec low = {-87, -87, -87, -87}, zero = {0, 0, 0, 0};
  ivec live = x >= low; /* false for NaN */
  x = (vec)((ivec)x & live);
  vec t = x * 1.44269504088896341f - 0.5f;
  ivec k = __builtin_convertvector(t, ivec); /* truncates: t <= 0, so this rounds x / ln 2 to nearest */
  vec kf = __builtin_convertvector(k, vec);
  vec r = x - kf * 0.693359375f + kf * 2.12194440e-4f;
  vec y = zero + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  ivec scale = (k + 127) << 23;
  return (vec)((ivec)(y * (vec)scale) & live);
}

/* out[i] = exp((x[i] - max) * rate); returns the sum, added in blocks so that single precision loses nothing. out may be NULL. */
static double exp_all(const float *x, int32_t n, float max, float rate, float *out)
{
  double sum = 0;
  int32_t i = 0;
  while (i + LANES <= n) {
    int32_t end = i + 512 * LANES <= n ? i + 512 * LANES : n - (n - i) % LANES;
    vec part = {0, 0, 0, 0};
    for (; i < end; i += LANES) {
      vec e = exp_vec((*(const vec *)(x + i) - max) * rate);
      if (out) *(vec *)(out + i) = e;
      part += e;
    }
    sum += (double)part[0] + part[1] + part[2] + part[3];
  }
  for (; i < n; i++) {
    vec one = {(x[i] - max) * rate, -100, -100, -100};
    float e = exp_vec(one)[0];
    if (out) out[i] = e;
    sum += e;
  }
  return sum;
}

static bool is_stop(const struct engine_draw *draw, int32_t i, int32_t *id)
{
  const struct sits_sampling *s = draw->sampling;
  if (i < draw->n_end_ids) *id = draw->end_ids[i];
  else *id = s->stop_ids[i - draw->n_end_ids];
  return true;
}

static bool needs_scores(const struct engine_draw *draw)
{
  const struct sits_sampling *s = draw->sampling;
  return s->n_bias > 0 || s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0 ||
         draw->n_tokens - draw->n_prompt < s->min_tokens;
}

static void apply_penalties(struct engine_sampler *sampler, const struct engine_draw *draw)
{
  const struct sits_sampling *s = draw->sampling;
  float *scores = sampler->scores;
  int32_t *counts = sampler->counts, n_vocab = sampler->n_vocab;
  if (s->repetition_penalty != 1) {
    for (int32_t i = 0; i < draw->n_tokens; i++) {
      int32_t id = draw->tokens[i];
      if (id < 0 || id >= n_vocab || counts[id]++) continue;
      scores[id] = scores[id] > 0 ? scores[id] / s->repetition_penalty : scores[id] * s->repetition_penalty;
    }
    for (int32_t i = 0; i < draw->n_tokens; i++) {
      if (draw->tokens[i] >= 0 && draw->tokens[i] < n_vocab) counts[draw->tokens[i]] = 0;
    }
  }
  if (s->presence_penalty == 0 && s->frequency_penalty == 0) return;
  for (int32_t i = draw->n_prompt; i < draw->n_tokens; i++) counts[draw->tokens[i]]++;
  for (int32_t i = draw->n_prompt; i < draw->n_tokens; i++) {
    int32_t id = draw->tokens[i];
    if (counts[id] == 0) continue;
    scores[id] -= s->frequency_penalty * (float)counts[id] + s->presence_penalty;
    counts[id] = 0;
  }
}

/* The logits to choose from: the row itself when nothing changes it, else a changed copy. */
static const float *scores_of(struct engine_sampler *sampler, const float *logits, const struct engine_draw *draw)
{
  const struct sits_sampling *s = draw->sampling;
  if (!needs_scores(draw)) return logits;
  memcpy(sampler->scores, logits, (size_t)sampler->n_vocab * sizeof *logits);
  if (draw->n_tokens - draw->n_prompt < s->min_tokens) {
    for (int32_t i = 0, id; i < draw->n_end_ids + s->n_stop_ids; i++) {
      if (is_stop(draw, i, &id) && id >= 0 && id < sampler->n_vocab) sampler->scores[id] = -INFINITY;
    }
  }
  for (int32_t i = 0; i < s->n_bias; i++) {
    if (s->bias[i].token >= 0 && s->bias[i].token < sampler->n_vocab) sampler->scores[s->bias[i].token] += s->bias[i].bias;
  }
  apply_penalties(sampler, draw);
  return sampler->scores;
}

static inline bool ranks_before(struct engine_ranked a, struct engine_ranked b)
{
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

/* Heap sort, best first: in place, no recursion, no allocation. */
static void sift(struct engine_ranked *x, int32_t at, int32_t n)
{
  for (int32_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && ranks_before(x[child], x[child + 1])) child++;
    if (!ranks_before(x[at], x[child])) return;
    struct engine_ranked t = x[at];
    x[at] = x[child];
    x[child] = t;
  }
}

static void sort_ranked(struct engine_ranked *x, int32_t n)
{
  for (int32_t i = n / 2 - 1; i >= 0; i--) sift(x, i, n);
  for (int32_t i = n - 1; i > 0; i--) {
    struct engine_ranked t = x[0];
    x[0] = x[i];
    x[i] = t;
    sift(x, 0, i);
  }
}

static inline int32_t bucket_of(float score, float max, float rate)
{
  float d = (max - score) * rate * (N_BUCKETS / BUCKET_RANGE);
  return d < N_BUCKETS - 1 ? (int32_t)d : N_BUCKETS - 1; /* NaN and far ones: the last */
}

/* The kept set so far: ids with score > cut, and the first n_ties of those equal to it. Find the smallest leading part of it that holds
 * max_count ids or `mass` of weight, whichever is fewer. */
static void shrink(struct engine_sampler *sampler, const float *scores, float rate, struct kept *d, int64_t max_count,
                   double mass)
{
  int32_t *counts = sampler->bucket_counts;
  double *sums = sampler->bucket_sums;
  memset(counts, 0, sizeof sampler->bucket_counts);
  memset(sums, 0, sizeof sampler->bucket_sums);
  int32_t n_vocab = sampler->n_vocab, ties = 0;
  for (int32_t i = 0; i < n_vocab; i++) {
    if (!(scores[i] >= d->cut) || (scores[i] == d->cut && ties++ >= d->n_ties)) continue;
    int32_t b = bucket_of(scores[i], d->max, rate);
    counts[b]++;
    sums[b] += sampler->weights[i];
  }
  int32_t edge = 0;
  int64_t count = 0;
  double sum = 0;
  while (edge < N_BUCKETS - 1 && count + counts[edge] < max_count && sum + sums[edge] < mass) {
    count += counts[edge];
    sum += sums[edge++];
  }
  int32_t n = 0;
  ties = 0;
  for (int32_t i = 0; i < n_vocab; i++) {
    if (!(scores[i] >= d->cut) || (scores[i] == d->cut && ties++ >= d->n_ties)) continue;
    if (bucket_of(scores[i], d->max, rate) == edge) sampler->ranked[n++] = (struct engine_ranked){scores[i], i};
  }
  sort_ranked(sampler->ranked, n);
  for (int32_t i = 0; i < n; i++) {
    sum += sampler->weights[sampler->ranked[i].id];
    count++;
    if (i > 0 && sampler->ranked[i].value == d->cut) d->n_ties++;
    else d->n_ties = 1;
    d->cut = sampler->ranked[i].value;
    if (count >= max_count || sum >= mass) break;
  }
  d->total = sum;
}

static void filter(struct engine_sampler *sampler, const float *scores, const struct sits_sampling *s, struct kept *d)
{
  float rate = 1 / s->temperature;
  int32_t n_vocab = sampler->n_vocab;
  d->max = max_of(scores, n_vocab);
  d->cut = -INFINITY;
  d->n_ties = 0; /* -infinity has no weight */
  d->total = exp_all(scores, n_vocab, d->max, rate, sampler->weights);
  if (s->min_p > 0) {
    d->cut = d->max + s->temperature * logf(s->min_p);
    if (d->cut > d->max) d->cut = d->max;
    d->n_ties = n_vocab;
    d->total = 0;
    for (int32_t i = 0; i < n_vocab; i++) d->total += scores[i] >= d->cut ? (double)sampler->weights[i] : 0;
  }
  if (s->top_k > 0 && s->top_k < n_vocab) shrink(sampler, scores, rate, d, s->top_k, INFINITY);
  if (s->top_p < 1) shrink(sampler, scores, rate, d, INT64_MAX, (double)s->top_p * d->total);
}

static int32_t pick(const float *scores, const float *weights, int32_t n, const struct kept *d, double u)
{
  double at = u * d->total, sum = 0;
  int32_t ties = 0, last = -1;
  for (int32_t i = 0; i < n; i++) {
    if (!(scores[i] >= d->cut) || (scores[i] == d->cut && ties++ >= d->n_ties) || weights[i] <= 0) continue;
    sum += weights[i];
    last = i;
    if (sum > at) return i;
  }
  return last >= 0 ? last : argmax(scores, n); /* rounding at the very end; or nothing but NaN */
}

int32_t engine_sample(struct engine_sampler *sampler, const float *logits, const struct engine_draw *draw)
{
  const float *scores = scores_of(sampler, logits, draw);
  if (draw->sampling->temperature <= 0) return argmax(scores, sampler->n_vocab);
  struct kept d;
  filter(sampler, scores, draw->sampling, &d);
  double u = engine_uniform(draw->sampling->seed, draw->choice, draw->n_tokens - draw->n_prompt, PURPOSE_DRAW);
  return pick(scores, sampler->weights, sampler->n_vocab, &d, u);
}

/* The n best, best first, by insertion: after the first few hundred ids hardly any beats the worst kept one. */
static int32_t best_n(const float *x, int32_t n_vocab, int32_t n, struct engine_ranked *best)
{
  int32_t n_best = 0;
  for (int32_t i = 0; i < n_vocab; i++) {
    if (n_best == n && !(x[i] > best[n - 1].value)) continue;
    if (x[i] != x[i]) continue;
    int32_t at = n_best < n ? n_best++ : n - 1;
    while (at > 0 && x[i] > best[at - 1].value) {
      best[at] = best[at - 1];
      at--;
    }
    best[at] = (struct engine_ranked){x[i], i};
  }
  return n_best;
}

static float floored(double logprob)
{
  return logprob > SITS_LOGPROB_FLOOR ? (float)logprob : SITS_LOGPROB_FLOOR; /* NaN too */
}

void engine_logprobs(struct engine_sampler *sampler, const float *logits, int32_t token, int32_t n_top, struct engine_logprobs *out)
{
  if (n_top < 0) return;
  float max = max_of(logits, sampler->n_vocab);
  double lse = (double)max + log(exp_all(logits, sampler->n_vocab, max, 1, NULL));
  out->logprob = floored((double)logits[token] - lse);
  if (n_top > SITS_MAX_TOP_LOGPROBS) n_top = SITS_MAX_TOP_LOGPROBS;
  struct engine_ranked best[SITS_MAX_TOP_LOGPROBS];
  out->n_top = n_top > 0 ? best_n(logits, sampler->n_vocab, n_top, best) : 0;
  for (int32_t i = 0; i < out->n_top; i++) {
    out->top_token[i] = best[i].id;
    out->top_logprob[i] = floored((double)best[i].value - lse);
  }
}
