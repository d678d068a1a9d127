/* See engine_sample.h. Passes over the whole vocabulary are in engine_vec.h; what is here works on the few ids near the best. */
#include "engine/engine_sample.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/mem.h"

enum { N_BUCKETS = ENGINE_SAMPLE_BUCKETS, PURPOSE_DRAW = 0 };
static const float BUCKET_RANGE = 32; /* exp(-32) of the best: what lies beyond shares the last bucket */
static const float NEAR = 8;          /* ids whose weight is at least exp(-8) of the best are looked at first */

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
  *sampler = (struct engine_sampler){.n_vocab = n_vocab, .vec = engine_vec_best()};
  sampler->scores = mem_aligned(64, n * sizeof(float));
  sampler->weights = mem_aligned(64, n * sizeof(float));
  sampler->sums = mem_calloc(n / ENGINE_VEC_BLOCK + 1, sizeof(double));
  sampler->counts = mem_calloc(n, sizeof(int32_t));
  sampler->kept = mem_calloc(n + 1, sizeof(int32_t)); /* collect writes one place ahead */
  sampler->ranked = mem_alloc(n * sizeof *sampler->ranked);
  if (sampler->scores && sampler->weights && sampler->sums && sampler->counts && sampler->kept && sampler->ranked) return SITS_OK;
  engine_sampler_fini(sampler);
  return SITS_NOMEM;
}

void engine_sampler_fini(struct engine_sampler *sampler)
{
  mem_free(sampler->scores);
  mem_free(sampler->weights);
  mem_free(sampler->sums);
  mem_free(sampler->counts);
  mem_free(sampler->kept);
  mem_free(sampler->ranked);
  *sampler = (struct engine_sampler){0};
}

