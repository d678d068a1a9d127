/* Writes tiny models of all-zero weights, as a Hugging Face directory or a GGUF file, with the changes a test asks for. */
#ifndef TESTS_TINY_MODEL_H
#define TESTS_TINY_MODEL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "gguf_builder.h"

enum { TINY_E = 64, TINY_H = 2, TINY_G = 1, TINY_D = 32, TINY_F = 96, TINY_V = 40, TINY_L = 2 };

struct tiny_change {               /* NULL or zero: none */
  const char *without;             /* leave this tensor out */
  const char *with;                /* add this tensor, [with_rows][with_columns] or a vector when columns is 0 */
  int64_t with_rows, with_columns;
  const char *type_of, *type;      /* give that tensor this type: safetensors' name for HF, e.g. "I32"; ggml number as text for GGUF */
  const char *reshape;             /* give this tensor one row more */
};

struct tiny_tensor { char name[96]; int64_t rows, columns; };
struct tiny_list { struct tiny_tensor items[64]; int n; };

static inline void tiny_add(struct tiny_list *list, const struct tiny_change *change, const char *name, int64_t rows, int64_t columns)
{
  if (change->without && strcmp(change->without, name) == 0) return;
  if (change->reshape && strcmp(change->reshape, name) == 0) rows++;
  struct tiny_tensor *t = &list->items[list->n++];
  snprintf(t->name, sizeof t->name, "%s", name);
  t->rows = rows;
  t->columns = columns;
}

/* names: embedding, norm, head (NULL: none), then of a layer in the order below; biases when has_bias, head norms when has_qk_norm. */
static inline void tiny_tensors(struct tiny_list *list, const struct tiny_change *change, bool is_gguf, bool has_head, bool has_bias,
                                bool has_qk_norm)
{
  static const char *const names[2][15] = {
      {"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
       "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
       "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.q_norm.weight", "self_attn.k_norm.weight"},
      {"attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "ffn_norm.weight", "ffn_gate.weight",
       "ffn_up.weight", "ffn_down.weight", "attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_q_norm.weight", "attn_k_norm.weight"}};
  static const int64_t shapes[14][2] = {
      {TINY_E, 0}, {TINY_H * TINY_D, TINY_E}, {TINY_G * TINY_D, TINY_E}, {TINY_G * TINY_D, TINY_E}, {TINY_E, TINY_H * TINY_D},
      {TINY_E, 0}, {TINY_F, TINY_E}, {TINY_F, TINY_E}, {TINY_E, TINY_F}, {TINY_H * TINY_D, 0}, {TINY_G * TINY_D, 0}, {TINY_G * TINY_D, 0},
      {TINY_D, 0}, {TINY_D, 0}};
  list->n = 0;
  tiny_add(list, change, is_gguf ? "token_embd.weight" : "model.embed_tokens.weight", TINY_V, TINY_E);
  tiny_add(list, change, is_gguf ? "output_norm.weight" : "model.norm.weight", TINY_E, 0);
  if (has_head) tiny_add(list, change, is_gguf ? "output.weight" : "lm_head.weight", TINY_V, TINY_E);
  for (int layer = 0; layer < TINY_L; layer++)
    for (int i = 0; i < 14; i++) {
      char name[96];
      if ((i >= 9 && i < 12 && !has_bias) || (i >= 12 && !has_qk_norm)) continue;
      snprintf(name, sizeof name, is_gguf ? "blk.%d.%s" : "model.layers.%d.%s", layer, names[is_gguf][i]);
      tiny_add(list, change, name, shapes[i][0], shapes[i][1]);
    }
  if (change->with) tiny_add(list, change, change->with, change->with_rows, change->with_columns);
}

static inline bool tiny_write(const char *path, const void *bytes, size_t n_bytes)
{
  FILE *f = fopen(path, "wb");
  bool is_ok = f && fwrite(bytes, 1, n_bytes, f) == n_bytes;
  if (f) fclose(f);
  return is_ok;
}

