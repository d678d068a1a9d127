/* Speculation over a fake model that repeats itself: answers with and without it are the same token for token, greedy and sampled, it
 * saves steps where text repeats, and it is off where it must be. */
#include "unit/engine/engine_rig.h"

#include "engine/engine_draft_model.h"

static struct rig_answer got[8], plain[8];

static void run_once(int32_t spec, int32_t n_choices, struct sits_sampling s, struct rig_answer *answers, struct engine_stats *stats)
{
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[200];
  options.spec_max_tokens = spec;
  rig_open(&rig, options, 64);
  atomic_store(&rig.fake.period, 12); /* the model says what it said 12 tokens ago, mostly */
  atomic_store(&rig.fake.step_delay_us, 200); /* a step costs something, another token nothing */
  rig_prompt(prompt, 200, 31);
  struct sits_request *request = rig_submit(&rig, prompt, 200, n_choices, s);
  memset(answers, 0, 8 * sizeof *answers);
  rig_run(&rig, request, answers, n_choices);
  sits_request_release(request);
  rig_idle(&rig);
  engine_stats(rig.engine, stats);
  rig_close(&rig);
}

static void test_same_answer(void **state)
{
  struct engine_stats with, without;
  for (int round = 0; round < 6; round++) {
    struct sits_sampling s = rig_greedy(90 + round);
    s.ignore_eos = round % 2;
    if (round >= 2) {
      s.temperature = 0.8f;
      s.seed = (uint64_t)round;
      s.repetition_penalty = round == 4 ? 1.1f : 1;
    }
    int32_t n_choices = round == 3 ? 4 : 1;
    run_once(0, n_choices, s, plain, &without);
    run_once(6, n_choices, s, got, &with);
    for (int32_t i = 0; i < n_choices; i++) rig_same(&got[i], &plain[i]);
    assert_int_equal(without.spec_drafts, 0);
    if (round >= 2) continue;
    print_message("%d steps instead of %d, %d of %d drafted tokens accepted\n", (int)with.n_steps, (int)without.n_steps,
                  (int)with.spec_accepted_tokens, (int)with.spec_draft_tokens);
    assert_true(with.spec_accepted_tokens > 20);
    assert_true(with.n_steps + with.spec_accepted_tokens >= without.n_steps && with.n_steps < without.n_steps * 3 / 4);
  }
}

static void test_off_when_many_run(void **state)
{
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[100];
  options.spec_max_tokens = 6;
  options.spec_max_running = 4;
  rig_open(&rig, options, 64);
  atomic_store(&rig.fake.period, 12);
  rig_prompt(prompt, 100, 31);
  struct sits_sampling s = rig_greedy(60);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 100, 4, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 4);
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.spec_drafts, 0);
  sits_request_release(request);
  rig_close(&rig);
}

static void test_off_for_folding_codecs(void **state)
{
  struct rig rig;
  struct engine_options options = rig_options();
  struct sits_error err;
  int32_t prompt[100];
  rig_open(&rig, options, 64);
  options.spec_max_tokens = 6;
  options.vtable = fake_vtable();
  options.program = rig.fake.program;
  options.kv = rig.fake.kv;
  options.geometry = rig.fake.geometry;
  options.geometry.codec = KV_INT4;
  engine_destroy(rig.engine);
  assert_int_equal(engine_create(&options, &rig.engine, &err), SITS_OK);
  atomic_store(&rig.fake.period, 12);
  rig_prompt(prompt, 100, 31);
  struct sits_sampling s = rig_greedy(60);
  s.ignore_eos = true;
  struct sits_request *request = rig_submit(&rig, prompt, 100, 1, s);
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_int_equal(stats.spec_drafts, 0);
  sits_request_release(request);
  rig_close(&rig);
}

/* ---- a draft model ---- */

static struct fake_rig draft;

/* A rig whose engine has a draft model, which gives another row now and then. */
static void open_with_draft(struct rig *rig, struct engine_options options, int32_t n_pages, int32_t disagree)
{
  struct fake_options fake = {.n_vocab = RIG_VOCAB, .max_batch_tokens = options.max_num_batched_tokens, .max_rows = options.max_rows,
                              .n_pages = 8 * (options.max_model_len / KV_PAGE_TOKENS)};
  assert_int_equal(fake_rig_init(&draft, &fake), 0);
  atomic_store(&draft.disagree, disagree);
  options.spec_max_tokens = 6;
  options.draft = (struct engine_draft_model){.program = draft.program, .kv = draft.kv, .geometry = draft.geometry,
                                              .max_model_len = options.max_model_len};
  rig_open(rig, options, n_pages);
  atomic_store(&rig->fake.step_delay_us, 400); /* the draft model is much quicker */
}

