/* model_config from a Hugging Face config.json. Meaning and defaults of the keys are those of transformers' LlamaConfig, MistralConfig,
 * Qwen2Config and Qwen3Config. Entry point: model_read_hf. */
#include <stdio.h>
#include <string.h>

#include "model/model_read.h"
#include "tensor/name_index.h"

struct reader {
  const char *path;
  struct sits_error *err;
};

static enum sits_status key_error(const struct reader *r, enum sits_status status, const char *key, const char *what)
{
  return sits_fail_param(r->err, status, key, "%s/config.json: '%s' %s", r->path, key, what);
}

/* Absent and null give `otherwise`; < 0: required. */
static enum sits_status read_int(const struct reader *r, const json_t *from, const char *key, int64_t otherwise, int32_t *out)
{
  const json_t *value = json_object_get(from, key);
  int64_t number = otherwise;
  if (json_is_integer(value)) number = json_integer_value(value);
  else if (value && !json_is_null(value)) return key_error(r, SITS_FORMAT, key, "is no whole number");
  else if (otherwise < 0) return key_error(r, SITS_FORMAT, key, "is missing");
  if (number < 0 || number > INT32_MAX) return key_error(r, SITS_FORMAT, key, "is out of range");
  *out = (int32_t)number;
  return SITS_OK;
}

static enum sits_status read_real(const struct reader *r, const json_t *from, const char *key, double otherwise, float *out)
{
  const json_t *value = json_object_get(from, key);
  if (json_is_number(value)) *out = (float)json_number_value(value);
  else if (value && !json_is_null(value)) return key_error(r, SITS_FORMAT, key, "is no number");
  else if (otherwise < 0) return key_error(r, SITS_FORMAT, key, "is missing");
  else *out = (float)otherwise;
  return SITS_OK;
}

static enum sits_status read_bool(const struct reader *r, const json_t *from, const char *key, bool otherwise, bool *out)
{
  const json_t *value = json_object_get(from, key);
  if (value && !json_is_null(value) && !json_is_boolean(value)) return key_error(r, SITS_FORMAT, key, "is neither true nor false");
  *out = json_is_boolean(value) ? json_is_true(value) : otherwise;
  return SITS_OK;
}

struct arch_row {
  const char *class_name, *model_type;
  enum model_arch arch;
  int32_t head_dim;                /* default; 0: hidden_size / heads */
  int32_t sliding_window;          /* default */
  int32_t max_context;             /* default */
};

static const struct arch_row arch_rows[] = {
    {"LlamaForCausalLM", "llama", MODEL_LLAMA, 0, 0, 2048},
    {"MistralForCausalLM", "mistral", MODEL_LLAMA, 0, 4096, 131072},
    {"Qwen2ForCausalLM", "qwen2", MODEL_QWEN2, 0, 4096, 32768},
    {"Qwen3ForCausalLM", "qwen3", MODEL_QWEN3, 128, 4096, 32768},
};

static enum sits_status find_arch(const struct reader *r, const json_t *config, const struct arch_row **out)
{
  const json_t *list = json_object_get(config, "architectures");
  const char *class_name = json_string_value(json_array_get(list, 0)), *type = json_string_value(json_object_get(config, "model_type"));
  const char *name = class_name ? class_name : type;
  if (!name) return key_error(r, SITS_FORMAT, "architectures", "is missing");
  for (size_t i = 0; i < sizeof arch_rows / sizeof arch_rows[0]; i++) {
    if (strcmp(name, class_name ? arch_rows[i].class_name : arch_rows[i].model_type) != 0) continue;
    *out = &arch_rows[i];
    return SITS_OK;
  }
  char printable[NAME_INDEX_MAX_PRINTED];
  return sits_fail_param(r->err, SITS_UNSUPPORTED, "architectures",
                         "%s/config.json: architecture '%s' is not supported (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and "
                         "Qwen3ForCausalLM are)", r->path, name_printable(printable, name, strlen(name)));
}

static enum sits_status read_sizes(const struct reader *r, const json_t *config, const struct arch_row *row, struct model_config *c)
{
  enum sits_status status = read_int(r, config, "num_hidden_layers", -1, &c->n_layers);
  if (!status) status = read_int(r, config, "hidden_size", -1, &c->n_embd);
  if (!status) status = read_int(r, config, "intermediate_size", -1, &c->n_ff);
  if (!status) status = read_int(r, config, "vocab_size", -1, &c->n_vocab);
  if (!status) status = read_int(r, config, "num_attention_heads", -1, &c->n_heads);
  if (!status) status = read_int(r, config, "num_key_value_heads", c->n_heads, &c->n_kv_heads);
  int32_t head_dim = row->head_dim ? row->head_dim : c->n_heads > 0 ? c->n_embd / c->n_heads : 0;
  if (!status) status = read_int(r, config, "head_dim", head_dim, &c->head_dim);
  if (!status) status = read_int(r, config, "max_position_embeddings", row->max_context, &c->max_context);
  if (!status) status = read_real(r, config, "rms_norm_eps", 1e-6, &c->rms_eps);
  return status;
}

