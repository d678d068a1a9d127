/* GGUF reader: values by hand-made files, hostile files by name, and the real files of the shared data. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/mem.h"
#include "gguf_builder.h"
#include "tensor/gguf.h"

static enum sits_status parse(const struct buf *b, struct gguf **out, struct sits_error *err)
{
  *err = (struct sits_error){0};
  return gguf_parse((const unsigned char *)b->data, b->size, "mem.gguf", out, err);
}

/* The bytes must be refused with this status and this text somewhere in the message; then b is emptied. */
static void refuse(struct buf *b, enum sits_status want, const char *text)
{
  struct gguf *g = NULL;
  struct sits_error err;
  assert_int_equal(parse(b, &g, &err), want);
  assert_null(g);
  if (!strstr(err.text, text)) fail_msg("'%s' lacks '%s'", err.text, text);
  buf_clear(b);
}

static void good_file(struct buf *b, uint32_t version)
{
  put_header(b, version, 2, 9);
  put_key_u32(b, "a.u32", 4000000000u);
  put_key(b, "a.i8", 1);
  buf_append_char(b, (char)-5);
  put_key_f32(b, "a.f32", 0.5f);
  put_key(b, "a.bool", 7);
  buf_append_char(b, 1);
  put_key_text(b, "a.text", "h\xc3\xa9llo");
  put_key(b, "a.words", 9);
  put_u32(b, 8);
  put_u64(b, 3);
  put_text(b, "x");
  put_text(b, "");
  put_text(b, "yz");
  put_key(b, "a.i32s", 9);
  put_u32(b, 5);
  put_u64(b, 2);
  put_u32(b, (uint32_t)-7);
  put_u32(b, 9);
  put_key_u32(b, "general.alignment", 64);
  put_key(b, "a.u64", 10);
  put_u64(b, UINT64_MAX);
  put_tensor(b, "w", 2, (uint64_t[]){32, 3}, 2, 64); /* Q4_0 [3][32] */
  put_tensor(b, "v", 1, (uint64_t[]){4}, 0, 0);
  pad_to(b, 64);
  for (int i = 0; i < 4; i++) put_f32(b, (float)i + 0.25f);
  pad_to(b, 64);
  for (int i = 0; i < 54; i++) buf_append_char(b, (char)i);
}

static void reads_values(void **state)
{
  for (uint32_t version = 2; version <= 3; version++) {
    struct buf b;
    struct gguf *g;
    struct sits_error err;
    buf_init(&b, 1 << 20);
    good_file(&b, version);
    if (parse(&b, &g, &err)) fail_msg("%s", err.text);
    uint64_t u = 1, n;
    int64_t i = 1;
    double d;
    bool is_set;
    struct gguf_string s;
    enum gguf_type type;
    assert_true(gguf_get_u64(g, "a.u32", &u));
    assert_true(u == 4000000000u);
    assert_true(gguf_get_i64(g, "a.i8", &i));
    assert_int_equal(i, -5);
    assert_false(gguf_get_u64(g, "a.i8", &u));
    assert_false(gguf_get_i64(g, "a.u64", &i));
    assert_true(gguf_get_u64(g, "a.u64", &u) && u == UINT64_MAX);
    assert_true(gguf_get_f64(g, "a.f32", &d) && d == 0.5);
    assert_false(gguf_get_f64(g, "a.u32", &d));
    assert_true(gguf_get_bool(g, "a.bool", &is_set) && is_set);
    assert_false(gguf_get_u64(g, "a.bool", &u));
    assert_true(gguf_get_string(g, "a.text", &s));
    assert_int_equal(s.size, 6);
    assert_memory_equal(s.data, "h\xc3\xa9llo", 6);
    assert_false(gguf_get_string(g, "a.words", &s));
    assert_true(gguf_get_array(g, "a.words", &type, &n) && type == GGUF_STRING && n == 3);
    assert_true(gguf_array_string(g, "a.words", 2, &s) && s.size == 2 && memcmp(s.data, "yz", 2) == 0);
    assert_true(gguf_array_string(g, "a.words", 1, &s) && s.size == 0);
    assert_false(gguf_array_string(g, "a.words", 3, &s));
    assert_true(gguf_array_i64(g, "a.i32s", 0, &i) && i == -7);
    assert_false(gguf_array_i64(g, "a.i32s", 2, &i));
    assert_false(gguf_array_f64(g, "a.i32s", 0, &d));
    assert_false(gguf_get_u64(g, "absent", &u));
    assert_int_equal(gguf_n_tensors(g), 2);
    const struct sits_utd *w = gguf_tensor(g, "w"), *v = gguf_tensor(g, "v");
    assert_ptr_equal(w, gguf_tensor_at(g, 0));
    assert_null(gguf_tensor(g, "ww"));
    assert_null(gguf_tensor_at(g, 2));
    assert_int_equal(w->dtype, SITS_DTYPE_Q4_0);
    assert_int_equal(w->dims[0], 3);
    assert_int_equal(w->dims[1], 32);
    assert_int_equal(w->n_bytes, 54);
    assert_int_equal(((const unsigned char *)w->data)[53], 53);
    float third;
    memcpy(&third, (const char *)v->data + 8, 4);
    assert_true(third == 2.25f);
    gguf_close(g);
    buf_fini(&b);
  }
}

