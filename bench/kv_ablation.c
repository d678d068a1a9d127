/* What each part of a 4-bit KV construction is worth: perplexity of a model whose cache rounds keys and values in a given way.
 *
 *   bench_kv_ablation --model FILE --text FILE --ctx 2048 --windows 8 --threads 1 [--only NAME]
 *
 * prints one JSON line a construction, to be laid beside the first line, the exact cache, window by window. Everything runs through the CPU
 * backend's own attention: the page layout is f32's, but numbers are rounded as the construction says before they are stored, and its
 * newest keys come from f16 tiles (cpu_kv_open.h) where it keeps a tail. So `int4` and `fp4` here must give what those codecs give.
 *
 * A construction: keys per token (groups of channels) or per channel (groups of tokens), after a Hadamard rotation or not, with the page's
 * mean key taken out or not, with a zero point, symmetric, with f16 scale and minimum, or in e2m1; a tail of newest keys kept in 16 bits;
 * values in groups of channels, rotated or not. Without a tail a key is rounded with its whole group even for queries inside the group. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu_kv.h"
#include "backend/cpu/cpu_kv_code.h"
#include "base/mem.h"
#include "config/option.h"
#include "tensor/dequant.h"
#include "tools/eval/eval.h"

#define P KV_PAGE_TOKENS

enum rounding { EXACT, SYMMETRIC, ZERO_POINT, MINIMUM, FP4_TOP, FP4_BEST };
enum axis { PER_TOKEN, PER_CHANNEL };

struct construction {
  const char *name, *what;
  enum axis axis;                    /* of the keys */
  enum rounding keys, values;
  int32_t key_group, value_group, tail; /* numbers rounded together; newest keys in f16, 0 = none */
  bool rotates_k, rotates_v, takes_mean;
};

static const struct construction constructions[] = {
    {"exact", "f32", PER_TOKEN, EXACT, EXACT, 32, 32, 0, false, false, false},
    {"token sym", "int4 keys per token, symmetric", PER_TOKEN, SYMMETRIC, SYMMETRIC, 32, 32, 0, false, false, false},
    {"token sym H", "+ Hadamard of keys and values", PER_TOKEN, SYMMETRIC, SYMMETRIC, 32, 32, 0, true, true, false},
    {"token zero", "int4 keys per token, zero point", PER_TOKEN, ZERO_POINT, ZERO_POINT, 32, 32, 0, false, false, false},
    {"token zero H", "+ Hadamard", PER_TOKEN, ZERO_POINT, ZERO_POINT, 32, 32, 0, true, true, false},
    {"token zero H mean", "+ page mean of 64 keys, tail of 64", PER_TOKEN, ZERO_POINT, ZERO_POINT, 32, 32, 64, true, true, true},
    {"channel sym", "int4 keys per channel over 32 tokens, symmetric, tail 32",
     PER_CHANNEL, SYMMETRIC, ZERO_POINT, 32, 32, 32, false, true, false},
    {"channel zero no tail", "zero point, no tail", PER_CHANNEL, ZERO_POINT, ZERO_POINT, 32, 32, 0, false, true, false},
    {"int4", "zero point, tail 32: the codec int4", PER_CHANNEL, ZERO_POINT, ZERO_POINT, 32, 32, 32, false, true, false},
    {"channel zero tail 64", "the same, tail 64", PER_CHANNEL, ZERO_POINT, ZERO_POINT, 32, 32, 64, false, true, false},
    {"channel zero V", "as int4, values not rotated", PER_CHANNEL, ZERO_POINT, ZERO_POINT, 32, 32, 32, false, false, false},
    {"channel min", "as int4, f16 scale and minimum", PER_CHANNEL, MINIMUM, MINIMUM, 32, 32, 32, false, true, false},
    {"channel zero H", "as int4, keys rotated", PER_CHANNEL, ZERO_POINT, ZERO_POINT, 32, 32, 32, true, true, false},
    {"channel sym mean", "symmetric, page mean instead of zero points, tail 64",
     PER_CHANNEL, SYMMETRIC, ZERO_POINT, 32, 32, 64, false, true, true},
    {"int4 keys only", "as int4, values exact", PER_CHANNEL, ZERO_POINT, EXACT, 32, 32, 32, false, false, false},
    {"int4 values only", "as int4, keys exact", PER_TOKEN, EXACT, ZERO_POINT, 32, 32, 0, false, true, false},
    {"fp4 top", "e2m1 g16, scale max/6", PER_TOKEN, FP4_TOP, FP4_TOP, 16, 16, 0, false, false, false},
    {"fp4 top H", "+ Hadamard", PER_TOKEN, FP4_TOP, FP4_TOP, 16, 16, 0, true, true, false},
    {"fp4 best H", "+ best of five scales", PER_TOKEN, FP4_BEST, FP4_BEST, 16, 16, 0, true, true, false},
    {"fp4 best H tail", "+ tail 64", PER_TOKEN, FP4_BEST, FP4_BEST, 16, 16, 64, true, true, false},
    {"fp4", "+ page mean: the codec fp4", PER_TOKEN, FP4_BEST, FP4_BEST, 16, 16, 64, true, true, true},
    {"fp4 channel", "e2m1 keys per channel over 16 tokens, tail 64", PER_CHANNEL, FP4_BEST, FP4_BEST, 16, 16, 64, false, true, false},
};
enum { N_CONSTRUCTIONS = sizeof constructions / sizeof *constructions };

