/* safetensors reader and the directory form of a model source: values, hostile headers, shards, and the shared data's model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "tensor/safetensors.h"
#include "tensor/source.h"

/* The file's bytes: header size, header, and n data bytes 0, 1, 2, ... In a 64-byte aligned block of exactly that size. */
static unsigned char *file_bytes(const char *header, size_t n_data, size_t *n_bytes)
{
  uint64_t size = strlen(header);
  *n_bytes = 8 + (size_t)size + n_data;
  unsigned char *bytes = mem_aligned(64, *n_bytes);
  memcpy(bytes, &size, 8);
  memcpy(bytes + 8, header, (size_t)size);
  for (size_t i = 0; i < n_data; i++) bytes[8 + size + i] = (unsigned char)i;
  return bytes;
}

static void refuse(const char *header, size_t n_data, enum sits_status want, const char *text)
{
  struct safetensors *f = NULL;
  struct sits_error err = {0};
  size_t n_bytes;
  unsigned char *bytes = file_bytes(header, n_data, &n_bytes);
  enum sits_status got = safetensors_parse(bytes, n_bytes, "mem.safetensors", &f, &err);
  if (got != want || !strstr(err.text, text)) fail_msg("%s: got %d '%s', want %d '%s'", header, got, err.text, want, text);
  assert_null(f);
  mem_free(bytes);
}

static void reads_tensors(void **state)
{
  struct safetensors *f;
  struct sits_error err = {0};
  size_t n_bytes;
  unsigned char *bytes = file_bytes(
      "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[4,16]},"
      "\"a\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[0,4]},\"s\":{\"dtype\":\"F16\",\"shape\":[],"
      "\"data_offsets\":[16,18]}}  ",
      18, &n_bytes);
  if (safetensors_parse(bytes, n_bytes, "m", &f, &err)) fail_msg("%s", err.text);
  assert_int_equal(safetensors_n_tensors(f), 3);
  const struct sits_utd *a = safetensors_tensor_at(f, 0), *b = safetensors_tensor_at(f, 1);
  assert_string_equal(a->name, "a");
  assert_int_equal(a->dtype, SITS_DTYPE_BF16);
  assert_int_equal(a->n_dims, 2);
  assert_int_equal(a->dims[0], 2);
  assert_string_equal(b->name, "b");
  assert_int_equal(b->n_bytes, 12);
  assert_int_equal((uintptr_t)b->data % 4, 0); /* copied where the file has it misaligned */
  assert_int_equal(((const unsigned char *)b->data)[11], 15);
  assert_null(safetensors_tensor_at(f, 3));
  safetensors_close(f);
  for (size_t n = 0; n < n_bytes; n++) { /* every truncation */
    unsigned char *cut = mem_alloc(n);
    memcpy(cut, bytes, n);
    f = NULL;
    assert_int_not_equal(safetensors_parse(cut, n, "m", &f, &err), SITS_OK);
    assert_null(f);
    mem_free(cut);
  }
  mem_free(bytes);
}

static void hostile_headers(void **state)
{
  refuse("", 100, SITS_FORMAT, "claims 0 bytes");
  refuse("[1,2]", 0, SITS_FORMAT, "no JSON object");
  refuse("{\"a\":", 0, SITS_FORMAT, "header: line 1");
  refuse("{}", 1, SITS_FORMAT, "unused bytes at the end");
  refuse("{\"a\":1}", 0, SITS_FORMAT, "'a': its entry");
  refuse("{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, SITS_UNSUPPORTED, "'a': dtype F8_E4M3");
  refuse("{\"a\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': its dtype");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":3,\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': its shape is no array");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': a dimension");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': a dimension");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, SITS_UNSUPPORTED, "'a': it has more than four");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],"
         "\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': its shape overflows");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],"
         "\"data_offsets\":[0,0]}}", 0, SITS_FORMAT, "'a': its shape overflows");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, SITS_FORMAT, "'a': its data_offsets do not match");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3, SITS_FORMAT, "'a': its data_offsets lie outside");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, SITS_FORMAT, "'a': its data_offsets lie outside");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, SITS_FORMAT, "'a': its data_offsets lie outside");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, SITS_FORMAT, "'a': its data_offsets are not two");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, SITS_FORMAT, "'a': its data_offsets are not two");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[4,8]}}", 8,
         SITS_FORMAT, "'b': its bytes overlap");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[8,12]}}", 12,
         SITS_FORMAT, "'b': unused bytes lie before");
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
         "\"data_offsets\":[4,8]}}", 8,
         SITS_FORMAT, "duplicate");
  refuse("{\"a\":{\"dtype\":[[[[[[[[[]]]]]]]]]}}", 0, SITS_FORMAT, "deep");
  unsigned char huge[16] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, '{', '}'};
  struct safetensors *f = NULL;
  struct sits_error err = {0};
  assert_int_equal(safetensors_parse(huge, sizeof huge, "m", &f, &err), SITS_FORMAT);
}