static void every_truncation_is_refused(void **state)
{
  struct buf b;
  buf_init(&b, 1 << 20);
  good_file(&b, 3);
  size_t whole = b.size;
  for (size_t n = 0; n < whole; n++) {
    struct gguf *g = NULL;
    struct sits_error err = {0};
    unsigned char *copy = mem_alloc(n); /* exactly n bytes, so that the sanitizer sees a read beyond */
    memcpy(copy, b.data, n);
    assert_int_not_equal(gguf_parse(copy, n, "cut.gguf", &g, &err), SITS_OK);
    assert_null(g);
    assert_true(err.text[0] != 0);
    mem_free(copy);
  }
  buf_fini(&b);
}

static void hostile_headers(void **state)
{
  struct buf b;
  buf_init(&b, 1 << 20);
  buf_append_text(&b, "GGUX0123456789");
  refuse(&b, SITS_FORMAT, "not a GGUF file");
  put_header(&b, 1, 0, 0);
  refuse(&b, SITS_UNSUPPORTED, "version 1");
  put_header(&b, 4, 0, 0);
  refuse(&b, SITS_UNSUPPORTED, "version 4");
  put_header(&b, 0x03000000, 0, 0);
  refuse(&b, SITS_UNSUPPORTED, "big-endian");
  put_header(&b, 3, UINT64_MAX, 0);
  refuse(&b, SITS_FORMAT, "tensors");
  put_header(&b, 3, 0, UINT64_MAX / 2);
  refuse(&b, SITS_FORMAT, "keys");
  put_header(&b, 3, 0, 5);
  refuse(&b, SITS_FORMAT, "keys");
  buf_fini(&b);
}

static void hostile_keys(void **state)
{
  struct buf b;
  buf_init(&b, 1 << 20);
  put_header(&b, 3, 0, 1);
  put_u64(&b, UINT64_MAX);
  for (int i = 0; i < 4; i++) put_u64(&b, 0);
  refuse(&b, SITS_FORMAT, "key number 0");
  put_header(&b, 3, 0, 1);
  put_key(&b, "k.type", 13);
  put_u64(&b, 0);
  refuse(&b, SITS_FORMAT, "'k.type': unknown value type");
  put_header(&b, 3, 0, 2);
  put_key_u32(&b, "twice", 1);
  put_key_u32(&b, "twice", 1);
  refuse(&b, SITS_FORMAT, "'twice': appears twice");
  put_header(&b, 3, 0, 1);
  put_key(&b, "deep", 9);
  put_u32(&b, 9);
  put_u64(&b, 1);
  refuse(&b, SITS_UNSUPPORTED, "'deep': arrays of arrays");
  put_header(&b, 3, 0, 1);
  put_key(&b, "long", 9);
  put_u32(&b, 10);
  put_u64(&b, (UINT64_MAX >> 3) + 2); /* times 8 bytes wraps to 8 */
  put_u64(&b, 0);
  refuse(&b, SITS_FORMAT, "'long': the array is longer");
  put_header(&b, 3, 0, 1);
  put_key(&b, "words", 9);
  put_u32(&b, 8);
  put_u64(&b, 2);
  put_text(&b, "a");
  put_u64(&b, 1u << 30);
  refuse(&b, SITS_FORMAT, "'words': the file ends inside a string");
  put_header(&b, 3, 0, 1);
  put_key(&b, "flag", 7);
  buf_append_char(&b, 2);
  refuse(&b, SITS_FORMAT, "'flag': a bool");
  put_header(&b, 3, 0, 1);
  put_u64(&b, 5);
  buf_append(&b, "a\0b\nc", 5);
  put_u32(&b, 4);
  put_u32(&b, 4);
  refuse(&b, SITS_FORMAT, "'a?b?c'");
  buf_fini(&b);
}

