/* A million random operations on the page bookkeeping against a small model: every sequence's tokens, a memory that is written and
 * copied as a device would, and the set of page runs ever committed. After each operation the rules are checked, and what is read
 * through the block tables must be what was written. SITS_PROPERTY_OPS and SITS_PROPERTY_SEED change the run. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kv/kv.h"
#include "ref/ref_sparse.h"

enum { COLUMNS = 3, N_PAGES = 30, N_SLOTS = 6, MAX_PAGES = 14, MAX_TOKENS = MAX_PAGES * KV_TOKENS,
       N_HOST = 12, N_SWAPPED = 3, N_STEMS = 4 };

struct sequence {
  bool is_open, is_checked;
  int32_t slot, n, stem;
  int32_t tokens[MAX_TOKENS];
  struct kv_owner owner;
  uint64_t given[MAX_PAGES][COLUMNS]; /* with a budget: what its blocks got */
  bool gone[MAX_PAGES][COLUMNS];
  int32_t n_drops;
};

/* Memory keeps whose each block is. */
struct block { int32_t column, tokens[KV_TOKENS]; };

struct world {
  struct kv *kv;
  uint64_t random;
  struct sequence sequences[N_SLOTS];
  struct sequence resting[N_SWAPPED];
  struct kv_swapped swapped[N_SWAPPED];
  struct block memory[N_PAGES][COLUMNS], host[N_HOST][COLUMNS];
  int32_t budget;             /* pages of a sequence, 0 = no limit */
  int64_t n_attached, n_moves, n_again, n_swaps, n_given_back, n_dropped, n_unshared;
};

static uint32_t draw(struct world *w, uint32_t n)
{
  w->random = w->random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((w->random >> 33) % n);
}

/* Texts of one stem share their beginning; where they part is random, so that prefixes of all lengths meet. */
static int32_t token_at(const struct sequence *s, int32_t i)
{
  return s->stem * 100000 + i;
}

/* Where a column of the sequence finds its block of an entry; NULL: it is gone. */
static struct block *block_of(struct world *w, const struct sequence *s, int32_t entry, int32_t column)
{
  const int32_t *pages;
  struct kv_blocks blocks;
  kv_pages(w->kv, s->slot, &pages);
  if (pages[entry] != KV_NO_PAGE) return &w->memory[pages[entry]][column];
  kv_blocks(w->kv, s->slot, &blocks);
  const int32_t number = blocks.numbers[entry * COLUMNS + column];
  return number == KV_NO_PAGE ? NULL : &w->memory[0][0] + number;
}

static void expect_content(struct world *w, const struct sequence *s)
{
  const int32_t *pages;
  int32_t n_pages = kv_pages(w->kv, s->slot, &pages);
  assert_int_equal(kv_tokens(w->kv, s->slot), s->n);
  assert_true(n_pages * KV_TOKENS >= s->n);
  for (int32_t i = 0; i < s->n; i += KV_TOKENS) {
    int32_t n = s->n - i < KV_TOKENS ? s->n - i : KV_TOKENS;
    for (int32_t c = 0; c < COLUMNS; c++) {
      const struct block *block = block_of(w, s, i / KV_TOKENS, c);
      assert_int_equal(block == NULL, s->gone[i / KV_TOKENS][c]);
      if (block == NULL) continue;
      assert_int_equal(block->column, c);
      assert_memory_equal(block->tokens, s->tokens + i, (size_t)n * sizeof(int32_t));
    }
  }
}

static void do_open(struct world *w, struct sequence *s)
{
  s->owner = (struct kv_owner){.tenant = draw(w, 2), .salt = draw(w, 8) == 0};
  s->stem = (int32_t)draw(w, N_STEMS);
  s->n = s->n_drops = 0;
  memset(s->given, 0, sizeof s->given);
  memset(s->gone, 0, sizeof s->gone);
  if (kv_open(w->kv, s->owner, &s->slot) != SITS_OK) return;
  s->is_open = true;
  int32_t n = 1 + (int32_t)draw(w, MAX_TOKENS - 1);
  for (int32_t i = 0; i < n; i++) s->tokens[i] = token_at(s, i);
  if (draw(w, 4) == 0) s->tokens[draw(w, (uint32_t)n)] = -1; /* parts from the stem somewhere */
  int32_t peeked = kv_match(w->kv, s->owner, s->tokens, n);
  s->n = kv_attach(w->kv, s->slot, s->tokens, n);
  assert_int_equal(s->n, peeked);
  assert_true(s->n < n && s->n % KV_TOKENS == 0);
  w->n_attached += s->n;
}

