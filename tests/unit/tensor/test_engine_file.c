/* The engine file: what is written is read back, equal input gives equal bytes, and every kind of damage is found and named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "tensor/engine_file.h"

static unsigned char nibbles[4 * 64 / 2];
static uint16_t scales[4 * 2], minimums[4 * 2];
static float plain[3 * 5];
static const char blob[] = "{\"a tokenizer\": true}";

static void fill(void)
{
  for (size_t i = 0; i < sizeof nibbles; i++) nibbles[i] = (unsigned char)hash_mix(1, i);
  for (size_t i = 0; i < 8; i++) scales[i] = (uint16_t)hash_mix(2, i), minimums[i] = (uint16_t)hash_mix(3, i);
  for (size_t i = 0; i < 15; i++) plain[i] = (float)i * 0.5f;
}

static enum sits_status write_sample(const char *path, struct sits_error *err)
{
  struct engine_writer *writer = NULL;
  struct sits_utd quantised = {.name = "blk.0.w", .dtype = SITS_DTYPE_I4, .n_dims = 2, .dims = {4, 64}, .quant = SITS_QUANT_GROUP,
                               .group_size = 32, .group_axis = 1, .scale_dtype = SITS_DTYPE_F16, .scales = scales, .minimums = minimums,
                               .data = nibbles, .n_bytes = sizeof nibbles};
  struct sits_utd floats = {.name = "norm", .dtype = SITS_DTYPE_F32, .n_dims = 2, .dims = {3, 5}, .data = plain, .n_bytes = sizeof plain};
  json_t *meta = json_pack("{s:s}", "recipe", "w4a8");
  enum sits_status status = meta ? engine_writer_create(&writer) : SITS_NOMEM;
  if (!status) status = engine_writer_add_tensor(writer, &quantised);
  if (!status) status = engine_writer_add_tensor(writer, &floats);
  if (!status) status = engine_writer_add_blob(writer, "tokenizer.json", blob, sizeof blob);
  if (!status) status = engine_writer_finish(writer, meta, path, err);
  engine_writer_destroy(writer);
  json_decref(meta);
  return status;
}

static unsigned char *slurp(const char *path, size_t *n_bytes)
{
  struct mapfile file;
  assert_int_equal(mapfile_open(&file, path, NULL), SITS_OK);
  unsigned char *copy = mem_alloc(file.n_bytes);
  assert_non_null(copy);
  memcpy(copy, file.data, file.n_bytes);
  *n_bytes = file.n_bytes;
  mapfile_close(&file);
  return copy;
}

static unsigned char *sample(size_t *n_bytes)
{
  char path[64];
  snprintf(path, sizeof path, "/tmp/sits-engine-%d.bin", (int)getpid());
  fill();
  assert_int_equal(write_sample(path, NULL), SITS_OK);
  assert_true(engine_file_is(path));
  unsigned char *bytes = slurp(path, n_bytes);
  unlink(path);
  return bytes;
}

static void test_round_trip(void **state)
{
  size_t n_bytes, n_again, n_blob;
  unsigned char *bytes = sample(&n_bytes), *again = sample(&n_again);
  assert_int_equal(n_bytes, n_again);
  assert_memory_equal(bytes, again, n_bytes);
  struct engine_file *file;
  assert_int_equal(engine_file_parse(bytes, n_bytes, "x.bin", &file, NULL), SITS_OK);
  assert_int_equal(engine_file_verify(file, 0, -1, NULL), SITS_OK);
  assert_int_equal(engine_file_n_tensors(file), 2);
  const struct sits_utd *q = engine_file_tensor_at(file, 0), *f = engine_file_tensor_at(file, 1);
  assert_string_equal(q->name, "blk.0.w");
  assert_int_equal(q->dtype, SITS_DTYPE_I4);
  assert_int_equal(q->quant, SITS_QUANT_GROUP);
  assert_int_equal(q->group_size, 32);
  assert_int_equal(q->dims[1], 64);
  assert_int_equal((uintptr_t)q->data % 1, 0);
  assert_memory_equal(q->data, nibbles, sizeof nibbles);
  assert_memory_equal(q->scales, scales, sizeof scales);
  assert_memory_equal(q->minimums, minimums, sizeof minimums);
  assert_memory_equal(f->data, plain, sizeof plain);
  assert_null(f->scales);
  assert_string_equal(json_string_value(json_object_get(engine_file_meta(file), "recipe")), "w4a8");
  assert_string_equal((const char *)engine_file_blob(file, "tokenizer.json", &n_blob), blob);
  assert_int_equal(n_blob, sizeof blob);
  assert_null(engine_file_blob(file, "nothing", &n_blob));
  engine_file_close(file);
  mem_free(bytes);
  mem_free(again);
}

/* Open and verify; the text of the refusal, or "" when the file was taken. */
static const char *refusal(const unsigned char *bytes, size_t n_bytes, struct sits_error *err)
{
  struct engine_file *file = NULL;
  *err = (struct sits_error){0};
  if (engine_file_parse(bytes, n_bytes, "x.bin", &file, err)) return err->text;
  enum sits_status status = engine_file_verify(file, 0, -1, err);
  engine_file_close(file);
  return status ? err->text : "";
}