static void close_with_draft(struct rig *rig)
{
  rig_close(rig);
  fake_rig_fini(&draft);
}

/* 20,000 answers of three sampled tokens, with drafts, against the model's own distribution at each position. */
static void check_distribution(bool with_model)
{
  enum { DRAWS = 20000, V = RIG_VOCAB };
  static int32_t counts[3][V];
  memset(counts, 0, sizeof counts);
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[40];
  if (!with_model) options.spec_max_tokens = 4;
  options.max_waiting_requests = 8;
  if (with_model) open_with_draft(&rig, options, 64, 3);
  else rig_open(&rig, options, 64);
  atomic_store(&rig.fake.step_delay_us, 0);
  /* Every token has been seen before, so something is always looked up; or none has, and the draft model guesses. */
  for (int i = 0; i < 40; i++) prompt[i] = with_model ? 30 + i : 20 + i % 5;
  for (int draw = 0; draw < DRAWS; draw++) {
    struct sits_sampling s = rig_greedy(5);
    s.temperature = 1;
    s.ignore_eos = true;
    s.seed = (uint64_t)draw;
    s.bias = (const struct sits_logit_bias[]){{20, 7}, {21, 7}, {22, 7}, {23, 7}, {24, 7}};
    s.n_bias = 5;
    struct sits_request *request = rig_submit(&rig, prompt, 40, 1, s);
    memset(&got[0], 0, sizeof got[0]);
    rig_run(&rig, request, got, 1);
    /* Which cell a token falls in depends on the path before it, so the test statistic is its rank in that path's distribution. */
    int32_t context[64];
    memcpy(context, prompt, sizeof prompt);
    for (int k = 0; k < 3; k++) {
      float logits[V];
      fake_logits(V, context, 40 + k, logits);
      for (int t = 20; t < 25; t++) logits[t] += 7;
      double total = 0, below = 0;
      for (int v = 0; v < V; v++) total += __builtin_exp(logits[v]);
      for (int v = 0; v < got[0].tokens[k]; v++) below += __builtin_exp(logits[v]);
      double mass = __builtin_exp(logits[got[0].tokens[k]]);
      /* Spread the token's own mass evenly: then the value is uniform if and only if the draw follows the distribution. */
      uint32_t hash = (uint32_t)draw * 2654435761u + (uint32_t)k * 40503u;
      double u = (below + mass * ((double)(hash >> 8) / (1 << 24))) / total;
      counts[k][(int)(u * 50)]++;
      context[40 + k] = got[0].tokens[k];
    }
    sits_request_release(request);
  }
  struct engine_stats stats;
  engine_stats(rig.engine, &stats);
  assert_true(stats.spec_drafts > DRAWS / 4 && stats.spec_accepted_tokens > 500);
  for (int k = 0; k < 3; k++) {
    double chi = 0;
    for (int c = 0; c < 50; c++) chi += (counts[k][c] - DRAWS / 50.0) * (counts[k][c] - DRAWS / 50.0) / (DRAWS / 50.0);
    print_message("position %d: chi-square %.1f with 49 degrees of freedom\n", k, chi);
    assert_true(chi < 94.0); /* p = 0.0001 */
  }
  if (with_model) close_with_draft(&rig);
  else rig_close(&rig);
}

static void test_distribution(void **state)
{
  (void)state;
  check_distribution(false);
}

static void test_distribution_with_draft_model(void **state)
{
  (void)state;
  check_distribution(true);
}

