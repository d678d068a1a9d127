/* See model.h. Opens the source, lets the reader for its kind fill the configuration, then binds every weight by name, checking shape
 * and type. A tensor in the file that nothing here knows is an error too: computing without it would be silently wrong.
 * Entry points: model_open, model_close. */
#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/model_read.h"
#include "tensor/dequant.h"
#include "tensor/name_index.h"

const char *model_arch_name(enum model_arch arch)
{
  static const char *const names[] = {[MODEL_LLAMA] = "llama", [MODEL_QWEN2] = "qwen2", [MODEL_QWEN3] = "qwen3"};
  return names[arch];
}

/* ---- configuration ---- */

enum sits_status model_check_config(const struct source *source, const struct model_config *c, struct sits_error *err)
{
  const struct { const char *what; int64_t value, least, most; } ranges[] = {
      {"number of layers", c->n_layers, 1, 1024},
      {"embedding length", c->n_embd, 1, 1 << 18},
      {"number of heads", c->n_heads, 1, 4096},
      {"number of KV heads", c->n_kv_heads, 1, 4096},
      {"head size", c->head_dim, 2, 1024},
      {"feed-forward length", c->n_ff, 1, 1 << 20},
      {"vocabulary size", c->n_vocab, 0, 1 << 22},
      {"context length", c->max_context, 1, 1 << 30},
      {"sliding window", c->sliding_window, 0, 1 << 30},
      {"number of rotated dimensions", c->rope_dims, 2, c->head_dim},
  };
  const char *path = name_path_tail(source_path(source));
  for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
    if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
      return sits_fail_param(err, SITS_FORMAT, ranges[i].what, "%s: %s %lld is not within %lld to %lld", path, ranges[i].what,
                             (long long)ranges[i].value, (long long)ranges[i].least, (long long)ranges[i].most);
  if (c->n_heads % c->n_kv_heads != 0)
    return sits_fail(err, SITS_FORMAT, "%s: %d heads are no multiple of %d KV heads", path, c->n_heads, c->n_kv_heads);
  if (c->head_dim % 2 != 0 || c->rope_dims % 2 != 0)
    return sits_fail(err, SITS_FORMAT, "%s: head size %d or rotated dimensions %d are odd", path, c->head_dim, c->rope_dims);
  if (!(c->rms_eps >= 0 && c->rms_eps < 1)) return sits_fail(err, SITS_FORMAT, "%s: RMS epsilon %g is not within 0 to 1", path, c->rms_eps);
  if (!(c->rope_theta > 1 && c->rope_theta < 1e12f))
    return sits_fail(err, SITS_FORMAT, "%s: RoPE base %g is not within 1 to 1e12", path, c->rope_theta);
  bool is_scaled = c->rope_scaling != ROPE_SCALING_NONE, is_yarn = c->rope_scaling == ROPE_SCALING_YARN;
  if (is_scaled && !(c->rope_factor >= 1 && c->rope_factor <= 65536))
    return sits_fail(err, SITS_FORMAT, "%s: RoPE scaling factor %g is not within 1 to 65536", path, c->rope_factor);
  if (is_scaled && c->rope_scaling != ROPE_SCALING_LINEAR && c->rope_original_context < 1)
    return sits_fail(err, SITS_FORMAT, "%s: RoPE scaling needs an original context length above 0", path);
  if (is_yarn && !(c->yarn_beta_fast > 0 && c->yarn_beta_slow > 0 && c->yarn_beta_fast < 1e6f && c->yarn_beta_slow < 1e6f &&
                   c->yarn_attn_factor > 0 && c->yarn_attn_factor < 1e3f))
    return sits_fail(err, SITS_FORMAT, "%s: a YaRN parameter is out of range", path);
  return SITS_OK;
}

/* ---- weights ---- */

enum part {
  ATTN_NORM, WQ, WK, WV, WO, BQ, BK, BV, BO, Q_NORM, K_NORM, FFN_NORM, W_GATE, W_UP, W_DOWN, N_PARTS
};

