/* Page bookkeeping: sharing, copy-on-write, eviction order, isolation, swapping; each against counts worked out by hand. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kv/kv.h"

static const struct kv_owner NOBODY = {0, 0};

static struct kv *create(int32_t n_pages, int32_t n_slots)
{
  struct kv *kv = NULL;
  struct kv_options options = {.n_pages = n_pages, .n_slots = n_slots, .max_pages = n_pages, .n_host_pages = 4, .prefix_caching = true};
  assert_int_equal(kv_create(&options, &kv), SITS_OK);
  return kv;
}

static void fill(int32_t *tokens, int32_t n, int32_t seed)
{
  for (int32_t i = 0; i < n; i++) tokens[i] = seed * 1000 + i;
}

/* Open a slot and bring it to hold tokens[0..n); returns the tokens that came from the cache. */
static int32_t put(struct kv *kv, struct kv_owner owner, const int32_t *tokens, int32_t n, int32_t *slot)
{
  struct kv_move move;
  int32_t n_moves = 0;
  assert_int_equal(kv_open(kv, owner, slot), SITS_OK);
  int32_t cached = kv_attach(kv, *slot, tokens, n);
  assert_int_equal(kv_reserve(kv, *slot, n, &move, &n_moves), SITS_OK);
  assert_int_equal(n_moves, 0);
  kv_commit(kv, *slot, tokens + cached, n - cached);
  kv_check(kv);
  return cached;
}

static void expect_counts(struct kv *kv, int32_t n_free, int32_t n_cached, int32_t n_referenced)
{
  struct kv_counts c;
  kv_check(kv);
  kv_counts(kv, &c);
  assert_int_equal(c.n_free, n_free);
  assert_int_equal(c.n_cached, n_cached);
  assert_int_equal(c.n_referenced, n_referenced);
}

static void test_prefix_is_shared_in_whole_pages(void **state)
{
  struct kv *kv = create(16, 4);
  int32_t tokens[300], a, b, c;
  fill(tokens, 300, 1);
  assert_int_equal(put(kv, NOBODY, tokens, 200, &a), 0);
  expect_counts(kv, 12, 0, 4);
  assert_int_equal(put(kv, NOBODY, tokens, 300, &b), 192); /* three full pages of a */
  expect_counts(kv, 10, 0, 6);
  assert_int_equal(kv_match(kv, NOBODY, tokens, 192), 128); /* one token is always left to compute */
  tokens[100] = -5;
  assert_int_equal(put(kv, NOBODY, tokens, 300, &c), 64);
  kv_close(kv, a);
  kv_close(kv, b);
  kv_close(kv, c);
  struct kv_counts counts;
  kv_counts(kv, &counts);
  assert_int_equal(counts.query_tokens, 800);
  assert_int_equal(counts.hit_tokens, 256);
  expect_counts(kv, 16 - 7, 7, 0); /* pages 0-3 of b, and 1-3 of c: full ones stay, partial ones do not */
  kv_drop_cache(kv);
  expect_counts(kv, 16, 0, 0);
  kv_destroy(kv);
}

static void test_owners_never_share(void **state)
{
  struct kv *kv = create(16, 4);
  int32_t tokens[200], slot;
  fill(tokens, 200, 1);
  const struct kv_owner owners[4] = {{1, 0}, {2, 0}, {1, 9}, {0, 0}};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(put(kv, owners[i], tokens, 150, &slot), 0);
    kv_close(kv, slot);
  }
  for (int i = 0; i < 4; i++) assert_int_equal(kv_match(kv, owners[i], tokens, 150), 128);
  kv_destroy(kv);
}

