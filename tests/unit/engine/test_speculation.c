/* Speculation over a fake model that repeats itself: answers with and without it are the same token for token, greedy and sampled, it
 * saves steps where text repeats, and it is off where it must be. */
#include "unit/engine/engine_rig.h"

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

/* 20,000 answers of three sampled tokens, with drafts, against the model's own distribution at each position. */
static void test_distribution(void **state)
{
  enum { DRAWS = 20000, V = RIG_VOCAB };
  static int32_t counts[3][V];
  struct rig rig;
  struct engine_options options = rig_options();
  int32_t prompt[40];
  options.spec_max_tokens = 4;
  options.max_waiting_requests = 8;
  rig_open(&rig, options, 64);
  for (int i = 0; i < 40; i++) prompt[i] = 20 + i % 5; /* every token has been seen before, so something is always drafted */
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
  rig_close(&rig);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_answer), cmocka_unit_test(test_off_when_many_run),
                                     cmocka_unit_test(test_off_for_folding_codecs), cmocka_unit_test(test_distribution)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
