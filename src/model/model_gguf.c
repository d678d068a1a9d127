/* model_config from a GGUF file's metadata. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's converter.
 * Entry point: model_read_gguf. */
#include <stdio.h>
#include <string.h>

#include "model/model_read.h"
#include "tensor/gguf.h"
#include "tensor/name_index.h"

struct reader {
  const struct gguf *gguf;
  const char *path;
  char arch[16];                   /* prefix of the keys */
  char key[96];                    /* last key looked at */
  struct sits_error *err;
};

static const char *full_key(struct reader *r, const char *suffix)
{
  snprintf(r->key, sizeof r->key, "%s.%s", r->arch, suffix);
  return r->key;
}

static bool has_key(const struct reader *r, const char *key)
{
  uint64_t u, n;
  int64_t i;
  double d;
  bool b;
  struct gguf_string s;
  enum gguf_type type;
  return gguf_get_u64(r->gguf, key, &u) || gguf_get_i64(r->gguf, key, &i) || gguf_get_f64(r->gguf, key, &d) ||
         gguf_get_bool(r->gguf, key, &b) || gguf_get_string(r->gguf, key, &s) || gguf_get_array(r->gguf, key, &type, &n);
}

/* A whole number in [0, 2^31). `otherwise` < 0: the key is required. */
static enum sits_status read_int(struct reader *r, const char *suffix, int64_t otherwise, int32_t *out)
{
  uint64_t value;
  enum gguf_type type;
  uint64_t n;
  const char *key = full_key(r, suffix);
  if (gguf_get_u64(r->gguf, key, &value)) {
    if (value > INT32_MAX) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is out of range", r->path, key);
    *out = (int32_t)value;
    return SITS_OK;
  }
  if (gguf_get_array(r->gguf, key, &type, &n))
    return sits_fail_param(r->err, SITS_UNSUPPORTED, key, "%s: key '%s' differs by layer, which is not supported", r->path, key);
  if (has_key(r, key)) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is no whole number", r->path, key);
  if (otherwise < 0) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is missing", r->path, key);
  *out = (int32_t)otherwise;
  return SITS_OK;
}

/* `otherwise` < 0: required. */
static enum sits_status read_real(struct reader *r, const char *suffix, float otherwise, float *out)
{
  double value;
  const char *key = full_key(r, suffix);
  if (gguf_get_f64(r->gguf, key, &value)) *out = (float)value;
  else if (has_key(r, key)) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is no real number", r->path, key);
  else if (otherwise < 0) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is missing", r->path, key);
  else *out = otherwise;
  return SITS_OK;
}

static bool string_is(const struct gguf_string *s, const char *text)
{
  return s->size == strlen(text) && memcmp(s->data, text, s->size) == 0;
}

static enum sits_status read_arch(struct reader *r, struct model_config *c, struct model_expect *expect)
{
  static const struct {
    const char *name;
    enum model_arch arch;
    enum rope_style style;
    enum presence qkv_bias, o_bias, qk_norm;
  } known[] = {
      {"llama", MODEL_LLAMA, ROPE_INTERLEAVED, OPTIONAL, OPTIONAL, ABSENT},
      {"qwen2", MODEL_QWEN2, ROPE_HALF_SPLIT, REQUIRED, OPTIONAL, ABSENT},
      {"qwen3", MODEL_QWEN3, ROPE_HALF_SPLIT, OPTIONAL, OPTIONAL, REQUIRED},
  };
  static const char key[] = "general.architecture";
  struct gguf_string arch;
  if (!gguf_get_string(r->gguf, key, &arch)) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is missing", r->path, key);
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (!string_is(&arch, known[i].name)) continue;
    snprintf(r->arch, sizeof r->arch, "%s", known[i].name);
    c->arch = known[i].arch;
    c->rope_style = known[i].style;
    *expect = (struct model_expect){
        .qkv_bias = known[i].qkv_bias, .o_bias = known[i].o_bias, .qk_norm = known[i].qk_norm, .head = OPTIONAL};
    return SITS_OK;
  }
  char printable[NAME_INDEX_MAX_PRINTED];
  return sits_fail_param(r->err, SITS_UNSUPPORTED, key, "%s: architecture '%s' is not supported (llama, qwen2 and qwen3 are)", r->path,
                         name_printable(printable, arch.data, arch.size));
}

