/* batch_is_well_formed: a batch that a backend may follow passes, and each way in which its arrays can disagree is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "backend/batch.h"

enum { MOST = 16, VOCAB = 100, PAGES = 4 };

/* Three sequences: 70 tokens in the cache and one more, none, a prompt of three. */
struct world {
  struct program_dims dims;
  struct kv_geometry geometry;
  int32_t tokens[MOST], positions[MOST], start[4], kv_len[3], row_token[MOST], table[3 * PAGES];
  struct backend_batch batch;
};

static void make(struct world *w)
{
  *w = (struct world){.dims = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 64, .n_vocab = VOCAB},
                      .geometry = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 64, .n_pages = 8},
                      .tokens = {5, 0, 99, 7}, .positions = {70, 0, 1, 2}, .start = {0, 1, 1, 4}, .kv_len = {71, -9, 3},
                      .row_token = {0, 3}};
  w->batch = (struct backend_batch){.n_tokens = 4, .n_seqs = 3, .n_rows = 2, .tokens = w->tokens, .positions = w->positions,
                                    .seq_start = w->start, .kv_len = w->kv_len, .block_table = w->table, .table_stride = PAGES,
                                    .row_token = w->row_token};
}

static bool passes(const struct world *w, int32_t n_drawn)
{
  return batch_is_well_formed(&w->batch, &w->dims, &w->geometry, MOST, 3, n_drawn);
}

static void good_ones(void **state)
{
  (void)state;
  struct world w;
  make(&w);
  assert_true(passes(&w, 0)); /* the empty sequence's length counts nothing */
  assert_int_equal(batch_pages(&w.batch, 0), 2);
  assert_int_equal(batch_pages(&w.batch, 1), 0);
  assert_int_equal(batch_pages(&w.batch, 2), 1);
  w.batch.n_rows = 0;
  assert_true(passes(&w, 0));
  w.tokens[0] = -2;
  assert_true(passes(&w, 2));
  assert_false(passes(&w, 1));
}

/* One value of one array changed. */
static void each_fault(void **state)
{
  (void)state;
  struct world w;
  const struct { int32_t *at, value; const char *what; } faults[] = {
      {&w.tokens[2], VOCAB, "an id beyond the vocabulary"}, {&w.tokens[2], -1, "a drawn id where none is drawn"},
      {&w.tokens[2], INT32_MIN, "the smallest id"}, {&w.positions[0], -1, "a negative position"},
      {&w.positions[2], 2, "a position twice"}, {&w.positions[3], 1, "a position that goes back"},
      {&w.start[0], 1, "a first token that is not 0"}, {&w.start[1], 5, "a start beyond the tokens"},
      {&w.start[2], 0, "starts that go back"}, {&w.start[3], 3, "an end before the tokens'"}, {&w.kv_len[0], 70, "too short a length"},
      {&w.kv_len[2], 4, "too long a length"}, {&w.row_token[1], 4, "a row beyond the tokens"}, {&w.row_token[0], -1, "a negative row"},
      {&w.batch.n_tokens, 0, "no token"}, {&w.batch.n_tokens, MOST + 1, "too many tokens"}, {&w.batch.n_seqs, 0, "no sequence"},
      {&w.batch.n_seqs, 4, "too many sequences"}, {&w.batch.n_rows, -1, "fewer than no rows"}, {&w.batch.n_rows, 4, "too many rows"},
      {&w.batch.table_stride, 1, "more pages than the table has"}, {&w.geometry.n_layers, 3, "another model's layers"},
      {&w.geometry.n_kv_heads, 2, "another model's heads"}, {&w.geometry.head_dim, 32, "another model's head size"}};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    make(&w);
    *faults[i].at = faults[i].value;
    if (passes(&w, 0)) fail_msg("%s is let through", faults[i].what);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(good_ones), cmocka_unit_test(each_fault)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