/* What this program does not compute must not be asked for. */
static enum sits_status check_features(const struct reader *r, const json_t *config)
{
  const char *act = json_string_value(json_object_get(config, "hidden_act"));
  if (act && strcmp(act, "silu") != 0) return key_error(r, SITS_UNSUPPORTED, "hidden_act", "is not silu");
  const json_t *quantization = json_object_get(config, "quantization_config");
  if (quantization && !json_is_null(quantization)) {
    const char *method = json_string_value(json_object_get(quantization, "quant_method"));
    char printable[NAME_INDEX_MAX_PRINTED];
    if (!method) method = "unnamed";
    return sits_fail_param(r->err, SITS_UNSUPPORTED, "quantization_config",
                           "%s/config.json: weights quantised by '%.40s' are not supported; use the unquantised model or a GGUF file",
                           r->path, name_printable(printable, method, strlen(method)));
  }
  bool has_mlp_bias;
  enum sits_status status = read_bool(r, config, "mlp_bias", false, &has_mlp_bias);
  if (status) return status;
  return has_mlp_bias ? key_error(r, SITS_UNSUPPORTED, "mlp_bias", "true is not supported") : SITS_OK;
}

/* ---- sliding window: one for all layers or none ---- */

/* "layer_types", where newer configurations say it layer by layer. *n_sliding = -1 when the key is absent. */
static enum sits_status count_sliding(const struct reader *r, const json_t *config, int32_t n_layers, int32_t *n_sliding)
{
  const json_t *types = json_object_get(config, "layer_types");
  *n_sliding = -1;
  if (!types || json_is_null(types)) return SITS_OK;
  if (!json_is_array(types) || json_array_size(types) != (size_t)n_layers)
    return key_error(r, SITS_FORMAT, "layer_types", "is no list with one entry for each layer");
  int32_t n = 0;
  for (size_t i = 0; i < json_array_size(types); i++) {
    const char *type = json_string_value(json_array_get(types, i));
    if (!type || (strcmp(type, "full_attention") != 0 && strcmp(type, "sliding_attention") != 0))
      return key_error(r, SITS_UNSUPPORTED, "layer_types", "has an entry other than full_attention and sliding_attention");
    n += type[0] == 's';
  }
  *n_sliding = n;
  return SITS_OK;
}

static enum sits_status read_window(const struct reader *r, const json_t *config, const struct arch_row *row, struct model_config *c)
{
  int32_t n_sliding = 0, window = 0, first_layer = 0;
  bool is_qwen = row->arch != MODEL_LLAMA, is_used = true;
  const json_t *value = json_object_get(config, "sliding_window");
  enum sits_status status = count_sliding(r, config, c->n_layers, &n_sliding);
  if (!status && !json_is_null(value)) status = read_int(r, config, "sliding_window", row->sliding_window, &window);
  if (!status && is_qwen) status = read_bool(r, config, "use_sliding_window", false, &is_used);
  if (!status && is_qwen) status = read_int(r, config, "max_window_layers", 28, &first_layer);
  if (status || !is_used || window == 0) return status;
  if (!is_qwen && row->sliding_window == 0) return SITS_OK; /* Llama knows no window, whatever its configuration says */
  if (n_sliding < 0) n_sliding = c->n_layers > first_layer ? c->n_layers - first_layer : 0;
  if (n_sliding != 0 && n_sliding != c->n_layers)
    return key_error(r, SITS_UNSUPPORTED, "sliding_window", "holds for some layers only, which is not supported");
  if (n_sliding != 0) c->sliding_window = window;
  return SITS_OK;
}

/* ---- rope ---- */

static enum sits_status read_llama3(const struct reader *r, const json_t *rope, struct model_config *c)
{
  c->rope_scaling = ROPE_SCALING_LLAMA3;
  enum sits_status status = read_real(r, rope, "factor", -1, &c->rope_factor);
  if (!status) status = read_real(r, rope, "low_freq_factor", -1, &c->rope_low_freq_factor);
  if (!status) status = read_real(r, rope, "high_freq_factor", -1, &c->rope_high_freq_factor);
  if (!status) status = read_int(r, rope, "original_max_position_embeddings", -1, &c->rope_original_context);
  if (!status && !(c->rope_low_freq_factor > 0 && c->rope_high_freq_factor > c->rope_low_freq_factor))
    status = key_error(r, SITS_FORMAT, "high_freq_factor", "is not above low_freq_factor, or that is not above 0");
  return status;
}

