/* A real model through an instance: answers of requests that share steps, pages and prefixes, fork, lose their pages and speculate equal
 * those of each run alone. Needs shared/data (stories260K); skipped without it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/mem.h"
#include "engine/instance.h"

enum { N = 7, LENGTH = 90, OUTPUT = 70 };

struct answer { int32_t tokens[OUTPUT], n; enum sits_finish finish; };

static char model_path[512];

static bool find_model(void)
{
  const char *data = getenv("SITS_SHARED_DATA");
  snprintf(model_path, sizeof model_path, "%s/models/stories260K/stories260K.gguf", data ? data : "../shared/data");
  return access(model_path, R_OK) == 0;
}

static struct instance *open_instance(struct instance_options options)
{
  struct instance *instance = NULL;
  struct sits_error err = {0};
  log_set_level(LOG_ERROR);
  options.model_path = model_path;
  options.device = "cpu";
  options.n_threads = 1;
  options.max_model_len = 256;
  enum sits_status status = instance_open(&options, &instance, &err);
  if (status != SITS_OK) print_error("%s\n", err.text);
  assert_int_equal(status, SITS_OK);
  return instance;
}

/* Prompts that share beginnings of different lengths. */
static void prompt_of(int32_t i, int32_t *tokens)
{
  tokens[0] = 1;
  for (int32_t k = 1; k < LENGTH; k++) tokens[k] = 3 + (k * 37 + (k > 30 + 10 * i ? i * 11 : 0)) % 500;
}

static struct sits_request *submit(struct instance *instance, const int32_t *prompt, int32_t n_choices, float temperature)
{
  struct sits_request_params p = {.prompt = prompt, .n_prompt = LENGTH, .n_choices = n_choices,
                                  .service_class = SITS_CLASS_NORMAL, .id = "t"};
  struct sits_request *request = NULL;
  struct sits_error err;
  p.sampling = (struct sits_sampling){.temperature = temperature, .top_p = 0.95f, .repetition_penalty = 1, .seed = 11, .max_tokens = OUTPUT,
                                      .ignore_eos = true, .n_top_logprobs = -1, .n_prompt_logprobs = -1};
  assert_int_equal(sits_engine_submit(instance_engine(instance), &p, &request, &err), SITS_OK);
  return request;
}

static void finish(struct instance *instance, struct sits_request *request, struct answer *answers, int32_t n_choices)
{
  struct sits_event e;
  int32_t n_ended = 0;
  memset(answers, 0, (size_t)n_choices * sizeof *answers);
  for (int32_t i = 0; n_ended < n_choices && i < 100000; i++) {
    while (sits_request_poll(request, &e) == SITS_OK) {
      struct answer *a = &answers[e.choice];
      if (e.kind == SITS_EVENT_TOKEN) a->tokens[a->n++] = e.token;
      if (e.kind == SITS_EVENT_FINISH) a->finish = e.finish, n_ended++;
    }
    if (n_ended < n_choices) engine_step_once(instance_engine(instance));
  }
  assert_int_equal(n_ended, n_choices);
  sits_request_release(request);
}

static uint64_t n_accepted;           /* drafted tokens over all comparisons: how many pay is the machine's business, that some do is not */

