/* model_open: configurations of every family and form, RoPE scalings against independent figures, and refusals that name the fault. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/model.h"
#include "tiny_model.h"

static char root[] = "/tmp/sits_model_XXXXXX";
static char gguf_path[64];
static const struct tiny_change unchanged;

static int make_root(void **state)
{
  if (!mkdtemp(root)) return -1;
  snprintf(gguf_path, sizeof gguf_path, "%s/m.gguf", root);
  return 0;
}

static int remove_root(void **state)
{
  static const char *const names[] = {"config.json", "model.safetensors", "m.gguf"};
  char path[128];
  for (size_t i = 0; i < 3; i++) {
    snprintf(path, sizeof path, "%s/%s", root, names[i]);
    unlink(path);
  }
  return rmdir(root);
}

static struct model *open_ok(const char *path)
{
  struct model *m = NULL;
  struct sits_error err = {0};
  if (model_open(path, &m, &err)) fail_msg("%s", err.text);
  return m;
}

static void refuse(const char *path, enum sits_status want, const char *text)
{
  struct model *m = NULL;
  struct sits_error err = {0};
  enum sits_status got = model_open(path, &m, &err);
  if (got != want || !strstr(err.text, text)) fail_msg("got %d '%s', want %d '%s'", got, err.text, want, text);
  assert_null(m);
}

/* ---- Hugging Face ---- */

static struct model *open_hf(const char *config, bool has_head, bool has_bias, bool has_qk_norm)
{
  assert_true(tiny_write_hf(root, config, &unchanged, has_head, has_bias, has_qk_norm));
  return open_ok(root);
}

static void hf_llama(void **state)
{
  struct model *m = open_hf("{\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":true}", false, false, false);
  const struct model_config *c = &m->config;
  assert_int_equal(c->arch, MODEL_LLAMA);
  assert_int_equal(c->n_layers, TINY_L);
  assert_int_equal(c->n_embd, TINY_E);
  assert_int_equal(c->n_heads, TINY_H);
  assert_int_equal(c->n_kv_heads, TINY_G);
  assert_int_equal(c->head_dim, TINY_D);
  assert_int_equal(c->n_ff, TINY_F);
  assert_int_equal(c->n_vocab, TINY_V);
  assert_int_equal(c->max_context, 2048);
  assert_int_equal(c->sliding_window, 0);
  assert_int_equal(c->rope_style, ROPE_HALF_SPLIT);
  assert_true(c->rms_eps == 1e-5f);
  assert_true(c->rope_theta == 10000);
  assert_true(c->tied_head);
  assert_ptr_equal(m->output, m->tok_embd);
  assert_string_equal(m->layers[1].w_down->name, "model.layers.1.mlp.down_proj.weight");
  assert_null(m->layers[0].bq);
  assert_null(m->layers[0].q_norm);
  model_close(m);
  m = open_hf("{\"num_key_value_heads\":1,\"attention_bias\":false,\"sliding_window\":512}", true, false, false);
  assert_true(m->config.rms_eps == 1e-6f);
  assert_false(m->config.tied_head);
  assert_string_equal(m->output->name, "lm_head.weight");
  assert_int_equal(m->config.sliding_window, 0); /* Llama has none */
  model_close(m);
  struct tiny_change buffer = {.with = "model.layers.0.self_attn.rotary_emb.inv_freq", .with_rows = 16}; /* as Llama 2 files have it */
  assert_true(tiny_write_hf(root, "{}", &buffer, true, false, false));
  model_close(open_ok(root));
  m = open_hf("{\"tie_word_embeddings\":true}", true, false, false); /* a stored copy of the head is not used */
  assert_ptr_equal(m->output, m->tok_embd);
  model_close(m);
}