/* ---- directories ---- */

static char root[] = "/tmp/sits_source_XXXXXX";

static int make_root(void **state) { return mkdtemp(root) ? 0 : -1; }

static void path_of(char *out, size_t size, const char *name) { snprintf(out, size, "%s/%s", root, name); }

static void write_file(const char *name, const void *bytes, size_t n_bytes)
{
  char path[256];
  path_of(path, sizeof path, name);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, n_bytes, f), n_bytes);
  fclose(f);
}

static void write_text(const char *name, const char *text) { write_file(name, text, strlen(text)); }

static void write_shard(const char *name, const char *header, size_t n_data)
{
  size_t n_bytes;
  unsigned char *bytes = file_bytes(header, n_data, &n_bytes);
  write_file(name, bytes, n_bytes);
  mem_free(bytes);
}

static int empty_root(void **state)
{
  static const char *names[] = {"config.json", "model.safetensors", "model.safetensors.index.json", "m-1.safetensors", "m-2.safetensors",
                                "pytorch_model.bin"};
  char path[256];
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    path_of(path, sizeof path, names[i]);
    unlink(path);
  }
  return 0;
}

static int remove_root(void **state) { empty_root(state); return rmdir(root); }

static void refuse_root(enum sits_status want, const char *text)
{
  struct source *s = NULL;
  struct sits_error err = {0};
  enum sits_status got = source_open(root, &s, &err);
  if (got != want || !strstr(err.text, text)) fail_msg("got %d '%s', want %d '%s'", got, err.text, want, text);
  assert_int_equal(err.status, want);
  assert_null(s);
}

