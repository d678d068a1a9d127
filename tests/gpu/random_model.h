/* A random model of two layers with heads of 64 channels, as a GGUF file in f32. One test program includes it. */
#ifndef SITS_TESTS_RANDOM_MODEL_H
#define SITS_TESTS_RANDOM_MODEL_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "gguf_builder.h"
#include "gpu_test.h"

enum { E = 256, HEADS = 4, KV_HEADS = 2, HEAD = 64, FF = 640, VOCAB = 320, LAYERS = 2, MAX_TENSORS = 3 + 9 * LAYERS };

struct tensor { char name[48]; int64_t rows, cols; float size; };

static const struct { const char *name; int64_t rows, cols; float size; } of_layer[] = {
    {"attn_norm", 0, E, 0}, {"attn_q", HEADS * HEAD, E, 0.35F}, {"attn_k", KV_HEADS * HEAD, E, 0.35F}, {"attn_v", KV_HEADS * HEAD, E, 1},
    {"attn_output", E, HEADS * HEAD, 0.4F}, {"ffn_norm", 0, E, 0}, {"ffn_gate", FF, E, 1}, {"ffn_up", FF, E, 1}, {"ffn_down", E, FF, 0.4F}};

static int32_t list_tensors(struct tensor *list)
{
  int32_t n = 0;
  list[n++] = (struct tensor){"token_embd.weight", VOCAB, E, 1};
  list[n++] = (struct tensor){"output_norm.weight", 0, E, 0};
  list[n++] = (struct tensor){"output.weight", VOCAB, E, 1};
  for (int32_t l = 0; l < LAYERS; l++)
    for (size_t i = 0; i < sizeof of_layer / sizeof *of_layer; i++, n++) {
      list[n] = (struct tensor){.rows = of_layer[i].rows, .cols = of_layer[i].cols, .size = of_layer[i].size};
      snprintf(list[n].name, sizeof list[n].name, "blk.%d.%s.weight", (int)l, of_layer[i].name);
    }
  return n;
}

/* Gains are ones. Matrices of unit gain times their size; groups of 128 columns of the layers' differ by up to 16 times. */
static void put_values(struct buf *file, const struct tensor *t)
{
  const bool is_layer = strncmp(t->name, "blk.", 4) == 0;
  const float unit = strcmp(t->name, "token_embd.weight") == 0 ? 1.7F : sqrtf(3.F / (float)t->cols);
  for (int64_t r = 0; r < (t->rows ? t->rows : 1); r++) {
    float group = 1;
    for (int64_t c = 0; c < t->cols; c++) {
      if (is_layer && c % 128 == 0) group = powf(4, rand_unit());
      put_f32(file, t->rows ? rand_unit() * unit * group * t->size : 1.F);
    }
  }
}

static bool write_gguf(const char *path)
{
  static const struct { const char *key; uint32_t value; } numbers[] = {
      {"llama.block_count", LAYERS}, {"llama.embedding_length", E}, {"llama.feed_forward_length", FF},
      {"llama.attention.head_count", HEADS}, {"llama.attention.head_count_kv", KV_HEADS}, {"llama.context_length", 2048}};
  struct tensor list[MAX_TENSORS];
  const int32_t n = list_tensors(list);
  struct buf file;
  buf_init(&file, 1 << 25);
  put_header(&file, 3, (uint64_t)n, 8);
  put_key_text(&file, "general.architecture", "llama");
  for (size_t i = 0; i < 6; i++) put_key_u32(&file, numbers[i].key, numbers[i].value);
  put_key_f32(&file, "llama.attention.layer_norm_rms_epsilon", 1e-5F);
  uint64_t at = 0;
  for (int32_t i = 0; i < n; i++) {
    const uint64_t dims[2] = {(uint64_t)list[i].cols, (uint64_t)list[i].rows};
    put_tensor(&file, list[i].name, list[i].rows ? 2 : 1, dims, 0, at);
    at += (uint64_t)((list[i].rows ? list[i].rows : 1) * list[i].cols) * 4; /* multiples of 32 all */
  }
  pad_to(&file, 32);
  for (int32_t i = 0; i < n; i++) put_values(&file, &list[i]);
  FILE *f = fopen(path, "wb");
  bool ok = f != NULL && !file.failed && fwrite(file.data, 1, file.size, f) == file.size;
  if (f != NULL) ok = fclose(f) == 0 && ok;
  buf_fini(&file);
  return ok;
}

#endif
