/* Sequences under a page budget: which blocks they lose follows from their text alone, so answers equal a plain model's whatever else runs,
 * however prompts are cut, forked and pre-empted; and no sequence ever holds more than its budget. */
#include "unit/engine/engine_rig.h"

#include "kv/kv.h"
#include "ref/ref_sparse.h"

enum { BUDGET = 9, MOST = 1500, N = 5, COLUMNS = 3 };

/* The model: pages fill up one after the other; once the last allowed one is full, a page's worth of blocks goes before each new page.
 * Writes n_out tokens. */
static void expect(const int32_t *prompt, int32_t n_prompt, int32_t n_out, int32_t *out, int32_t *n_dropped)
{
  static int32_t tokens[MOST + 1], kept[(MOST + 1) * COLUMNS];
  uint64_t given[MOST / KV_TOKENS + 1][COLUMNS] = {{0}};
  bool gone[MOST / KV_TOKENS + 1][COLUMNS] = {{false}};
  *n_dropped = 0;
  memcpy(tokens, prompt, (size_t)n_prompt * sizeof *prompt);
  for (int32_t at = 0; at < n_prompt + n_out - 1; at++) {
    int32_t page = at / KV_TOKENS;
    if (at % KV_TOKENS == 0 && page - *n_dropped == BUDGET) {
      ref_drop_blocks(given[0], gone[0], COLUMNS, page);
      ++*n_dropped;
    }
    for (int32_t i = 0; i <= page - KV_NEWEST_KEPT; i++)
      for (int32_t c = 0; c < COLUMNS; c++) given[i][c] += gone[i][c] ? 0 : fake_given(tokens[at], at, i, c);
    if (at < n_prompt - 1) continue;
    int32_t n = 0;
    for (int32_t i = 0; i <= at; i++)
      for (int32_t c = 0; c < COLUMNS; c++)
        if (!gone[i / KV_TOKENS][c]) kept[n++] = tokens[i];
    tokens[at + 1] = out[at + 1 - n_prompt] = fake_next(RIG_VOCAB, kept, n);
  }
}

static struct engine_options budget_options(void)
{
  struct engine_options o = rig_options();
  o.geometry.codec = KV_FP4_SPARSE;
  o.geometry.n_kv_heads = COLUMNS;
  o.page_budget = BUDGET;
  o.max_model_len = MOST;
  o.spec_max_tokens = 4; /* turned off by the engine */
  return o;
}

static void test_answers(void **state)
{
  static const int32_t lengths[N] = {700, 64 * BUDGET, 64 * BUDGET + 1, 30, 1200};
  static int32_t prompts[N][MOST], want[N][300];
  static struct rig_answer got[2];
  struct sits_sampling s = rig_greedy(299);
  int32_t dropped[N];
  (void)state;
  s.ignore_eos = true;
  for (int i = 0; i < N; i++) {
    rig_prompt(prompts[i], lengths[i], (uint32_t)i + 5);
    expect(prompts[i], lengths[i], 299, want[i], &dropped[i]);
  }
  assert_true(dropped[0] > 5 && dropped[3] == 0);
  for (int round = 0; round < 3; round++) { /* much room; little, so that some lose their pages on the way; two choices each */
    struct rig rig;
    struct engine_options o = budget_options();
    struct sits_request *requests[N];
    int32_t n_choices = round == 2 ? 2 : 1;
    if (round == 1) o.n_host_pages = 20; /* not used */
    rig_open(&rig, o, round == 1 ? 2 * BUDGET + 3 : 100);
    for (int i = 0; i < N; i++) requests[i] = rig_submit(&rig, prompts[i], lengths[i], n_choices, s);
    for (int i = 0; i < N; i++) {
      memset(got, 0, sizeof got);
      rig_run(&rig, requests[i], got, n_choices);
      for (int c = 0; c < n_choices; c++) {
        assert_int_equal(got[c].n, 299);
        assert_memory_equal(got[c].tokens, want[i], 299 * sizeof(int32_t));
      }
      sits_request_release(requests[i]);
    }
    rig_idle(&rig);
    struct engine_stats stats;
    engine_stats(rig.engine, &stats);
    assert_true(stats.n_pages_dropped > 0 && stats.n_pages_used == 0);
    assert_true(stats.spec_drafts == 0 && stats.prefix_hit_tokens == 0 && stats.n_preemptions_swapped == 0);
    if (round == 1) assert_true(stats.n_preemptions > 0);
    rig_close(&rig);
  }
}

/* A budget of pages for a text of any length: more tokens than all pages hold. */
static void test_longer_than_memory(void **state)
{
  static int32_t prompt[MOST], want[100];
  static struct rig_answer got[1];
  struct rig rig;
  struct sits_sampling s = rig_greedy(100);
  int32_t n_dropped;
  (void)state;
  s.ignore_eos = true;
  rig_prompt(prompt, 1300, 3);
  expect(prompt, 1300, 100, want, &n_dropped);
  rig_open(&rig, budget_options(), BUDGET);
  struct sits_request *request = rig_submit(&rig, prompt, 1300, 1, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  assert_memory_equal(got[0].tokens, want, sizeof want);
  sits_request_release(request);
  rig_idle(&rig);
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.n_pages_dropped, n_dropped);
  rig_close(&rig);
}