static void write_two_shards(void)
{
  write_text("config.json", "{\"model_type\":\"llama\"}");
  write_shard("m-1.safetensors", "{\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
  write_shard("m-2.safetensors", "{\"y\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4);
}

static void joins_shards(void **state)
{
  write_two_shards();
  write_text("model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":{\"x\":\"m-1.safetensors\",\"y\":\"m-2.safetensors\"}}");
  struct source *s;
  struct sits_error err = {0};
  if (source_open(root, &s, &err)) fail_msg("%s", err.text);
  assert_int_equal(source_kind(s), SOURCE_HF);
  assert_int_equal(source_n_tensors(s), 2);
  assert_int_equal(source_tensor(s, "y")->dtype, SITS_DTYPE_F16);
  assert_null(source_tensor(s, "z"));
  assert_string_equal(json_string_value(json_object_get(source_hf_config(s), "model_type")), "llama");
  assert_non_null(source_hf_file(s, "config.json"));
  assert_null(source_hf_file(s, "tokenizer.json"));
  assert_null(source_hf_file(s, "../config.json"));
  source_drop_pages(s, source_tensor(s, "x"));
  assert_int_equal(((const unsigned char *)source_tensor(s, "x")->data)[3], 3); /* dropped pages come back */
  source_close(s);
}

static void hostile_directories(void **state)
{
  refuse_root(SITS_NOT_FOUND, "no config.json");
  write_text("config.json", "{\"a\":");
  refuse_root(SITS_FORMAT, "config.json: line 1");
  write_text("config.json", "[]");
  refuse_root(SITS_FORMAT, "no object");
  write_text("config.json", "{}");
  refuse_root(SITS_NOT_FOUND, "no model.safetensors");
  write_text("pytorch_model.bin", "x");
  refuse_root(SITS_UNSUPPORTED, "pickle");
  write_two_shards();
  static const struct { const char *map; enum sits_status status; const char *text; } cases[] = {
      {"{}", SITS_FORMAT, "weight_map"},
      {"{\"weight_map\":{}}", SITS_FORMAT, "weight_map"},
      {"{\"weight_map\":{\"x\":1}}", SITS_FORMAT, "'x': its file is no string"},
      {"{\"weight_map\":{\"x\":\"../m-1.safetensors\"}}", SITS_FORMAT, "'x': '../m-1.safetensors' is no plain"},
      {"{\"weight_map\":{\"x\":\"/etc/m-1.safetensors\"}}", SITS_FORMAT, "'x': '/etc/m-1.safetensors' is no plain"},
      {"{\"weight_map\":{\"x\":\"..safetensors\"}}", SITS_FORMAT, "is no plain"},
      {"{\"weight_map\":{\"x\":\"m-1.safetensors\\u0000\"}}", SITS_FORMAT, "is no plain"},
      {"{\"weight_map\":{\"x\":\"config.json\"}}", SITS_FORMAT, "is no plain"},
      {"{\"weight_map\":{\"x\":\"m-3.safetensors\"}}", SITS_NOT_FOUND, "'x': its file 'm-3.safetensors' is missing"},
      {"{\"weight_map\":{\"x\":\"m-2.safetensors\",\"y\":\"m-1.safetensors\"}}", SITS_FORMAT, "'x' is not in 'm-2.safetensors'"},
      {"{\"weight_map\":{\"x\":\"m-1.safetensors\",\"q\":\"m-1.safetensors\"}}", SITS_FORMAT, "'q' is not in 'm-1.safetensors'"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    write_text("model.safetensors.index.json", cases[i].map);
    refuse_root(cases[i].status, cases[i].text);
  }
  write_shard("m-2.safetensors", "{\"x\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4);
  write_text("model.safetensors.index.json", "{\"weight_map\":{\"x\":\"m-1.safetensors\",\"y\":\"m-2.safetensors\"}}");
  refuse_root(SITS_FORMAT, "'x' lies in two shards");
}

static void allocation_failures_are_clean(void **state)
{
  write_two_shards();
  write_text("model.safetensors.index.json", "{\"weight_map\":{\"x\":\"m-1.safetensors\",\"y\":\"m-2.safetensors\"}}");
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct source *s = NULL;
    struct sits_error err = {0};
    mem_fault_arm(n);
    enum sits_status status = source_open(root, &s, &err);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (!fired) {
      assert_int_equal(status, SITS_OK);
      source_close(s);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_null(s);
    assert_int_equal(mem_live_blocks(), before);
  }
  assert_int_equal(mem_live_blocks(), before);
}

static void reads_shared_model(void **state)
{
  char path[512];
  const char *shared = getenv("SITS_SHARED_DATA");
  snprintf(path, sizeof path, "%s/models/stories260K/hf", shared ? shared : "../shared/data");
  if (access(path, R_OK) != 0) skip();
  struct source *s;
  struct sits_error err = {0};
  if (source_open(path, &s, &err)) fail_msg("%s", err.text);
  const struct sits_utd *t = source_tensor(s, "model.layers.4.self_attn.k_proj.weight");
  assert_non_null(t);
  assert_int_equal(t->dims[0], 32);
  assert_int_equal(t->dims[1], 64);
  assert_true(source_file_bytes(s) == 1044984);
  source_close(s);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads_tensors), cmocka_unit_test(hostile_headers), cmocka_unit_test_setup(joins_shards, empty_root),
      cmocka_unit_test_setup(hostile_directories, empty_root), cmocka_unit_test_setup(allocation_failures_are_clean, empty_root),
      cmocka_unit_test(reads_shared_model)};
  return cmocka_run_group_tests(tests, make_root, remove_root);
}
