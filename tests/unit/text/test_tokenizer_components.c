/* Single components and small tokenizers with every flag, against what Hugging Face tokenizers answers (components.json, written by
 * make_components.py); refusals by name; hand-written scanners against PCRE2; bounds and long inputs. */
#include "text_data.h"

#include "base/clock.h"
#include "base/utf8.h"
#include "text/tokenizer_json.h"
#include "text/unicode.h"

static json_t *reference;
static int n_shown;

static int load_reference(void **state)
{
  json_error_t at;
  reference = json_load_file("tests/unit/text/components.json", JSON_ALLOW_NUL, &at);
  if (!reference) print_message("components.json: %s line %d\n", at.text, at.line);
  return reference == NULL;
}

static int free_reference(void **state)
{
  json_decref(reference);
  return 0;
}

static void show(const json_t *config, const char *text)
{
  char *dump = json_dumps(config, JSON_COMPACT);
  if (++n_shown <= 12) print_message("  %.160s\n    text \"%s\"\n", dump, text);
  free(dump);
}

struct pieces { const json_t *want; size_t n; bool same; };

static enum sits_status take_piece(void *context, const char *text, size_t n_bytes)
{
  struct pieces *p = context;
  const json_t *want = json_array_get(p->want, p->n++);
  p->same = p->same && want && json_string_length(want) == n_bytes && memcmp(json_string_value(want), text, n_bytes) == 0;
  return SITS_OK;
}

static void pre_tokenizers(void **state)
{
  size_t i, k;
  const json_t *row, *test;
  int n_wrong = 0, n_cases = 0;
  n_shown = 0;
  json_array_foreach(json_object_get(reference, "pretok"), i, row) {
    struct tokenizer *tokenizer = tokenizer_new();
    struct sits_error err = {0};
    const json_t *config = json_object_get(row, "config");
    if (tokenizer_json_pre_tokenizer(tokenizer, config, &err)) fail_msg("%zu: %s", i, err.text);
    json_array_foreach(json_object_get(row, "cases"), k, test) {
      const json_t *text = json_array_get(json_array_get(json_object_get(reference, "texts"), 0), k);
      struct pieces pieces = {test, 0, true};
      struct pretok_scratch scratch = {0};
      const char *bytes = json_string_value(text);
      assert_int_equal(pretok_run(&tokenizer->pretok, &scratch, bytes, json_string_length(text), true, take_piece, &pieces), SITS_OK);
      pretok_scratch_fini(&scratch);
      n_cases++;
      if (pieces.same && pieces.n == json_array_size(pieces.want)) continue;
      n_wrong++;
      show(config, json_string_value(text));
    }
    tokenizer_destroy(tokenizer);
  }
  print_message("pre-tokenizers: %d cases, %d wrong\n", n_cases, n_wrong);
  assert_true(n_cases > 1000);
  assert_int_equal(n_wrong, 0);
}

static void normalizers(void **state)
{
  size_t i, k;
  const json_t *row, *test;
  int n_wrong = 0, n_cases = 0;
  n_shown = 0;
  json_array_foreach(json_object_get(reference, "norm"), i, row) {
    struct tokenizer *tokenizer = tokenizer_new();
    struct sits_error err = {0};
    struct buf scratch[2];
    buf_init(&scratch[0], 1 << 20);
    buf_init(&scratch[1], 1 << 20);
    if (tokenizer_json_normalizer(tokenizer, json_object_get(row, "config"), &err)) fail_msg("%s", err.text);
    json_array_foreach(json_object_get(row, "cases"), k, test) {
      const json_t *text = json_array_get(test, 0), *want = json_array_get(test, 1);
      const char *got;
      size_t n;
      assert_int_equal(norm_run(&tokenizer->norm, json_string_value(text), json_string_length(text), scratch, &got, &n), SITS_OK);
      n_cases++;
      if (n == json_string_length(want) && memcmp(got, json_string_value(want), n) == 0) continue;
      n_wrong++;
      show(json_object_get(row, "config"), json_string_value(text));
    }
    buf_fini(&scratch[0]);
    buf_fini(&scratch[1]);
    tokenizer_destroy(tokenizer);
  }
  print_message("normalizers: %d cases, %d wrong\n", n_cases, n_wrong);
  assert_true(n_cases > 500);
  assert_int_equal(n_wrong, 0);
}