static const char *const part_names[2][N_PARTS] = {
    [SOURCE_GGUF] = {"attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "attn_q.bias",
                     "attn_k.bias", "attn_v.bias", "attn_output.bias", "attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight",
                     "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"},
    [SOURCE_HF] = {"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                   "self_attn.o_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
                   "self_attn.o_proj.bias", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "post_attention_layernorm.weight",
                   "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"},
};

struct binder {
  struct model *model;
  struct model_expect expect;
  struct name_index used;          /* names bound so far */
  struct sits_error *err;
};

/* Vectors are read as floats; matrices may also be in GGUF's blocks, or, in an engine file, integers with scales. */
static bool is_weight_type(const struct sits_utd *t, bool is_vector)
{
  const enum sits_dtype dtype = t->dtype;
  if (t->quant != SITS_QUANT_NONE) return !is_vector && (dtype == SITS_DTYPE_I4 || dtype == SITS_DTYPE_I8);
  if (dtype == SITS_DTYPE_F32 || dtype == SITS_DTYPE_F16 || dtype == SITS_DTYPE_BF16) return true;
  return !is_vector && dtype >= SITS_DTYPE_Q4_0 && dtype <= SITS_DTYPE_Q6_K;
}

/* The engine file can describe forms that nothing here reads: NULL, or what is wrong with this one. */
static const char *bad_form(const struct sits_utd *t)
{
  if (t->layout != SITS_LAYOUT_ROW_MAJOR) return "packed in tiles, which is not supported";
  if (t->quant == SITS_QUANT_NONE) return NULL;
  if (t->scale_dtype != SITS_DTYPE_F16 && t->scale_dtype != SITS_DTYPE_F32) return "its scales are not f16 or f32";
  if (t->quant == SITS_QUANT_GROUP && (t->group_axis != 1 || t->dims[1] % t->group_size != 0))
    return "its groups are no whole number along its rows";
  return NULL;
}

static enum sits_status check_shape(const struct binder *b, const struct sits_utd *t, int64_t rows, int64_t columns)
{
  bool is_vector = columns == 0;
  char printable[NAME_INDEX_MAX_PRINTED], want[48], got[96];
  const char *path = name_path_tail(source_path(b->model->source));
  if (!is_weight_type(t, is_vector))
    return sits_fail_param(b->err, SITS_UNSUPPORTED, t->name, "%s: tensor '%s': type %s is not supported here", path,
                           name_printable(printable, t->name, strlen(t->name)), sits_dtype_info(t->dtype)->name);
  if (bad_form(t))
    return sits_fail_param(b->err, SITS_UNSUPPORTED, t->name, "%s: tensor '%s': %s", path,
                           name_printable(printable, t->name, strlen(t->name)), bad_form(t));
  if (is_vector ? t->n_dims == 1 && t->dims[0] == rows : t->n_dims == 2 && t->dims[0] == rows && t->dims[1] == columns) return SITS_OK;
  if (is_vector) snprintf(want, sizeof want, "[%lld]", (long long)rows);
  else snprintf(want, sizeof want, "[%lld][%lld]", (long long)rows, (long long)columns);
  size_t at = 0;
  got[0] = '\0';
  for (int i = 0; i < t->n_dims; i++) at += (size_t)snprintf(got + at, sizeof got - at, "[%lld]", (long long)t->dims[i]);
  return sits_fail_param(b->err, SITS_FORMAT, t->name, "%s: tensor '%s': shape %s, but the configuration wants %s", path,
                         name_printable(printable, t->name, strlen(t->name)), got, want);
}

/* columns == 0: a vector. */
static enum sits_status bind(struct binder *b, const char *name, enum presence presence, int64_t rows, int64_t columns,
                             const struct sits_utd **out)
{
  const struct sits_utd *t = presence == ABSENT ? NULL : source_tensor(b->model->source, name);
  if (!t) {
    if (presence != REQUIRED) return SITS_OK;
    return sits_fail_param(b->err, SITS_FORMAT, name, "%s: tensor '%s' is missing", name_path_tail(source_path(b->model->source)), name);
  }
  enum sits_status status = check_shape(b, t, rows, columns);
  if (status) return status;
  name_index_add(&b->used, t->name, strlen(t->name), 0);
  *out = t;
  return SITS_OK;
}

