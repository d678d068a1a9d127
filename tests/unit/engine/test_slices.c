/* Prompts read in slices beside decoding streams, over the fake backend's lane: the same answers, no stall, and nothing left behind when
 * the prompt is cancelled, the device fails, or a request of a higher class comes in between. */
#include "unit/engine/engine_rig.h"

enum { STREAMS = 3, LONG = 700, SHORT = 10, URGENT = 2, STREAM_TOKENS = 900 };

struct scene {
  struct rig rig;
  struct sits_request *streams[STREAMS], *longer;
  int32_t prompts[STREAMS][SHORT], prompt[LONG];
  struct rig_answer answers[STREAMS], long_answer;
};

static struct scene scene;
static struct { int32_t n, n_sliced; } told;
static bool overlap; /* slices before the decodes, as beside a device; else behind them */
static bool tells;   /* overlap: the device says when pieces end, and begins slices ahead */

/* engine_options.on_step: the parts of a step are within it. */
static void note_step(void *user, const struct engine_step_times *t)
{
  assert_ptr_equal(user, &told);
  assert_true(t->n_decode > 0 || t->n_prompt_tokens > 0);
  assert_true(t->batch_us > 0 && t->sliced_us >= 0 && t->sliced_us + t->batch_us <= t->step_us);
  assert_true(t->slice_us > 0 || t->sliced_us == 0);
  told.n++;
  told.n_sliced += t->sliced_us > 0;
}

static struct sits_request *submit_class(const int32_t *prompt, int32_t n, int32_t max_tokens, enum sits_class service_class)
{
  struct sits_request_params p = {.prompt = prompt, .n_prompt = n, .n_choices = 1, .sampling = rig_greedy(max_tokens),
                                  .service_class = service_class, .id = "slices"};
  struct sits_request *request = NULL;
  struct sits_error err;
  p.sampling.ignore_eos = true;
  assert_int_equal(sits_engine_submit(scene.rig.engine, &p, &request, &err), SITS_OK);
  return request;
}

static void drain_streams(void)
{
  for (int i = 0; i < STREAMS; i++) rig_drain(scene.streams[i], &scene.answers[i], 1);
}

/* Streams whose events nobody takes are held. */
static void step(void)
{
  engine_step_once(scene.rig.engine);
  drain_streams();
}

static void finish(struct sits_request *request, struct rig_answer *answer)
{
  for (int32_t i = 0; i < 5000 && rig_drain(request, answer, 1) == 0; i++) step();
  assert_int_equal(rig_drain(request, answer, 1), 1);
  sits_request_release(request);
}

/* Three streams of low class decode, and a long prompt of theirs has begun in slices: a token of it takes 100 us and more, a step may take
 * 3,000. */
static void open_scene(void)
{
  memset(&scene, 0, sizeof scene);
  struct engine_options options = rig_options();
  options.vtable = fake_slicing_vtable();
  options.itl_target_us = 3000;
  options.overlap = overlap;
  options.on_step = note_step;
  options.step_user = &told;
  rig_open(&scene.rig, options, 64);
  for (int i = 0; i < STREAMS; i++) {
    rig_prompt(scene.prompts[i], SHORT, 40 + (uint32_t)i);
    scene.streams[i] = submit_class(scene.prompts[i], SHORT, STREAM_TOKENS, SITS_CLASS_LOW);
  }
  atomic_store(&scene.rig.fake.tells_ends, tells);
  atomic_store(&scene.rig.fake.token_delay_us, 100);
  for (int i = 0; i < 30; i++) step();
  rig_prompt(scene.prompt, LONG, 49); /* one before it: the planner learns what a prompt's token costs */
  scene.longer = submit_class(scene.prompt, LONG, 1, SITS_CLASS_LOW);
  finish(scene.longer, &scene.long_answer);
  memset(&scene.long_answer, 0, sizeof scene.long_answer);
  atomic_store(&scene.rig.fake.n_slices, 0);
  atomic_store(&scene.rig.fake.n_lanes_begun, 0);
  rig_prompt(scene.prompt, LONG, 50);
  scene.longer = submit_class(scene.prompt, LONG, 5, SITS_CLASS_LOW);
  for (int i = 0; i < 200 && atomic_load(&scene.rig.fake.n_slices) == 0; i++) step();
  assert_true(atomic_load(&scene.rig.fake.n_slices) > 0);
}

