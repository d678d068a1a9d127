/* Models cut over processes: the same bits as ranks of one process, pages over the wire, who is turned away, and followers that die or
 * stand still. Followers are forked children of the test. */
#include "nodes_rig.h"

#include <signal.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"

/* A child that follows, with a model made from `seed`; its exit status is 0 when the leader closed, else 1. */
static pid_t fork_follower(const struct nodes_options *options, uint64_t seed)
{
  const pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid > 0) return pid;
  struct synth synth;
  struct sits_error err = {0};
  synth_init(&synth, &shape, seed);
  const struct backend_options own = {.n_threads = 1};
  const enum sits_status status = nodes_follow(options, backend_find("cpu"), &own, make_program, &synth.model, &err);
  synth_fini(&synth);
  _exit(status == SITS_OK ? 0 : 1);
}

/* The leader, ready for steps. */
static enum sits_status lead(struct rig *rig, struct synth *synth, const struct nodes_options *options, int32_t timeout_ms, bool compress,
                             struct sits_error *err)
{
  *rig = (struct rig){.vt = backend_nodes(backend_find("cpu")), .model = &synth->model, .n_pages = N_PAGES};
  const struct backend_options own = {.n_threads = 1, .max_batch_tokens = MAX_TOKENS, .max_seqs = MAX_TOKENS, .n_ranks = options->n_ranks,
                                      .collective_timeout_ms = timeout_ms, .nodes = options, .compress_reduce = compress};
  const struct kv_geometry geometry = {.n_layers = synth->model.config.n_layers, .n_kv_heads = synth->model.config.n_kv_heads,
                                       .head_dim = synth->model.config.head_dim, .n_pages = N_PAGES, .codec = KV_F16,
                                       .n_ranks = options->n_ranks};
  RIG_OK(program_for_rank(rig->model, rig->vt->fusions, NULL, 0, options->n_ranks, &rig->program, err), *err);
  enum sits_status status = rig->vt->open(&own, &rig->backend, err);
  if (status == SITS_OK) status = rig->vt->compile(rig->backend, rig->program, &rig->compiled, err);
  if (status == SITS_OK) status = rig->vt->kv_create(rig->backend, &geometry, &rig->kv, err);
  return status;
}

static void close_leader(struct rig *rig)
{
  rig->vt->kv_destroy(rig->kv);
  rig->vt->program_destroy(rig->compiled);
  rig->vt->close(rig->backend);
  program_destroy(rig->program);
}

/* Two sequences in pieces and a page moved about: all logits, one after the other. */
enum { N_STEPS = 5 };
static void run_steps(struct rig *rig, float *out)
{
  static const int32_t first[1] = {2}, second[1] = {0}, third[1] = {3}, fourth[1] = {1};
  int32_t ids[40];
  const size_t V = (size_t)rig->model->config.n_vocab;
  const struct kv_geometry geometry = {.n_layers = 2, .n_kv_heads = 4, .head_dim = 16, .codec = KV_F16, .n_ranks = 2};
  const size_t n_page = (size_t)rig->vt->kv_page_bytes(&geometry);
  uint8_t *page = mem_calloc(1, n_page);
  assert_non_null(page);
  for (int32_t t = 0; t < 40; t++) ids[t] = (t * 17 + t * t % 7) % (int32_t)V;
  const struct rig_part both[2] = {{ids, 30, 0, first}, {ids + 5, 7, 0, second}}, one[1] = {{ids + 30, 3, 30, first}};
  memcpy(out, rig_step(rig, both, 2, false), 2 * V * sizeof *out);
  memcpy(out + 2 * V, rig_step(rig, one, 1, false), V * sizeof *out);
  assert_int_equal(rig->vt->kv_copy_pages(rig->kv, &(struct kv_copy){2, 3}, 1), SITS_OK);
  assert_int_equal(rig->vt->kv_read_page(rig->kv, 3, page), SITS_OK);
  assert_int_equal(rig->vt->kv_write_page(rig->kv, 1, page), SITS_OK);
  memcpy(out + 3 * V, rig_step(rig, &(struct rig_part){ids + 33, 1, 33, third}, 1, false), V * sizeof *out);
  memcpy(out + 4 * V, rig_step(rig, &(struct rig_part){ids + 33, 1, 33, fourth}, 1, false), V * sizeof *out);
  mem_free(page);
}

