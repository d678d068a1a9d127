/* Engine files as models: what their meta says reaches the sites, and meta that does not fit the model is refused by layer and site. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mapfile.h"
#include "base/mem.h"
#include "model/model.h"
#include "tensor/engine_file.h"
#include "tensor/gguf.h"
#include "tiny_model.h"

static char gguf_path[64], bin_path[64];

static int setup(void **state)
{
  (void)state;
  struct buf keys;
  snprintf(gguf_path, sizeof gguf_path, "/tmp/engine_model_%d.gguf", (int)getpid());
  snprintf(bin_path, sizeof bin_path, "/tmp/engine_model_%d.bin", (int)getpid());
  buf_init(&keys, 1 << 16);
  put_key_text(&keys, "general.architecture", "llama");
  static const struct { const char *key; uint32_t value; } numbers[] = {
      {"llama.block_count", TINY_L}, {"llama.embedding_length", TINY_E}, {"llama.feed_forward_length", TINY_F},
      {"llama.attention.head_count", TINY_H}, {"llama.attention.head_count_kv", TINY_G}, {"llama.context_length", 2048}};
  for (size_t i = 0; i < 6; i++) put_key_u32(&keys, numbers[i].key, numbers[i].value);
  put_key_f32(&keys, "llama.attention.layer_norm_rms_epsilon", 1e-5F);
  const struct tiny_change none = {0};
  const bool ok = tiny_write_gguf(gguf_path, &keys, 8, &none, false, false, false);
  buf_fini(&keys);
  return ok ? 0 : 1;
}

static int teardown(void **state)
{
  (void)state;
  unlink(gguf_path);
  unlink(bin_path);
  return 0;
}

typedef void change_fn(struct sits_utd *utd);

/* An engine file of the tiny model with that meta; `blob`: name of the metadata blob; change: of its tensors, or NULL. */
static void write_changed(const char *meta_text, const char *blob, change_fn *change)
{
  struct model *model = NULL;
  struct engine_writer *writer = NULL;
  struct sits_error err = {0};
  size_t n_bytes;
  uint64_t n_values;
  uint32_t version;
  struct buf image;
  if (model_open(gguf_path, &model, &err)) fail_msg("%s", err.text);
  assert_int_equal(engine_writer_create(&writer), SITS_OK);
  for (int64_t i = 0; i < source_n_tensors(model->source); i++) {
    struct sits_utd utd = *source_tensor_at(model->source, i);
    if (change) change(&utd);
    assert_int_equal(engine_writer_add_tensor(writer, &utd), SITS_OK);
  }
  const unsigned char *bytes = gguf_metadata(source_gguf(model->source), &n_bytes, &n_values, &version);
  buf_init(&image, 1 << 20);
  put_header(&image, version, 0, n_values);
  buf_append(&image, bytes, n_bytes);
  assert_int_equal(engine_writer_add_blob(writer, blob, image.data, image.size), SITS_OK);
  json_t *meta = json_loads(meta_text, 0, NULL);
  assert_non_null(meta);
  if (engine_writer_finish(writer, meta, bin_path, &err)) fail_msg("%s", err.text);
  json_decref(meta);
  engine_writer_destroy(writer);
  buf_fini(&image);
  model_close(model);
}

static void write_engine(const char *meta_text, const char *blob) { write_changed(meta_text, blob, NULL); }

static void sites_are_read(void **state)
{
  (void)state;
  struct model *m = NULL;
  struct sits_error err = {0};
  write_engine("{\"origin\": \"gguf\", \"kv_cache\": \"int8\", \"sites\": ["
               "{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [0, 5, 63]},"
               "{\"layer\": 1, \"site\": \"down\", \"act\": \"int4\", \"outliers\": [95]},"
               "{\"layer\": 1, \"site\": \"o\", \"act\": \"float\", \"rotation\": 32},"
               "{\"layer\": -1, \"site\": \"head\", \"act\": \"int8\"}]}",
               "metadata.gguf");
  if (model_open(bin_path, &m, &err)) fail_msg("%s", err.text);
  assert_int_equal(m->config.n_embd, TINY_E);
  assert_string_equal(m->kv_codec, "int8");
  const struct act_format *qkv = &m->layers[0].act[MODEL_SITE_QKV], *down = &m->layers[1].act[MODEL_SITE_DOWN];
  assert_int_equal(qkv->kind, ACT_INT4);
  assert_int_equal(qkv->n_outliers, 3);
  assert_int_equal(qkv->outliers[2], 63);
  assert_int_equal(down->n_outliers, 1);
  assert_int_equal(down->outliers[0], 95);
  assert_int_equal(m->layers[1].act[MODEL_SITE_O].kind, ACT_FLOAT);
  assert_int_equal(m->layers[1].act[MODEL_SITE_O].rotation, 32);
  assert_int_equal(down->rotation, 0);
  assert_int_equal(m->layers[0].act[MODEL_SITE_O].kind, ACT_BACKEND);
  assert_int_equal(m->head_act.kind, ACT_INT8);
  model_close(m);
}

