/* GGUF vocabularies: llama.cpp's own vocabulary files with its own inputs and ids, the real SmolLM2 file over all of WikiText-2, and
 * stories260K in both forms. */
#include "text_data.h"

#include "tensor/gguf.h"

static struct tokenizer *load_gguf(const char *path)
{
  struct gguf *gguf = NULL;
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  if (gguf_open(path, &gguf, &err) || tokenizer_load_gguf(gguf, &tokenizer, &err)) fail_msg("%s: %s", path, err.text);
  gguf_close(gguf); /* a tokenizer keeps nothing of the file */
  return tokenizer;
}

static void check_cases(const char *name, struct tokenizer *tokenizer)
{
  char relative[128];
  size_t n_bytes;
  int n_cases = 0, n_wrong = 0;
  snprintf(relative, sizeof relative, "gguf_vocab/ggml-vocab-%s.jsonl", name);
  const char *path = data_path(relative);
  assert_non_null(path);
  char *text = read_whole(path, &n_bytes), *save = NULL;
  for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), n_cases++) {
    json_t *test = json_loads(line, JSON_ALLOW_NUL, NULL), *ids = json_object_get(test, "ids"), *input = json_object_get(test, "text");
    struct token_list got = {0};
    assert_int_equal(tokenizer_encode(tokenizer, json_string_value(input), json_string_length(input), 0, &got), SITS_OK);
    bool same = json_array_size(ids) == (size_t)got.n;
    for (int64_t i = 0; same && i < got.n; i++) same = json_integer_value(json_array_get(ids, (size_t)i)) == got.ids[i];
    if (!same) {
      n_wrong++;
      print_message("%s: \"%.60s\"\n  want", name, json_string_value(input));
      for (size_t i = 0; i < json_array_size(ids) && i < 24; i++) print_message(" %lld", json_integer_value(json_array_get(ids, i)));
      print_message("\n  got ");
      for (int64_t i = 0; i < got.n && i < 24; i++) print_message(" %d", got.ids[i]);
      print_message("\n");
    }
    token_list_fini(&got);
    json_decref(test);
  }
  free(text);
  tokenizer_destroy(tokenizer);
  print_message("%s: %d cases, %d wrong\n", name, n_cases, n_wrong);
  assert_true(n_cases > 40);
  assert_int_equal(n_wrong, 0);
}

static void check_vocab(const char *name)
{
  char relative[128];
  snprintf(relative, sizeof relative, "gguf_vocab/ggml-vocab-%s.gguf", name);
  const char *path = data_path(relative);
  if (!path) skip();
  check_cases(name, load_gguf(path));
}

static void vocab_gpt2(void **state) { check_vocab("gpt-2"); }
static void vocab_llama_spm(void **state) { check_vocab("llama-spm"); }
static void vocab_phi3(void **state) { check_vocab("phi-3"); }
static void vocab_deepseek_llm(void **state) { check_vocab("deepseek-llm"); }

/* These come without their GGUF; the tokenizer.json gives the same ids for these texts. */
static void vocab_llama_bpe(void **state)
{
  struct tokenizer *tokenizer = load_named("llama3_1");
  if (!tokenizer) skip();
  check_cases("llama-bpe", tokenizer);
}
static void vocab_qwen2(void **state)
{
  struct tokenizer *tokenizer = load_named("qwen3");
  if (!tokenizer) skip();
  check_cases("qwen2", tokenizer);
}

