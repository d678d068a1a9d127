/* Streaming detokeniser: whole characters only, stop strings held back by character, token counts, and the joined pieces against
 * tokenizer_decode. The small tokenizer of these tests is written here: byte-level, ids 0-255 are the bytes, then a few words. */
#include "text_data.h"

#include "base/mem.h"
#include "base/utf8.h"
#include "text/detok.h"

enum { HELLO = 256, WORLD = 257, END = 258, SPACED = 259, N_VOCAB = 260 };

/* The byte alphabet as JSON text, for byte b. */
static void put_alias(FILE *file, int b)
{
  int shifted = 256 + (b < 33 ? b : b < 161 ? b - 127 + 33 : 67);
  bool is_plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  fprintf(file, "\\u%04x", is_plain ? b : shifted);
}

static struct tokenizer *byte_tokenizer(void)
{
  char path[] = "/tmp/sits_detok_XXXXXX";
  struct tokenizer *tokenizer = NULL;
  struct sits_error err = {0};
  int fd = mkstemp(path);
  FILE *file = fdopen(fd, "w");
  assert_non_null(file);
  fputs("{\"added_tokens\":[{\"id\":258,\"content\":\"<end>\",\"special\":true,\"normalized\":false}],\"normalizer\":null,"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"decoder\":{\"type\":\"ByteLevel\"},"
        "\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{", file);
  for (int b = 0; b < 256; b++) {
    fputc('"', file);
    put_alias(file, b);
    fprintf(file, "\":%d,", b);
  }
  fputs("\"Hello\":256,\"\\u0120world\":257,\"<end>\":258,\"\\u0120\\u0120two\":259}}}", file);
  fclose(file);
  enum sits_status status = tokenizer_load_json(path, &tokenizer, &err);
  unlink(path);
  if (status) fail_msg("%s", err.text);
  return tokenizer;
}

static struct tokenizer *tokenizer_here;
static int set_up(void **state) { return (tokenizer_here = byte_tokenizer()) == NULL; }
static int tear_down(void **state)
{
  tokenizer_destroy(tokenizer_here);
  return 0;
}

static struct detok *make(const char *const *stops, int32_t n_stops, bool include_stop)
{
  struct detok *detok = NULL;
  struct detok_options options = {.skip_special = true, .stops = stops, .n_stops = n_stops, .include_stop = include_stop};
  assert_int_equal(detok_create(tokenizer_here, &options, &detok), SITS_OK);
  return detok;
}

static void expect(struct detok *detok, int32_t token, const char *text, int n_tokens, int stop_index)
{
  struct detok_piece piece;
  assert_int_equal(token < 0 ? detok_finish(detok, &piece) : detok_push(detok, token, &piece), SITS_OK);
  char got[256] = {0};
  assert_true(piece.n_bytes < sizeof got);
  memcpy(got, piece.text, piece.n_bytes);
  assert_string_equal(got, text);
  assert_int_equal(piece.n_tokens, n_tokens);
  assert_int_equal(piece.stop_index, stop_index);
}

static void whole_characters_only(void **state) /* contract 14, 16, 18, 19 */
{
  struct detok *detok = make(NULL, 0, false);
  expect(detok, HELLO, "Hello", 1, -1);
  expect(detok, 0xF0, "", 0, -1); /* U+1F600 byte by byte */
  expect(detok, 0x9F, "", 0, -1);
  expect(detok, 0x98, "", 0, -1);
  expect(detok, 0x80, "\xF0\x9F\x98\x80", 4, -1);
  expect(detok, 0xE4, "", 0, -1);  /* broken off by ASCII: one U+FFFD */
  expect(detok, 'a', "\xEF\xBF\xBD" "a", 2, -1);
  expect(detok, 0xFF, "\xEF\xBF\xBD", 1, -1); /* never valid: at once */
  expect(detok, 0x80, "\xEF\xBF\xBD", 1, -1);
  expect(detok, 0xE4, "", 0, -1);
  expect(detok, 0xB8, "", 0, -1);
  expect(detok, -1, "\xEF\xBF\xBD", 2, -1); /* one maximal subpart at the end */
  detok_destroy(detok);
}

static void special_tokens_count_but_give_no_text(void **state)
{
  struct detok *detok = make(NULL, 0, false);
  expect(detok, END, "", 1, -1);
  expect(detok, 0xC3, "", 0, -1);
  expect(detok, END, "", 0, -1); /* waits behind the unfinished character */
  expect(detok, 0xA9, "\xC3\xA9", 3, -1);
  expect(detok, 1 << 30, "", 1, -1); /* unknown ids too */
  expect(detok, -1, "", 0, -1);
  detok_destroy(detok);
}