/* Run to the end; the streams must have said what they say alone. */
static void close_scene(void)
{
  static struct rig_answer expected;
  for (int i = 0; i < STREAMS; i++) {
    for (int32_t k = 0; k < 5000 && scene.answers[i].n_finish == 0; k++) step();
    rig_expect(scene.prompts[i], SHORT, STREAM_TOKENS, true, &expected);
    rig_same(&scene.answers[i], &expected);
    sits_request_release(scene.streams[i]);
  }
  rig_idle(&scene.rig);
  rig_close(&scene.rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_read_in_slices(void **state)
{
  static struct rig_answer expected;
  (void)state;
  open_scene();
  int32_t n_steps = 0, before = scene.answers[0].n;
  memset(&told, 0, sizeof told);
  for (; rig_drain(scene.longer, &scene.long_answer, 1) == 0 && n_steps < 5000; n_steps++) step();
  rig_expect(scene.prompt, LONG, 5, true, &expected);
  rig_same(&scene.long_answer, &expected);
  print_message("%d chunks, %d slices, streams said %d tokens meanwhile\n", atomic_load(&scene.rig.fake.n_lanes_begun),
                atomic_load(&scene.rig.fake.n_slices), (int)(scene.answers[0].n - before));
  assert_true(atomic_load(&scene.rig.fake.n_lanes_begun) >= 2);
  assert_true(atomic_load(&scene.rig.fake.n_slices) > 10);
  assert_true(tells == (atomic_load(&scene.rig.fake.n_ahead) > 10));
  assert_true(told.n > 10 && told.n <= n_steps + 1 && told.n_sliced > told.n / 2);
  assert_true(scene.answers[0].n - before >= n_steps - 1 || scene.answers[0].n_finish == 1); /* a token each step */
  sits_request_release(scene.longer);
  close_scene();
}

static void test_cancelled(void **state)
{
  (void)state;
  open_scene();
  sits_request_cancel(scene.longer, -1);
  assert_int_equal(atomic_load(&scene.rig.fake.n_lanes_dropped), 0);
  engine_step_once(scene.rig.engine);
  assert_int_equal(rig_drain(scene.longer, &scene.long_answer, 1), 1);
  assert_int_equal(scene.long_answer.finish, SITS_FINISH_CANCELLED);
  assert_int_equal(atomic_load(&scene.rig.fake.n_lanes_dropped), 1); /* at once, not when another chunk begins */
  sits_request_release(scene.longer);
  close_scene();
}

struct urgent { struct sits_request *request; int32_t prompt[URGENT], n_calls; };

static void send_urgent(void *user)
{
  struct urgent *u = user;
  if (++u->n_calls == 3) u->request = submit_class(u->prompt, URGENT, 4, SITS_CLASS_HIGH);
}

/* It comes in the middle of a slice: the slice stops, and its first token is the next thing that is computed; of the lower class only what
 * was computed before the slice still goes out. */
static void test_higher_class_comes(void **state)
{
  static struct urgent urgent;
  static struct rig_answer answer, expected;
  (void)state;
  open_scene();
  memset(&urgent, 0, sizeof urgent);
  memset(&answer, 0, sizeof answer);
  rig_prompt(urgent.prompt, URGENT, 60);
  scene.rig.fake.during_slice = send_urgent;
  scene.rig.fake.during_user = &urgent;
  int32_t before = 0, n_steps = 0;
  while (!urgent.request && n_steps++ < 1000) {
    before = scene.answers[0].n;
    step();
  }
  assert_non_null(urgent.request);
  if (!overlap) {
    assert_int_equal(scene.answers[0].n, before + 1);
    before++;
    step();
  }
  rig_drain(urgent.request, &answer, 1);
  assert_int_equal(answer.n, 1);
  assert_int_equal(scene.answers[0].n, before); /* the lower class waited */
  finish(urgent.request, &answer);
  rig_expect(urgent.prompt, URGENT, 4, true, &expected);
  rig_same(&answer, &expected);
  finish(scene.longer, &scene.long_answer);
  rig_expect(scene.prompt, LONG, 5, true, &expected);
  rig_same(&scene.long_answer, &expected);
  close_scene();
}

/* All requests end when the scene has failed within so many steps. */
static void expect_failure(int32_t most_steps)
{
  log_set_level(LOG_OFF);
  for (int32_t i = 0; i < most_steps && rig_drain(scene.longer, &scene.long_answer, 1) == 0; i++) step();
  assert_int_equal(rig_drain(scene.longer, &scene.long_answer, 1), 1);
  assert_int_equal(scene.long_answer.status, SITS_DEVICE);
  for (int i = 0; i < STREAMS; i++) {
    assert_int_equal(rig_drain(scene.streams[i], &scene.answers[i], 1), 1);
    sits_request_release(scene.streams[i]);
  }
  sits_request_release(scene.longer);
  rig_close(&scene.rig);
  assert_int_equal(mem_live_blocks(), 0);
}

static void test_device_fails(void **state)
{
  (void)state;
  open_scene();
  atomic_store(&scene.rig.fake.fail_at_step, 1);
  expect_failure(1);
}

/* The next chunk cannot begin while batches still run: the prompt must not be planned again and again. */
static void test_device_fails_to_begin(void **state)
{
  (void)state;
  open_scene();
  atomic_store(&scene.rig.fake.refuses_lanes, true);
  expect_failure(1000);
}

static enum sits_status refusal;
static bool refuses_without_text;

static enum sits_status refuse_lane(struct backend_program *program, const struct backend_kv *kv, int32_t max_tokens,
                                    struct backend_program **out, struct sits_error *err)
{
  (void)program, (void)kv, (void)max_tokens, (void)out;
  return refuses_without_text ? refusal : sits_fail(err, refusal, "no lane here");
}

/* A lane that cannot be had costs the slices, not the engine; but a device that has failed is told by its own words, or by its status. */
static void test_no_lane(void **state)
{
  static const enum sits_status statuses[] = {SITS_UNSUPPORTED, SITS_NOMEM, SITS_DEVICE, SITS_DEVICE};
  static struct rig_answer answer, expected;
  struct backend_vtable vtable = *fake_slicing_vtable();
  (void)state;
  vtable.lane_open = refuse_lane;
  for (int i = 0; i < 4; i++) {
    refusal = statuses[i];
    refuses_without_text = i == 3;
    memset(&scene, 0, sizeof scene);
    memset(&answer, 0, sizeof answer);
    struct engine_options options = rig_options();
    options.vtable = &vtable;
    options.overlap = overlap;
    if (refusal == SITS_DEVICE) {
      struct sits_error err = {0};
      const struct fake_options fake = {.n_vocab = RIG_VOCAB, .max_batch_tokens = 128, .max_rows = 32, .n_pages = 64};
      assert_int_equal(fake_rig_init(&scene.rig.fake, &fake), 0);
      options.program = scene.rig.fake.program;
      options.kv = scene.rig.fake.kv;
      options.geometry = scene.rig.fake.geometry;
      assert_int_equal(engine_create(&options, &scene.rig.engine, &err), SITS_DEVICE);
      assert_string_equal(err.text, refuses_without_text ? "engine: device failed" : "no lane here");
      fake_rig_fini(&scene.rig.fake);
      continue;
    }
    rig_open(&scene.rig, options, 64);
    rig_prompt(scene.prompt, LONG, 50);
    rig_run(&scene.rig, scene.longer = submit_class(scene.prompt, LONG, 5, SITS_CLASS_LOW), &answer, 1);
    rig_expect(scene.prompt, LONG, 5, true, &expected);
    rig_same(&answer, &expected);
    assert_int_equal(atomic_load(&scene.rig.fake.n_lanes_begun), 0);
    sits_request_release(scene.longer);
    rig_idle(&scene.rig);
    rig_close(&scene.rig);
  }
  assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_read_in_slices), cmocka_unit_test(test_cancelled),
                                     cmocka_unit_test(test_higher_class_comes), cmocka_unit_test(test_device_fails),
                                     cmocka_unit_test(test_device_fails_to_begin), cmocka_unit_test(test_no_lane)};
  int n_failed = 0;
  static const char *const names[] = {"slices behind the decodes", "slices before the decodes", "slices that begin ahead"};
  for (int i = 0; i < 3; i++) {
    overlap = i > 0;
    tells = i == 2;
    n_failed += cmocka_run_group_tests_name(names[i], tests, NULL, NULL);
  }
  return n_failed;
}