static void test_same_bits(void **state)
{
  (void)state;
  static const int32_t three[3] = {1, 2, 3}, first[1] = {0};
  const struct rig_part few = {three, 3, 0, first};
  for (int32_t n_ranks = 2; n_ranks <= 4; n_ranks += 2) {
    struct synth synth;
    struct sits_error err = {0};
    struct rig rig;
    pid_t children[4];
    synth_init(&synth, &shape, 7);
    const size_t n = N_STEPS * (size_t)synth.model.config.n_vocab;
    float *want = mem_calloc(n, sizeof *want), *got = mem_calloc(n, sizeof *got);
    assert_true(want != NULL && got != NULL);
    const int32_t port = free_port();
    for (int32_t r = 1; r < n_ranks; r++) {
      const struct nodes_options follow = options_of(r, n_ranks, port);
      children[r] = fork_follower(&follow, 7);
    }
    const struct nodes_options options = options_of(0, n_ranks, port);
    RIG_OK(lead(&rig, &synth, &options, 60000, false, &err), err);
    struct backend_info info;
    rig.vt->info(rig.backend, &info);
    assert_non_null(strstr(info.name, "processes x cpu"));
    if (n_ranks == 2) run_steps(&rig, got);
    else memcpy(got, rig_step(&rig, &few, 1, true), 3 * n / N_STEPS * sizeof *got);
    assert_false(rig.vt->is_lost(rig.backend));
    close_leader(&rig);
    for (int32_t r = 1; r < n_ranks; r++) assert_int_equal(exit_of(children[r]), 0);
    struct rig ranks = rig_attach(&synth.model, &(struct rig_options){.n_threads = 1, .max_batch_tokens = MAX_TOKENS,
                                  .max_seqs = MAX_TOKENS, .n_pages = N_PAGES, .fusions = ~0u, .codec = KV_F16, .n_ranks = n_ranks,
                                  .timeout_ms = 60000});
    if (n_ranks == 2) run_steps(&ranks, want);
    else memcpy(want, rig_step(&ranks, &few, 1, true), 3 * n / N_STEPS * sizeof *want);
    rig_close(&ranks);
    assert_memory_equal(got, want, n * sizeof *got);
    mem_free(got);
    mem_free(want);
    synth_fini(&synth);
  }
}

/* Garbage, another secret, another number of processes: turned away, and the leader waits on for the right one. */
static void test_turned_away(void **state)
{
  (void)state;
  struct synth synth;
  struct sits_error err = {0};
  struct rig rig;
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  const int32_t port = free_port();
  struct nodes_options wrong = options_of(1, 2, port), many = options_of(1, 3, port), late = options_of(1, 2, port);
  wrong.secret = "another secret, as long";
  const pid_t bad[2] = {fork_follower(&wrong, 7), fork_follower(&many, 7)};
  const pid_t noise = fork();
  if (noise == 0) {
    const struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    static char bytes[4096];
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(bytes, 'x', sizeof bytes);
    for (int i = 0; i < 300 && connect(fd, (const struct sockaddr *)&a, sizeof a) != 0; i++)
      nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    (void)send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
    _exit(0);
  }
  const pid_t good = fork();
  if (good == 0) { /* after the others were turned away */
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    const pid_t pid = fork_follower(&late, 7);
    _exit(exit_of(pid));
  }
  const struct nodes_options options = options_of(0, 2, port);
  RIG_OK(lead(&rig, &synth, &options, 60000, false, &err), err);
  close_leader(&rig);
  assert_int_equal(exit_of(good), 0);
  assert_int_equal(exit_of(bad[0]), 1);
  assert_int_equal(exit_of(bad[1]), 1);
  (void)exit_of(noise);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

static int connect_to(int32_t port)
{
  const struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) _exit(2);
  for (int i = 0; connect(fd, (const struct sockaddr *)&a, sizeof a) != 0; i++) {
    if (i == 600) _exit(2);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
  }
  return fd;
}

