/* Where prompt lookup finds what to guess: the longest match, the more numerous of its continuations, and a place that is resumed behind
 * one replaced token. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>

#include <cmocka.h>

#include "engine/engine_draft.c"

enum { STRANGE = 99, MOST = 64 };

/* Tokens first..last behind the n there are. */
static int32_t say(int32_t *tokens, int32_t n, int32_t first, int32_t last)
{
  for (int32_t t = first; t <= last; t++) tokens[n++] = t;
  return n;
}

/* The draft's token number n, from the places as they are after those before it. */
static void guess(int32_t *tokens, int32_t known, struct places *places, int32_t n, int32_t expected, int32_t agreed)
{
  int32_t agreement;
  tokens[known + n] = vote(tokens, n, places, &agreement);
  assert_int_equal(tokens[known + n], expected);
  assert_int_equal(agreement, agreed);
}

static void test_longest_match_and_majority(void **state)
{
  int32_t tokens[MOST], n = 0;
  struct places places;
  for (int32_t i = 0; i < 3; i++) {
    n = say(tokens, n, 1, 4);
    tokens[n++] = i == 2 ? 50 : 40; /* 1 2 3 4 is followed by 40 twice, at last by 50 */
  }
  n = say(tokens, say(tokens, n, 60, 61), 4, 4); /* 4 alone, followed by what comes now */
  n = say(tokens, n, 1, 4);
  find_places(tokens, n, &places);
  assert_int_equal(places.length, 4);
  assert_int_equal(places.n, 3);
  assert_false(places.is_resumed);
  assert_int_equal(kind_of(&places, 0, MOST_AGREE), 3 * 4 + 1);
  guess(tokens, n, &places, 0, 40, MOST_AGREE);
  guess(tokens, n, &places, 1, 1, ALL_AGREE);
}

static void test_how_many_agree(void **state)
{
  static const struct { int32_t next[4], n, expected, agreed; } cases[] = {
      {{40}, 1, 40, ALL_AGREE},        {{40, 40}, 2, 40, ALL_AGREE},         {{40, 50}, 2, 50, HALF_AGREE},
      {{40, 50, 60}, 3, 60, HALF_AGREE}, {{40, 40, 50, 60}, 4, 40, HALF_AGREE}, {{40, 40, 40, 50}, 4, 40, MOST_AGREE},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int32_t tokens[MOST], n = 0;
    struct places places;
    for (int32_t k = 0; k < cases[i].n; k++) {
      n = say(tokens, n, 1, 4);
      tokens[n++] = cases[i].next[k];
    }
    n = say(tokens, n, 1, 4);
    find_places(tokens, n, &places);
    guess(tokens, n, &places, 0, cases[i].expected, cases[i].agreed);
  }
}

static void test_resumed_behind_a_replaced_token(void **state)
{
  int32_t tokens[MOST], n = say(tokens, 0, 1, 20);
  struct places places;
  n = say(tokens, n, 11, 11 + SURE_MATCH - 1);
  tokens[n++] = STRANGE;
  find_places(tokens, n, &places);
  assert_true(places.is_resumed);
  assert_int_equal(kind_of(&places, 0, ALL_AGREE), FIRST_RESUMED);
  assert_true(kind_of(&places, MOST, ALL_AGREE) < ENGINE_LOOKUP_KINDS);
  for (int32_t i = 0; i < 4; i++) guess(tokens, n, &places, i, 11 + SURE_MATCH + 1 + i, ALL_AGREE);
  /* One token fewer before it, and the place is not sure. */
  n = say(tokens, say(tokens, 0, 1, 20), 11, 11 + SURE_MATCH - 2);
  tokens[n++] = STRANGE;
  find_places(tokens, n, &places);
  assert_int_equal(places.n, 0);
}

static void test_a_match_of_the_strange_token(void **state)
{
  int32_t tokens[MOST], n = say(tokens, 0, 1, 20);
  struct places places;
  tokens[n++] = STRANGE;
  tokens[n++] = 70;
  const int32_t n_before = n;
  n = say(tokens, n, 11, 11 + SURE_MATCH - 1);
  tokens[n++] = STRANGE;
  find_places(tokens, n, &places);
  assert_false(places.is_resumed); /* it stood alone before: that is as good */
  guess(tokens, n, &places, 0, 70, ALL_AGREE);
  n = say(tokens, n_before, 10, 10 + SURE_MATCH);
  tokens[n++] = STRANGE;
  find_places(tokens, n, &places);
  assert_true(places.is_resumed);
  guess(tokens, n, &places, 0, 10 + SURE_MATCH + 2, ALL_AGREE);
}

static void test_places_up_to_the_end(void **state)
{
  int32_t tokens[MOST], n = 0;
  struct places places;
  for (int32_t known = 1; known < 12; known++) {
    for (n = 0; n < known; n++) tokens[n] = n < known - 1 ? 5 : STRANGE;
    find_places(tokens, known, &places);
    for (int32_t i = 0; i < places.n; i++) assert_true(places.end[i] > 0 && places.end[i] < known);
    for (int32_t i = 0; places.n > 0 && i < 20; i++) {
      int32_t agreement;
      tokens[known + i] = vote(tokens, i, &places, &agreement);
      assert_true(tokens[known + i] == 5 || tokens[known + i] == STRANGE);
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_longest_match_and_majority),
      cmocka_unit_test(test_how_many_agree),
      cmocka_unit_test(test_resumed_behind_a_replaced_token),
      cmocka_unit_test(test_a_match_of_the_strange_token),
      cmocka_unit_test(test_places_up_to_the_end),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