static void one_tensor(struct buf *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
  put_header(b, 3, 1, 0);
  put_tensor(b, name, n_dims, dims, type, offset);
  pad_to(b, 32);
  for (int i = 0; i < 32; i++) put_u64(b, 0);
}

static void hostile_tensors(void **state)
{
  struct buf b;
  buf_init(&b, 1 << 20);
  one_tensor(&b, "t", 5, (uint64_t[]){1, 1, 1, 1, 1}, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': the number of dimensions");
  one_tensor(&b, "t", 0, NULL, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': the number of dimensions");
  one_tensor(&b, "t", 2, (uint64_t[]){4, 0}, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': a dimension is zero");
  one_tensor(&b, "t", 2, (uint64_t[]){1ull << 32, 1ull << 32}, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': the number of elements overflows");
  one_tensor(&b, "t", 2, (uint64_t[]){1ull << 31, 1ull << 31}, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': a row is no whole number of blocks, or the size overflows");
  one_tensor(&b, "t", 1, (uint64_t[]){48}, 2, 0);
  refuse(&b, SITS_FORMAT, "'t': a row is no whole number of blocks");
  one_tensor(&b, "t", 1, (uint64_t[]){4}, 16, 0);
  refuse(&b, SITS_UNSUPPORTED, "'t': element type IQ2_XXS");
  one_tensor(&b, "t", 1, (uint64_t[]){4}, 39, 0);
  refuse(&b, SITS_UNSUPPORTED, "MXFP4");
  one_tensor(&b, "t", 1, (uint64_t[]){4}, 999, 0);
  refuse(&b, SITS_FORMAT, "type number 999");
  one_tensor(&b, "t", 1, (uint64_t[]){4}, 0, 16);
  refuse(&b, SITS_FORMAT, "'t': its offset is no multiple");
  one_tensor(&b, "t", 1, (uint64_t[]){4}, 0, UINT64_MAX - 31);
  refuse(&b, SITS_FORMAT, "'t': its bytes lie beyond");
  one_tensor(&b, "t", 1, (uint64_t[]){65}, 0, 0);
  refuse(&b, SITS_FORMAT, "'t': its bytes lie beyond");
  char long_name[SITS_MAX_NAME + 1];
  memset(long_name, 'n', SITS_MAX_NAME);
  long_name[SITS_MAX_NAME] = 0;
  one_tensor(&b, long_name, 1, (uint64_t[]){4}, 0, 0);
  refuse(&b, SITS_FORMAT, "longer than");
  put_header(&b, 3, 2, 0);
  put_tensor(&b, "first", 1, (uint64_t[]){9}, 0, 0);
  put_tensor(&b, "second", 1, (uint64_t[]){8}, 0, 32);
  pad_to(&b, 32);
  for (int i = 0; i < 32; i++) put_u64(&b, 0);
  refuse(&b, SITS_FORMAT, "'second': its bytes overlap those of 'first'");
  put_header(&b, 3, 2, 0);
  put_tensor(&b, "same", 1, (uint64_t[]){8}, 0, 0);
  put_tensor(&b, "same", 1, (uint64_t[]){8}, 0, 32);
  refuse(&b, SITS_FORMAT, "'same': appears twice");
  buf_fini(&b);
}

static void hostile_alignment(void **state)
{
  struct buf b;
  buf_init(&b, 1 << 20);
  static const uint32_t bad[] = {0, 1, 4, 24, 1u << 21, 0x80000000u};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    put_header(&b, 3, 0, 1);
    put_key_u32(&b, "general.alignment", bad[i]);
    refuse(&b, SITS_FORMAT, "'general.alignment'");
  }
  put_header(&b, 3, 0, 1);
  put_key_text(&b, "general.alignment", "32");
  refuse(&b, SITS_FORMAT, "'general.alignment'");
  buf_fini(&b);
}

static void allocation_failures_are_clean(void **state)
{
  struct buf b;
  struct gguf *g;
  struct sits_error err;
  buf_init(&b, 1 << 20);
  good_file(&b, 3);
  int64_t before = mem_live_blocks();
  uint64_t n = 1;
  for (;; n++) {
    g = NULL;
    mem_fault_arm(n);
    enum sits_status status = parse(&b, &g, &err);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (!fired) {
      assert_int_equal(status, SITS_OK);
      gguf_close(g);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_null(g);
    assert_int_equal(mem_live_blocks(), before);
  }
  if (mem_live_blocks() > 0) assert_true(n > 8);
  assert_int_equal(mem_live_blocks(), before);
  buf_fini(&b);
}

static const char *shared(char *out, size_t size, const char *name)
{
  const char *root = getenv("SITS_SHARED_DATA");
  snprintf(out, size, "%s/%s", root ? root : "../shared/data", name);
  FILE *f = fopen(out, "rb");
  if (!f) return NULL;
  fclose(f);
  return out;
}

static void reads_stories260k(void **state)
{
  char path[512];
  if (!shared(path, sizeof path, "models/stories260K/stories260K.gguf")) skip();
  struct gguf *g;
  struct sits_error err = {0};
  if (gguf_open(path, &g, &err)) fail_msg("%s", err.text);
  struct gguf_string s;
  uint64_t u, n;
  enum gguf_type type;
  double d;
  assert_true(gguf_get_string(g, "general.architecture", &s) && s.size == 5 && memcmp(s.data, "llama", 5) == 0);
  assert_true(gguf_get_u64(g, "llama.context_length", &u) && u == 2048);
  assert_true(gguf_get_u64(g, "llama.embedding_length", &u) && u == 64);
  assert_true(gguf_get_f64(g, "llama.attention.layer_norm_rms_epsilon", &d) && fabs(d - 1e-5) < 1e-9);
  assert_true(gguf_get_array(g, "tokenizer.ggml.tokens", &type, &n) && type == GGUF_STRING && n == 512);
  assert_true(gguf_array_string(g, "tokenizer.ggml.tokens", 1, &s) && s.size == 3 && memcmp(s.data, "<s>", 3) == 0);
  const struct sits_utd *t = gguf_tensor(g, "blk.4.attn_k.weight");
  assert_non_null(t);
  assert_int_equal(t->dims[0], 32); /* 4 KV heads of 8, out features first */
  assert_int_equal(t->dims[1], 64);
  assert_int_equal(t->dtype, SITS_DTYPE_F32);
  gguf_close(g);
  struct gguf *none = NULL;
  assert_int_equal(gguf_open("/nonexistent/x.gguf", &none, &err), SITS_NOT_FOUND);
  assert_null(none);
}

static void reads_vocabularies(void **state)
{
  static const struct { const char *name; uint64_t n; } cases[] = {
      {"gguf_vocab/ggml-vocab-llama-spm.gguf", 32000}, {"gguf_vocab/ggml-vocab-gpt-2.gguf", 50257},
      {"gguf_vocab/ggml-vocab-deepseek-llm.gguf", 102400}, {"gguf_vocab/ggml-vocab-phi-3.gguf", 32064}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char path[512];
    if (!shared(path, sizeof path, cases[i].name)) skip();
    struct gguf *g;
    struct sits_error err = {0};
    enum gguf_type type;
    uint64_t n;
    if (gguf_open(path, &g, &err)) fail_msg("%s", err.text);
    assert_true(gguf_get_array(g, "tokenizer.ggml.tokens", &type, &n));
    assert_int_equal(n, cases[i].n);
    assert_int_equal(gguf_n_tensors(g), 0);
    gguf_close(g);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads_values), cmocka_unit_test(every_truncation_is_refused), cmocka_unit_test(hostile_headers),
      cmocka_unit_test(hostile_keys), cmocka_unit_test(hostile_tensors), cmocka_unit_test(hostile_alignment),
      cmocka_unit_test(allocation_failures_are_clean), cmocka_unit_test(reads_stories260k), cmocka_unit_test(reads_vocabularies)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