static void compare(const char *codec, float temperature)
{
  static struct answer alone[N], together[N], forked[3];
  int32_t prompts[N][LENGTH];
  struct sits_request *requests[N];
  for (int32_t i = 0; i < N; i++) {
    struct instance *instance = open_instance((struct instance_options){
        .max_num_seqs = 1, .max_num_batched_tokens = 256, .kv_codec = codec});
    prompt_of(i, prompts[i]);
    finish(instance, submit(instance, prompts[i], 1, temperature), &alone[i], 1);
    assert_int_equal(alone[i].n, OUTPUT);
    instance_close(instance);
  }
  struct instance *probe = open_instance((struct instance_options){.max_num_seqs = 4, .max_num_batched_tokens = 64, .kv_codec = codec});
  struct instance_info info;
  instance_info(probe, &info);
  instance_close(probe);
  struct instance *instance = open_instance((struct instance_options){
      .max_num_seqs = 6, .max_num_batched_tokens = 48, .kv_codec = codec, .prefix_caching = true, .kv_cache_bytes = 7 * info.page_bytes,
      .swap_bytes = 6 * info.page_bytes, .spec_max_tokens = 4});
  for (int round = 0; round < 2; round++) { /* the second time prefixes are cached */
    for (int32_t i = 0; i < N; i++) requests[i] = submit(instance, prompts[i], 1, temperature);
    for (int32_t i = 0; i < N; i++) finish(instance, requests[i], &together[i], 1);
    for (int32_t i = 0; i < N; i++) {
      assert_int_equal(together[i].n, OUTPUT);
      assert_memory_equal(together[i].tokens, alone[i].tokens, sizeof alone[i].tokens);
    }
  }
  finish(instance, submit(instance, prompts[2], 3, temperature), forked, 3);
  assert_memory_equal(forked[0].tokens, alone[2].tokens, sizeof alone[2].tokens);
  struct engine_stats stats;
  engine_stats(instance_engine(instance), &stats);
  print_message("%s: %llu steps, %llu pre-emptions (%llu swapped), %llu prefix tokens hit, %llu drafted tokens accepted\n", codec,
                (unsigned long long)stats.n_steps, (unsigned long long)stats.n_preemptions, (unsigned long long)stats.n_preemptions_swapped,
                (unsigned long long)stats.prefix_hit_tokens, (unsigned long long)stats.spec_accepted_tokens);
  assert_true(stats.n_preemptions > 0 && stats.prefix_hit_tokens > 0);
  n_accepted += stats.spec_accepted_tokens;
  instance_close(instance);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_f16(void **state)
{
  if (!find_model()) skip();
  compare("f16", 0);
  compare("f16", 0.8f);
}

static void test_int8(void **state)
{
  if (!find_model()) skip();
  compare("int8", 0);
}

static void test_some_were_drafted(void **state)
{
  (void)state;
  if (!find_model()) skip();
  assert_true(n_accepted > 0);
}

/* Codecs that fold groups of tokens depend on where chunks end, so answers are not compared with those of other chunks; the same load must
 * give the same answers again, and everything must end well. */
static void test_folding_codecs_repeat(void **state)
{
  static const char *const codecs[] = {"int4", "fp4"};
  static struct answer answers[2][N];
  if (!find_model()) skip();
  for (int c = 0; c < 2; c++) {
    for (int round = 0; round < 2; round++) {
      struct sits_request *requests[N];
      int32_t prompt[LENGTH];
      struct instance *instance = open_instance((struct instance_options){
          .max_num_seqs = 6, .max_num_batched_tokens = 48, .kv_codec = codecs[c], .spec_max_tokens = 4});
      for (int32_t i = 0; i < N; i++) {
        prompt_of(i, prompt);
        requests[i] = submit(instance, prompt, 1, 0);
      }
      for (int32_t i = 0; i < N; i++) finish(instance, requests[i], &answers[round][i], 1);
      struct engine_stats stats;
      engine_stats(instance_engine(instance), &stats);
      assert_int_equal(stats.spec_drafts, 0);
      assert_int_equal(stats.n_pages_used, 0);
      instance_close(instance);
    }
    for (int32_t i = 0; i < N; i++) assert_int_equal(answers[0][i].n, OUTPUT);
    assert_memory_equal(answers[0], answers[1], sizeof answers[0]);
  }
}

/* A draft model, here the model itself: the same answers in far fewer steps; refused where the cache cannot take a token back. */
static void test_draft_model(void **state)
{
  static struct answer plain[2], drafted[2];
  int32_t prompt[LENGTH];
  if (!find_model()) skip();
  for (int with = 0; with < 2; with++) {
    struct instance *instance = open_instance((struct instance_options){
        .max_num_seqs = 2, .max_num_batched_tokens = 256, .spec_max_tokens = with ? 5 : 0, .draft_model_path = with ? model_path : NULL});
    struct answer *answers = with ? drafted : plain;
    for (int i = 0; i < 2; i++) {
      prompt_of(i, prompt);
      finish(instance, submit(instance, prompt, 1, i ? 0.8f : 0), &answers[i], 1);
      assert_int_equal(answers[i].n, OUTPUT);
    }
    struct engine_stats stats;
    engine_stats(instance_engine(instance), &stats);
    if (with) print_message("%d guesses, %d of %d verified ones right\n", (int)stats.spec_model_tokens, (int)stats.spec_accepted_tokens,
                            (int)stats.spec_draft_tokens);
    if (with) assert_true(stats.spec_model_tokens > 0);
    instance_close(instance);
  }
  assert_memory_equal(plain, drafted, sizeof plain);
  struct instance *instance = NULL;
  struct sits_error err = {0};
  static const struct instance_options bad[] = {{.spec_max_tokens = 4, .kv_codec = "int4"}, {.spec_max_tokens = 0}};
  for (int i = 0; i < 2; i++) {
    struct instance_options options = bad[i];
    options.model_path = options.draft_model_path = model_path;
    options.device = "cpu";
    assert_int_equal(instance_open(&options, &instance, &err), SITS_CONFIG);
    assert_string_equal(err.param, "draft-model");
  }
  assert_int_equal(mem_live_blocks(), 0);
}

/* The same for an engine with a thread of its own. */
static void finish_threaded(struct sits_request *request, struct answer *answer)
{
  struct sits_event e;
  memset(answer, 0, sizeof *answer);
  for (int32_t i = 0; answer->finish == SITS_FINISH_NONE && i < 600000; i++) {
    while (sits_request_poll(request, &e) == SITS_OK) {
      if (e.kind == SITS_EVENT_TOKEN) answer->tokens[answer->n++] = e.token;
      if (e.kind == SITS_EVENT_FINISH) answer->finish = e.finish;
    }
    usleep(100);
  }
  sits_request_release(request);
}

/* Prompts read on a second backend: the same answers for every codec, and both paths used. */
static void test_placement(void **state)
{
  static const char *const codecs[] = {"f16", "int8", "int4", "fp4"};
  static struct answer answers[2][N];
  if (!find_model()) skip();
  for (int c = 0; c < 4; c++) {
    for (int with = 0; with < 2; with++) {
      struct instance *instance = open_instance((struct instance_options){
          .max_num_seqs = 6, .max_num_batched_tokens = 48, .kv_codec = codecs[c], .prefix_caching = true, .has_placement = with == 1,
          .decode_device = 1, .always_hand_over = true});
      struct sits_request *requests[N];
      struct engine_stats stats;
      struct sits_error err;
      int32_t prompt[LENGTH];
      if (with) assert_int_equal(instance_start(instance, &err), SITS_OK);
      for (int32_t i = 0; i < N; i++) {
        prompt_of(i, prompt);
        requests[i] = submit(instance, prompt, 1, i % 2 ? 0.8f : 0);
      }
      for (int32_t i = 0; i < N; i++) {
        if (with) finish_threaded(requests[i], &answers[1][i]);
        else finish(instance, requests[i], &answers[0][i], 1);
      }
      engine_stats(instance_engine(instance), &stats);
      if (with) assert_true(stats.placement_sent > 0 && stats.placement_pages > 0);
      instance_close(instance);
    }
    for (int32_t i = 0; i < N; i++) assert_int_equal(answers[0][i].n, OUTPUT);
    assert_memory_equal(answers[0], answers[1], sizeof answers[0]);
  }
  struct instance *instance = NULL;
  struct sits_error err = {0};
  static const struct instance_options bad[] = {{.prefix_caching = true}, {.decode_device = 1, .prefix_caching = true, .n_ranks = 2},
                                                {.decode_device = 1},
                                                {.decode_device = 1, .prefix_caching = true, .kv_codec = "fp4-sparse"}};
  for (int i = 0; i < 4; i++) {
    struct instance_options options = bad[i];
    options.model_path = model_path;
    options.device = "cpu";
    options.has_placement = true;
    options.max_model_len = 512;
    assert_int_not_equal(instance_open(&options, &instance, &err), SITS_OK);
    assert_string_equal(err.param, "placement");
  }
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_bad_model(void **state)
{
  struct instance *instance = NULL;
  struct sits_error err = {0};
  struct instance_options options = {.model_path = "/nonexistent.gguf", .device = "cpu"};
  assert_int_not_equal(instance_open(&options, &instance, &err), SITS_OK);
  assert_null(instance);
  assert_true(strstr(err.text, "nonexistent") != NULL);
  if (!find_model()) skip();
  options = (struct instance_options){.model_path = model_path, .device = "cpu", .max_model_len = 1 << 20};
  assert_int_equal(instance_open(&options, &instance, &err), SITS_CONFIG);
  assert_string_equal(err.param, "max-model-len");
  options = (struct instance_options){.model_path = model_path, .device = "cpu", .prefill_weights = "resident"};
  assert_int_equal(instance_open(&options, &instance, &err), SITS_UNSUPPORTED);
  assert_string_equal(err.param, "prefill-weights");
  options = (struct instance_options){.model_path = model_path, .device = "cpu", .max_model_len = 256, .kv_cache_bytes = 1};
  assert_int_equal(instance_open(&options, &instance, &err), SITS_CONFIG);
  assert_string_equal(err.param, "kv-cache-memory");
  assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_f16), cmocka_unit_test(test_int8), cmocka_unit_test(test_some_were_drafted),
                                     cmocka_unit_test(test_folding_codecs_repeat),
                                     cmocka_unit_test(test_draft_model), cmocka_unit_test(test_placement),
                                     cmocka_unit_test(test_bad_model)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
