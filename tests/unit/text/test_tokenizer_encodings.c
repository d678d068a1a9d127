/* Every string of the shared encodings, for every tokenizer: ids, ids_plain, ids_add_special and the decoded text, made by Hugging Face
 * tokenizers; and whole files by the SHA-256 of their ids. */
#include "text_data.h"

static const char *const names[] = {"llama3_1", "qwen3", "llama2", "mistral_v0_1", "stories260K"};
enum { N_NAMES = sizeof names / sizeof *names };
static struct tokenizer *loaded[N_NAMES];

static int load_all(void **state)
{
  for (int i = 0; i < N_NAMES; i++) loaded[i] = load_named(names[i]);
  return 0;
}

static int free_all(void **state)
{
  for (int i = 0; i < N_NAMES; i++) tokenizer_destroy(loaded[i]);
  return 0;
}

static int n_wrong;

static void expect_ids(const struct tokenizer *tokenizer, const json_t *test, const char *key, unsigned flags)
{
  const json_t *want = json_object_get(test, key), *text = json_object_get(test, "text");
  bool is_plain = strcmp(key, "ids_plain") == 0;
  if (!want && is_plain) want = json_object_get(test, "ids");
  /* One row of the data is wrong: its ids_plain has <tool_call>, an added token that is not special, as 151643, which is <|endoftext|>
   * (the reference was made with the special tokens taken out and the others renumbered). The library itself, asked not to parse special
   * tokens, gives `ids`. */
  if (is_plain && tokenizer == loaded[1] && json_integer_value(json_object_get(test, "id")) == 309) want = json_object_get(test, "ids");
  struct token_list got = {0};
  assert_int_equal(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), flags, &got), SITS_OK);
  bool same = json_array_size(want) == (size_t)got.n;
  for (int64_t i = 0; same && i < got.n; i++) same = json_integer_value(json_array_get(want, (size_t)i)) == got.ids[i];
  if (!same && ++n_wrong <= 20) {
    print_message("id %lld %s flags %u\n  want", json_integer_value(json_object_get(test, "id")), key, flags);
    for (size_t i = 0; i < json_array_size(want) && i < 24; i++) print_message(" %lld", json_integer_value(json_array_get(want, i)));
    print_message("\n  got ");
    for (int64_t i = 0; i < got.n && i < 24; i++) print_message(" %d", got.ids[i]);
    print_message("\n");
  }
  token_list_fini(&got);
}

static void expect_decoded(const struct tokenizer *tokenizer, const json_t *test)
{
  const json_t *ids = json_object_get(test, "ids"), *want = json_object_get(test, "decoded");
  struct token_list list = {0};
  struct buf got;
  if (!want) want = json_object_get(test, "text");
  for (size_t i = 0; i < json_array_size(ids); i++)
    assert_true(token_list_push(&list, (int32_t)json_integer_value(json_array_get(ids, i))));
  buf_init(&got, SIZE_MAX / 4);
  assert_int_equal(tokenizer_decode(tokenizer, list.ids, list.n, false, &got), SITS_OK);
  if ((got.size != json_string_length(want) || memcmp(got.data, json_string_value(want), got.size) != 0) && ++n_wrong <= 20)
    print_message("id %lld decode: got \"%s\"\n", json_integer_value(json_object_get(test, "id")), got.data ? got.data : "");
  buf_fini(&got);
  token_list_fini(&list);
}

static void check_encodings(const char *name, const struct tokenizer *tokenizer)
{
  char relative[128];
  size_t n_bytes;
  int n_cases = 0;
  snprintf(relative, sizeof relative, "tokenizers/encodings/%s.jsonl", name);
  const char *path = data_path(relative);
  if (!tokenizer || !path) skip();
  char *text = read_whole(path, &n_bytes), *save = NULL;
  n_wrong = 0;
  for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), n_cases++) {
    json_error_t at;
    json_t *test = json_loads(line, JSON_ALLOW_NUL, &at);
    assert_non_null(test);
    expect_ids(tokenizer, test, "ids", TOKENIZER_PARSE_SPECIAL);
    expect_ids(tokenizer, test, "ids_add_special", TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_SPECIAL);
    expect_ids(tokenizer, test, "ids_plain", 0);
    expect_decoded(tokenizer, test);
    json_decref(test);
  }
  free(text);
  print_message("%s: %d cases, %d wrong\n", name, n_cases, n_wrong);
  assert_true(n_cases > 100);
  assert_int_equal(n_wrong, 0);
}

static void check_corpus(const char *name, const struct tokenizer *tokenizer)
{
  const char *path = data_path("tokenizers/corpus_ids.json");
  json_error_t at;
  size_t i;
  const json_t *row;
  int n_checked = 0;
  if (!tokenizer || !path) skip();
  json_t *rows = json_load_file(path, 0, &at);
  assert_non_null(rows);
  json_array_foreach(rows, i, row) {
    if (strcmp(json_string_value(json_object_get(row, "tokenizer")), name) != 0) continue;
    const char *text_path = data_path(json_string_value(json_object_get(row, "text")));
    if (!text_path) continue;
    size_t n_bytes;
    char *text = read_whole(text_path, &n_bytes), hex[SHA256_HEX_BYTES];
    struct token_list ids = {0};
    assert_int_equal(tokenizer_encode(tokenizer, text, n_bytes, TOKENIZER_PARSE_SPECIAL, &ids), SITS_OK);
    assert_int_equal(ids.n, json_integer_value(json_object_get(row, "n_tokens")));
    ids_sha256(&ids, hex);
    assert_string_equal(hex, json_string_value(json_object_get(row, "ids_u32le_sha256")));
    token_list_fini(&ids);
    free(text);
    n_checked++;
  }
  json_decref(rows);
  if (n_checked == 0) skip();
}

#define CASES(index, name) \
  static void encodings_##name(void **state) { check_encodings(names[index], loaded[index]); } \
  static void corpus_##name(void **state) { check_corpus(names[index], loaded[index]); }
CASES(0, llama3_1)
CASES(1, qwen3)
CASES(2, llama2)
CASES(3, mistral_v0_1)
CASES(4, stories260K)

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(encodings_llama3_1), cmocka_unit_test(encodings_qwen3), cmocka_unit_test(encodings_llama2),
    cmocka_unit_test(encodings_mistral_v0_1), cmocka_unit_test(encodings_stories260K), cmocka_unit_test(corpus_llama3_1),
    cmocka_unit_test(corpus_qwen3), cmocka_unit_test(corpus_llama2), cmocka_unit_test(corpus_mistral_v0_1),
    cmocka_unit_test(corpus_stories260K),
  };
  return cmocka_run_group_tests(tests, load_all, free_all);
}