static void hf_mistral(void **state)
{
  static const struct { const char *config; int window; } cases[] = {
      {"{\"architectures\":[\"MistralForCausalLM\"]}", 4096},
      {"{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":null}", 0},
      {"{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":128}", 128},
      {"{\"architectures\":[\"MistralForCausalLM\"],\"sliding_window\":128,\"layer_types\":[\"full_attention\",\"full_attention\"]}", 0},
      {"{\"architectures\":[\"Qwen2ForCausalLM\"],\"sliding_window\":128}", 0},
      {"{\"architectures\":[\"Qwen2ForCausalLM\"],\"sliding_window\":128,\"use_sliding_window\":true}", 0}, /* from layer 28 on */
      {"{\"architectures\":[\"Qwen2ForCausalLM\"],\"sliding_window\":128,\"use_sliding_window\":true,\"max_window_layers\":0}", 128},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct model *m = open_hf(cases[i].config, true, strstr(cases[i].config, "Qwen2") != NULL, false);
    if (m->config.sliding_window != cases[i].window) fail_msg("%s: window %d", cases[i].config, m->config.sliding_window);
    model_close(m);
  }
  refuse("/nonexistent", SITS_NOT_FOUND, "No such file");
}

static void hf_qwen(void **state)
{
  struct model *m = open_hf("{\"architectures\":[\"Qwen2ForCausalLM\"]}", true, true, false);
  assert_int_equal(m->config.arch, MODEL_QWEN2);
  assert_string_equal(m->layers[0].bk->name, "model.layers.0.self_attn.k_proj.bias");
  assert_null(m->layers[0].bo);
  model_close(m);
  m = open_hf("{\"architectures\":[\"Qwen3ForCausalLM\"]}", true, false, true);
  assert_int_equal(m->config.arch, MODEL_QWEN3);
  assert_string_equal(m->layers[1].k_norm->name, "model.layers.1.self_attn.k_norm.weight");
  assert_null(m->layers[0].bq);
  model_close(m);
  m = open_hf("{\"architectures\":null,\"model_type\":\"qwen3\"}", true, false, true);
  assert_int_equal(m->config.arch, MODEL_QWEN3);
  model_close(m);
}