/* A tokenizer from JSON text, through a temporary file as everywhere else. */
static enum sits_status load_text(const char *text, struct tokenizer **out, struct sits_error *err)
{
  char path[] = "/tmp/sits_components_XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
  close(fd);
  enum sits_status status = tokenizer_load_json(path, out, err);
  unlink(path);
  return status;
}

static bool ids_equal(const struct tokenizer *tokenizer, const json_t *text, const json_t *want, unsigned flags)
{
  struct token_list got = {0};
  assert_int_equal(tokenizer_encode(tokenizer, json_string_value(text), json_string_length(text), flags, &got), SITS_OK);
  bool same = (size_t)got.n == json_array_size(want);
  for (int64_t i = 0; same && i < got.n; i++) same = got.ids[i] == json_integer_value(json_array_get(want, (size_t)i));
  token_list_fini(&got);
  return same;
}

static bool decodes_to(const struct tokenizer *tokenizer, const json_t *ids, const json_t *want, bool skip_special)
{
  struct token_list list = {0};
  struct buf got;
  buf_init(&got, 1 << 20);
  for (size_t i = 0; i < json_array_size(ids); i++)
    assert_true(token_list_push(&list, (int32_t)json_integer_value(json_array_get(ids, i))));
  assert_int_equal(tokenizer_decode(tokenizer, list.ids, list.n, skip_special, &got), SITS_OK);
  bool same = got.size == json_string_length(want) && memcmp(got.data, json_string_value(want), got.size) == 0;
  if (!same) print_message("decode: \"%s\" but \"%s\"\n", got.data, json_string_value(want));
  token_list_fini(&list);
  buf_fini(&got);
  return same;
}

static void small_tokenizers(void **state)
{
  static const char *const what[] = {"ids", "ids_add_special", "ids_plain", "decode", "decode without special"};
  size_t i, k;
  const json_t *row, *test;
  int n_wrong = 0, n_cases = 0;
  n_shown = 0;
  json_array_foreach(json_object_get(reference, "tokenizers"), i, row) {
    struct tokenizer *tokenizer = NULL;
    struct sits_error err = {0};
    char *dump = json_dumps(json_object_get(row, "json"), JSON_COMPACT);
    if (load_text(dump, &tokenizer, &err)) fail_msg("%zu: %s", i, err.text);
    free(dump);
    json_array_foreach(json_object_get(row, "cases"), k, test) {
      const json_t *text = json_array_get(test, 0), *ids = json_array_get(test, 1);
      bool ok[5];
      ok[0] = ids_equal(tokenizer, text, ids, TOKENIZER_PARSE_SPECIAL);
      ok[1] = ids_equal(tokenizer, text, json_array_get(test, 2), TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_SPECIAL);
      ok[2] = ids_equal(tokenizer, text, json_array_get(test, 3), 0);
      ok[3] = decodes_to(tokenizer, ids, json_array_get(test, 4), false);
      ok[4] = decodes_to(tokenizer, ids, json_array_get(test, 5), true);
      n_cases++;
      for (int j = 0; j < 5; j++) {
        if (ok[j]) continue;
        n_wrong++;
        print_message("tokenizer %zu, %s\n", i, what[j]);
        show(json_object_get(json_object_get(row, "json"), "pre_tokenizer"), json_string_value(text));
      }
    }
    tokenizer_destroy(tokenizer);
  }
  print_message("small tokenizers: %d cases, %d wrong\n", n_cases, n_wrong);
  assert_true(n_cases > 300);
  assert_int_equal(n_wrong, 0);
}

/* Refusals name what they refuse. */
#define MODEL "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}"
#define DECODER "\"decoder\":{\"type\":\"Fuse\"}"
#define SPLIT(regex) \
  "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"Isolated\"}," DECODER "," MODEL "}"