static enum sits_status read_sizes(struct reader *r, struct model_config *c)
{
  int32_t value_length = 0, n_experts = 0;
  enum sits_status status = read_int(r, "block_count", -1, &c->n_layers);
  if (!status) status = read_int(r, "embedding_length", -1, &c->n_embd);
  if (!status) status = read_int(r, "feed_forward_length", -1, &c->n_ff);
  if (!status) status = read_int(r, "attention.head_count", -1, &c->n_heads);
  if (!status) status = read_int(r, "attention.head_count_kv", c->n_heads, &c->n_kv_heads);
  if (!status) status = read_int(r, "attention.key_length", c->n_heads > 0 ? c->n_embd / c->n_heads : 0, &c->head_dim);
  if (!status) status = read_int(r, "attention.value_length", c->head_dim, &value_length);
  if (!status) status = read_int(r, "context_length", -1, &c->max_context);
  if (!status) status = read_int(r, "vocab_size", 0, &c->n_vocab);
  if (!status) status = read_int(r, "attention.sliding_window", 0, &c->sliding_window);
  if (!status) status = read_real(r, "attention.layer_norm_rms_epsilon", -1, &c->rms_eps);
  if (!status) status = read_int(r, "expert_count", 0, &n_experts);
  if (status) return status;
  const char *at_fault = n_experts > 0 ? "expert_count" : value_length != c->head_dim ? "attention.value_length" : NULL;
  if (!at_fault) return SITS_OK;
  return sits_fail_param(r->err, SITS_UNSUPPORTED, full_key(r, at_fault), "%s: key '%s': %s", r->path, r->key,
                         n_experts > 0 ? "mixtures of experts are not supported" : "keys and values of different sizes are not supported");
}

static enum sits_status read_scaling(struct reader *r, struct model_config *c)
{
  struct gguf_string type;
  float attn_factor, old_linear, extrapolation;
  const char *key = full_key(r, "rope.scaling.type");
  bool has_type = gguf_get_string(r->gguf, key, &type);
  if (!has_type && has_key(r, key)) return sits_fail_param(r->err, SITS_FORMAT, key, "%s: key '%s' is no string", r->path, key);
  if (has_type && string_is(&type, "linear")) c->rope_scaling = ROPE_SCALING_LINEAR;
  else if (has_type && string_is(&type, "yarn")) c->rope_scaling = ROPE_SCALING_YARN;
  else if (has_type && !string_is(&type, "none")) {
    char printable[NAME_INDEX_MAX_PRINTED];
    return sits_fail_param(r->err, SITS_UNSUPPORTED, key, "%s: key '%s': scaling '%s' is not supported", r->path, key,
                           name_printable(printable, type.data, type.size));
  }
  enum sits_status status = read_real(r, "rope.scale_linear", 0, &old_linear);
  if (!status) status = read_real(r, "rope.scaling.factor", old_linear > 0 ? old_linear : 0, &c->rope_factor);
  if (!status) status = read_int(r, "rope.scaling.original_context_length", c->max_context, &c->rope_original_context);
  if (!status) status = read_real(r, "rope.scaling.attn_factor", 1, &attn_factor);
  if (!status) status = read_real(r, "rope.scaling.yarn_beta_fast", 32, &c->yarn_beta_fast);
  if (!status) status = read_real(r, "rope.scaling.yarn_beta_slow", 1, &c->yarn_beta_slow);
  if (!status) status = read_real(r, "rope.scaling.yarn_ext_factor", 1, &extrapolation);
  if (!status && extrapolation != 1 && extrapolation != -1) /* -1: as if absent */
    status = sits_fail_param(r->err, SITS_UNSUPPORTED, r->key, "%s: key '%s' other than 1 is not supported", r->path, r->key);
  if (!status && attn_factor != 1 && c->rope_scaling != ROPE_SCALING_YARN)
    status = sits_fail_param(r->err, SITS_UNSUPPORTED, full_key(r, "rope.scaling.attn_factor"), "%s: key '%s' other than 1 goes with yarn",
                             r->path, r->key);
  if (status) return status;
  if (c->rope_factor == 0) c->rope_factor = 1; /* as if absent */
  if (!has_type && c->rope_factor != 1) c->rope_scaling = ROPE_SCALING_LINEAR;
  if (c->rope_scaling == ROPE_SCALING_YARN) c->yarn_attn_factor = attn_factor * model_yarn_magnitude(c->rope_factor, 1);
  return SITS_OK;
}

static void read_name(const struct reader *r, struct model_config *c)
{
  struct gguf_string name;
  if (!gguf_get_string(r->gguf, "general.name", &name) || name.size == 0)
    name = (struct gguf_string){.data = r->arch, .size = strlen(r->arch)};
  char printable[NAME_INDEX_MAX_PRINTED];
  snprintf(c->name, sizeof c->name, "%s", name_printable(printable, name.data, name.size));
}

enum sits_status model_read_gguf(const struct source *source, struct model_config *c, struct model_expect *expect, struct sits_error *err)
{
  struct reader r = {.gguf = source_gguf(source), .path = name_path_tail(source_path(source)), .err = err};
  enum sits_status status = read_arch(&r, c, expect);
  if (!status) status = read_sizes(&r, c);
  if (!status) status = read_int(&r, "rope.dimension_count", c->head_dim, &c->rope_dims);
  if (!status) status = read_real(&r, "rope.freq_base", 10000, &c->rope_theta);
  if (!status) status = read_scaling(&r, c);
  if (!status) read_name(&r, c);
  return status;
}