static void test_oldest_tail_is_evicted_first(void **state)
{
  struct kv *kv = create(4, 2);
  int32_t old[200], young[200], slot;
  fill(old, 200, 1);
  fill(young, 200, 2);
  put(kv, NOBODY, old, 130, &slot);
  kv_close(kv, slot);
  put(kv, NOBODY, young, 65, &slot); /* pages: old0 old1 cached, young0, young1 partial */
  kv_close(kv, slot);
  expect_counts(kv, 1, 3, 0);
  int32_t big[200];
  fill(big, 200, 3);
  put(kv, NOBODY, big, 128, &slot); /* takes the free page and the oldest tail: old1 */
  assert_int_equal(kv_match(kv, NOBODY, old, 130), 64);
  assert_int_equal(kv_match(kv, NOBODY, young, 65), 64);
  kv_close(kv, slot);
  kv_destroy(kv);
}

static void test_fork_copies_on_write(void **state)
{
  struct kv *kv = create(16, 4);
  int32_t tokens[200], a, b, c;
  struct kv_move move;
  int32_t n_moves = 0;
  fill(tokens, 200, 1);
  put(kv, NOBODY, tokens, 100, &a);
  assert_int_equal(kv_fork(kv, a, &b), SITS_OK);
  assert_int_equal(kv_fork(kv, a, &c), SITS_OK);
  expect_counts(kv, 14, 0, 2);
  const int32_t *pages_a, *pages_b;
  kv_pages(kv, a, &pages_a);
  int32_t shared = pages_a[1];
  assert_int_equal(kv_extra(kv, b), 1);
  assert_int_equal(kv_need(kv, b, 101), 1);
  assert_int_equal(kv_reserve(kv, b, 101, &move, &n_moves), SITS_OK);
  assert_int_equal(n_moves, 1);
  kv_pages(kv, b, &pages_b);
  assert_int_equal(move.from_page, shared);
  assert_int_equal(move.to_page, pages_b[1]);
  assert_int_equal(kv_reserve(kv, c, 101, &move, &n_moves), SITS_OK);
  assert_int_equal(n_moves, 2);
  assert_int_equal(kv_extra(kv, a), 0); /* the last one left writes in place */
  kv_commit(kv, a, tokens + 100, 1);
  kv_commit(kv, b, tokens + 100, 1);
  kv_commit(kv, c, tokens + 100, 1);
  expect_counts(kv, 12, 0, 4);
  kv_close(kv, a);
  kv_close(kv, b);
  kv_close(kv, c);
  expect_counts(kv, 15, 1, 0);
  kv_destroy(kv);
}