#define VOCAB(rest) "{" DECODER ",\"model\":{\"type\":\"BPE\"," rest "}}"

static void expect_refusal(const char *text, enum sits_status want, const char *word)
{
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  enum sits_status status = load_text(text, &tokenizer, &err);
  if (status != want || !strstr(err.text, word)) fail_msg("%s\n  gave %s: %s", text, sits_status_info(status)->name, err.text);
  assert_null(tokenizer);
}

static void refusals(void **state)
{
  static const struct { const char *text; enum sits_status status; const char *word; } cases[] = {
    {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", SITS_UNSUPPORTED, "Unigram"},
    {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", SITS_UNSUPPORTED, "WordPiece"},
    {"{\"model\":{\"vocab\":{\"a\":0}}}", SITS_UNSUPPORTED, "model"},
    {VOCAB("\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1"), SITS_UNSUPPORTED, "dropout"},
    {VOCAB("\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"</w>\""), SITS_UNSUPPORTED, "end_of_word_suffix"},
    {"{\"normalizer\":{\"type\":\"BertNormalizer\"}," DECODER "," MODEL "}", SITS_UNSUPPORTED, "BertNormalizer"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x\"},\"content\":\"\"}," MODEL "}", SITS_UNSUPPORTED, "Replace"},
    {"{\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}," DECODER "," MODEL "}", SITS_UNSUPPORTED, "BertPreTokenizer"},
    {SPLIT("[a&&b]"), SITS_UNSUPPORTED, "&&"}, {SPLIT("\\\\bx"), SITS_UNSUPPORTED, "\\b"}, {SPLIT("[a[b]]"), SITS_UNSUPPORTED, "nested"},
    {SPLIT("("), SITS_FORMAT, "Split"},
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]}," MODEL "}",
     SITS_UNSUPPORTED, "Digits after ByteLevel"},
    {"{\"decoder\":{\"type\":\"WordPiece\"}," MODEL "}", SITS_UNSUPPORTED, "WordPiece"},
    {"{\"decoder\":null," MODEL "}", SITS_UNSUPPORTED, "decoder"},
    {"{" DECODER ",\"post_processor\":{\"type\":\"BertProcessing\"}," MODEL "}", SITS_UNSUPPORTED, "BertProcessing"},
    {VOCAB("\"vocab\":{\"a\":0},\"merges\":[\"a c\"]"), SITS_FORMAT, "merge 0"},
    {VOCAB("\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]"), SITS_FORMAT, "merge 0"},
    {VOCAB("\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]"), SITS_FORMAT, "vocab"},
    {VOCAB("\"vocab\":{\"a\":99999999999},\"merges\":[]"), SITS_FORMAT, "vocab"},
    {VOCAB("\"vocab\":{\"a\":-1},\"merges\":[]"), SITS_FORMAT, "vocab"},
    {VOCAB("\"vocab\":{},\"merges\":[]"), SITS_FORMAT, "vocab"},
    {VOCAB("\"unk_token\":\"u\",\"vocab\":{\"a\":0},\"merges\":[]"), SITS_FORMAT, "unk_token"},
    {"{\"added_tokens\":[{\"id\":0,\"content\":\"z\"}]," DECODER "," MODEL "}", SITS_FORMAT, "added_tokens"},
    {"{\"added_tokens\":[{\"content\":\"z\"}]," DECODER "," MODEL "}", SITS_FORMAT, "added_tokens"},
    {"[]", SITS_FORMAT, "model"},
    {"{", SITS_INVALID_JSON, "line"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_refusal(cases[i].text, cases[i].status, cases[i].word);
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  assert_int_equal(tokenizer_load_json("/nonexistent/tokenizer.json", &tokenizer, &err), SITS_NOT_FOUND);
  assert_int_equal(load_text("{" DECODER "," MODEL "}", &tokenizer, &err), SITS_OK); /* the frame itself is good */
  tokenizer_destroy(tokenizer);
}

/* xorshift, so that a failure can be repeated. */
static uint64_t random_state = 88172645463325252u;
static uint32_t random_below(uint32_t n)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32) % n;
}