/* One flipped bit anywhere that is not padding is found; in tensor data the error names the tensor. */
static void test_every_flip_is_found(void **state)
{
  size_t n_bytes;
  struct sits_error err;
  unsigned char *bytes = sample(&n_bytes);
  struct engine_file *file;
  assert_int_equal(engine_file_parse(bytes, n_bytes, "x.bin", &file, NULL), SITS_OK);
  const struct sits_utd *q = engine_file_tensor_at(file, 0);
  struct { const void *at; size_t n; const char *want; } regions[] = {
      {bytes, 40, ""}, {q->data, sizeof nibbles, "blk.0.w"}, {q->scales, sizeof scales, "blk.0.w"},
      {q->minimums, sizeof minimums, "blk.0.w"},
      {engine_file_tensor_at(file, 1)->data, sizeof plain, "norm"}, {bytes + 40, 400, "header"}};
  for (size_t r = 0; r < sizeof regions / sizeof regions[0]; r++) {
    size_t start = (size_t)((const unsigned char *)regions[r].at - bytes);
    for (size_t i = start; i < start + regions[r].n; i++) {
      bytes[i] ^= (unsigned char)(1u << (i % 8));
      const char *text = refusal(bytes, n_bytes, &err);
      if (!*text || !strstr(text, regions[r].want)) fail_msg("flip at %zu: '%s'", i, text);
      bytes[i] ^= (unsigned char)(1u << (i % 8));
    }
  }
  engine_file_close(file);
  mem_free(bytes);
}

static void test_truncation_version_order(void **state)
{
  size_t n_bytes;
  struct sits_error err;
  unsigned char *bytes = sample(&n_bytes);
  for (size_t n = 0; n < n_bytes; n += n < 64 ? 1 : 997) assert_string_not_equal(refusal(bytes, n, &err), "");
  assert_non_null(strstr(refusal(bytes, n_bytes - 1, &err), "truncated"));
  bytes[8] = 9;
  assert_non_null(strstr(refusal(bytes, n_bytes, &err), "version 9"));
  bytes[8] = 1;
  unsigned char order[4];
  memcpy(order, bytes + 12, 4);
  for (int i = 0; i < 4; i++) bytes[12 + i] = order[3 - i];
  assert_non_null(strstr(refusal(bytes, n_bytes, &err), "other byte order"));
  mem_free(bytes);
}

/* Change the JSON header, which has zeros behind it, and mend its size and checksum, so that only the content checks can object. */
static void edit(unsigned char *bytes, const char *from, const char *to)
{
  uint64_t header_bytes, checksum;
  memcpy(&header_bytes, bytes + 16, 8);
  char *at = memmem(bytes + 40, header_bytes, from, strlen(from));
  if (!at) fail_msg("no '%s' in %.*s", from, (int)header_bytes, (const char *)bytes + 40);
  const size_t behind = (size_t)((char *)bytes + 40 + header_bytes - at) - strlen(from);
  assert_true(40 + header_bytes + strlen(to) < ENGINE_FILE_ALIGN);
  memmove(at + strlen(to), at + strlen(from), behind);
  memcpy(at, to, strlen(to));
  header_bytes = header_bytes + strlen(to) - strlen(from);
  memcpy(bytes + 16, &header_bytes, 8);
  checksum = hash_bulk(0, bytes + 40, header_bytes);
  memcpy(bytes + 32, &checksum, 8);
}