/* Several requests of all kinds, with little room so that some are pre-empted: the answers are those without a draft model. */
static void test_draft_model_same_answers(void **state)
{
  enum { REQUESTS = 5 };
  static struct rig_answer answers[2][REQUESTS][3];
  static struct engine_stats stats[2];
  (void)state;
  for (int with = 0; with < 2; with++) {
    struct rig rig;
    struct engine_options options = rig_options();
    struct sits_request *requests[REQUESTS];
    int32_t prompt[400];
    if (with) {
      open_with_draft(&rig, options, 20, 5);
    } else {
      rig_open(&rig, options, 20);
      atomic_store(&rig.fake.step_delay_us, 400);
    }
    for (int i = 0; i < REQUESTS; i++) {
      struct sits_sampling s = rig_greedy(100 + 10 * i);
      s.ignore_eos = i % 2;
      s.seed = (uint64_t)i;
      if (i >= 2) s.temperature = 0.7f, s.top_p = 0.9f;
      if (i == 3) s.repetition_penalty = 1.2f;
      rig_prompt(prompt, 60 + 80 * i, (uint32_t)i + 40);
      requests[i] = rig_submit(&rig, prompt, 60 + 80 * i, i == 4 ? 3 : 1, s);
    }
    memset(answers[with], 0, sizeof answers[with]);
    for (int i = 0; i < REQUESTS; i++) {
      rig_run(&rig, requests[i], answers[with][i], i == 4 ? 3 : 1);
      sits_request_release(requests[i]);
    }
    rig_idle(&rig);
    engine_stats(rig.engine, &stats[with]);
    if (with) close_with_draft(&rig);
    else rig_close(&rig);
  }
  for (int i = 0; i < REQUESTS; i++)
    for (int c = 0; c < (i == 4 ? 3 : 1); c++) rig_same(&answers[1][i][c], &answers[0][i][c]);
  print_message("%d steps instead of %d, %d guesses, %d of %d verified ones right\n", (int)stats[1].n_steps, (int)stats[0].n_steps,
                (int)stats[1].spec_model_tokens, (int)stats[1].spec_accepted_tokens, (int)stats[1].spec_draft_tokens);
  assert_true(stats[1].spec_model_tokens > 100 && stats[1].spec_accepted_tokens > 60);
  assert_true(stats[1].n_steps < stats[0].n_steps);
}

/* Wholly wrong guesses, or a draft model as slow as the model: it is soon not asked any more. With as many running as the limit says:
 * never. */
static void test_draft_model_off(void **state)
{
  (void)state;
  for (int way = 0; way < 3; way++) {
    struct rig rig;
    struct engine_options options = rig_options();
    int32_t prompt[100];
    if (way == 2) options.spec_max_running = 2;
    open_with_draft(&rig, options, 64, way == 0 ? 1 : 0);
    if (way == 1) atomic_store(&draft.step_delay_us, 800);
    rig_prompt(prompt, 100, 31);
    struct sits_sampling s = rig_greedy(200);
    s.ignore_eos = true;
    int32_t n_choices = way == 2 ? 2 : 1;
    s.temperature = 1;
    struct sits_request *request = rig_submit(&rig, prompt, 100, n_choices, s);
    memset(got, 0, sizeof got);
    rig_run(&rig, request, got, n_choices);
    struct engine_stats stats;
    engine_stats(rig.engine, &stats);
    print_message("way %d: %d guesses for %d tokens\n", way, (int)stats.spec_model_tokens, 200);
    assert_true(stats.spec_model_tokens <= (way == 2 ? 0 : 60));
    sits_request_release(request);
    close_with_draft(&rig);
  }
}

static void test_draft_length(void **state)
{
  (void)state;
  assert_int_equal(engine_draft_length(0.95f, 0.05, 6), 6);  /* sure and cheap: all that is allowed */
  assert_int_equal(engine_draft_length(0.95f, 1.0, 6), 0);   /* as slow as the model itself */
  assert_int_equal(engine_draft_length(0.2f, 0.3, 6), 0);    /* (1 + 0.2) / 1.3 < 1 */
  assert_int_equal(engine_draft_length(0.5f, 0.3, 6), 1);    /* 1.5 / 1.3 = 1.154; 1.75 / 1.6 = 1.094 */
  assert_int_equal(engine_draft_length(0.9f, 0.05, 0), 0);
}

/* A draft model that fails is left alone; answers go on. */
static void test_draft_model_fails(void **state)
{
  struct rig rig;
  int32_t prompt[100];
  (void)state;
  open_with_draft(&rig, rig_options(), 64, 0);
  atomic_store(&draft.fail_at_step, 9);
  rig_prompt(prompt, 100, 31);
  struct sits_request *request = rig_submit(&rig, prompt, 100, 1, rig_greedy(60));
  memset(got, 0, sizeof got);
  rig_run(&rig, request, got, 1);
  rig_expect(prompt, 100, 60, false, &plain[0]);
  rig_same(&got[0], &plain[0]);
  sits_request_release(request);
  rig_idle(&rig);
  close_with_draft(&rig);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_answer), cmocka_unit_test(test_off_when_many_run),
                                     cmocka_unit_test(test_off_for_folding_codecs), cmocka_unit_test(test_distribution),
                                     cmocka_unit_test(test_distribution_with_draft_model),
                                     cmocka_unit_test(test_draft_model_same_answers), cmocka_unit_test(test_draft_model_off),
                                     cmocka_unit_test(test_draft_length), cmocka_unit_test(test_draft_model_fails)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