static const struct construction *current;

/* Bits of a number, of keys and values together: 4 and what is stored beside a group, and the page's means. */
static double bits_of(const struct construction *c)
{
  static const double beside[] = {[EXACT] = 0, [SYMMETRIC] = 8, [ZERO_POINT] = 16, [MINIMUM] = 32, [FP4_TOP] = 8, [FP4_BEST] = 8};
  const double keys = c->keys == EXACT ? 32 : 4 + beside[c->keys] / c->key_group + (c->takes_mean ? 16.0 / P : 0);
  const double values = c->values == EXACT ? 32 : 4 + beside[c->values] / c->value_group;
  return (keys + values) / 2;
}

static float nearest_half(float x) { return half_to_float(float_to_half(x)); }

static void round_symmetric(float *x, int32_t n)
{
  float top = 0;
  for (int32_t i = 0; i < n; i++) top = fmaxf(top, fabsf(x[i]));
  const float s = cpu_kv_scale(cpu_kv_scale_code(top / 7));
  for (int32_t i = 0; i < n; i++) x[i] = s > 0 ? s * fminf(7, fmaxf(-8, nearbyintf(x[i] / s))) : 0;
}

static void round_minimum(float *x, int32_t n)
{
  float lo = x[0], hi = x[0];
  for (int32_t i = 0; i < n; i++) lo = fminf(lo, x[i]), hi = fmaxf(hi, x[i]);
  const float s = nearest_half((hi - lo) / 15), m = nearest_half(lo);
  for (int32_t i = 0; i < n; i++) x[i] = s > 0 ? m + s * fminf(15, fmaxf(0, nearbyintf((x[i] - m) / s))) : m;
}

static float e2m1(float a)
{
  const float step = a < 2 ? 0.5f : a < 4 ? 1 : 2;
  return fminf(6, nearbyintf(a / step) * step);
}

static void round_fp4_top(float *x, int32_t n)
{
  float top = 0;
  for (int32_t i = 0; i < n; i++) top = fmaxf(top, fabsf(x[i]));
  const float s = cpu_kv_scale(cpu_kv_scale_code(top / 6));
  for (int32_t i = 0; i < n; i++) x[i] = s > 0 ? copysignf(s * e2m1(fabsf(x[i]) / s), x[i]) : 0;
}

/* The product's own quantisers. */
static void round_zero_point(const struct cpu_ops *ops, float *x, int32_t n)
{
  uint8_t codes[32], scale;
  int8_t zero;
  ops->quantize_u4(x, n, codes, &scale, &zero);
  for (int32_t i = 0; i < n; i++) x[i] = (float)(codes[i] - zero) * cpu_kv_scale(scale);
}

static void round_fp4_best(const struct cpu_ops *ops, float *x, int32_t n)
{
  static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  uint8_t codes[16], scale;
  ops->quantize_fp4(x, n, codes, &scale);
  for (int32_t i = 0; i < n; i++) x[i] = (codes[i] & 8 ? -1.0f : 1.0f) * values[codes[i] & 7] * cpu_kv_scale(scale);
}

