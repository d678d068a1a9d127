/* Lanes of the CPU backend: a chunk that is computed slice by slice, with other batches in between, gives the bits of one that is not. */
#include "unit/backend/rig.h"
#include "unit/backend/synth.h"

enum { P = KV_PAGE_TOKENS, V = 50, LONG = 5 * P + 9, CHUNK = 70, OTHER = 40 };

static const struct synth_shape shape = {"lane", 2, 64, 6, 2, 32, 64, V, 0, 0, false, false, false, true};

/* Says yes so many times, then no. */
struct patience { int32_t left; int32_t n_asked; };

static bool go_on(void *user, int64_t end_us)
{
  struct patience *p = user;
  assert_int_equal(end_us, 0); /* it does not say */
  p->n_asked++;
  return p->left-- > 0;
}

static void make_ids(int32_t *ids, int32_t n, int32_t seed)
{
  for (int32_t i = 0; i < n; i++) ids[i] = (i * 29 + i * i % 11 + seed * 13) % V;
}

/* One sequence's chunk as a batch of its own. */
struct chunk { int32_t tokens[CHUNK], positions[CHUNK], starts[2], len, table[8], row; struct backend_batch batch; };

static void make_chunk(struct chunk *c, const int32_t *ids, int32_t p0, int32_t n, const int32_t *table)
{
  memset(c, 0, sizeof *c);
  for (int32_t i = 0; i < n; i++) {
    c->tokens[i] = ids[p0 + i];
    c->positions[i] = p0 + i;
  }
  c->starts[1] = n;
  c->len = p0 + n;
  c->row = n - 1;
  memcpy(c->table, table, sizeof c->table);
  c->batch = (struct backend_batch){.n_tokens = n, .n_seqs = 1, .n_rows = 1, .tokens = c->tokens, .positions = c->positions,
                                    .seq_start = c->starts, .kv_len = &c->len, .block_table = c->table, .table_stride = 8,
                                    .row_token = &c->row};
}

static struct rig open_rig(struct synth *synth, enum kv_codec codec, int32_t n_threads)
{
  return rig_attach(&synth->model, &(struct rig_options){.n_threads = n_threads, .max_batch_tokens = 512, .max_seqs = 512, .n_pages = 12,
                                                         .fusions = ~0u, .codec = codec});
}

static void check_slices(struct synth *synth, enum kv_codec codec, int32_t n_threads, int32_t patience)
{
  static const int32_t table[8] = {5, 3, 11, 0, 7, 8}, other_table[8] = {1};
  static float want[LONG * V], want_other[OTHER * V];
  int32_t ids[LONG], other[OTHER], at = 0, n_stops = 0;
  struct backend_program *lane = NULL;
  struct backend_result result;
  struct sits_error err = {0};
  struct chunk c;
  make_ids(ids, LONG, 1);
  make_ids(other, OTHER, 2);
  struct rig rig = open_rig(synth, codec, n_threads);
  memcpy(want, rig_step(&rig, &(struct rig_part){ids, LONG, 0, table}, 1, true), sizeof want);
  memcpy(want_other, rig_step(&rig, &(struct rig_part){other, OTHER, 0, other_table}, 1, true), sizeof want_other);
  rig_close(&rig);
  rig = open_rig(synth, codec, n_threads);
  RIG_OK(rig.vt->lane_open(rig.compiled, rig.kv, CHUNK, &lane, &err), err);
  for (int32_t p0 = 0, n; p0 < LONG; p0 += n) {
    n = LONG - p0 < CHUNK ? LONG - p0 : CHUNK;
    make_chunk(&c, ids, p0, n, table);
    assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &c.batch), SITS_OK);
    for (bool is_done = false; !is_done;) {
      int64_t end_us;
      struct patience p = {patience, 0};
      assert_int_equal(rig.vt->lane_run(lane, go_on, &p, &is_done, &end_us), SITS_OK);
      n_stops += !is_done;
      assert_int_equal(end_us, 0);
      if (at < OTHER) { /* another sequence decodes meanwhile */
        const float *logits = rig_step(&rig, &(struct rig_part){other + at, 1, at, other_table}, 1, true);
        if (memcmp(logits, want_other + at * V, V * sizeof *logits) != 0) fail_msg("other bits of the batch at %d", (int)at);
        at++;
      }
    }
    assert_int_equal(rig.vt->wait(lane, &result), SITS_OK);
    if (memcmp(result.logits, want + (p0 + n - 1) * V, V * sizeof *want) != 0)
      fail_msg("%s, %d threads, %d: other bits at token %d", kv_codec_name(codec), (int)n_threads, (int)patience, (int)(p0 + n - 1));
  }
  if (n_threads == 1) assert_true(n_stops > 10 || patience > 100); /* of several, the one that is asked may come late to every phase */
  rig.vt->program_destroy(lane);
  rig_close(&rig);
}

static void test_slices_change_nothing(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &shape, 5);
  for (int32_t threads = 1; threads <= 3; threads++) {
    check_slices(&synth, KV_F16, threads, 1);
    check_slices(&synth, KV_F16, threads, 3);
    check_slices(&synth, KV_INT8, threads, 2);
    check_slices(&synth, KV_F32, threads, 1 << 30);
  }
  synth_fini(&synth);
}