/* Pages that several share become available with the last of them. */
static void test_supposed_closed(void **state)
{
  struct kv *kv = create(16, 4);
  int32_t tokens[300], a, b, c;
  (void)state;
  fill(tokens, 300, 1);
  put(kv, NOBODY, tokens, 200, &a);
  put(kv, NOBODY, tokens, 300, &b); /* three pages of a, two of its own */
  assert_int_equal(kv_fork(kv, b, &c), SITS_OK);
  for (int i = 0; i < 2; i++) { /* nothing is kept */
    assert_int_equal(kv_suppose_closed(kv, a), 1);
    assert_int_equal(kv_suppose_closed(kv, b), 0);
    kv_suppose_open(kv, a);
    assert_int_equal(kv_suppose_closed(kv, c), 2);
    assert_int_equal(kv_suppose_closed(kv, a), 4);
    kv_suppose_open(kv, b);
    kv_suppose_open(kv, a);
    kv_suppose_open(kv, c);
    expect_counts(kv, 10, 0, 6);
  }
  kv_close(kv, a);
  kv_close(kv, b);
  kv_close(kv, c);
  kv_destroy(kv);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_reserve_all_or_nothing(void **state)
{
  struct kv *kv = create(4, 3);
  int32_t tokens[300], a, b;
  struct kv_move move;
  int32_t n_moves = 0;
  fill(tokens, 300, 1);
  put(kv, NOBODY, tokens, 150, &a);
  assert_int_equal(kv_open(kv, NOBODY, &b), SITS_OK);
  assert_int_equal(kv_reserve(kv, b, 65, &move, &n_moves), SITS_AGAIN);
  expect_counts(kv, 1, 0, 3);
  assert_int_equal(kv_reserve(kv, b, 64, &move, &n_moves), SITS_OK);
  kv_commit(kv, b, tokens, 0); /* nothing computed: the reserved page goes back */
  expect_counts(kv, 1, 0, 3);
  kv_close(kv, a);
  kv_close(kv, b);
  kv_destroy(kv);
}

static void test_twins_are_indexed_once(void **state)
{
  struct kv *kv = create(16, 4);
  int32_t tokens[200], a, b, c;
  struct kv_move move;
  int32_t n_moves = 0;
  fill(tokens, 200, 1);
  assert_int_equal(kv_open(kv, NOBODY, &a), SITS_OK);
  assert_int_equal(kv_open(kv, NOBODY, &b), SITS_OK);
  int32_t slots[2] = {a, b};
  for (int round = 0; round < 2; round++) { /* both compute the same prompt at the same time, page by page */
    for (int i = 0; i < 2; i++) {
      assert_int_equal(kv_reserve(kv, slots[i], 64 * (round + 1), &move, &n_moves), SITS_OK);
      kv_commit(kv, slots[i], tokens + 64 * round, 64);
      kv_check(kv);
    }
  }
  kv_close(kv, b);
  expect_counts(kv, 14, 0, 2);
  kv_close(kv, a);
  expect_counts(kv, 14, 2, 0);
  assert_int_equal(put(kv, NOBODY, tokens, 150, &c), 128);
  kv_close(kv, c);
  kv_destroy(kv);
}

static void test_swap_places(void **state)
{
  struct kv *kv = create(8, 2);
  int32_t tokens[300], a;
  struct kv_swapped s = {.head = -1}, t = {.head = -1};
  fill(tokens, 300, 1);
  put(kv, NOBODY, tokens, 200, &a);
  assert_int_equal(kv_swap_out(kv, a, &s), SITS_OK);
  assert_int_equal(s.n_pages, 3); /* whole pages only: the eight tokens behind them are computed again */
  assert_int_equal(s.n_tokens, 192);
  int32_t n = 0, seen[8] = {0};
  for (int32_t p = s.head; p >= 0; p = kv_swap_next(kv, p), n++) assert_int_equal(seen[p]++, 0);
  assert_int_equal(n, 3);
  assert_int_equal(kv_swap_out(kv, a, &t), SITS_AGAIN); /* one place left */
  kv_swap_free(kv, &s);
  assert_int_equal(s.head, -1);
  assert_int_equal(kv_swap_out(kv, a, &t), SITS_OK);
  struct kv_counts c;
  for (int32_t left = 3; left >= 0; left--) { /* the partial page first, then whole ones, which stay cached */
    kv_give_back(kv, a, left);
    kv_check(kv);
    kv_counts(kv, &c);
    assert_int_equal(c.n_referenced, left);
    assert_int_equal(c.n_cached, 3 - left);
  }
  kv_swap_free(kv, &t);
  kv_swap_free(kv, &t);
  kv_counts(kv, &c);
  assert_int_equal(c.n_host_free, 4);
  kv_close(kv, a);
  kv_destroy(kv);
}

/* Eight pages of two blocks are full. Of pages 1 to 3 the two blocks that got least for each page of queries go, the rest of page 3 moves
 * to where one was. A fork shares all that it has, and needs pages of its own to do so. */
static void test_budget_drops_the_least_blocks(void **state)
{
  struct kv *kv = NULL;
  struct kv_options options = {.n_pages = 20, .n_slots = 2, .max_pages = 12, .prefix_caching = true, .page_budget = 8, .n_columns = 2};
  static const uint64_t got[8][2] = {{0, 0}, {30, 300}, {40, 10}, {9, 100}}; /* over 3, 2, 1 pages of queries */
  int32_t tokens[640], slot, twin, n_moves = 0;
  struct kv_move move;
  struct kv_blocks blocks;
  const int32_t *pages, (*copies)[2];
  fill(tokens, 640, 1);
  assert_int_equal(kv_create(&options, &kv), SITS_OK);
  put(kv, NOBODY, tokens, 512, &slot);
  kv_pages(kv, slot, &pages);
  const int32_t first = pages[1], second = pages[2], third = pages[3];
  kv_blocks(kv, slot, &blocks);
  assert_null(blocks.numbers);
  for (int i = 0; i < 16; i++) blocks.given[i] += got[i / 2][i % 2];
  assert_int_equal(kv_extra(kv, slot), -1);
  assert_int_equal(kv_need(kv, slot, 513), 0);
  assert_int_equal(kv_reserve(kv, slot, 513, &move, &n_moves), SITS_OK);
  assert_int_equal(kv_block_copies(kv, slot, &copies), 1);
  assert_int_equal(copies[0][0], third * 2 + 1);
  assert_int_equal(copies[0][1], second * 2 + 1);
  kv_blocks(kv, slot, &blocks);
  const int32_t want[3][2] = {{first * 2, first * 2 + 1}, {second * 2, KV_NO_PAGE}, {KV_NO_PAGE, second * 2 + 1}};
  assert_memory_equal(blocks.numbers + 2, want, sizeof want);
  for (int i = 0; i < 9; i++) assert_int_equal(pages[i] == KV_NO_PAGE, i >= 1 && i <= 3);
  assert_int_equal(kv_held(kv, slot), 8);
  kv_commit(kv, slot, tokens + 512, 64);
  expect_counts(kv, 12, 0, 8);
  assert_int_equal(kv_fork(kv, slot, &twin), SITS_OK);
  expect_counts(kv, 12, 0, 8);
  assert_int_equal(kv_extra(kv, slot), 2);
  assert_int_equal(kv_reserve(kv, slot, 577, &move, &n_moves), SITS_OK);
  expect_counts(kv, 9, 0, 11);
  assert_int_equal(kv_extra(kv, twin), -1); /* the other has left the shared pages */
  assert_int_equal(n_moves, 0);
  kv_close(kv, slot);
  kv_close(kv, twin);
  expect_counts(kv, 20, 0, 0);
  kv_destroy(kv);
}

/* A budget beyond any table drops nothing and takes no memory of its own. */
static void test_a_budget_beyond_all_pages(void **state)
{
  struct kv *kv = NULL;
  struct kv_options options = {.n_pages = 12, .n_slots = 256, .max_pages = 12, .page_budget = 1 << 24, .n_columns = 90};
  int32_t tokens[12 * KV_TOKENS], slot;
  (void)state;
  fill(tokens, 12 * KV_TOKENS, 1);
  assert_int_equal(kv_create(&options, &kv), SITS_OK);
  put(kv, NOBODY, tokens, 12 * KV_TOKENS, &slot);
  assert_int_equal(kv_held(kv, slot), 12);
  kv_check(kv);
  kv_close(kv, slot);
  kv_destroy(kv);
}

static void test_creation_survives_no_memory(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip(); /* this build counts no allocations */
#endif
  struct kv_options options = {.n_pages = 8, .n_slots = 2, .max_pages = 8, .n_host_pages = 4, .prefix_caching = true,
                               .page_budget = KV_LEAST_BUDGET, .n_columns = 2};
  for (uint64_t n = 1; n < 100; n++) {
    struct kv *kv = NULL;
    mem_fault_arm(n);
    enum sits_status status = kv_create(&options, &kv);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (status == SITS_OK) {
      assert_false(fired);
      assert_true(n > 5);
      kv_destroy(kv);
      break;
    }
    assert_int_equal(status, SITS_NOMEM);
    assert_null(kv);
  }
  assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_prefix_is_shared_in_whole_pages), cmocka_unit_test(test_supposed_closed),
      cmocka_unit_test(test_owners_never_share),
      cmocka_unit_test(test_oldest_tail_is_evicted_first), cmocka_unit_test(test_fork_copies_on_write),
      cmocka_unit_test(test_reserve_all_or_nothing), cmocka_unit_test(test_twins_are_indexed_once), cmocka_unit_test(test_swap_places),
      cmocka_unit_test(test_budget_drops_the_least_blocks), cmocka_unit_test(test_a_budget_beyond_all_pages),
      cmocka_unit_test(test_creation_survives_no_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