static enum sits_status read_yarn(const struct reader *r, const json_t *rope, struct model_config *c)
{
  float mscale, mscale_all, attention_factor;
  bool truncates;
  c->rope_scaling = ROPE_SCALING_YARN;
  enum sits_status status = read_int(r, rope, "original_max_position_embeddings", c->max_context, &c->rope_original_context);
  double ratio = c->rope_original_context > 0 ? (double)c->max_context / c->rope_original_context : 1;
  if (!status) status = read_real(r, rope, "factor", ratio, &c->rope_factor);
  if (!status) status = read_real(r, rope, "beta_fast", 32, &c->yarn_beta_fast);
  if (!status) status = read_real(r, rope, "beta_slow", 1, &c->yarn_beta_slow);
  if (!status) status = read_real(r, rope, "mscale", 0, &mscale);
  if (!status) status = read_real(r, rope, "mscale_all_dim", 0, &mscale_all);
  if (!status) status = read_real(r, rope, "attention_factor", 0, &attention_factor);
  if (!status) status = read_bool(r, rope, "truncate", true, &truncates);
  if (status) return status;
  if (!truncates) return key_error(r, SITS_UNSUPPORTED, "truncate", "false is not supported");
  if (attention_factor > 0) c->yarn_attn_factor = attention_factor;
  else if (mscale > 0 && mscale_all > 0)
    c->yarn_attn_factor = model_yarn_magnitude(c->rope_factor, mscale) / model_yarn_magnitude(c->rope_factor, mscale_all);
  else c->yarn_attn_factor = model_yarn_magnitude(c->rope_factor, 1);
  double reach = (double)c->rope_original_context * c->rope_factor; /* models made for YaRN on demand state the unscaled length */
  if (reach > c->max_context && reach <= INT32_MAX) c->max_context = (int32_t)reach;
  return SITS_OK;
}

static enum sits_status read_scaling(const struct reader *r, const json_t *rope, struct model_config *c)
{
  const json_t *value = json_object_get(rope, "rope_type");
  if (!value) value = json_object_get(rope, "type"); /* as older files call it */
  const char *type = json_string_value(value);
  if (!type) return key_error(r, SITS_FORMAT, "rope_type", "is missing or no string");
  if (strcmp(type, "default") == 0) return SITS_OK;
  if (strcmp(type, "llama3") == 0) return read_llama3(r, rope, c);
  if (strcmp(type, "yarn") == 0) return read_yarn(r, rope, c);
  if (strcmp(type, "linear") == 0) {
    c->rope_scaling = ROPE_SCALING_LINEAR;
    return read_real(r, rope, "factor", -1, &c->rope_factor);
  }
  char printable[NAME_INDEX_MAX_PRINTED];
  return sits_fail_param(r->err, SITS_UNSUPPORTED, "rope_type", "%s/config.json: RoPE scaling '%.40s' is not supported", r->path,
                         name_printable(printable, type, strlen(type)));
}

static enum sits_status read_rope(const struct reader *r, const json_t *config, struct model_config *c)
{
  const json_t *newer = json_object_get(config, "rope_parameters"), *older = json_object_get(config, "rope_scaling");
  const json_t *rope = json_is_object(newer) ? newer : older;
  float partial, theta;
  c->rope_style = ROPE_HALF_SPLIT;
  c->rope_factor = 1;
  enum sits_status status = read_real(r, config, "rope_theta", 10000, &theta);
  if (!status && !(theta > 0)) status = key_error(r, SITS_FORMAT, "rope_theta", "is not above 0");
  if (!status) status = read_real(r, rope, "rope_theta", theta, &c->rope_theta);
  if (!status) status = read_real(r, config, "partial_rotary_factor", 1, &partial);
  if (!status && partial > 0) status = read_real(r, rope, "partial_rotary_factor", partial, &partial);
  if (status) return status;
  if (!(partial > 0 && partial <= 1)) return key_error(r, SITS_FORMAT, "partial_rotary_factor", "is not in (0, 1]");
  c->rope_dims = (int32_t)((double)c->head_dim * partial);
  if (!rope || json_is_null(rope)) return SITS_OK;
  if (!json_is_object(rope)) return key_error(r, SITS_FORMAT, newer ? "rope_parameters" : "rope_scaling", "is no object");
  return read_scaling(r, rope, c);
}

enum sits_status model_read_hf(const struct source *source, struct model_config *c, struct model_expect *expect, struct sits_error *err)
{
  const json_t *config = source_hf_config(source);
  const struct reader r = {.path = name_path_tail(source_path(source)), .err = err};
  const struct arch_row *row = NULL;
  bool has_bias = false;
  enum sits_status status = find_arch(&r, config, &row);
  if (status) return status;
  c->arch = row->arch;
  status = read_sizes(&r, config, row, c);
  if (!status) status = check_features(&r, config);
  if (!status) status = read_window(&r, config, row, c);
  if (!status) status = read_rope(&r, config, c);
  if (!status) status = read_bool(&r, config, "attention_bias", false, &has_bias);
  if (!status) status = read_bool(&r, config, "tie_word_embeddings", false, &expect->ties_head);
  if (status) return status;
  expect->head = REQUIRED;
  expect->qkv_bias = has_bias || row->arch == MODEL_QWEN2 ? REQUIRED : ABSENT;
  expect->o_bias = has_bias && row->arch != MODEL_QWEN2 ? REQUIRED : ABSENT;
  expect->qk_norm = row->arch == MODEL_QWEN3 ? REQUIRED : ABSENT;
  const char *slash = strrchr(source_path(source), '/'), *base = slash && slash[1] ? slash + 1 : source_path(source);
  char printable[NAME_INDEX_MAX_PRINTED];
  snprintf(c->name, sizeof c->name, "%s", name_printable(printable, base, strlen(base)));
  return SITS_OK;
}