static void write_through(struct world *w, const struct sequence *s, int32_t from, int32_t to)
{
  const int32_t *pages;
  kv_pages(w->kv, s->slot, &pages);
  for (int32_t i = from; i < to; i++)
    for (int32_t c = 0; c < COLUMNS; c++) {
      struct block *block = &w->memory[pages[i / KV_TOKENS]][c];
      block->column = c;
      block->tokens[i % KV_TOKENS] = s->tokens[i];
    }
}

/* Queries of n further tokens give random amounts to the blocks that are left. */
static void credit(struct world *w, struct sequence *s, int32_t n)
{
  struct kv_blocks blocks;
  kv_blocks(w->kv, s->slot, &blocks);
  assert_int_equal(blocks.nearest, KV_NEWEST_KEPT);
  for (int32_t page = s->n / KV_TOKENS; page <= (s->n + n - 1) / KV_TOKENS; page++)
    for (int32_t i = 0; i <= page - KV_NEWEST_KEPT; i++)
      for (int32_t c = 0; c < COLUMNS; c++) {
        const uint32_t given = s->gone[i][c] ? 0 : draw(w, 50);
        s->given[i][c] += given;
        blocks.given[i * COLUMNS + c] += given;
      }
}

/* After a reserve, when all pages were full: the model drops what it thinks is worth least, and memory is copied as is asked for. */
static void drop_worst(struct world *w, struct sequence *s)
{
  const int32_t(*copies)[2];
  const int32_t n_copies = kv_block_copies(w->kv, s->slot, &copies);
  if (s->n % KV_TOKENS != 0 || s->n / KV_TOKENS - s->n_drops < w->budget) {
    assert_int_equal(n_copies, 0);
    return;
  }
  for (int32_t i = 0; i < n_copies; i++) (&w->memory[0][0])[copies[i][1]] = (&w->memory[0][0])[copies[i][0]];
  ref_drop_blocks(s->given[0], s->gone[0], COLUMNS, s->n / KV_TOKENS);
  s->n_drops++;
  w->n_dropped++;
  w->n_unshared += n_copies > COLUMNS; /* more than a page: blocks left pages that a fork shares */
}

static void do_grow(struct world *w, struct sequence *s)
{
  int32_t n = draw(w, 3) ? 1 + (int32_t)draw(w, 5) : 1 + (int32_t)draw(w, 150), n_moves = 0;
  struct kv_move move;
  struct kv_counts before, after;
  int32_t limit = w->budget > 0 ? (int32_t)kv_sparse_limit(w->budget, KV_TOKENS, s->n) - s->n : n;
  if (n > limit) n = limit;
  if (s->n + n > MAX_TOKENS) return;
  for (int32_t i = s->n; i < s->n + n; i++) s->tokens[i] = draw(w, 40) ? token_at(s, i) : (int32_t)draw(w, 3) - 7;
  int32_t need = kv_need(w->kv, s->slot, s->n + n), available = kv_available(w->kv);
  kv_counts(w->kv, &before);
  enum sits_status status = kv_reserve(w->kv, s->slot, s->n + n, &move, &n_moves);
  kv_counts(w->kv, &after);
  assert_int_equal(status, need <= available ? SITS_OK : SITS_AGAIN);
  if (status != SITS_OK) {
    w->n_again++;
    assert_memory_equal(&before, &after, sizeof before);
    return;
  }
  assert_int_equal(kv_available(w->kv), available - need);
  if (n_moves) memcpy(w->memory[move.to_page], w->memory[move.from_page], sizeof w->memory[0]);
  w->n_moves += n_moves;
  if (w->budget > 0) drop_worst(w, s);
  int32_t kept = draw(w, 4) ? n : (int32_t)draw(w, (uint32_t)n + 1); /* a verified draft may be kept in part */
  if (w->budget > 0) kept = n;
  write_through(w, s, s->n, s->n + n);
  if (w->budget > 0) credit(w, s, n);
  kv_commit(w->kv, s->slot, s->tokens + s->n, kept);
  s->n += kept;
}

