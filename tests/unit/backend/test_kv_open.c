/* Slots of open groups: who gets one, what is folded and read back when there are too few, copies of pages, batches that go on while others
 * run. Groups of 32 tokens, pages of 64, so group g of page p has key 2 p + g. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/kv_open.h"

static char said[512];

static void fold(void *user, int32_t slot, int32_t page, int32_t group, int32_t n)
{
  (void)user;
  snprintf(said + strlen(said), sizeof said - strlen(said), "fold %d to %d.%d %d; ", slot, page, group, n);
}

static void unfold(void *user, int32_t page, int32_t group, int32_t slot)
{
  (void)user;
  snprintf(said + strlen(said), sizeof said - strlen(said), "unfold %d.%d to %d; ", page, group, slot);
}

static void copy(void *user, int32_t from, int32_t to)
{
  (void)user;
  snprintf(said + strlen(said), sizeof said - strlen(said), "copy %d to %d; ", from, to);
}

static void visit(void *user, int32_t slot, int32_t group, int32_t n)
{
  (void)user;
  snprintf(said + strlen(said), sizeof said - strlen(said), "slot %d group %d %d; ", slot, group, n);
}

static struct kv_open *make(int32_t n_slots)
{
  said[0] = 0;
  struct kv_open *o = kv_open_create(32, 8, n_slots, (struct kv_open_ops){fold, unfold, copy}, NULL);
  assert_non_null(o);
  return o;
}

/* n tokens of one sequence from a position on, whose pages are page, page + 1, ... */
static void begin(struct kv_open *o, int32_t page, int32_t from, int32_t n, int32_t *tiles)
{
  int32_t positions[256], table[8];
  const int32_t start[2] = {0, n};
  for (int32_t i = 0; i < n; i++) positions[i] = from + i;
  for (int32_t i = 0; i < 8; i++) table[i] = page + i;
  const struct backend_batch batch = {.n_tokens = n, .n_seqs = 1, .positions = positions, .seq_start = start, .block_table = table,
                                      .table_stride = 8};
  kv_open_begin(o, &batch, tiles);
}

static void test_which_groups_have_slots(void **state)
{
  (void)state;
  struct kv_open *o = make(4);
  int32_t tiles[256];
  begin(o, 0, 0, 100, tiles); /* three whole groups and four tokens */
  assert_int_equal(tiles[0], -1);
  assert_int_equal(tiles[31], -1);
  assert_int_equal(tiles[32], -2);
  assert_int_equal(tiles[95], -3);
  assert_int_equal(tiles[96], 0);
  assert_int_equal(tiles[99], 0);
  begin(o, 0, 100, 40, tiles); /* ends that group, begins another */
  assert_int_equal(tiles[0], 0);
  assert_int_equal(tiles[27], 0);
  assert_int_equal(tiles[28], 1);
  begin(o, 0, 120, 1, tiles); /* a roll-back: the slot still has its keys */
  assert_int_equal(tiles[0], 0);
  assert_string_equal(said, "");
  kv_open_visit(o, 1, visit, NULL);
  assert_string_equal(said, "slot 0 group 1 25; ");
  kv_open_destroy(o);
}

static void test_recycled(void **state)
{
  (void)state;
  struct kv_open *o = make(2);
  int32_t tiles[256];
  begin(o, 0, 0, 5, tiles);
  begin(o, 1, 0, 6, tiles);
  begin(o, 2, 0, 7, tiles); /* the least recently used is folded as it is */
  assert_int_equal(tiles[0], 0);
  assert_string_equal(said, "fold 0 to 0.0 5; ");
  said[0] = 0;
  begin(o, 0, 5, 1, tiles); /* and read back where its sequence goes on */
  assert_int_equal(tiles[0], 1);
  assert_string_equal(said, "fold 1 to 1.0 6; unfold 0.0 to 1; ");
  said[0] = 0;
  begin(o, 0, 6, 26, tiles); /* complete: the first to go, and nothing is folded */
  begin(o, 3, 0, 1, tiles);
  assert_int_equal(tiles[0], 1);
  assert_string_equal(said, "");
  kv_open_written(o, 2);
  begin(o, 4, 0, 1, tiles); /* forgotten: free */
  assert_int_equal(tiles[0], 0);
  assert_string_equal(said, "");
  kv_open_destroy(o);
}

static void test_copied(void **state)
{
  (void)state;
  struct kv_open *o = make(4);
  int32_t tiles[256];
  begin(o, 0, 0, 40, tiles);
  kv_open_copied(o, 0, 3);
  assert_string_equal(said, "copy 0 to 1; ");
  begin(o, 3, 40, 1, tiles);
  assert_int_equal(tiles[0], 1);
  begin(o, 0, 40, 1, tiles);
  assert_int_equal(tiles[0], 0);
  assert_string_equal(said, "copy 0 to 1; ");
  kv_open_destroy(o);
}

static void test_held(void **state)
{
  (void)state;
  struct kv_open *o = make(4);
  int32_t tiles[256];
  begin(o, 0, 0, 10, tiles);
  begin(o, 0, 10, 30, tiles); /* completes slot 0, begins slot 1 */
  assert_int_equal(tiles[0], 0);
  assert_int_equal(tiles[29], 1);
  kv_open_hold(o);
  begin(o, 3, 0, 1, tiles);
  begin(o, 4, 0, 2, tiles);
  begin(o, 5, 0, 3, tiles); /* slot 0 is complete, but its batch has not ended */
  assert_int_equal(tiles[0], 2);
  assert_string_equal(said, "fold 2 to 3.0 1; ");
  kv_open_release(o, true);
  begin(o, 6, 0, 4, tiles);
  assert_int_equal(tiles[0], 0);
  kv_open_destroy(o);
}

/* A batch that is given up leaves its groups as they were: the one that it would have completed is folded before its slot goes to another,
 * leaves the device with its keys, and is read back; the one that it began has nothing. */
static void test_given_up(void **state)
{
  (void)state;
  int32_t tiles[256];
  for (int gone = 0; gone < 2; gone++) {
    struct kv_open *o = make(2);
    begin(o, 0, 0, 10, tiles);
    begin(o, 0, 10, 30, tiles); /* completes slot 0, begins slot 1 */
    kv_open_hold(o);
    if (gone == 1) kv_open_written(o, 0); /* another's now, which the hold must not reach */
    if (gone == 1) begin(o, 0, 0, 3, tiles);
    kv_open_release(o, false);
    kv_open_visit(o, 0, visit, NULL);
    assert_string_equal(said, gone ? "slot 0 group 0 3; " : "slot 0 group 0 10; ");
    said[0] = 0;
    begin(o, 3, 0, 1, tiles);
    assert_int_equal(tiles[0], 1);
    assert_string_equal(said, "");
    begin(o, 4, 0, 2, tiles);
    assert_int_equal(tiles[0], 0);
    assert_string_equal(said, gone ? "fold 0 to 0.0 3; " : "fold 0 to 0.0 10; ");
    said[0] = 0;
    if (gone == 0) begin(o, 0, 10, 30, tiles); /* the sequence goes on after all */
    if (gone == 0) assert_non_null(strstr(said, "unfold 0.0 to "));
    kv_open_destroy(o);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_which_groups_have_slots), cmocka_unit_test(test_recycled),
                                     cmocka_unit_test(test_copied), cmocka_unit_test(test_held),
                                     cmocka_unit_test(test_given_up)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