/* Whether scanner and PCRE2 see the same class; PCRE2's Unicode may be older than ours. */
static bool same_class(uint32_t c, void *const codes[3], struct pretok_scratch *scratch)
{
  static const enum unicode_class classes[3] = {UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE};
  char text[4];
  size_t n = utf8_encode(c, text), start, end;
  bool same = true;
  for (int i = 0; i < 3 && same; i++) {
    struct pretok_step step = {.kind = PRETOK_REGEX, .code = codes[i]};
    int got = pretok_regex_next(&step, scratch, text, n, 0, &start, &end);
    assert_true(got >= 0);
    same = (got == 1) == (unicode_class(c) == classes[i]);
  }
  return same;
}

static unsigned char is_same[0x110000];

/* Random text of usual and unusual characters. */
static size_t random_text(char *text, size_t n_chars)
{
  static const char usual[] = "aabcdefgstrvemlldSTREVML 0123456789    \n\r\t''\'.,-!?_\v\f\x1c";
  static const uint32_t unusual[] = {0x17F, 0xE9, 0x301, 0x3000, 0xA0, 0x85, 0x2028, 0x4E2D, 0x663, 0xBD, 0x2167, 0x1F600, 0x180E, 0x200B,
                                     0x212A, 0xAC00, 0xFEFF, 0xFFFD};
  size_t n = 0;
  for (size_t i = 0; i < n_chars; i++) {
    uint32_t kind = random_below(10), c = (uint32_t)usual[random_below(sizeof usual - 1)];
    if (kind == 8) c = unusual[random_below(sizeof unusual / sizeof *unusual)];
    while (kind == 9 && !is_same[c = random_below(random_below(2) ? 0x110000 : 0x3000)]) {}
    n += utf8_encode(c, text + n);
  }
  return n;
}

struct spans { size_t end[512]; size_t n; const char *text; };
static enum sits_status take_span(void *context, const char *text, size_t n_bytes)
{
  struct spans *spans = context;
  assert_true(spans->n < 512);
  spans->end[spans->n++] = (size_t)(text - spans->text) + n_bytes;
  return SITS_OK;
}

static void compare_scanner(const char *pattern, struct pretok_scratch *scratch)
{
  struct pretok fast = {0}, slow = {0};
  size_t length = strlen(pattern);
  assert_int_equal(pretok_add_split(&fast, pattern, length, false, PRETOK_ISOLATED, false, false, NULL), SITS_OK);
  assert_int_equal(pretok_add_split(&slow, pattern, length, false, PRETOK_ISOLATED, false, true, NULL), SITS_OK);
  assert_int_not_equal(fast.steps[0].kind, PRETOK_REGEX);
  assert_int_equal(slow.steps[0].kind, PRETOK_REGEX);
  for (int i = 0; i < 6000; i++) {
    char text[4 * 64];
    size_t n = random_text(text, 1 + random_below(40));
    struct spans a = {.text = text}, b = {.text = text};
    assert_int_equal(pretok_run(&fast, scratch, text, n, true, take_span, &a), SITS_OK);
    assert_int_equal(pretok_run(&slow, scratch, text, n, true, take_span, &b), SITS_OK);
    if (a.n != b.n || memcmp(a.end, b.end, a.n * sizeof *a.end) != 0) fail_msg("%s: \"%.*s\"", pattern, (int)n, text);
  }
  pretok_fini(&fast);
  pretok_fini(&slow);
}