/* config: changes to the base configuration as JSON text. False when a file cannot be written. */
static inline bool tiny_write_hf(const char *dir, const char *config, const struct tiny_change *change, bool has_head, bool has_bias,
                                 bool has_qk_norm)
{
  char path[256];
  json_t *whole = json_pack("{s[s]si si si si si si si si}", "architectures", "LlamaForCausalLM", "hidden_size", TINY_E,
                            "intermediate_size", TINY_F, "num_hidden_layers", TINY_L, "num_attention_heads", TINY_H,
                            "num_key_value_heads", TINY_G, "head_dim", TINY_D, "vocab_size", TINY_V, "max_position_embeddings", 2048);
  json_t *changes = json_loads(config, 0, NULL);
  json_object_update(whole, changes);
  snprintf(path, sizeof path, "%s/config.json", dir);
  bool is_ok = changes && json_dump_file(whole, path, 0) == 0;
  json_decref(changes);
  json_decref(whole);

  struct tiny_list list;
  tiny_tensors(&list, change, false, has_head, has_bias, has_qk_norm);
  struct buf header, file;
  buf_init(&header, 1 << 20);
  buf_init(&file, 1 << 24);
  uint64_t at = 0;
  for (int i = 0; i < list.n; i++) {
    const struct tiny_tensor *t = &list.items[i];
    bool is_changed = change->type_of && strcmp(change->type_of, t->name) == 0;
    uint64_t n_bytes = (uint64_t)(t->rows * (t->columns ? t->columns : 1)) * 4;
    buf_printf(&header, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", i ? ',' : '{', t->name, is_changed ? change->type : "F32",
               (long long)t->rows);
    if (t->columns) buf_printf(&header, ",%lld", (long long)t->columns);
    buf_printf(&header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)(at + n_bytes));
    at += n_bytes;
  }
  buf_append_char(&header, '}');
  put_u64(&file, header.size);
  buf_append(&file, header.data, header.size);
  while (at-- > 0) buf_append_char(&file, 0);
  snprintf(path, sizeof path, "%s/model.safetensors", dir);
  is_ok = is_ok && !file.failed && tiny_write(path, file.data, file.size);
  buf_fini(&header);
  buf_fini(&file);
  return is_ok;
}

/* keys: key-value pairs already in GGUF's form, n_keys of them. */
static inline bool tiny_write_gguf(const char *path, const struct buf *keys, uint64_t n_keys, const struct tiny_change *change,
                                   bool has_head, bool has_bias, bool has_qk_norm)
{
  struct tiny_list list;
  tiny_tensors(&list, change, true, has_head, has_bias, has_qk_norm);
  struct buf file;
  buf_init(&file, 1 << 24);
  put_header(&file, 3, (uint64_t)list.n, n_keys);
  buf_append(&file, keys->data, keys->size);
  uint64_t at = 0;
  for (int i = 0; i < list.n; i++) {
    const struct tiny_tensor *t = &list.items[i];
    bool is_changed = change->type_of && strcmp(change->type_of, t->name) == 0;
    uint64_t dims[2] = {(uint64_t)(t->columns ? t->columns : t->rows), (uint64_t)t->rows};
    uint32_t type = is_changed ? (uint32_t)(change->type[0] - '0') * 10 + (uint32_t)(change->type[1] - '0') : 0;
    put_tensor(&file, t->name, t->columns ? 2 : 1, dims, type, at);
    at += (uint64_t)(t->rows * (t->columns ? t->columns : 1)) * 4;
    at = (at + 31) / 32 * 32;
  }
  pad_to(&file, 32);
  while (at-- > 0) buf_append_char(&file, 0);
  bool is_ok = !file.failed && tiny_write(path, file.data, file.size);
  buf_fini(&file);
  return is_ok;
}

#endif