static void test_hostile_headers(void **state)
{
  static const struct { const char *from, *to, *want; } cases[] = {
      {"[4096,128]", "[4096,129]", "data of a wrong size"},
      {"[4096,128]", "[4097,128]", "not aligned"},
      {"[4096,128]", "[9999,128]", "not aligned"},
      {"[4096,128]", "[8192,128]", "overlap"},
      {"[4096,128]", "[4096,-12]", "outside the file"},
      {"{\"meta\"", "{{meta\"", "header"},
      {"[4096,128]", "[4096,1e9]", "not aligned"},
      {"\"dims\":[4,64]", "\"dims\":[4,-4]", "bad shape"},
      {"\"dims\":[4,64]", "\"dims\":[4,96]", "wrong size"},
      {"\"i4\"", "\"i9\"", "unknown element type"},
      {"\"group\"", "\"grope\"", "unknown kind of quantisation"},
      {"\"group_size\":32", "\"group_size\":-2", "group size"},
      {"\"group_axis\":1", "\"group_axis\":7", "group size or axis"},
      {"\"f16\"", "\"f61\"", "unknown scale type"},
      {"\"name\":\"norm\"", "\"mane\":\"norm\"", "without a usable name"},
      {"\"meta\"", "\"atem\"", "missing"},
      {"\"group_size\":32", "\"group_size\":4294967328", "group size or axis"},
      {"\"group_size\":32", "\"group_size\":\"32\"", "group size or axis"},
      {"\"group_axis\":1", "\"group_axis\":4294967297", "group size or axis"},
      {"\"quant\":\"group\"", "\"quant\":2", "unknown kind of quantisation"},
      {"\"dims\":[4,64]", "\"dims\":[1,9223372036854775807]", "wrong size"},
      {"\"dims\":[3,5]", "\"dims\":[3,5],\"tile_name\":7", "tile_name is no text"},
      {"\"norm\"", "\"nor\\u001bm\"", "without a usable name"},
      {"\"norm\"", "\"norm\\u0000x\"", "without a usable name"},
      {"\"tokenizer.json\"", "\"tokenizer\\u001b.json\"", "lacks name"},
      {"\"tokenizer.json\"", "\"\"", "lacks name"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    size_t n_bytes;
    struct sits_error err;
    unsigned char *bytes = sample(&n_bytes);
    edit(bytes, cases[i].from, cases[i].to);
    const char *text = refusal(bytes, n_bytes, &err);
    if (!strstr(text, cases[i].want)) fail_msg("'%s' -> '%s': '%s' lacks '%s'", cases[i].from, cases[i].to, text, cases[i].want);
    mem_free(bytes);
  }
}

static void test_unwritable_path_and_faults(void **state)
{
  struct sits_error err = {0};
  fill();
  assert_int_equal(write_sample("/nonexistent/dir/x.bin", &err), SITS_IO);
  assert_non_null(strstr(err.text, "/nonexistent/dir/x.bin"));
#ifdef SITS_DEBUG_CHECKS
  size_t n_bytes;
  unsigned char *bytes = sample(&n_bytes);
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct engine_file *file = NULL;
    mem_fault_arm(n);
    enum sits_status status = engine_file_parse(bytes, n_bytes, "x.bin", &file, &err);
    bool fired = mem_fault_fired();
    mem_fault_arm(0);
    if (!status) engine_file_close(file);
    else assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
    if (!fired) break;
  }
  mem_free(bytes);
#endif
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_round_trip), cmocka_unit_test(test_every_flip_is_found), cmocka_unit_test(test_truncation_version_order),
      cmocka_unit_test(test_hostile_headers), cmocka_unit_test(test_unwritable_path_and_faults),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