static void do_fork(struct world *w, const struct sequence *s, struct sequence *to)
{
  if (to->is_open) return;
  int32_t slot;
  if (kv_fork(w->kv, s->slot, &slot) != SITS_OK) return;
  *to = *s;
  to->slot = slot;
}

static void do_close(struct world *w, struct sequence *s)
{
  const int32_t n = kv_available(w->kv) + kv_suppose_closed(w->kv, s->slot);
  kv_suppose_open(w->kv, s->slot);
  kv_close(w->kv, s->slot);
  assert_int_equal(kv_available(w->kv), n);
  s->is_open = false;
}

static void do_swap_out(struct world *w, struct sequence *s)
{
  uint32_t at = draw(w, N_SWAPPED);
  if (w->resting[at].is_open || kv_swap_out(w->kv, s->slot, &w->swapped[at]) != SITS_OK) return;
  const int32_t *pages;
  kv_pages(w->kv, s->slot, &pages);
  /* From the last page on; some give each back as it is copied. */
  const bool is_piecewise = draw(w, 2) > 0;
  int32_t place = w->swapped[at].head, left = w->swapped[at].n_pages;
  if (is_piecewise) kv_give_back(w->kv, s->slot, left);
  for (; place >= 0; place = kv_swap_next(w->kv, place)) {
    memcpy(w->host[place], w->memory[pages[--left]], sizeof w->host[0]);
    if (!is_piecewise) continue;
    const int32_t n = kv_available(w->kv);
    kv_give_back(w->kv, s->slot, left);
    assert_in_range(kv_available(w->kv), n, n + 1);
    kv_check(w->kv);
    w->n_given_back += kv_available(w->kv) - n;
  }
  w->resting[at] = *s;
  do_close(w, s);
  w->resting[at].n = w->swapped[at].n_tokens; /* whole pages */
  w->n_swaps++;
}

static void do_swap_in(struct world *w, struct sequence *s)
{
  uint32_t at = draw(w, N_SWAPPED);
  int32_t n_moves = 0;
  struct kv_move move;
  if (!w->resting[at].is_open || kv_open(w->kv, w->resting[at].owner, &s->slot) != SITS_OK) return;
  if (draw(w, 8) == 0 || kv_reserve(w->kv, s->slot, w->resting[at].n, &move, &n_moves) != SITS_OK) {
    kv_close(w->kv, s->slot); /* it is dropped instead */
  } else {
    int32_t slot = s->slot, place = w->swapped[at].head;
    const int32_t *pages;
    int32_t i = kv_pages(w->kv, slot, &pages);
    for (; place >= 0; place = kv_swap_next(w->kv, place)) memcpy(w->memory[pages[--i]], w->host[place], sizeof w->host[0]);
    *s = w->resting[at];
    s->slot = slot;
    kv_commit(w->kv, slot, s->tokens, s->n);
  }
  kv_swap_free(w->kv, &w->swapped[at]);
  w->resting[at].is_open = false;
}

static void one_operation(struct world *w)
{
  struct sequence *s = &w->sequences[draw(w, N_SLOTS)];
  uint32_t what = draw(w, 100);
  if (!s->is_open) {
    if (what < 20) do_swap_in(w, s);
    else do_open(w, s);
  } else if (what < 70) {
    do_grow(w, s);
  } else if (what < 78) {
    do_fork(w, s, &w->sequences[draw(w, N_SLOTS)]);
  } else if (what < 84) {
    do_swap_out(w, s);
  } else if (what < 99) {
    do_close(w, s);
  } else if (draw(w, 20) == 0) {
    kv_drop_cache(w->kv);
  }
}

