/* One tokenizer, many threads, from its first use on (the memo is still empty): all give the ids that one thread gives. TSan watches. */
#include "text_data.h"

#include <pthread.h>

#include "text/detok.h"

enum { N_THREADS = 6, N_ROUNDS = 8 };

static char *text;
static size_t n_text;
static const struct tokenizer *shared;

static void *encode_and_stream(void *result)
{
  for (int round = 0; round < N_ROUNDS; round++) {
    struct token_list ids = {0};
    struct detok *detok = NULL;
    struct detok_piece piece;
    struct detok_options options = {.skip_special = true};
    if (tokenizer_encode(shared, text, n_text, 0, &ids) || detok_create(shared, &options, &detok)) break;
    for (int64_t i = 0; i < 500 && i < ids.n; i++)
      if (detok_push(detok, ids.ids[i], &piece)) return NULL;
    detok_destroy(detok);
    struct token_list *first = result;
    if (round == 0) *first = ids;
    else token_list_fini(&ids);
  }
  return NULL;
}

static void threads_agree(void **state)
{
  size_t i;
  const json_t *row;
  json_t *reference = json_load_file("tests/unit/text/components.json", JSON_ALLOW_NUL, NULL);
  assert_non_null(reference);
  text = read_whole("tests/unit/text/components.json", &n_text); /* JSON with every kind of character */
  if (n_text > 40000) n_text = 40000;
  json_array_foreach(json_object_get(reference, "tokenizers"), i, row) {
    char path[] = "/tmp/sits_threads_XXXXXX";
    struct tokenizer *tokenizer = NULL;
    struct token_list got[N_THREADS] = {{0}}, want = {0};
    pthread_t threads[N_THREADS];
    struct sits_error err = {0};
    close(mkstemp(path));
    assert_int_equal(json_dump_file(json_object_get(row, "json"), path, JSON_COMPACT), 0);
    assert_int_equal(tokenizer_load_json(path, &tokenizer, &err), SITS_OK);
    unlink(path);
    shared = tokenizer;
    for (int t = 0; t < N_THREADS; t++) assert_int_equal(pthread_create(&threads[t], NULL, encode_and_stream, &got[t]), 0);
    for (int t = 0; t < N_THREADS; t++) pthread_join(threads[t], NULL);
    assert_int_equal(tokenizer_encode(tokenizer, text, n_text, 0, &want), SITS_OK);
    assert_true(want.n > 1000);
    for (int t = 0; t < N_THREADS; t++) {
      assert_int_equal(got[t].n, want.n);
      assert_memory_equal(got[t].ids, want.ids, (size_t)want.n * sizeof *want.ids);
      token_list_fini(&got[t]);
    }
    token_list_fini(&want);
    tokenizer_destroy(tokenizer);
  }
  json_decref(reference);
  free(text);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(threads_agree)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