static void round_group(const struct cpu_ops *ops, enum rounding rounding, float *x, int32_t n)
{
  switch (rounding) {
  case EXACT: break;
  case SYMMETRIC: round_symmetric(x, n); break;
  case ZERO_POINT: round_zero_point(ops, x, n); break;
  case MINIMUM: round_minimum(x, n); break;
  case FP4_TOP: round_fp4_top(x, n); break;
  case FP4_BEST: round_fp4_best(ops, x, n); break;
  }
}

/* Keys whose rounding waits for one another: tokens that a fold covers. */
static int32_t fold_tokens(const struct construction *c)
{
  const int32_t group = c->axis == PER_CHANNEL ? c->key_group : 1, n = c->tail > group ? c->tail : group;
  return c->takes_mean ? P : n;
}

/* Round tokens first..first+n of a block's keys, [D][P] f32. */
static void fold_keys(const struct backend_kv *kv, float *keys, int32_t first, int32_t n)
{
  const struct construction *c = current;
  const int32_t D = kv->geometry.head_dim;
  float mean[CPU_KV_MAX_HEAD_DIM] = {0}, x[CPU_KV_MAX_HEAD_DIM];
  for (int32_t d = 0; d < D && c->takes_mean; d++) {
    for (int32_t j = first; j < first + n; j++) mean[d] += keys[d * P + j] / (float)n;
    mean[d] = nearest_half(mean[d]);
  }
  if (c->axis == PER_CHANNEL) {
    for (int32_t d = 0; d < D; d++)
      for (int32_t g = first; g < first + n; g += c->key_group) {
        for (int32_t j = 0; j < c->key_group; j++) x[j] = keys[d * P + g + j] - mean[d];
        round_group(kv->ops, c->keys, x, c->key_group);
        for (int32_t j = 0; j < c->key_group; j++) keys[d * P + g + j] = x[j] + mean[d];
      }
    return;
  }
  for (int32_t j = first; j < first + n; j++)
    for (int32_t g = 0; g < D; g += c->key_group) {
      const int32_t length = D - g < c->key_group ? D - g : c->key_group;
      for (int32_t i = 0; i < length; i++) x[i] = keys[(g + i) * P + j] - mean[g + i];
      round_group(kv->ops, c->keys, x, length);
      for (int32_t i = 0; i < length; i++) keys[(g + i) * P + j] = x[i] + mean[g + i];
    }
}

/* ---- the construction as a codec over f32 pages ---- */

static void append_k(const struct backend_kv *kv, void *block, int32_t slot, const float *k, uint16_t *open)
{
  const int32_t n = fold_tokens(current), D = kv->geometry.head_dim;
  float half[CPU_KV_MAX_HEAD_DIM];
  for (int32_t d = 0; d < D; d++) half[d] = current->tail > 0 ? nearest_half(k[d]) : k[d];
  cpu_kv_f32.append_k(kv, block, slot, half, NULL);
  if (current->tail > 0) cpu_kv_open_append(kv, open, slot % current->tail, k);
  if (slot % n == n - 1) fold_keys(kv, block, slot + 1 - n, n);
}

static void append_v(const struct backend_kv *kv, void *block, int32_t slot, const float *v)
{
  const int32_t D = kv->geometry.head_dim, group = current->value_group;
  float x[CPU_KV_MAX_HEAD_DIM];
  memcpy(x, v, (size_t)D * sizeof *v);
  for (int32_t g = 0; g < D; g += group) round_group(kv->ops, current->values, x + g, D - g < group ? D - g : group);
  cpu_kv_f32.append_v(kv, block, slot, x);
}

/* Incomplete groups stay as they are in the f32 page. */
static void fold(const struct backend_kv *kv, void *block, int32_t group, const uint16_t *open, int32_t n)
{
  (void)kv, (void)block, (void)group, (void)open, (void)n;
}

static void unfold(const struct backend_kv *kv, const void *block, int32_t group, uint16_t *open)
{
  const int32_t tail = current->tail;
  for (int32_t d = 0; d < kv->geometry.head_dim; d++)
    kv->ops->to_f16((const float *)block + d * P + group * tail, tail, open + d * tail);
}