static void hf_refusals(void **state)
{
  static const struct { const char *config; enum sits_status status; const char *text; } cases[] = {
      {"{\"architectures\":[\"GemmaForCausalLM\"]}", SITS_UNSUPPORTED, "architecture 'GemmaForCausalLM' is not supported"},
      {"{\"architectures\":null}", SITS_FORMAT, "'architectures' is missing"},
      {"{\"hidden_size\":null}", SITS_FORMAT, "'hidden_size' is missing"},
      {"{\"hidden_size\":\"64\"}", SITS_FORMAT, "'hidden_size' is no whole number"},
      {"{\"hidden_size\":-1}", SITS_FORMAT, "'hidden_size' is out of range"},
      {"{\"num_hidden_layers\":0}", SITS_FORMAT, "number of layers 0 is not within"},
      {"{\"num_hidden_layers\":3}", SITS_FORMAT, "tensor 'model.layers.2.input_layernorm.weight' is missing"},
      {"{\"num_hidden_layers\":1}", SITS_UNSUPPORTED, "tensor 'model.layers.1."},
      {"{\"num_attention_heads\":3,\"num_key_value_heads\":2}", SITS_FORMAT, "3 heads are no multiple of 2 KV heads"},
      {"{\"num_key_value_heads\":0}", SITS_FORMAT, "number of KV heads 0"},
      {"{\"head_dim\":33}", SITS_FORMAT, "odd"},
      {"{\"vocab_size\":41}", SITS_FORMAT, "'model.embed_tokens.weight': shape [40][64], but the configuration wants [41][64]"},
      {"{\"hidden_act\":\"gelu\"}", SITS_UNSUPPORTED, "'hidden_act'"},
      {"{\"mlp_bias\":true}", SITS_UNSUPPORTED, "'mlp_bias'"},
      {"{\"attention_bias\":true}", SITS_FORMAT, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"},
      {"{\"attention_bias\":1}", SITS_FORMAT, "'attention_bias' is neither"},
      {"{\"quantization_config\":{\"quant_method\":\"gptq\"}}", SITS_UNSUPPORTED, "quantised by 'gptq'"},
      {"{\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2.0}}", SITS_UNSUPPORTED, "RoPE scaling 'dynamic'"},
      {"{\"rope_scaling\":{\"type\":\"longrope\"}}", SITS_UNSUPPORTED, "RoPE scaling 'longrope'"},
      {"{\"rope_scaling\":{\"factor\":2.0}}", SITS_FORMAT, "'rope_type' is missing"},
      {"{\"rope_scaling\":{\"type\":\"linear\"}}", SITS_FORMAT, "'factor' is missing"},
      {"{\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.0}}", SITS_FORMAT, "scaling factor 0"},
      {"{\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2.0}}", SITS_FORMAT, "'low_freq_factor' is missing"},
      {"{\"rope_scaling\":\"linear\"}", SITS_FORMAT, "'rope_scaling' is no object"},
      {"{\"rope_theta\":-1}", SITS_FORMAT, "'rope_theta' is not above 0"},
      {"{\"partial_rotary_factor\":2}", SITS_FORMAT, "'partial_rotary_factor'"},
      {"{\"architectures\":[\"MistralForCausalLM\"],\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", SITS_UNSUPPORTED,
       "'sliding_window' holds for some layers only"},
      {"{\"architectures\":[\"MistralForCausalLM\"],\"layer_types\":[\"full_attention\"]}", SITS_FORMAT, "'layer_types'"},
      {"{\"architectures\":[\"Qwen2ForCausalLM\"],\"use_sliding_window\":true,\"max_window_layers\":1}", SITS_UNSUPPORTED,
       "'sliding_window' holds for some layers only"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    assert_true(tiny_write_hf(root, cases[i].config, &unchanged, true, false, false));
    refuse(root, cases[i].status, cases[i].text);
  }
  static const struct { struct tiny_change change; enum sits_status status; const char *text; } weights[] = {
      {{.without = "lm_head.weight"}, SITS_FORMAT, "tensor 'lm_head.weight' is missing"},
      {{.without = "model.layers.1.self_attn.o_proj.weight"}, SITS_FORMAT, "tensor 'model.layers.1.self_attn.o_proj.weight' is missing"},
      {{.reshape = "model.layers.0.mlp.up_proj.weight"}, SITS_FORMAT, "'model.layers.0.mlp.up_proj.weight': shape [97][64]"},
      {{.reshape = "model.norm.weight"}, SITS_FORMAT, "'model.norm.weight': shape [65], but the configuration wants [64]"},
      {{.type_of = "model.norm.weight", .type = "I32"}, SITS_UNSUPPORTED, "'model.norm.weight': type i32"},
      {{.with = "model.layers.0.self_attn.q_norm.weight", .with_rows = 32}, SITS_UNSUPPORTED,
       "'model.layers.0.self_attn.q_norm.weight' is not part"},
      {{.with = "model.layers.0.block_sparse_moe.gate.weight", .with_rows = 8}, SITS_UNSUPPORTED,
       "block_sparse_moe.gate.weight' is not part"},
  };
  for (size_t i = 0; i < sizeof weights / sizeof weights[0]; i++) {
    assert_true(tiny_write_hf(root, "{}", &weights[i].change, true, false, false));
    refuse(root, weights[i].status, weights[i].text);
  }
}

static void rope_scalings(void **state)
{
  static const struct { const char *config; int context; double magnitude; int n; double inv_freq[16]; } cases[] = {
#include "rope_vectors.inc"
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct model *m = open_hf(cases[i].config, true, false, false);
    assert_int_equal(m->config.rope_dims, 2 * cases[i].n);
    if (m->config.max_context != cases[i].context) fail_msg("%s: context %d", cases[i].config, m->config.max_context);
    if (fabs(m->rope_magnitude - cases[i].magnitude) > 1e-6) fail_msg("%s: magnitude %g", cases[i].config, (double)m->rope_magnitude);
    for (int k = 0; k < cases[i].n; k++)
      if (fabs(m->rope_inv_freq[k] / cases[i].inv_freq[k] - 1) > 2e-7)
        fail_msg("%s: frequency %d is %.9g, not %.9g", cases[i].config, k, (double)m->rope_inv_freq[k], cases[i].inv_freq[k]);
    model_close(m);
  }
}

/* ---- GGUF ---- */

static uint64_t put_base_keys(struct buf *b, const char *arch, const char *without)
{
  const struct { const char *suffix; uint32_t value; } keys[] = {
      {"block_count", TINY_L}, {"embedding_length", TINY_E}, {"feed_forward_length", TINY_F}, {"attention.head_count", TINY_H},
      {"attention.head_count_kv", TINY_G}, {"context_length", 2048}};
  uint64_t n = 2;
  char key[96];
  put_key_text(b, "general.architecture", arch);
  snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
  put_key_f32(b, key, 1e-5f);
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    if (without && strcmp(without, keys[i].suffix) == 0) continue;
    snprintf(key, sizeof key, "%s.%s", arch, keys[i].suffix);
    put_key_u32(b, key, keys[i].value);
    n++;
  }
  return n;
}

static void gguf_families(void **state)
{
  static const struct { const char *name; enum model_arch arch; enum rope_style style; bool has_bias, has_qk_norm, has_head; } cases[] = {
      {"llama", MODEL_LLAMA, ROPE_INTERLEAVED, false, false, false},
      {"llama", MODEL_LLAMA, ROPE_INTERLEAVED, true, false, true},
      {"qwen2", MODEL_QWEN2, ROPE_HALF_SPLIT, true, false, true},
      {"qwen3", MODEL_QWEN3, ROPE_HALF_SPLIT, false, true, false}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct buf keys;
    buf_init(&keys, 1 << 16);
    uint64_t n = put_base_keys(&keys, cases[i].name, NULL);
    put_key_text(&keys, "general.name", "Tiny");
    assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, cases[i].has_head, cases[i].has_bias, cases[i].has_qk_norm));
    struct model *m = open_ok(gguf_path);
    assert_int_equal(m->config.arch, cases[i].arch);
    assert_int_equal(m->config.rope_style, cases[i].style);
    assert_int_equal(m->config.n_vocab, TINY_V);
    assert_int_equal(m->config.head_dim, TINY_D);
    assert_int_equal(m->config.rope_dims, TINY_D);
    assert_true(m->config.rope_theta == 10000);
    assert_true(m->config.tied_head == !cases[i].has_head);
    assert_true((m->layers[1].bv != NULL) == cases[i].has_bias);
    assert_true((m->layers[1].q_norm != NULL) == cases[i].has_qk_norm);
    assert_string_equal(m->config.name, "Tiny");
    assert_string_equal(model_arch_name(m->config.arch), cases[i].name);
    model_close(m);
    buf_fini(&keys);
  }
}