static void run(uint64_t seed, int64_t n_operations, bool with_faults, int32_t budget)
{
  static struct world the_world;
  struct world *w = &the_world;
  struct kv_options options = {.n_pages = N_PAGES, .n_slots = N_SLOTS, .max_pages = MAX_PAGES, .n_host_pages = N_HOST,
                               .prefix_caching = true, .page_budget = budget, .n_columns = COLUMNS};
  memset(w, 0, sizeof *w);
  w->budget = budget;
  w->random = seed;
  assert_int_equal(kv_create(&options, &w->kv), SITS_OK);
  for (int64_t i = 0; i < n_operations; i++) {
    /* Nothing allocates after creation, so a failing heap must change nothing (kv_check itself skips a round). */
    if (with_faults) mem_fault_arm(1);
    one_operation(w);
    kv_check(w->kv);
    if (with_faults) {
      mem_fault_arm(0);
      if (i % 64 == 0) kv_check(w->kv);
    }
    struct sequence *s = &w->sequences[i % N_SLOTS];
    if (s->is_open) expect_content(w, s);
  }
  /* The run did meet what it is for. */
  if (budget > 0) assert_true(w->n_attached == 0 && w->n_swaps == 0 && w->n_dropped > 0 && w->n_unshared > 0);
  else assert_true(w->n_attached > 0 && w->n_swaps > 0 && w->n_given_back > 0);
  assert_true(w->n_moves > 0);
  assert_true(w->n_again > 0);
  for (int i = 0; i < N_SLOTS; i++) {
    if (w->sequences[i].is_open) do_close(w, &w->sequences[i]);
  }
  for (int i = 0; i < N_SWAPPED; i++) {
    if (w->resting[i].is_open) kv_swap_free(w->kv, &w->swapped[i]);
  }
  kv_check(w->kv);
  struct kv_counts c;
  kv_counts(w->kv, &c);
  assert_int_equal(c.n_referenced, 0);
  assert_int_equal(c.n_free + c.n_cached, N_PAGES);
  assert_int_equal(c.n_host_free, N_HOST);
  kv_destroy(w->kv);

}

static int64_t setting(const char *name, int64_t fallback)
{
  const char *text = getenv(name);
  return text ? strtoll(text, NULL, 10) : fallback;
}

static void test_million(void **state)
{
  run((uint64_t)setting("SITS_PROPERTY_SEED", 1), setting("SITS_PROPERTY_OPS", 1000000), false, 0);
}

static void test_without_memory(void **state)
{
  run(2, setting("SITS_PROPERTY_OPS", 1000000) / 5, true, 0);
}

static void test_page_budget(void **state)
{
  run(3, setting("SITS_PROPERTY_OPS", 1000000) / 4, false, KV_LEAST_BUDGET);
}

/* With pages to spare nothing is evicted, and the hits are what a plain list of all texts says. */
static void test_hits_match_oracle(void **state)
{
  enum { N = 60, LENGTH = 500 };
  static int32_t texts[N][LENGTH];
  struct kv_options options = {.n_pages = N * 8, .n_slots = 2, .max_pages = 8, .prefix_caching = true};
  struct kv *kv = NULL;
  uint64_t hits = 0;
  assert_int_equal(kv_create(&options, &kv), SITS_OK);
  struct world w = {.random = 77};
  for (int i = 0; i < N; i++) {
    for (int k = 0; k < LENGTH; k++) texts[i][k] = k;
    int from = i ? (int)draw(&w, (uint32_t)i) : 0, until = (int)draw(&w, LENGTH); /* as an earlier text, and from `until` on its own */
    for (int k = 0; i && k < until; k++) texts[i][k] = texts[from][k];
    for (int k = until; k < LENGTH; k++) texts[i][k] = i * 1000 + k;
    int32_t best = 0, slot, n_moves = 0;
    struct kv_move move;
    for (int j = 0; j < i; j++) {
      int32_t same = 0;
      while (same < LENGTH && texts[i][same] == texts[j][same]) same++;
      int32_t whole = same / KV_TOKENS * KV_TOKENS;
      if (whole > best) best = whole;
    }
    assert_int_equal(kv_open(kv, (struct kv_owner){0}, &slot), SITS_OK);
    assert_int_equal(kv_attach(kv, slot, texts[i], LENGTH), best);
    hits += (uint64_t)best;
    assert_int_equal(kv_reserve(kv, slot, LENGTH, &move, &n_moves), SITS_OK);
    kv_commit(kv, slot, texts[i] + best, LENGTH - best);
    kv_close(kv, slot);
    kv_check(kv);
  }
  struct kv_counts c;
  kv_counts(kv, &c);
  assert_true(hits > 0);
  assert_int_equal(c.hit_tokens, hits);
  assert_int_equal(c.query_tokens, N * LENGTH);
  kv_destroy(kv);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_million), cmocka_unit_test(test_page_budget),
                                     cmocka_unit_test(test_without_memory), cmocka_unit_test(test_hits_match_oracle)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