/* Silent and dripping callers, more than are greeted at once: the follower that comes after them need not
 * outwait each. */
static void test_slow_callers(void **state)
{
  (void)state;
  enum { N_SLOW = 90 };
  struct synth synth;
  struct sits_error err = {0};
  struct rig rig;
  int ready[2];
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  assert_int_equal(pipe(ready), 0);
  const int32_t port = free_port();
  const struct nodes_options options = options_of(0, 2, port), follow = options_of(1, 2, port);
  const pid_t slow = fork();
  if (slow == 0) {
    int fds[N_SLOW];
    for (int i = 0; i < N_SLOW; i++) fds[i] = connect_to(port);
    if (write(ready[1], "", 1) != 1) _exit(2);
    for (;; nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL))
      for (int i = 0; i < N_SLOW; i += 2) (void)send(fds[i], "S", 1, MSG_NOSIGNAL);
  }
  const pid_t good = fork();
  if (good == 0) {
    char byte;
    if (read(ready[0], &byte, 1) != 1) _exit(2);
    _exit(exit_of(fork_follower(&follow, 7)));
  }
  RIG_OK(lead(&rig, &synth, &options, 60000, false, &err), err);
  assert_int_equal(kill(slow, SIGKILL), 0);
  close_leader(&rig);
  assert_int_equal(exit_of(good), 0);
  (void)exit_of(slow);
  close(ready[0]);
  close(ready[1]);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

static void test_refusals(void **state)
{
  (void)state;
  struct synth synth;
  struct rig rig;
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  struct { struct nodes_options options; enum sits_status status; const char *text; } bad[] = {
      {options_of(0, 2, free_port()), SITS_CONFIG, "node-secret"},
      {options_of(0, 2, free_port()), SITS_UNAVAILABLE, "1 of 2 processes came"},
      {options_of(0, 9, free_port()), SITS_CONFIG, "of node-count 9"},
  };
  bad[0].options.secret = "short";
  bad[1].options.connect_timeout_us = 200000;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    struct sits_error err = {0};
    struct nodes *nodes = NULL;
    assert_int_equal(nodes_connect(&bad[i].options, &nodes, &err), bad[i].status);
    if (strstr(err.text, bad[i].text) == NULL) fail_msg("'%s'", err.text);
  }
  /* another model */
  struct sits_error err = {0};
  const int32_t port = free_port();
  const struct nodes_options options = options_of(0, 2, port), follow = options_of(1, 2, port);
  const pid_t child = fork_follower(&follow, 8);
  assert_int_equal(lead(&rig, &synth, &options, 60000, false, &err), SITS_CONFIG);
  if (strstr(err.text, "rank 1: its model is not the leader's") == NULL) fail_msg("'%s'", err.text);
  rig.vt->close(rig.backend);
  program_destroy(rig.program);
  assert_int_equal(exit_of(child), 1);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

