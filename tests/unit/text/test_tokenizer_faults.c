/* Every allocation of load, encode, decode and streaming fails once: the call says so, nothing leaks, and the next try works. Needs a build
 * with SITS_DEBUG_CHECKS; elsewhere the cases are skipped. */
#include "text_data.h"

#include "base/mem.h"
#include "tensor/gguf.h"
#include "text/detok.h"

static json_t *reference;
static char *sources[16]; /* paths of the small tokenizers of components.json */
static int n_sources;

static int set_up(void **state)
{
  size_t i;
  const json_t *row;
  reference = json_load_file("tests/unit/text/components.json", JSON_ALLOW_NUL, NULL);
  json_array_foreach(json_object_get(reference, "tokenizers"), i, row) {
    char path[] = "/tmp/sits_faults_XXXXXX";
    close(mkstemp(path));
    if (json_dump_file(json_object_get(row, "json"), path, JSON_COMPACT)) return 1;
    sources[n_sources++] = strdup(path);
  }
  return n_sources == 0;
}

static int tear_down(void **state)
{
  for (int i = 0; i < n_sources; i++) {
    unlink(sources[i]);
    free(sources[i]);
  }
  json_decref(reference);
  return 0;
}

/* True when this build can make an allocation fail. */
static bool has_faults(void)
{
  mem_fault_arm(1);
  void *block = mem_alloc(1);
  mem_free(block);
  mem_fault_arm(0);
  return block == NULL;
}

static void load_fails_cleanly(void **state)
{
  if (!has_faults()) skip();
  for (int i = 0; i < n_sources; i++) {
    int64_t live = mem_live_blocks();
    for (uint64_t n = 1;; n++) {
      struct tokenizer *tokenizer = NULL;
      struct sits_error err = {0};
      mem_fault_arm(n);
      enum sits_status status = tokenizer_load_json(sources[i], &tokenizer, &err);
      bool has_fired = mem_fault_fired();
      mem_fault_arm(0);
      if (has_fired) {
        assert_int_equal(status, SITS_NOMEM);
        assert_null(tokenizer);
      }
      tokenizer_destroy(tokenizer);
      assert_int_equal(mem_live_blocks(), live);
      if (!has_fired) {
        assert_int_equal(status, SITS_OK);
        assert_true(n > 10);
        break;
      }
    }
  }
}

static const char sample[] = " Hello <s>caf\xC3\xA9 e\xCC\x81 world's  12345 a\xE4\xB8\xAD\xF0\x9F\x98\x80\xFF <mask> "
                             "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa</s>";

/* Encode, decode and stream once; the first failure's status. */
static enum sits_status run_once(const struct tokenizer *tokenizer, struct token_list *ids, struct buf *decoded)
{
  static const char *const stops[] = {"world's", "zz"};
  struct detok *detok = NULL;
  struct detok_piece piece;
  struct detok_options options = {.stops = stops, .n_stops = 2, .at_text_start = true};
  int64_t n_before = ids->n;
  enum sits_status status = tokenizer_encode(tokenizer, sample, sizeof sample - 1, TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, ids);
  if (status) assert_int_equal(ids->n, n_before);
  if (!status) status = tokenizer_decode(tokenizer, ids->ids, ids->n, false, decoded);
  if (!status) status = detok_create(tokenizer, &options, &detok);
  for (int64_t i = 0; i < ids->n && !status; i++) status = detok_push(detok, ids->ids[i], &piece);
  if (!status) status = detok_finish(detok, &piece);
  detok_destroy(detok);
  return status;
}

static void use_fails_cleanly(void **state)
{
  if (!has_faults()) skip();
  for (int i = 0; i < n_sources; i++) {
    struct tokenizer *tokenizer = NULL;
    struct sits_error err = {0};
    assert_int_equal(tokenizer_load_json(sources[i], &tokenizer, &err), SITS_OK);
    int64_t live = mem_live_blocks();
    for (uint64_t n = 1;; n++) {
      struct token_list ids = {0};
      struct buf decoded;
      buf_init(&decoded, 1 << 20);
      mem_fault_arm(n);
      enum sits_status status = run_once(tokenizer, &ids, &decoded);
      bool has_fired = mem_fault_fired();
      mem_fault_arm(0);
      token_list_fini(&ids);
      buf_fini(&decoded);
      assert_int_equal(mem_live_blocks(), live);
      assert_int_equal(status, has_fired ? SITS_NOMEM : SITS_OK);
      if (!has_fired) {
        assert_true(n > 5);
        break;
      }
    }
    tokenizer_destroy(tokenizer);
  }
}

static void gguf_load_fails_cleanly(void **state)
{
  const char *paths[] = {data_path("models/stories260K/stories260K.gguf"), data_path("gguf_vocab/ggml-vocab-deepseek-llm.gguf")};
  if (!has_faults() || !paths[0] || !paths[1]) skip();
  for (int i = 0; i < 2; i++) {
    struct gguf *gguf = NULL;
    struct sits_error err = {0};
    assert_int_equal(gguf_open(paths[i], &gguf, &err), SITS_OK);
    int64_t live = mem_live_blocks();
    int n_refused = 0;
    for (uint64_t n = 1;; n++) {
      struct tokenizer *tokenizer = NULL;
      mem_fault_arm(n);
      enum sits_status status = tokenizer_load_gguf(gguf, &tokenizer, &err);
      bool has_fired = mem_fault_fired();
      mem_fault_arm(0);
      tokenizer_destroy(tokenizer);
      assert_int_equal(mem_live_blocks(), live);
      /* PCRE2's JIT may go without memory: the interpreter serves then. */
      if (status || !has_fired) assert_int_equal(status, has_fired ? SITS_NOMEM : SITS_OK);
      n_refused += status != SITS_OK;
      if (!has_fired) break;
    }
    assert_true(n_refused > 20);
    gguf_close(gguf);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(load_fails_cleanly), cmocka_unit_test(use_fails_cleanly), cmocka_unit_test(gguf_load_fails_cleanly),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