static void stop_is_cut_by_character(void **state) /* contract 22, 25, 26, 27, 28 */
{
  const char *const stops[] = {"lo wo"};
  struct detok *detok = make(stops, 1, false);
  expect(detok, HELLO, "Hel", 0, -1); /* "lo" could become the stop; the token is not out */
  expect(detok, WORLD, "", 1, 0);     /* HELLO has text before the cut, WORLD has none */
  expect(detok, HELLO, "", 0, 0);
  expect(detok, -1, "", 0, 0);
  detok_destroy(detok);
  detok = make(stops, 1, true);
  expect(detok, HELLO, "Hel", 0, -1);
  expect(detok, WORLD, "lo wo", 2, 0);
  detok_destroy(detok);
}

static void held_text_comes_out(void **state) /* contract 23, 24 */
{
  const char *const stops[] = {"lo!", "\xE4\xB8\xAD\xE6\x96\x87"};
  struct detok *detok = make(stops, 2, false);
  expect(detok, HELLO, "Hel", 0, -1);
  expect(detok, WORLD, "lo world", 2, -1);
  expect(detok, 'l', "", 0, -1);
  expect(detok, 'o', "", 0, -1);
  expect(detok, 0xE4, "", 0, -1);
  expect(detok, 0xB8, "", 0, -1);
  expect(detok, 0xAD, "lo", 2, -1); /* the character itself may begin the other stop */
  expect(detok, 'x', "\xE4\xB8\xADx", 4, -1);
  expect(detok, 'l', "", 0, -1);
  expect(detok, 'o', "", 0, -1);
  expect(detok, -1, "lo", 2, -1);
  detok_destroy(detok);
}

/* Within the first tokens nothing ends the text; a string that is whole behind them does, also where it began before. */
static void stops_wait_for_min_tokens(void **state)
{
  const char *const stops[] = {"ab"};
  const struct detok_options options = {.stops = stops, .n_stops = 1, .min_tokens = 3};
  struct detok *detok = NULL;
  assert_int_equal(detok_create(tokenizer_here, &options, &detok), SITS_OK);
  expect(detok, 'a', "", 0, -1);
  expect(detok, 'b', "ab", 2, -1);
  expect(detok, 'a', "", 0, -1);
  expect(detok, 'b', "", 0, 0);
  detok_destroy(detok);
}

static void overlapping_stops(void **state)
{
  const char *const stops[] = {"abcd", "bc", "abc"};
  struct detok *detok = make(stops, 3, false);
  expect(detok, 'x', "x", 1, -1);
  expect(detok, 'a', "", 0, -1);
  expect(detok, 'b', "", 0, -1);
  expect(detok, 'c', "", 0, 2); /* ends first and is longer than "bc" */
  detok_destroy(detok);
  const char *const self[] = {"aab"};
  detok = make(self, 1, false);
  expect(detok, 'a', "", 0, -1);
  expect(detok, 'a', "", 0, -1);
  expect(detok, 'a', "a", 1, -1);
  expect(detok, 'b', "", 0, 0);
  detok_destroy(detok);
}