static void gguf_rope(void **state)
{
  struct buf keys;
  buf_init(&keys, 1 << 16);
  uint64_t n = put_base_keys(&keys, "llama", NULL);
  put_key_text(&keys, "llama.rope.scaling.type", "linear");
  put_key_f32(&keys, "llama.rope.scaling.factor", 4);
  put_key_u32(&keys, "llama.attention.sliding_window", 256);
  assert_true(tiny_write_gguf(gguf_path, &keys, n + 3, &unchanged, false, false, false));
  struct model *m = open_ok(gguf_path);
  assert_int_equal(m->config.sliding_window, 256);
  assert_true(m->rope_inv_freq[0] == 0.25f);
  assert_true(m->rope_magnitude == 1);
  model_close(m);
  buf_clear(&keys);
  n = put_base_keys(&keys, "qwen2", NULL);
  put_key_text(&keys, "qwen2.rope.scaling.type", "yarn");
  put_key_f32(&keys, "qwen2.rope.scaling.factor", 4);
  put_key_u32(&keys, "qwen2.rope.scaling.original_context_length", 512);
  assert_true(tiny_write_gguf(gguf_path, &keys, n + 3, &unchanged, false, true, false));
  m = open_ok(gguf_path);
  assert_true(m->rope_inv_freq[0] == 1);
  assert_true(fabs(m->rope_magnitude - (1 + 0.1 * log(4))) < 1e-6);
  assert_true(fabs(m->rope_inv_freq[15] / (pow(10000, -15.0 / 16) / 4) - 1) < 1e-6);
  model_close(m);
  buf_clear(&keys);
  n = put_base_keys(&keys, "llama", NULL); /* rope_freqs.weight of zeros is refused, by value */
  struct tiny_change freqs = {.with = "rope_freqs.weight", .with_rows = TINY_D / 2};
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &freqs, false, false, false));
  refuse(gguf_path, SITS_FORMAT, "'rope_freqs.weight': value 0");
  FILE *f = fopen(gguf_path, "r+b"); /* its bytes are the file's last: 16 floats in 64 bytes */
  float divisors[TINY_D / 2];
  for (int i = 0; i < TINY_D / 2; i++) divisors[i] = i < 8 ? 1 : 8;
  assert_int_equal(fseek(f, -(long)sizeof divisors, SEEK_END), 0);
  assert_int_equal(fwrite(divisors, sizeof divisors, 1, f), 1);
  fclose(f);
  m = open_ok(gguf_path);
  assert_true(fabs(m->rope_inv_freq[7] / pow(10000, -7.0 / 16) - 1) < 1e-6);
  assert_true(fabs(m->rope_inv_freq[8] / (pow(10000, -8.0 / 16) / 8) - 1) < 1e-6);
  model_close(m);
  buf_fini(&keys);
}