/* Choices that share every page there is: one goes on, which nobody else's pages can be taken for, and the others are computed again. */
static void test_choices_in_one_budget(void **state)
{
  static int32_t prompt[MOST], want[100];
  static struct rig_answer got[3];
  struct sits_sampling s = rig_greedy(100);
  int32_t n_dropped;
  (void)state;
  s.ignore_eos = true;
  static const int32_t lengths[] = {64 * BUDGET - 1, 64 * BUDGET, 64 * BUDGET + 1, 64 * BUDGET + 60};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    struct rig rig;
    rig_prompt(prompt, lengths[i], 3);
    expect(prompt, lengths[i], 100, want, &n_dropped);
    rig_open(&rig, budget_options(), BUDGET);
    struct sits_request *request = rig_submit(&rig, prompt, lengths[i], 3, s);
    memset(got, 0, sizeof got);
    rig_run(&rig, request, got, 3);
    for (int c = 0; c < 3; c++) {
      assert_int_equal(got[c].n, 100);
      assert_memory_equal(got[c].tokens, want, sizeof want);
    }
    sits_request_release(request);
    rig_idle(&rig);
    rig_close(&rig);
  }
}

/* Two choices drop blocks of shared pages in the same steps: the first takes three pages of its own and a new one, which leaves the second
 * what it needs; a page later the first takes one more. */
static void test_choices_drop_together(void **state)
{
  static int32_t prompt[MOST], want[100];
  static struct rig_answer got[2];
  struct sits_sampling s = rig_greedy(100);
  struct engine_stats stats;
  struct rig rig;
  int32_t n_dropped;
  (void)state;
  s.ignore_eos = true;
  rig_prompt(prompt, 64 * BUDGET, 3);
  expect(prompt, 64 * BUDGET, 100, want, &n_dropped);
  rig_open(&rig, budget_options(), BUDGET + 5);
  struct sits_request *request = rig_submit(&rig, prompt, 64 * BUDGET, 2, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 2);
  for (int c = 0; c < 2; c++) assert_memory_equal(got[c].tokens, want, sizeof want);
  sits_request_release(request);
  rig_idle(&rig);
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.n_pages_dropped, 2 * n_dropped);
  assert_int_equal(stats.n_preemptions, 0);
  rig_close(&rig);
}

/* Choices that drop together, apart, or end early, in memory for few of them. */
static void test_random_choices(void **state)
{
  enum { LIVE = 3, JOBS = 60, OUT = 150 };
  static struct { struct sits_request *request; int32_t n_choices, prompt[MOST], want[OUT]; struct rig_answer got[4]; } jobs[LIVE];
  uint32_t random = 1;
  int32_t n_ended = 0, n_started = 0, n_dropped;
  struct sits_sampling s = rig_greedy(OUT);
  struct engine_stats stats;
  struct rig rig;
  (void)state;
  s.ignore_eos = true;
  rig_open(&rig, budget_options(), 3 * BUDGET);
  memset(jobs, 0, sizeof jobs);
  while (n_ended < JOBS) {
    for (int i = 0; i < LIVE; i++) {
      random = random * 1664525u + 1013904223u;
      if (!jobs[i].request && n_started < JOBS) {
        const int32_t n = 64 * (BUDGET - 2) + (int32_t)(random >> 8) % 250;
        memset(&jobs[i], 0, sizeof jobs[i]);
        jobs[i].n_choices = 1 + n_started++ % 4;
        rig_prompt(jobs[i].prompt, n, random);
        expect(jobs[i].prompt, n, OUT, jobs[i].want, &n_dropped);
        jobs[i].request = rig_submit(&rig, jobs[i].prompt, n, jobs[i].n_choices, s);
      }
      if (!jobs[i].request) continue;
      if ((random >> 20) % 200 == 0) sits_request_cancel(jobs[i].request, (int32_t)(random >> 8) % jobs[i].n_choices);
      if (rig_drain(jobs[i].request, jobs[i].got, jobs[i].n_choices) < jobs[i].n_choices) continue;
      for (int c = 0; c < jobs[i].n_choices; c++) {
        const struct rig_answer *got = &jobs[i].got[c];
        assert_true(got->n == OUT || got->finish == SITS_FINISH_CANCELLED);
        assert_memory_equal(got->tokens, jobs[i].want, (size_t)got->n * sizeof(int32_t));
      }
      sits_request_release(jobs[i].request);
      jobs[i].request = NULL;
      n_ended++;
    }
    engine_step_once(rig.engine);
  }
  rig_idle(&rig);
  engine_stats(rig.engine, &stats);
  assert_true(stats.n_preemptions > 0 && stats.n_pages_dropped > JOBS && stats.finished[SITS_FINISH_CANCELLED] > 0);
  rig_close(&rig);
}

static void test_bad_budgets(void **state)
{
  struct rig rig;
  struct sits_error err = {0};
  struct sits_engine *engine = NULL;
  (void)state;
  rig_open(&rig, rig_options(), 64);
  for (int i = 0; i < 2; i++) {
    struct engine_options o = budget_options();
    o.vtable = fake_vtable();
    o.program = rig.fake.program;
    o.kv = rig.fake.kv;
    o.geometry = rig.fake.geometry;
    o.geometry.codec = i == 0 ? KV_FP4 : KV_FP4_SPARSE;
    if (i == 1) o.page_budget = KV_LEAST_BUDGET - 1;
    assert_int_equal(engine_create(&o, &engine, &err), SITS_INVALID_ARGUMENT);
    assert_string_equal(err.param, "page_budget");
  }
  rig_close(&rig);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_answers), cmocka_unit_test(test_longer_than_memory),
                                     cmocka_unit_test(test_choices_in_one_budget),
                                     cmocka_unit_test(test_choices_drop_together), cmocka_unit_test(test_random_choices),
                                     cmocka_unit_test(test_bad_budgets)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