static void scanners_equal_regex(void **state)
{
  static const char *const patterns[] = {
    pretok_gpt2_pattern, pretok_llama3_pattern, pretok_qwen2_pattern, "\\p{N}", "\\p{N}+", "\\p{N}{1,3}", "\\s+$"};
  static const char *const classes[3] = {"\\p{L}", "\\p{N}", "\\s"};
  struct pretok_scratch scratch = {0};
  void *codes[3];
  uint32_t n_newer = 0;
  for (int i = 0; i < 3; i++) assert_int_equal(pretok_regex_compile(classes[i], strlen(classes[i]), false, &codes[i], NULL), SITS_OK);
  for (uint32_t c = 0; c < 0x110000; c++) {
    if (c >= 0xD800 && c < 0xE000) continue;
    is_same[c] = same_class(c, codes, &scratch);
    n_newer += !is_same[c];
  }
  print_message("%u code points are newer than PCRE2's Unicode\n", n_newer);
  assert_true(n_newer < 12000); /* 9,392 with Unicode 14 (Debian 12); far more would be an error in the tables */
  for (size_t k = 0; k < sizeof patterns / sizeof *patterns; k++) {
    pretok_scratch_fini(&scratch);
    compare_scanner(patterns[k], &scratch);
  }
  pretok_scratch_fini(&scratch);
  for (int i = 0; i < 3; i++) pretok_regex_free(codes[i]);
}

static enum sits_status count_span(void *context, const char *text, size_t n_bytes)
{
  ++*(size_t *)context;
  return SITS_OK;
}

/* A pattern that is quadratic (or worse) on a text ends with an error in bounded time. */
static void regex_has_limits(void **state)
{
  static const struct { const char *pattern; char fill, last; } cases[] = {
    {"\\s+$", ' ', 'x'}, {"(a+)+b", 'a', 'c'}, {"(a|aa)+$", 'a', 'b'}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    size_t n = 4 << 20, n_spans = 0;
    char *text = malloc(n);
    struct pretok pretok = {0};
    struct pretok_scratch scratch = {0};
    const char *pattern = cases[i].pattern;
    memset(text, cases[i].fill, n);
    text[n - 1] = cases[i].last;
    assert_int_equal(pretok_add_split(&pretok, pattern, strlen(pattern), false, PRETOK_ISOLATED, false, true, NULL), SITS_OK);
    int64_t start = clock_monotonic_us();
    assert_int_equal(pretok_run(&pretok, &scratch, text, n, true, count_span, &n_spans), SITS_INVALID_ARGUMENT);
    assert_true(clock_monotonic_us() - start < 60000000);
    pretok_scratch_fini(&scratch);
    pretok_fini(&pretok);
    free(text);
  }
}

static int64_t time_encode(const struct tokenizer *tokenizer, const char *text, size_t n)
{
  struct token_list ids = {0};
  struct buf decoded;
  int64_t start = clock_monotonic_us();
  assert_int_equal(tokenizer_encode(tokenizer, text, n, 0, &ids), SITS_OK);
  int64_t took = clock_monotonic_us() - start;
  buf_init(&decoded, SIZE_MAX / 4);
  assert_int_equal(tokenizer_decode(tokenizer, ids.ids, ids.n, true, &decoded), SITS_OK);
  buf_fini(&decoded);
  token_list_fini(&ids);
  return took;
}

/* Long runs without a space, of one letter, of spaces and of mixed letters, are n log n: eight times the length costs far less than 64
 * times. */
static void long_words_are_not_quadratic(void **state)
{
  size_t i, n = 1 << 20;
  const json_t *row;
  char *text = malloc(n);
  json_array_foreach(json_object_get(reference, "tokenizers"), i, row) {
    struct tokenizer *tokenizer = NULL;
    struct sits_error err = {0};
    char *dump = json_dumps(json_object_get(row, "json"), JSON_COMPACT);
    if (load_text(dump, &tokenizer, &err)) fail_msg("%s", err.text);
    free(dump);
    for (int kind = 0; kind < 3; kind++) {
      for (size_t k = 0; k < n; k++) text[k] = kind == 0 ? 'a' : kind == 1 ? ' ' : "etaoinshr"[random_below(9)];
      int64_t small = time_encode(tokenizer, text, n / 8);
      assert_true(time_encode(tokenizer, text, n) < 40 * small + 400000);
    }
    tokenizer_destroy(tokenizer);
  }
  free(text);
}