static void meta_that_does_not_fit_is_refused(void **state)
{
  (void)state;
  static const struct { const char *meta, *blob, *text; } cases[] = {
      {"{\"sites\": []}", "metadata.gguf", "made from"},
      {"{\"origin\": \"onnx\"}", "metadata.gguf", "made from"},
      {"{\"origin\": \"gguf\"}", "other", "metadata.gguf"},
      {"{\"origin\": \"hf\"}", "metadata.gguf", "config.json"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 2, \"site\": \"qkv\", \"act\": \"int8\"}]}", "metadata.gguf", "layer 2"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"head\", \"act\": \"int8\"}]}", "metadata.gguf", "no such site"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int2\"}]}", "metadata.gguf", "unknown kind"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\"}]}", "metadata.gguf", "unknown kind"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"act\": \"int8\"}]}", "metadata.gguf", "no name"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"site\": \"qkv\", \"act\": \"int8\"}]}", "metadata.gguf", "no name or layer"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\", \"outliers\": [1]}]}", "metadata.gguf",
       "without 4-bit"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [64]}]}", "metadata.gguf",
       "ascending"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [5, 5]}]}", "metadata.gguf",
       "ascending"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [-1]}]}", "metadata.gguf",
       "ascending"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [\"a\"]}]}", "metadata.gguf",
       "ascending"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\"},"
       "{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\"}]}", "metadata.gguf", "twice"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\", \"rotation\": 24}]}", "metadata.gguf",
       "power of two"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\", \"rotation\": 4096}]}", "metadata.gguf",
       "power of two"},
      {"{\"origin\": \"gguf\", \"sites\": {\"layer\": 0, \"site\": \"qkv\", \"act\": \"int8\"}}", "metadata.gguf", "'sites' is no list"},
      {"{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": {\"0\": 1}}]}",
       "metadata.gguf", "ascending"},
      {"{\"origin\": \"gguf\", \"kv_cache\": 8}", "metadata.gguf", "'kv_cache' is no text"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct model *m = NULL;
    struct sits_error err = {0};
    write_engine(cases[i].meta, cases[i].blob);
    const int64_t blocks = mem_live_blocks();
    assert_int_equal(model_open(bin_path, &m, &err), SITS_FORMAT);
    if (!strstr(err.text, cases[i].text)) fail_msg("case %zu: '%s' lacks '%s'", i, err.text, cases[i].text);
    assert_int_equal(mem_live_blocks(), blocks);
  }
}

static void pack_norm(struct sits_utd *u)
{
  if (strcmp(u->name, "output_norm.weight") != 0) return;
  u->layout = SITS_LAYOUT_PACKED_TILE;
  u->tile_name = "mma";
  u->n_bytes = 0;
}

/* The bytes do not matter here: as many as the file's floats have, at least. */
static void make_integers(struct sits_utd *u, int32_t axis, int32_t group, enum sits_dtype scale_dtype)
{
  if (strcmp(u->name, "token_embd.weight") != 0) return;
  u->dtype = SITS_DTYPE_I8;
  u->n_bytes = (size_t)sits_utd_row_major_bytes(u);
  u->quant = SITS_QUANT_GROUP;
  u->group_axis = axis;
  u->group_size = group;
  u->scale_dtype = scale_dtype;
  u->scales = u->data;
}

static void as_compiled(struct sits_utd *u) { make_integers(u, 1, 32, SITS_DTYPE_F16); }
static void group_rows(struct sits_utd *u) { make_integers(u, 0, 8, SITS_DTYPE_F16); }
static void group_unevenly(struct sits_utd *u) { make_integers(u, 1, 48, SITS_DTYPE_F16); }
static void narrow_scales(struct sits_utd *u) { make_integers(u, 1, 32, SITS_DTYPE_I8); }

/* What the format can describe and nothing here reads: a vector in tiles would be read past its end, scales of bytes as well. */
static void forms_that_nothing_reads_are_refused(void **state)
{
  (void)state;
  static const struct { change_fn *change; const char *tensor, *text; } cases[] = {
      {as_compiled, NULL, NULL},
      {pack_norm, "output_norm.weight", "packed in tiles"},
      {group_rows, "token_embd.weight", "along its rows"},
      {group_unevenly, "token_embd.weight", "along its rows"},
      {narrow_scales, "token_embd.weight", "f16 or f32"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct model *m = NULL;
    struct sits_error err = {0};
    write_changed("{\"origin\": \"gguf\"}", "metadata.gguf", cases[i].change);
    const enum sits_status status = model_open(bin_path, &m, &err);
    assert_int_equal(status, cases[i].text ? SITS_UNSUPPORTED : SITS_OK);
    if (!status) model_close(m);
    else if (!strstr(err.text, cases[i].text) || strcmp(err.param, cases[i].tensor) != 0) fail_msg("case %zu: '%s'", i, err.text);
  }
}

static void allocation_failures(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip(); /* this build counts no allocations */
#endif
  write_engine("{\"origin\": \"gguf\", \"sites\": [{\"layer\": 0, \"site\": \"qkv\", \"act\": \"int4\", \"outliers\": [1, 2]}]}",
               "metadata.gguf");
  for (uint64_t n = 1;; n++) {
    struct model *m = NULL;
    struct sits_error err = {0};
    const int64_t blocks = mem_live_blocks();
    mem_fault_arm(n);
    const enum sits_status status = model_open(bin_path, &m, &err);
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) model_close(m);
    assert_int_equal(mem_live_blocks(), blocks);
    if (!fired) break;
    assert_true(status == SITS_NOMEM || status == SITS_FORMAT); /* jansson does not tell the two apart */
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(sites_are_read), cmocka_unit_test(meta_that_does_not_fit_is_refused),
                                     cmocka_unit_test(forms_that_nothing_reads_are_refused),
                                     cmocka_unit_test(allocation_failures)};
  return cmocka_run_group_tests(tests, setup, teardown);
}