static enum sits_status bind_layer(struct binder *b, int32_t number)
{
  const struct model_config *c = &b->model->config;
  const struct model_expect *e = &b->expect;
  struct model_layer *l = &b->model->layers[number];
  int64_t width = c->n_embd, q = (int64_t)c->n_heads * c->head_dim, kv = (int64_t)c->n_kv_heads * c->head_dim, ff = c->n_ff;
  const struct { enum part part; enum presence presence; int64_t rows, columns; const struct sits_utd **out; } rows[] = {
      {ATTN_NORM, REQUIRED, width, 0, &l->attn_norm},
      {WQ, REQUIRED, q, width, &l->wq},
      {WK, REQUIRED, kv, width, &l->wk},
      {WV, REQUIRED, kv, width, &l->wv},
      {WO, REQUIRED, width, q, &l->wo},
      {BQ, e->qkv_bias, q, 0, &l->bq},
      {BK, e->qkv_bias, kv, 0, &l->bk},
      {BV, e->qkv_bias, kv, 0, &l->bv},
      {BO, e->o_bias, width, 0, &l->bo},
      {Q_NORM, e->qk_norm, c->head_dim, 0, &l->q_norm},
      {K_NORM, e->qk_norm, c->head_dim, 0, &l->k_norm},
      {FFN_NORM, REQUIRED, width, 0, &l->ffn_norm},
      {W_GATE, REQUIRED, ff, width, &l->w_gate},
      {W_UP, REQUIRED, ff, width, &l->w_up},
      {W_DOWN, REQUIRED, width, ff, &l->w_down},
  };
  enum source_kind kind = source_kind(b->model->source);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char name[SITS_MAX_NAME];
    snprintf(name, sizeof name, kind == SOURCE_GGUF ? "blk.%d.%s" : "model.layers.%d.%s", number, part_names[kind][rows[i].part]);
    enum sits_status status = bind(b, name, rows[i].presence, rows[i].rows, rows[i].columns, rows[i].out);
    if (status) return status;
  }
  return SITS_OK;
}

/* An engine file that holds a head needs it, whatever its origin's configuration says: rotation unties the two. */
static bool ties_head(const struct binder *b)
{
  const struct source *source = b->model->source;
  return b->expect.ties_head && !(source_engine(source) && source_tensor(source, "lm_head.weight"));
}

static enum sits_status bind_outer(struct binder *b)
{
  struct model *m = b->model;
  struct model_config *c = &m->config;
  bool is_gguf = source_kind(m->source) == SOURCE_GGUF;
  const char *embd = is_gguf ? "token_embd.weight" : "model.embed_tokens.weight";
  const struct sits_utd *t = source_tensor(m->source, embd);
  if (t && c->n_vocab == 0 && t->n_dims == 2) { /* the file does not say how many */
    if (t->dims[0] < 1 || t->dims[0] > 1 << 22)
      return sits_fail_param(b->err, SITS_FORMAT, embd, "%s: tensor '%s': too many rows", name_path_tail(source_path(m->source)), embd);
    c->n_vocab = (int32_t)t->dims[0];
  }
  enum sits_status status = bind(b, embd, REQUIRED, c->n_vocab, c->n_embd, &m->tok_embd);
  if (!status) status = bind(b, is_gguf ? "output_norm.weight" : "model.norm.weight", REQUIRED, c->n_embd, 0, &m->output_norm);
  if (!status && !ties_head(b))
    status = bind(b, is_gguf ? "output.weight" : "lm_head.weight", b->expect.head, c->n_vocab, c->n_embd, &m->output);
  if (status) return status;
  c->tied_head = !m->output;
  if (!m->output) m->output = m->tok_embd;
  return SITS_OK;
}

/* Tensors that take no part in the computation: buffers of old checkpoints, and a stored copy of a tied head. */
static bool is_ignored(const struct binder *b, const char *name)
{
  static const char buffer[] = ".self_attn.rotary_emb.inv_freq";
  size_t size = strlen(name), suffix = sizeof buffer - 1;
  if (source_kind(b->model->source) != SOURCE_HF) return false;
  if (ties_head(b) && strcmp(name, "lm_head.weight") == 0) return true;
  return size > suffix && strcmp(name + size - suffix, buffer) == 0;
}