/* A follower that dies is noticed without a step; one that stands still ends the step that it misses. */
static void test_lost(void **state)
{
  (void)state;
  static const int signals[] = {SIGKILL, SIGSTOP};
  log_set_level(LOG_OFF);
  for (int i = 0; i < 2; i++) {
    struct synth synth;
    struct sits_error err = {0};
    struct rig rig;
    synth_init(&synth, &shape, 7);
    const int32_t port = free_port(), ids[2] = {1, 2}, table[1] = {0}, zero[2] = {0, 1}, position[1] = {1}, len[1] = {2};
    const struct nodes_options options = options_of(0, 2, port), follow = options_of(1, 2, port);
    const pid_t child = fork_follower(&follow, 7);
    RIG_OK(lead(&rig, &synth, &options, 3000, false, &err), err);
    (void)rig_step(&rig, &(struct rig_part){ids, 1, 0, table}, 1, false);
    assert_int_equal(kill(child, signals[i]), 0);
    const int64_t start_us = clock_monotonic_us();
    while (signals[i] == SIGKILL && !rig.vt->is_lost(rig.backend)) {
      if (clock_monotonic_us() - start_us > 10000000) fail_msg("a dead follower was not noticed");
      nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    const struct backend_batch batch = {.n_tokens = 1, .n_seqs = 1, .n_rows = 1, .tokens = ids + 1, .positions = position,
                                        .seq_start = zero, .kv_len = len, .block_table = table, .table_stride = 1, .row_token = zero};
    struct backend_result result;
    enum sits_status status = rig.vt->submit(rig.compiled, rig.kv, &batch);
    if (status == SITS_OK) status = rig.vt->wait(rig.compiled, &result);
    assert_int_equal(status, SITS_DEVICE);
    if (clock_monotonic_us() - start_us > 10000000) fail_msg("it took %lld us", (long long)(clock_monotonic_us() - start_us));
    assert_true(rig.vt->is_lost(rig.backend));
    assert_int_equal(rig.vt->submit(rig.compiled, rig.kv, &batch), SITS_DEVICE);
    close_leader(&rig);
    (void)kill(child, SIGCONT);
    assert_int_not_equal(exit_of(child), 0);
    synth_fini(&synth);
  }
  log_set_level(LOG_INFO);
}

/* What comes in a step message is bounded by the options. */
static void test_step_bounds(void **state)
{
  (void)state;
  enum { T = 8, S = 4, C = 3 };
  const int32_t tokens[2] = {1, 2}, positions[2] = {0, 0}, starts[3] = {0, 1, 2}, lens[2] = {1, 1}, table[2 * 5] = {0}, rows[2] = {0, 1};
  const struct backend_sample sample[2] = {{.top_p = 1}, {.top_p = 1}};
  const struct backend_batch batch = {.n_tokens = 2, .n_seqs = 2, .n_rows = 2, .tokens = tokens, .positions = positions,
                                      .seq_start = starts, .kv_len = lens, .block_table = table, .table_stride = 5, .row_token = rows,
                                      .sample = sample};
  uint8_t *bytes = mem_calloc(1, node_step_bytes(T, S, C));
  struct backend_batch back;
  struct node_step head;
  size_t n = 0;
  assert_non_null(bytes);
  assert_true(node_step_write(&batch, T, S, C, &head, bytes, &n));
  assert_true(n <= node_step_bytes(T, S, C) && head.n_columns == 1);
  assert_true(node_step_read(&head, bytes, n, T, S, C, &back));
  assert_true(back.n_tokens == 2 && back.tokens[1] == 2 && back.seq_start[2] == 2 && back.row_token[1] == 1 && back.sample[1].top_p == 1);
  assert_false(node_step_read(&head, bytes, n - 1, T, S, C, &back));
  const struct node_step bad[] = {{9, 2, 2, 1, 1, 0}, {0, 2, 2, 1, 1, 0},  {2, 5, 2, 1, 1, 0},  {2, -1, 2, 1, 1, 0},
                                  {2, 2, 5, 1, 1, 0}, {2, 2, -1, 1, 1, 0}, {2, 2, 2, 4, 1, 0}, {2, 2, 2, 0, 1, 0}, {2, 2, 2, 1, 0, 0}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_false(node_step_read(&bad[i], bytes, n, T, S, C, &back));
  const int32_t long_lens[2] = {1, 4 * KV_PAGE_TOKENS};
  struct backend_batch wide = batch;
  wide.kv_len = long_lens;
  assert_false(node_step_write(&wide, T, S, C, &head, bytes, &n));
  assert_int_equal(node_step_bytes(INT32_MAX, INT32_MAX, INT32_MAX), 0);
  mem_free(bytes);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bits), cmocka_unit_test(test_turned_away),
                                     cmocka_unit_test(test_slow_callers), cmocka_unit_test(test_refusals),
                                     cmocka_unit_test(test_lost), cmocka_unit_test(test_step_bounds)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