static struct cpu_kv_codec codec;

/* Called with the session open: its pages take the construction's codec. */
static enum sits_status take_codec(struct eval_session *session, struct sits_error *err)
{
  struct backend_kv *kv = session->runner.kv;
  codec = cpu_kv_f32;
  codec.append_k = append_k;
  codec.append_v = append_v;
  codec.rotates_k = current->rotates_k;
  codec.rotates_v = current->rotates_v;
  codec.open_tokens = current->tail;
  codec.fold = fold;
  codec.unfold = unfold;
  kv->codec = &codec;
  if (current->tail == 0) return SITS_OK;
  enum sits_status status = cpu_kv_open_create(kv, session->max_tokens, session->max_rows, &kv->open);
  return status == SITS_OK ? status : sits_fail(err, status, "no memory for open groups");
}

struct ablation_options { struct eval_options eval; const char *only; };

static enum sits_status measure(struct ablation_options *o, struct sits_error *err)
{
  struct eval_score score;
  o->eval.kv_cache_dtype = "f32";
  o->eval.on_open = take_codec;
  enum sits_status status = eval_score(&o->eval, &score, err);
  if (status != SITS_OK) return status;
  const int64_t scored = o->eval.ctx - 1 - o->eval.ctx / 2;
  double sum = 0;
  for (int64_t i = 0; i < score.n_windows; i++) sum += score.nll[i];
  printf("{\"name\": \"%s\", \"what\": \"%s\", \"bits\": %.3f, \"windows\": %lld, \"perplexity\": %.6f, \"accuracy\": %.5f, "
         "\"window_nll\": [",
         current->name, current->what, bits_of(current), (long long)score.n_windows,
         exp(sum / (double)(score.n_windows * scored)), (double)score.n_right / (double)(score.n_windows * scored));
  for (int64_t i = 0; i < score.n_windows; i++) printf("%s%.8f", i ? ", " : "", score.nll[i] / (double)scored);
  printf("]}\n");
  fflush(stdout);
  mem_free(score.nll);
  return SITS_OK;
}

#define AT(field) offsetof(struct ablation_options, field)
static const struct option_spec specs[] = {
    {"model", OPTION_STRING, AT(eval.model), "", 0, 0, "", 0, NULL, "Options", "The model."},
    {"text", OPTION_STRING, AT(eval.text), "", 0, 0, "", 0, NULL, "Options", "UTF-8 text file."},
    {"only", OPTION_STRING, AT(only), "", 0, 0, "", 0, NULL, "Options", "One construction, by name. Default: all."},
    {"ctx", OPTION_INT, AT(eval.ctx), "2048", 4, 1 << 20, "tokens", 0, NULL, "Options", "Window."},
    {"windows", OPTION_INT, AT(eval.windows), "8", 1, 1e9, "windows", 0, NULL, "Options", "Windows to score."},
    {"batch-tokens", OPTION_INT, AT(eval.batch_tokens), "512", 64, 65536, "tokens", 0, NULL, "Options", "A multiple of 64."},
    {"threads", OPTION_INT, AT(eval.threads), "1", 0, 1024, "threads", 0, NULL, "Options", "CPU worker threads."},
};

int main(int argc, char **argv)
{
  struct ablation_options o = {.eval = {.device = "cpu", .isa = "auto"}};
  struct option_set set;
  struct sits_error err = {0};
  enum sits_status status = option_set_init(&set, specs, sizeof specs / sizeof *specs, &o, &err);
  if (status == SITS_OK) status = option_parse_args(&set, argc, argv, 1, NULL, &err);
  o.eval.device = "cpu";
  o.eval.isa = "auto";
  o.eval.tensor_parallel_size = 1;
  if (status == SITS_OK && (o.eval.model == NULL || o.eval.text == NULL)) status = sits_fail(&err, SITS_CONFIG, "--model and --text");
  for (int i = 0; i < N_CONSTRUCTIONS && status == SITS_OK; i++) {
    current = &constructions[i];
    if (o.only == NULL || strcmp(o.only, current->name) == 0) status = measure(&o, &err);
  }
  if (status != SITS_OK) fprintf(stderr, "bench_kv_ablation: %s\n", err.text);
  option_set_fini(&set);
  return status != SITS_OK;
}