/* The demo model, from $SITS_TEST_MODEL or the user's cache. */
static struct tokenizer *load_smollm2(void)
{
  char path[512];
  const char *given = getenv("SITS_TEST_MODEL"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (given && *given) snprintf(path, sizeof path, "%s", given);
  else if (cache && *cache) snprintf(path, sizeof path, "%s/sits2026/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
  else snprintf(path, sizeof path, "%s/.cache/sits2026/SmolLM2-135M-Instruct.Q4_1.gguf", home ? home : "");
  return access(path, R_OK) == 0 ? load_gguf(path) : NULL;
}

static void smollm2_whole_corpus(void **state)
{
  const char *reference = data_path("models/smollm2/reference.json"), *corpus = data_path("text/wikitext2.test.raw");
  struct tokenizer *tokenizer = load_smollm2();
  if (!tokenizer || !reference || !corpus) skip();
  size_t n_bytes;
  char *text = read_whole(corpus, &n_bytes), hex[SHA256_HEX_BYTES];
  json_t *root = json_load_file(reference, 0, NULL), *want = json_object_get(root, "corpus");
  struct token_list ids = {0};
  assert_int_equal(tokenizer_encode(tokenizer, text, n_bytes, 0, &ids), SITS_OK);
  assert_int_equal(ids.n, json_integer_value(json_object_get(want, "n_ids")));
  ids_sha256(&ids, hex);
  assert_string_equal(hex, json_string_value(json_object_get(want, "sha256_le_u32")));
  json_decref(root);
  token_list_fini(&ids);
  free(text);
  tokenizer_destroy(tokenizer);
}

static void smollm2_special_tokens(void **state)
{
  struct tokenizer *tokenizer = load_smollm2();
  if (!tokenizer) skip();
  static const char prompt[] = "<|im_start|>user\nHi<|im_end|>\n";
  struct token_list special = {0}, plain = {0};
  struct buf text;
  int32_t n_ends;
  assert_int_equal(tokenizer_bos(tokenizer), 1);
  assert_int_equal(tokenizer_eos(tokenizer), 2);
  assert_false(tokenizer_adds_bos(tokenizer));
  const int32_t *ends = tokenizer_end_tokens(tokenizer, &n_ends);
  assert_int_equal(n_ends, 2);
  assert_int_equal(ends[0], 2);
  assert_int_equal(ends[1], 0); /* <|endoftext|> */
  assert_int_equal(tokenizer_encode(tokenizer, prompt, sizeof prompt - 1, TOKENIZER_PARSE_SPECIAL, &special), SITS_OK);
  assert_int_equal(special.ids[0], 1);
  assert_int_equal(special.ids[special.n - 2], 2);
  assert_int_equal(tokenizer_encode(tokenizer, prompt, sizeof prompt - 1, 0, &plain), SITS_OK);
  for (int64_t i = 0; i < plain.n; i++) assert_false(tokenizer_is_special(tokenizer, plain.ids[i]));
  buf_init(&text, 1000);
  assert_int_equal(tokenizer_decode(tokenizer, plain.ids, plain.n, true, &text), SITS_OK);
  assert_string_equal(text.data, prompt);
  buf_clear(&text);
  assert_int_equal(tokenizer_decode(tokenizer, special.ids, special.n, true, &text), SITS_OK);
  assert_string_equal(text.data, "user\nHi\n");
  buf_fini(&text);
  token_list_fini(&special);
  token_list_fini(&plain);
  tokenizer_destroy(tokenizer);
}

/* The same model as GGUF (scores) and as tokenizer.json (merges) gives the same ids, and the tokenizer of a source is the right one. */
static void stories_in_both_forms(void **state)
{
  const char *paths[] = {data_path("models/stories260K/stories260K.gguf"), data_path("models/stories260K/hf")};
  const char *corpus = data_path("text/pride_and_prejudice.txt");
  if (!paths[0] || !paths[1] || !corpus) skip();
  struct token_list ids[2] = {{0}, {0}};
  size_t n_bytes;
  char *text = read_whole(corpus, &n_bytes);
  for (int i = 0; i < 2; i++) {
    struct source *source = NULL;
    struct tokenizer *tokenizer = NULL;
    struct sits_error err = {0};
    int32_t n_ends;
    if (source_open(paths[i], &source, &err) || tokenizer_load(source, &tokenizer, &err)) fail_msg("%s", err.text);
    source_close(source);
    assert_int_equal(tokenizer_n_vocab(tokenizer), 512);
    assert_int_equal(tokenizer_bos(tokenizer), 1);
    assert_int_equal(tokenizer_eos(tokenizer), 2);
    assert_true(tokenizer_adds_bos(tokenizer));
    assert_int_equal(tokenizer_end_tokens(tokenizer, &n_ends)[0], 2);
    assert_int_equal(n_ends, 1);
    assert_int_equal(tokenizer_encode(tokenizer, text, n_bytes, TOKENIZER_ADD_SPECIAL, &ids[i]), SITS_OK);
    tokenizer_destroy(tokenizer);
  }
  assert_int_equal(ids[0].n, ids[1].n);
  assert_memory_equal(ids[0].ids, ids[1].ids, (size_t)ids[0].n * sizeof *ids[0].ids);
  for (int i = 0; i < 2; i++) token_list_fini(&ids[i]);
  free(text);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(vocab_gpt2), cmocka_unit_test(vocab_llama_spm), cmocka_unit_test(vocab_phi3), cmocka_unit_test(vocab_deepseek_llm),
    cmocka_unit_test(vocab_llama_bpe), cmocka_unit_test(vocab_qwen2), cmocka_unit_test(smollm2_whole_corpus),
    cmocka_unit_test(smollm2_special_tokens), cmocka_unit_test(stories_in_both_forms),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