static void bad_stops_are_refused(void **state)
{
  const char *const bad[][1] = {{""}, {"\xE4\xB8"}};
  for (int i = 0; i < 2; i++) {
    struct detok *detok = NULL;
    struct detok_options options = {.stops = bad[i], .n_stops = 1};
    assert_int_equal(detok_create(tokenizer_here, &options, &detok), SITS_INVALID_ARGUMENT);
    assert_null(detok);
  }
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

/* Random ids, streamed: the pieces joined are tokenizer_decode's text, each piece is valid UTF-8, all tokens are counted once. */
static void check_random_streams(const struct tokenizer *tokenizer, int n_streams, uint32_t n_ids, bool at_start)
{
  for (int k = 0; k < n_streams; k++) {
    int32_t ids[60];
    int n = 1 + (int)random_below(60), n_counted = 0;
    bool skip_special = random_below(2);
    struct detok *detok = NULL;
    struct buf joined, whole;
    struct detok_piece piece;
    const char *const stops[] = {"never in the text", " and so on, never"};
    struct detok_options options = {.skip_special = skip_special, .at_text_start = at_start, .stops = stops, .n_stops = 2};
    buf_init(&joined, SIZE_MAX / 4);
    buf_init(&whole, SIZE_MAX / 4);
    assert_int_equal(detok_create(tokenizer, &options, &detok), SITS_OK);
    for (int i = 0; i < n; i++) {
      ids[i] = (int32_t)random_below(n_ids);
      assert_int_equal(detok_push(detok, ids[i], &piece), SITS_OK);
      assert_true(utf8_is_valid(piece.text, piece.n_bytes));
      assert_true(buf_append(&joined, piece.text, piece.n_bytes));
      n_counted += piece.n_tokens;
    }
    assert_int_equal(detok_finish(detok, &piece), SITS_OK);
    assert_true(buf_append(&joined, piece.text, piece.n_bytes));
    assert_int_equal(n_counted + piece.n_tokens, n);
    assert_int_equal(tokenizer_decode(tokenizer, ids, n, skip_special, &whole), SITS_OK);
    if (at_start) {
      assert_int_equal(joined.size, whole.size);
      assert_memory_equal(joined.data, whole.data, whole.size);
    }
    detok_destroy(detok);
    buf_fini(&joined);
    buf_fini(&whole);
  }
}

static void random_bytes_join_to_decode(void **state) { check_random_streams(tokenizer_here, 3000, N_VOCAB, true); } /* contract 20, 21 */

static void random_ids_of_real_models(void **state)
{
  static const char *const names[] = {"llama2", "mistral_v0_1", "stories260K", "qwen3"};
  int n_run = 0;
  for (int i = 0; i < 4; i++) {
    struct tokenizer *tokenizer = load_named(names[i]);
    if (!tokenizer) continue;
    check_random_streams(tokenizer, 300, (uint32_t)tokenizer_n_vocab(tokenizer), true);
    check_random_streams(tokenizer, 300, i < 3 ? 300 : 256, true); /* mostly single bytes */
    tokenizer_destroy(tokenizer);
    n_run++;
  }
  if (n_run == 0) skip();
}

/* A naive twin: decode everything, find the stop whose match ends first, cut. */
static void random_stops_against_whole_text(void **state)
{
  static const char letters[] = "ab";
  for (int k = 0; k < 5000; k++) {
    char stop_text[3][6] = {{0}}, text[40] = {0};
    const char *stops[3];
    int n = (int)random_below(39), n_stops = 1 + (int)random_below(3), found = -1;
    size_t want = 0;
    for (int i = 0; i < n_stops; i++) {
      int length = 1 + (int)random_below(5);
      for (int j = 0; j < length; j++) stop_text[i][j] = letters[random_below(2)];
      stops[i] = stop_text[i];
    }
    for (int i = 0; i < n; i++) text[i] = letters[random_below(2)];
    for (int end = 1; end <= n && found < 0; end++) {
      for (int i = 0; i < n_stops; i++) {
        size_t length = strlen(stops[i]);
        if (length > (size_t)end || memcmp(text + end - length, stops[i], length) != 0) continue;
        if (found < 0 || length > strlen(stops[found])) found = i;
      }
      if (found >= 0) want = (size_t)end - strlen(stops[found]);
    }
    if (found < 0) want = (size_t)n;
    struct detok *detok = make(stops, n_stops, false);
    struct detok_piece piece = {.stop_index = -1};
    size_t got = 0;
    int counted = 0;
    for (int i = 0; i < n && piece.stop_index < 0; i++) {
      assert_int_equal(detok_push(detok, text[i], &piece), SITS_OK);
      assert_memory_equal(piece.text, text + got, piece.n_bytes);
      got += piece.n_bytes;
      counted += piece.n_tokens;
      assert_int_equal(counted, got); /* one byte a token: text and ids stay together */
    }
    assert_int_equal(piece.stop_index, found);
    if (found < 0) {
      assert_int_equal(detok_finish(detok, &piece), SITS_OK);
      got += piece.n_bytes;
    }
    assert_int_equal(got, want);
    detok_destroy(detok);
  }
}

static void start_of_text(void **state)
{
  struct tokenizer *tokenizer = load_named("llama2");
  if (!tokenizer) skip();
  for (int at_start = 0; at_start < 2; at_start++) {
    struct detok *detok = NULL;
    struct detok_piece piece;
    struct detok_options options = {.at_text_start = at_start};
    assert_int_equal(detok_create(tokenizer, &options, &detok), SITS_OK);
    assert_int_equal(detok_push(detok, 15043, &piece), SITS_OK); /* "_Hello" */
    assert_int_equal(piece.n_bytes, at_start ? 5 : 6);
    assert_memory_equal(piece.text, at_start ? "Hello" : " Hello", piece.n_bytes);
    assert_int_equal(detok_push(detok, 15043, &piece), SITS_OK);
    assert_memory_equal(piece.text, " Hello", 6);
    detok_destroy(detok);
  }
  tokenizer_destroy(tokenizer);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(whole_characters_only), cmocka_unit_test(special_tokens_count_but_give_no_text),
    cmocka_unit_test(stop_is_cut_by_character), cmocka_unit_test(held_text_comes_out), cmocka_unit_test(overlapping_stops),
    cmocka_unit_test(stops_wait_for_min_tokens),
    cmocka_unit_test(bad_stops_are_refused), cmocka_unit_test(random_bytes_join_to_decode), cmocka_unit_test(random_ids_of_real_models),
    cmocka_unit_test(random_stops_against_whole_text), cmocka_unit_test(start_of_text),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