/* As llama.cpp reads them: a factor without a type is linear, 0 none, and the older key counts where the newer one is absent. */
static void gguf_factor_without_type(void **state)
{
  static const struct { const char *key; float value, first; } cases[] = {
      {"llama.rope.scaling.factor", 4, 0.25F}, {"llama.rope.scaling.factor", 1, 1}, {"llama.rope.scaling.factor", 0, 1},
      {"llama.rope.scale_linear", 2, 0.5F},    {"llama.rope.scale_linear", 0, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct buf keys;
    buf_init(&keys, 1 << 16);
    uint64_t n = put_base_keys(&keys, "llama", NULL);
    put_key_f32(&keys, cases[i].key, cases[i].value);
    assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, false, false, false));
    struct model *m = open_ok(gguf_path);
    if (m->rope_inv_freq[0] != cases[i].first) fail_msg("case %zu: %g", i, (double)m->rope_inv_freq[0]);
    model_close(m);
    buf_clear(&keys);
    n = put_base_keys(&keys, "llama", NULL);
    put_key_f32(&keys, "llama.rope.scaling.attn_factor", 1.25F);
    assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, false, false, false));
    refuse(gguf_path, SITS_UNSUPPORTED, "'llama.rope.scaling.attn_factor' other than 1 goes with yarn");
    buf_fini(&keys);
  }
}

static void gguf_refusals(void **state)
{
  static const struct { const char *key; uint32_t value; enum sits_status status; const char *text; } cases[] = {
      {"llama.expert_count", 8, SITS_UNSUPPORTED, "'llama.expert_count': mixtures"},
      {"llama.attention.value_length", 16, SITS_UNSUPPORTED, "'llama.attention.value_length'"},
      {"llama.attention.key_length", 0, SITS_UNSUPPORTED, "'llama.attention.value_length'"},
      {"llama.vocab_size", 41, SITS_FORMAT, "'token_embd.weight': shape [40][64], but the configuration wants [41][64]"},
      {"llama.rope.dimension_count", 34, SITS_FORMAT, "rotated dimensions 34"},
      {"llama.rope.dimension_count", 4000000000u, SITS_FORMAT, "'llama.rope.dimension_count' is out of range"},
      {"llama.rope.freq_base", 5, SITS_FORMAT, "'llama.rope.freq_base' is no real number"},
      {"llama.rope.scaling.type", 5, SITS_FORMAT, "'llama.rope.scaling.type' is no string"},
      {"split.count", 3, SITS_UNSUPPORTED, "split into 3 parts"},
  };
  struct buf keys;
  buf_init(&keys, 1 << 16);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    uint64_t n = put_base_keys(&keys, "llama", NULL);
    put_key_u32(&keys, cases[i].key, cases[i].value);
    if (strcmp(cases[i].key, "llama.attention.key_length") == 0) {
      put_key_u32(&keys, "llama.attention.value_length", 32);
      n++;
    }
    assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, false, false, false));
    refuse(gguf_path, cases[i].status, cases[i].text);
    buf_clear(&keys);
  }
  uint64_t n = put_base_keys(&keys, "llama", "block_count");
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &unchanged, false, false, false));
  refuse(gguf_path, SITS_FORMAT, "'llama.block_count' is missing");
  buf_clear(&keys);
  n = put_base_keys(&keys, "gemma2", NULL);
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &unchanged, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "architecture 'gemma2' is not supported");
  buf_clear(&keys);
  n = put_base_keys(&keys, "llama", "attention.head_count_kv");
  put_key(&keys, "llama.attention.head_count_kv", 9);
  put_u32(&keys, 4);
  put_u64(&keys, 2);
  put_u32(&keys, 1);
  put_u32(&keys, 2);
  assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "'llama.attention.head_count_kv' differs by layer");
  buf_clear(&keys);
  n = put_base_keys(&keys, "qwen2", NULL);
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &unchanged, false, false, false));
  refuse(gguf_path, SITS_FORMAT, "'blk.0.attn_q.bias' is missing");
  buf_clear(&keys);
  n = put_base_keys(&keys, "llama", NULL);
  put_key_text(&keys, "llama.rope.scaling.type", "longrope");
  assert_true(tiny_write_gguf(gguf_path, &keys, n + 1, &unchanged, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "scaling 'longrope'");
  buf_clear(&keys);
  n = put_base_keys(&keys, "llama", NULL);
  struct tiny_change integer = {.type_of = "blk.1.ffn_up.weight", .type = "26"};
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &integer, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "'blk.1.ffn_up.weight': type i32");
  struct tiny_change block = {.type_of = "blk.1.ffn_norm.weight", .type = "08"};
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &block, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "'blk.1.ffn_norm.weight': type q8_0");
  struct tiny_change unknown = {.with = "blk.0.attn_sinks.weight", .with_rows = 4};
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &unknown, false, false, false));
  refuse(gguf_path, SITS_UNSUPPORTED, "'blk.0.attn_sinks.weight' is not part");
  struct tiny_change block_weight = {.type_of = "blk.1.ffn_up.weight", .type = "08"}; /* the same in a matrix is fine */
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &block_weight, false, false, false));
  model_close(open_ok(gguf_path));
  buf_fini(&keys);
}