static enum sits_status check_all_used(const struct binder *b)
{
  const struct source *source = b->model->source;
  for (int64_t i = 0; i < source_n_tensors(source); i++) {
    const char *name = source_tensor_at(source, i)->name;
    if (name_index_find(&b->used, name, strlen(name)) >= 0 || is_ignored(b, name)) continue;
    char printable[NAME_INDEX_MAX_PRINTED];
    name_printable(printable, name, strlen(name));
    return sits_fail_param(b->err, SITS_UNSUPPORTED, printable, "%s: tensor '%s' is not part of architecture %s as it is known here",
                           name_path_tail(source_path(source)), printable, model_arch_name(b->model->config.arch));
  }
  return SITS_OK;
}

/* Llama 3.x GGUF files carry their scaling as divisors of the frequencies. */
static enum sits_status compute_rope(struct binder *b)
{
  struct model *m = b->model;
  const struct sits_utd *tensor = NULL;
  int32_t n = m->config.rope_dims / 2;
  enum presence presence = source_kind(m->source) == SOURCE_GGUF ? OPTIONAL : ABSENT;
  enum sits_status status = bind(b, "rope_freqs.weight", presence, n, 0, &tensor);
  if (status) return status;
  m->rope_inv_freq = mem_calloc((size_t)n, sizeof(float));
  float *factors = tensor ? mem_calloc((size_t)n, sizeof(float)) : NULL;
  if (!m->rope_inv_freq || (tensor && !factors)) {
    mem_free(factors);
    return sits_fail(b->err, SITS_NOMEM, "out of memory for the RoPE table");
  }
  if (tensor) dequant_row(tensor->dtype, tensor->data, n, factors);
  for (int32_t i = 0; i < n && tensor && !status; i++)
    if (!(factors[i] > 0) || isinf(factors[i]))
      status = sits_fail_param(b->err, SITS_FORMAT, tensor->name, "tensor '%s': value %d is no positive number", tensor->name, i);
  if (!status) m->rope_magnitude = model_rope_frequencies(&m->config, factors, m->rope_inv_freq);
  mem_free(factors);
  return status;
}

/* ---- open and close ---- */

static enum sits_status load(struct model *m, struct sits_error *err)
{
  struct binder b = {.model = m, .err = err};
  bool is_gguf = source_kind(m->source) == SOURCE_GGUF;
  enum sits_status status = is_gguf ? model_read_gguf(m->source, &m->config, &b.expect, err)
                                    : model_read_hf(m->source, &m->config, &b.expect, err);
  if (!status) status = model_check_config(m->source, &m->config, err);
  if (status) return status;
  m->layers = mem_calloc((size_t)m->config.n_layers, sizeof *m->layers);
  if (!m->layers || !name_index_init(&b.used, (uint64_t)source_n_tensors(m->source)))
    return sits_fail(err, SITS_NOMEM, "%s: out of memory for the layer table", name_path_tail(source_path(m->source)));
  status = bind_outer(&b);
  for (int32_t i = 0; i < m->config.n_layers && !status; i++) status = bind_layer(&b, i);
  if (!status) status = compute_rope(&b);
  if (!status) status = check_all_used(&b);
  if (!status) status = model_read_engine(m, err);
  name_index_fini(&b.used);
  return status;
}

enum sits_status model_open(const char *path, struct model **out, struct sits_error *err)
{
  static const char synthetic[] = "synthetic:";
  if (strncmp(path, synthetic, sizeof synthetic - 1) == 0) return model_synthetic(path + sizeof synthetic - 1, out, err);
  struct model *m = mem_calloc(1, sizeof *m);
  if (!m) return sits_fail(err, SITS_NOMEM, "%s: out of memory", name_path_tail(path));
  enum sits_status status = source_open(path, &m->source, err);
  if (!status) status = load(m, err);
  if (!status) *out = m;
  else model_close(m);
  return status;
}

void model_close(struct model *m)
{
  if (!m) return;
  mem_free(m->layers);
  mem_free(m->rope_inv_freq);
  mem_free(m->synthetic);
  mem_free(m->outliers);
  if (m->source) source_close(m->source);
  mem_free(m);
}