/* What was begun may be dropped for another chunk, of the same sequence or not. */
static void test_given_up(void **state)
{
  (void)state;
  static const int32_t table[8] = {2, 4, 6, 8, 10, 1}, other_table[8] = {0, 3};
  static float want[LONG * V];
  int32_t ids[LONG];
  struct backend_program *lane = NULL;
  struct backend_result result;
  struct sits_error err = {0};
  struct synth synth;
  struct chunk c, d;
  make_ids(ids, LONG, 3);
  synth_init(&synth, &shape, 6);
  struct rig rig = open_rig(&synth, KV_F16, 2);
  memcpy(want, rig_step(&rig, &(struct rig_part){ids, LONG, 0, table}, 1, true), sizeof want);
  RIG_OK(rig.vt->lane_open(rig.compiled, rig.kv, CHUNK, &lane, &err), err);
  for (int32_t patience = 0; patience < 60; patience++) {
    bool is_done = false;
    int64_t end_us;
    make_chunk(&c, ids, LONG - CHUNK, CHUNK, table); /* deep: its attention is cut into chunks, whose counts must not stay behind */
    make_chunk(&d, ids, 0, 20, other_table);
    assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &c.batch), SITS_OK);
    assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){patience, 0}, &is_done, &end_us), SITS_OK);
    assert_int_equal(rig.vt->wait(lane, &result), is_done ? SITS_OK : SITS_INVALID_ARGUMENT);
    if (patience % 2 == 1) { /* said at once, or only by what comes next */
      rig.vt->lane_drop(lane);
      assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){1 << 30, 0}, &is_done, &end_us), SITS_INVALID_ARGUMENT);
      assert_int_equal(rig.vt->wait(lane, &result), SITS_INVALID_ARGUMENT);
    }
    assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &d.batch), SITS_OK);
    assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){1 << 30, 0}, &is_done, &end_us), SITS_OK);
    assert_true(is_done);
    assert_int_equal(rig.vt->wait(lane, &result), SITS_OK);
    assert_memory_equal(result.logits, want + 19 * V, V * sizeof *want);
    assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &c.batch), SITS_OK);
    assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){1 << 30, 0}, &is_done, &end_us), SITS_OK);
    assert_int_equal(rig.vt->wait(lane, &result), SITS_OK);
    assert_memory_equal(result.logits, want + (LONG - 1) * V, V * sizeof *want);
  }
  rig.vt->program_destroy(lane);
  rig_close(&rig);
  synth_fini(&synth);
}

static void test_refusals(void **state)
{
  (void)state;
  static const int32_t table[8] = {2, 4, 6};
  int32_t ids[LONG];
  bool is_done;
  int64_t end_us;
  struct backend_program *lane = NULL;
  struct backend_result result;
  struct sits_error err;
  struct synth synth;
  struct chunk c;
  make_ids(ids, LONG, 3);
  synth_init(&synth, &shape, 7);
  struct rig rig = open_rig(&synth, KV_INT4, 1);
  assert_int_equal(rig.vt->lane_open(rig.compiled, rig.kv, CHUNK, &lane, &err), SITS_UNSUPPORTED);
  rig_close(&rig);
  rig = open_rig(&synth, KV_F16, 1);
  assert_int_equal(rig.vt->lane_open(rig.compiled, rig.kv, 513, &lane, &err), SITS_UNSUPPORTED);
  assert_int_equal(rig.vt->lane_open(rig.compiled, rig.kv, 20, &lane, &err), SITS_OK);
  assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){9, 0}, &is_done, &end_us), SITS_INVALID_ARGUMENT);
  assert_int_equal(rig.vt->wait(lane, &result), SITS_INVALID_ARGUMENT);
  make_chunk(&c, ids, 0, 21, table);
  assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &c.batch), SITS_INVALID_ARGUMENT);
  assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){9, 0}, &is_done, &end_us), SITS_INVALID_ARGUMENT);
  make_chunk(&c, ids, 0, 20, table);
  assert_int_equal(rig.vt->lane_begin(lane, rig.kv, &c.batch), SITS_OK);
  assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){1 << 30, 0}, &is_done, &end_us), SITS_OK);
  assert_int_equal(rig.vt->wait(lane, &result), SITS_OK);
  assert_int_equal(rig.vt->lane_run(lane, go_on, &(struct patience){9, 0}, &is_done, &end_us), SITS_INVALID_ARGUMENT); /* it is done */
  rig.vt->program_destroy(lane);
  rig_close(&rig);
  synth_fini(&synth);
}

static void test_out_of_memory(void **state)
{
  (void)state;
#ifndef SITS_DEBUG_CHECKS
  skip(); /* allocations cannot be made to fail in this build */
#endif
  struct synth synth;
  synth_init(&synth, &shape, 8);
  struct rig rig = open_rig(&synth, KV_F16, 2);
  const int64_t live = mem_live_blocks();
  for (uint64_t n = 1;; n++) {
    struct backend_program *lane = NULL;
    struct sits_error err;
    mem_fault_arm(n);
    enum sits_status status = rig.vt->lane_open(rig.compiled, rig.kv, CHUNK, &lane, &err);
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    assert_int_equal(status, fired ? SITS_NOMEM : SITS_OK);
    rig.vt->program_destroy(lane);
    assert_int_equal(mem_live_blocks(), live);
    if (!fired) break;
  }
  rig_close(&rig);
  synth_fini(&synth);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_slices_change_nothing), cmocka_unit_test(test_given_up),
                                     cmocka_unit_test(test_refusals), cmocka_unit_test(test_out_of_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