/* ---- both ---- */

static void fail_each_allocation(const char *path)
{
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct model *m = NULL;
    struct sits_error err = {0};
    mem_fault_arm(n);
    enum sits_status status = model_open(path, &m, &err);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (!fired) {
      assert_int_equal(status, SITS_OK);
      model_close(m);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_null(m);
    assert_int_equal(mem_live_blocks(), before);
  }
  assert_int_equal(mem_live_blocks(), before);
}

static void allocation_failures_are_clean(void **state)
{
  struct buf keys;
  buf_init(&keys, 1 << 16);
  uint64_t n = put_base_keys(&keys, "llama", NULL);
  assert_true(tiny_write_gguf(gguf_path, &keys, n, &unchanged, false, false, false));
  assert_true(tiny_write_hf(root, "{}", &unchanged, true, false, false));
  buf_fini(&keys);
  fail_each_allocation(root);
  fail_each_allocation(gguf_path);
}

static void shared_models(void **state)
{
  char path[512];
  const char *shared = getenv("SITS_SHARED_DATA");
  if (!shared) shared = "../shared/data";
  snprintf(path, sizeof path, "%s/models/stories260K/stories260K.gguf", shared);
  if (access(path, R_OK) != 0) skip();
  struct model *m = open_ok(path);
  assert_int_equal(m->config.max_context, 2048);
  assert_int_equal(m->config.n_kv_heads, 4);
  assert_int_equal(m->config.rope_style, ROPE_INTERLEAVED);
  assert_false(m->config.tied_head); /* the file holds the head on its own */
  model_close(m);
  snprintf(path, sizeof path, "%s/models/stories260K/hf", shared);
  m = open_ok(path);
  assert_int_equal(m->config.max_context, 512);
  assert_true(m->config.tied_head);
  assert_string_equal(m->config.name, "hf");
  model_close(m);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(hf_llama), cmocka_unit_test(hf_mistral), cmocka_unit_test(hf_qwen), cmocka_unit_test(hf_refusals),
      cmocka_unit_test(rope_scalings), cmocka_unit_test(gguf_families), cmocka_unit_test(gguf_rope), cmocka_unit_test(gguf_refusals),
      cmocka_unit_test(gguf_factor_without_type),
      cmocka_unit_test(allocation_failures_are_clean), cmocka_unit_test(shared_models)};
  return cmocka_run_group_tests(tests, make_root, remove_root);
}