static void marks_are_not_quadratic(void **state)
{
  size_t n = 1 << 20;
  char *text = malloc(n);
  struct buf out;
  for (size_t i = 0; i < n; i += 2) memcpy(text + i, i / 2 % 2 ? "\xCC\xA3" : "\xCC\x81", 2); /* U+0323, U+0301: two classes */
  text[0] = text[1] = 'a';
  buf_init(&out, SIZE_MAX / 4);
  int64_t start = clock_monotonic_us();
  assert_true(unicode_normalize(text, n, true, &out));
  assert_true(clock_monotonic_us() - start < 5000000);
  assert_memory_equal(out.data, "a\xE1\xBA\xA1\xCC\xA3", 6); /* U+1EA1, then the other dots below, then the accents */
  assert_memory_equal(out.data + out.size - 4, "\xCC\x81\xCC\x81", 4);
  buf_fini(&out);
  free(text);
}

static void invalid_utf8_is_replaced(void **state) /* contract 17 */
{
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  char *dump = json_dumps(json_object_get(json_array_get(json_object_get(reference, "tokenizers"), 0), "json"), JSON_COMPACT);
  if (load_text(dump, &tokenizer, &err)) fail_msg("%s", err.text);
  free(dump);
  static const struct { const char *in, *out; } cases[] = {
    {"a\xE4\xB8", "a\xEF\xBF\xBD"}, {"\xFF\xFE", "\xEF\xBF\xBD\xEF\xBF\xBD"}, {"\xF0\x9F\x98x\xC3", "\xEF\xBF\xBDx\xEF\xBF\xBD"},
    {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, {"\x80", "\xEF\xBF\xBD"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct token_list ids = {0};
    struct buf text;
    buf_init(&text, 1000);
    assert_int_equal(tokenizer_encode(tokenizer, cases[i].in, strlen(cases[i].in), 0, &ids), SITS_OK);
    assert_int_equal(tokenizer_decode(tokenizer, ids.ids, ids.n, false, &text), SITS_OK);
    assert_string_equal(text.data, cases[i].out);
    buf_fini(&text);
    token_list_fini(&ids);
  }
  tokenizer_destroy(tokenizer);
}

/* A vocabulary of numbers: text becomes its bytes and comes back, every id has a text of its own. */
static void numbered(void **state)
{
  (void)state;
  static const char text[] = "a \"b\\ \n\xC3\xA9\xE2\x82\xAC";
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  struct token_list ids = {0};
  struct buf out;
  buf_init(&out, 1 << 16);
  assert_int_equal(tokenizer_numbered(255, &tokenizer, &err), SITS_UNSUPPORTED);
  assert_int_equal(tokenizer_numbered(5001, &tokenizer, &err), SITS_OK);
  assert_int_equal(tokenizer_n_vocab(tokenizer), 5001);
  assert_int_equal(tokenizer_encode(tokenizer, text, sizeof text - 1, 0, &ids), SITS_OK);
  assert_int_equal(ids.n, sizeof text - 1);
  for (size_t i = 0; i < sizeof text - 1; i++) assert_int_equal(ids.ids[i], (unsigned char)text[i]);
  assert_int_equal(tokenizer_decode(tokenizer, ids.ids, ids.n, false, &out), SITS_OK);
  assert_int_equal(out.size, sizeof text - 1);
  assert_memory_equal(out.data, text, out.size);
  for (int32_t i = 0; i < 5001; i++) {
    out.size = 0;
    assert_true(tokenizer_token_bytes(tokenizer, i, false, &out));
    if (i < 256) assert_true(out.size == 1 && (unsigned char)out.data[0] == i);
    else assert_true(out.size >= 4 && out.data[0] == 't' && strtol(out.data + 1, NULL, 10) == i);
  }
  token_list_fini(&ids);
  buf_fini(&out);
  tokenizer_destroy(tokenizer);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(pre_tokenizers), cmocka_unit_test(normalizers), cmocka_unit_test(small_tokenizers), cmocka_unit_test(refusals),
    cmocka_unit_test(scanners_equal_regex), cmocka_unit_test(regex_has_limits), cmocka_unit_test(long_words_are_not_quadratic),
    cmocka_unit_test(marks_are_not_quadratic), cmocka_unit_test(invalid_utf8_is_replaced), cmocka_unit_test(numbered),
  };
  return cmocka_run_group_tests(tests, load_reference, free_reference);
}