static int32_t argmax(const struct engine_sampler *sampler, const float *x)
{
  float best = sampler->vec->max(x, sampler->n_vocab);
  for (int32_t i = 0; i < sampler->n_vocab; i++) {
    if (x[i] == best) return i;
  }
  return 0; /* all NaN */
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

/* Cut kept[0..n) (ascending ids) down to its smallest leading part by score, lower ids first among equals, that holds max_count ids or
 * `mass` of weight, whichever is fewer. Returns the new count; *total becomes its weight. */
static int32_t shrink(struct engine_sampler *sampler, const float *scores, int32_t n, float max, float rate, int64_t max_count, double mass,
                      double *total)
{
  int32_t *counts = sampler->bucket_counts, *kept = sampler->kept;
  double *bucket_sums = sampler->bucket_sums, sum = 0;
  memset(counts, 0, sizeof sampler->bucket_counts);
  memset(bucket_sums, 0, sizeof sampler->bucket_sums);
  for (int32_t i = 0; i < n; i++) {
    int32_t b = bucket_of(scores[kept[i]], max, rate);
    counts[b]++;
    bucket_sums[b] += sampler->weights[kept[i]];
  }
  int32_t edge = 0, n_edge = 0;
  int64_t count = 0;
  while (edge < N_BUCKETS - 1 && count + counts[edge] < max_count && sum + bucket_sums[edge] < mass) {
    count += counts[edge];
    sum += bucket_sums[edge++];
  }
  for (int32_t i = 0; i < n; i++) {
    if (bucket_of(scores[kept[i]], max, rate) == edge) sampler->ranked[n_edge++] = (struct engine_ranked){scores[kept[i]], kept[i]};
  }
  sort_ranked(sampler->ranked, n_edge);
  struct engine_ranked last = {-INFINITY, INT32_MAX}; /* nothing to cut off */
  for (int32_t i = 0; i < n_edge && count < max_count && sum < mass; i++) {
    sum += sampler->weights[sampler->ranked[i].id];
    count++;
    last = sampler->ranked[i];
  }
  int32_t n_left = 0;
  for (int32_t i = 0; i < n; i++) {
    struct engine_ranked r = {scores[kept[i]], kept[i]};
    if (!ranks_before(last, r)) kept[n_left++] = kept[i];
  }
  *total = sum;
  return n_left;
}

static double weight_of(const struct engine_sampler *sampler, int32_t n)
{
  double sum = 0;
  for (int32_t i = 0; i < n; i++) sum += sampler->weights[sampler->kept[i]];
  return sum;
}

/* Apply min_p, top_k and top_p: the ids left lie in sampler->kept, ascending; returns how many, and their weight in *total. What can be
 * decided among the ids near the best is decided there, which is nearly always; else all ids are listed. `all` is the weight of all. */
static int32_t filter(struct engine_sampler *sampler, const float *scores, const struct sits_sampling *s, float max, double all,
                      double *total)
{
  const struct engine_vec *vec = sampler->vec;
  float rate = 1 / s->temperature, near = max - NEAR * s->temperature;
  float least = s->min_p > 0 ? fminf(max, max + s->temperature * logf(s->min_p)) : -INFINITY;
  bool has_top_k = s->top_k > 0 && s->top_k < sampler->n_vocab, has_top_p = s->top_p < 1;
  int32_t n = vec->collect(scores, sampler->n_vocab, least > near ? least : near, sampler->kept);
  double sum = weight_of(sampler, n);
  bool is_enough = least >= near || (s->min_p <= 0 && (has_top_k ? n >= s->top_k : sum >= (double)s->top_p * all));
  if (!is_enough) {
    n = vec->collect(scores, sampler->n_vocab, least, sampler->kept);
    sum = weight_of(sampler, n);
  }
  /* Without min_p and top_k the share is of everything, listed or not. */
  double whole = s->min_p <= 0 && !has_top_k ? all : sum;
  if (has_top_k) {
    n = shrink(sampler, scores, n, max, rate, s->top_k, INFINITY, &sum);
    whole = sum;
  }
  if (has_top_p) n = shrink(sampler, scores, n, max, rate, INT64_MAX, (double)s->top_p * whole, &sum);
  *total = sum;
  return n;
}

/* The id on which u * total falls when the kept weights are laid end to end. */
static int32_t pick_kept(const struct engine_sampler *sampler, int32_t n, double at)
{
  double sum = 0;
  int32_t last = -1;
  for (int32_t i = 0; i < n; i++) {
    float weight = sampler->weights[sampler->kept[i]];
    if (weight <= 0) continue;
    sum += weight;
    last = sampler->kept[i];
    if (sum > at) return last;
  }
  return last; /* rounding at the very end */
}

static int32_t pick_any(const struct engine_sampler *sampler, double at)
{
  int32_t n = sampler->n_vocab, n_blocks = (n + ENGINE_VEC_BLOCK - 1) / ENGINE_VEC_BLOCK, block = 0, last = -1;
  while (block < n_blocks - 1 && at >= sampler->sums[block]) at -= sampler->sums[block++];
  int32_t end = (block + 1) * ENGINE_VEC_BLOCK < n ? (block + 1) * ENGINE_VEC_BLOCK : n;
  double sum = 0;
  for (int32_t i = block * ENGINE_VEC_BLOCK; i < end; i++) {
    if (sampler->weights[i] <= 0) continue;
    sum += sampler->weights[i];
    last = i;
    if (sum > at) return i;
  }
  return last;
}

bool engine_device_draw(const struct engine_draw *draw, struct backend_sample *out)
{
  const struct sits_sampling *s = draw->sampling;
  if (needs_scores(draw) || s->n_top_logprobs >= 0) return false;
  double u = engine_uniform(s->seed, draw->choice, draw->n_tokens - draw->n_prompt, PURPOSE_DRAW);
  *out = (struct backend_sample){.temperature = s->temperature > 0 ? s->temperature : 0, .top_p = s->top_p, .min_p = s->min_p,
                                 .top_k = s->top_k > 0 ? s->top_k : 0, .u = (float)u < 1 ? (float)u : 0x1.fffffep-1f};
  return true;
}

int32_t engine_sample(struct engine_sampler *sampler, const float *logits, const struct engine_draw *draw)
{
  const struct sits_sampling *s = draw->sampling;
  const float *scores = scores_of(sampler, logits, draw);
  if (s->temperature <= 0) return argmax(sampler, scores);
  float max = sampler->vec->max(scores, sampler->n_vocab);
  double total = sampler->vec->exp_sum(scores, sampler->n_vocab, max, 1 / s->temperature, sampler->weights, sampler->sums);
  double u = engine_uniform(s->seed, draw->choice, draw->n_tokens - draw->n_prompt, PURPOSE_DRAW);
  int32_t id;
  if (s->min_p > 0 || s->top_p < 1 || (s->top_k > 0 && s->top_k < sampler->n_vocab)) {
    int32_t n = filter(sampler, scores, s, max, total, &total);
    id = pick_kept(sampler, n, u * total);
  } else {
    id = pick_any(sampler, u * total);
  }
  return id >= 0 ? id : argmax(sampler, scores); /* infinities or nothing but NaN: no weights to draw from */
}

/* The n best, best first, lower ids first among equals: those near the largest are listed, further and further until there are enough. */
static int32_t best_n(struct engine_sampler *sampler, const float *x, float max, int32_t n, struct engine_ranked *best)
{
  int32_t n_kept = 0;
  for (float reach = NEAR / 2; n_kept < n && reach < 1e6f; reach *= 4) {
    n_kept = sampler->vec->collect(x, sampler->n_vocab, max - reach, sampler->kept);
  }
  if (n_kept < n) n_kept = sampler->vec->collect(x, sampler->n_vocab, -INFINITY, sampler->kept);
  int32_t n_best = 0;
  for (int32_t i = 0; i < n_kept; i++) {
    float value = x[sampler->kept[i]];
    if (n_best == n && !(value > best[n - 1].value)) continue;
    int32_t at = n_best < n ? n_best++ : n - 1;
    while (at > 0 && value > best[at - 1].value) {
      best[at] = best[at - 1];
      at--;
    }
    best[at] = (struct engine_ranked){value, sampler->kept[i]};
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
  float max = sampler->vec->max(logits, sampler->n_vocab);
  double lse = (double)max + log(sampler->vec->exp_sum(logits, sampler->n_vocab, max, 1, NULL, NULL));
  out->logprob = floored((double)logits[token] - lse);
  if (n_top > SITS_MAX_TOP_LOGPROBS) n_top = SITS_MAX_TOP_LOGPROBS;
  struct engine_ranked best[SITS_MAX_TOP_LOGPROBS];
  out->n_top = n_top > 0 ? best_n(sampler, logits, max, n_top, best) : 0;
  for (int32_t i = 0; i < out->n_top; i++) {
    out->top_token[i] = best[i].id;
    out->top_logprob[i] = floored((double)best[i].value - lse);
  }
}
