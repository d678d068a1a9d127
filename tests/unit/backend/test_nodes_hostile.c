/* Broken and hostile messages between the processes of a model: a follower and a leader that get them answer or end with an error that says
 * why, and stand after those that they can refuse. The hostile end is a forked child; the other one is this process. */
#include "nodes_rig.h"

#include <poll.h>

#include "base/log.h"

enum { MAGIC = 0x53495453, WAIT_MS = 60000 };

struct head { uint32_t magic, kind, n_bytes[2]; }; /* low, high */

/* ---- the hostile end, in a child: what fails there is its exit status ---- */

static void give(int fd, const void *bytes, size_t n)
{
  if (n > 0 && send(fd, bytes, n, MSG_NOSIGNAL) != (ssize_t)n) _exit(90);
}

/* Up to n bytes; fewer where the other end closes. */
static size_t take(int fd, void *bytes, size_t n)
{
  for (size_t at = 0; at < n;) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, WAIT_MS) != 1) _exit(91); /* it hangs */
    const ssize_t got = recv(fd, (uint8_t *)bytes + at, n - at, 0);
    if (got <= 0) return at;
    at += (size_t)got;
  }
  return n;
}

static int connect_as(int32_t rank, int32_t port)
{
  const struct nodes_options options = options_of(rank, 2, port);
  struct nodes *nodes = NULL;
  struct sits_error err;
  if (nodes_connect(&options, &nodes, &err) != SITS_OK) _exit(92);
  return nodes->fd[rank == 0 ? 1 : 0];
}

struct answer { struct head head; struct node_reply reply; };

/* ---- to a follower that has just connected ---- */

struct broken { uint32_t magic, kind; uint64_t n_bytes; size_t n_head, n_sent; bool is_answered; const char *text; };

static const struct broken to_follower[] = {
    {0x12345678, NODE_INFO, 0, 16, 0, false, "the leader is lost"},
    {MAGIC, NODE_OPEN, 16, 7, 0, false, "the leader is lost"},
    {MAGIC, NODE_OPEN, 16, 16, 15, false, "the leader is lost"},
    {MAGIC, NODE_OPEN, 65537, 16, 0, false, "a message of 65537 bytes"},
    {MAGIC, NODE_STEP, UINT64_MAX, 16, 0, false, "a message of 18446744073709551615 bytes"},
    {MAGIC, 0, 0, 16, 0, false, "says what it must not"},
    {MAGIC, 99, 5, 16, 5, false, "says what it must not"},
    {MAGIC, UINT32_MAX, 0, 16, 0, false, "says what it must not"},
    {MAGIC, NODE_EXCHANGE, 8, 16, 8, false, "says what it must not"},
    {MAGIC, NODE_REPLY, 260, 16, 260, false, "says what it must not"},
    {MAGIC, NODE_OPEN, 3, 16, 3, true, "message 1 of 3 bytes"},
    {MAGIC, NODE_OPEN, 16, 16, 16, true, "options do not fit"},
    {MAGIC, NODE_COMPILE, 7, 16, 7, true, "message 3 of 7 bytes"},
    {MAGIC, NODE_COMPILE, 8, 16, 8, true, "a program where none is expected"},
    {MAGIC, NODE_INFO, 0, 16, 0, true, "the leader is lost"},
    {MAGIC, NODE_CREATE_KV, 4, 16, 4, true, "the leader is lost"},
    {MAGIC, NODE_CREATE_KV, sizeof(struct kv_geometry), 16, sizeof(struct kv_geometry), true, "the leader is lost"},
    {MAGIC, NODE_STEP, 24, 16, 24, true, "the leader is lost"},
    {MAGIC, NODE_COPY_PAGES, 8, 16, 8, true, "the leader is lost"},
    {MAGIC, NODE_READ_PAGE, 4, 16, 4, true, "the leader is lost"},
    {MAGIC, NODE_WRITE_PAGE, 4, 16, 4, true, "the leader is lost"},
};

static void be_leader(const struct broken *b, int32_t port)
{
  uint8_t filler[512];
  struct answer answer[2];
  const struct head head = {b->magic, b->kind, {(uint32_t)b->n_bytes, (uint32_t)(b->n_bytes >> 32)}};
  const int fd = connect_as(0, port);
  memset(filler, 0xa5, sizeof filler);
  give(fd, &head, b->n_head);
  give(fd, filler, b->n_sent);
  (void)shutdown(fd, SHUT_WR);
  const size_t n = take(fd, answer, sizeof answer);
  if (n != (b->is_answered ? sizeof answer[0] : 0)) _exit(1);
  _exit(b->is_answered && (answer[0].head.kind != NODE_REPLY || answer[0].reply.status == SITS_OK) ? 2 : 0);
}

static void test_follower(void **state)
{
  (void)state;
  struct synth synth;
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  for (size_t i = 0; i < sizeof to_follower / sizeof *to_follower; i++) {
    const struct backend_options own = {.n_threads = 1};
    struct sits_error err = {0};
    const int32_t port = free_port();
    const struct nodes_options options = options_of(1, 2, port);
    const pid_t child = fork();
    if (child == 0) be_leader(&to_follower[i], port);
    assert_int_not_equal(nodes_follow(&options, backend_find("cpu"), &own, make_program, &synth.model, &err), SITS_OK);
    if (strstr(err.text, to_follower[i].text) == NULL) fail_msg("row %zu: '%s'", i, err.text);
    const int status = exit_of(child);
    if (status != 0) fail_msg("row %zu: the hostile end ends with %d", i, status);
  }
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

/* ---- to a follower that is ready for steps ---- */

/* The leader. */
static enum sits_status lead(struct rig *rig, struct synth *synth, int32_t port, struct sits_error *err)
{
  const struct nodes_options options = options_of(0, 2, port);
  *rig = (struct rig){.vt = backend_nodes(backend_find("cpu")), .model = &synth->model, .n_pages = N_PAGES};
  const struct backend_options own = {.n_threads = 1, .max_batch_tokens = MAX_TOKENS, .max_seqs = MAX_TOKENS, .n_ranks = 2,
                                      .collective_timeout_ms = 60000, .nodes = &options};
  const struct kv_geometry geometry = {.n_layers = synth->model.config.n_layers, .n_kv_heads = synth->model.config.n_kv_heads,
                                       .head_dim = synth->model.config.head_dim, .n_pages = N_PAGES, .codec = KV_F16, .n_ranks = 2};
  enum sits_status status = program_for_rank(rig->model, rig->vt->fusions, NULL, 0, 2, &rig->program, err);
  if (status == SITS_OK) status = rig->vt->open(&own, &rig->backend, err);
  if (status == SITS_OK) status = rig->vt->compile(rig->backend, rig->program, &rig->compiled, err);
  if (status == SITS_OK) status = rig->vt->kv_create(rig->backend, &geometry, &rig->kv, err);
  return status;
}

/* The one connection of this process. */
static int find_connection(void)
{
  for (int fd = 3; fd < 256; fd++) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    if (getpeername(fd, (struct sockaddr *)&a, &n) == 0 && a.sin_family == AF_INET) return fd;
  }
  _exit(93);
}

/* A step of one token as it must be, but for one number. */
enum { TOKEN, POSITION, START, END, KV_LEN, PAGE, ROW, N_WORDS };
static const struct { int word; int32_t value; } bad_words[] = {
    {TOKEN, -1}, {TOKEN, 52}, {TOKEN, INT32_MAX}, {POSITION, -1}, {POSITION, 1}, {POSITION, INT32_MAX}, {START, 1}, {START, -1},
    {END, 0}, {END, 2}, {END, -1}, {KV_LEN, 0}, {KV_LEN, 2}, {KV_LEN, INT32_MIN}, {KV_LEN, INT32_MAX}, {PAGE, -1}, {PAGE, N_PAGES},
    {PAGE, INT32_MAX}, {ROW, -1}, {ROW, 1}, {ROW, INT32_MIN}};
static const struct node_step bad_heads[] = {{0, 1, 1, 1, 0, 0}, {-1, 1, 1, 1, 0, 0}, {MAX_TOKENS + 1, 1, 1, 1, 0, 0}, {2, 1, 1, 1, 0, 0},
                                             {1, INT32_MAX, 1, 1, 0, 0}, {1, 1, INT32_MAX, 1, 0, 0}, {1, 1, 1, INT32_MAX, 0, 0},
                                             {1, 1, 1, 1, 1, 0}};
/* Pages. */
static const struct { enum node_message kind; size_t n_bytes; int32_t words[6]; } bad_pages[] = {
    {NODE_COPY_PAGES, 8, {0, N_PAGES}}, {NODE_COPY_PAGES, 8, {-1, 0}}, {NODE_COPY_PAGES, 5, {0}}, {NODE_READ_PAGE, 4, {-1}},
    {NODE_READ_PAGE, 4, {N_PAGES}}, {NODE_READ_PAGE, 0, {0}}, {NODE_READ_PAGE, 8, {0}}, {NODE_WRITE_PAGE, 4, {0}},
    {NODE_WRITE_PAGE, 0, {0}}, {NODE_CREATE_KV, 24, {2, 4, 16, 2, N_PAGES, KV_F16}}, {NODE_STEP, 0, {0}}, {NODE_STEP, 23, {1, 1, 1, 1}}};

static void refuse(int fd, enum node_message kind, const void *head, size_t n_head, const void *body, size_t n_body, int code)
{
  struct answer answer;
  const struct head h = {MAGIC, (uint32_t)kind, {(uint32_t)(n_head + n_body), 0}};
  give(fd, &h, sizeof h);
  give(fd, head, n_head);
  give(fd, body, n_body);
  if (take(fd, &answer, sizeof answer) != sizeof answer || answer.head.n_bytes[0] != sizeof answer.reply || answer.reply.status == SITS_OK)
    _exit(code);
}

static void be_ready_leader(struct synth *synth, int32_t port)
{
  static const int32_t good[N_WORDS] = {1, 0, 0, 1, 1, 0, 0};
  const struct node_step head = {1, 1, 1, 1, 0, 0};
  struct rig rig;
  struct sits_error err;
  if (lead(&rig, synth, port, &err) != SITS_OK) _exit(94);
  const int fd = find_connection();
  for (size_t i = 0; i < sizeof bad_words / sizeof *bad_words; i++) {
    int32_t words[N_WORDS];
    memcpy(words, good, sizeof words);
    words[bad_words[i].word] = bad_words[i].value;
    refuse(fd, NODE_STEP, &head, sizeof head, words, sizeof words, 1 + (int)i);
  }
  { /* one that wraps round to fit itself */
    int32_t words[N_WORDS] = {1, INT32_MAX, 0, 1, INT32_MIN, 0, 0};
    refuse(fd, NODE_STEP, &head, sizeof head, words, sizeof words, 30);
  }
  for (size_t i = 0; i < sizeof bad_heads / sizeof *bad_heads; i++)
    refuse(fd, NODE_STEP, &bad_heads[i], sizeof bad_heads[i], good, sizeof good, 40 + (int)i);
  for (size_t i = 0; i < sizeof bad_pages / sizeof *bad_pages; i++)
    refuse(fd, bad_pages[i].kind, bad_pages[i].words, bad_pages[i].n_bytes, NULL, 0, 60 + (int)i);
  const int32_t token[1] = {1}, table[1] = {0}; /* it still works */
  (void)rig_step(&rig, &(struct rig_part){token, 1, 0, table}, 1, false);
  rig_close(&rig);
  _exit(0);
}

static void test_ready_follower(void **state)
{
  (void)state;
  struct synth synth;
  struct sits_error err = {0};
  const struct backend_options own = {.n_threads = 1};
  const int32_t port = free_port();
  const struct nodes_options options = options_of(1, 2, port);
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  const pid_t child = fork();
  if (child == 0) be_ready_leader(&synth, port);
  const enum sits_status status = nodes_follow(&options, backend_find("cpu"), &own, make_program, &synth.model, &err);
  assert_int_equal(exit_of(child), 0);
  if (status != SITS_OK) fail_msg("'%s'", err.text);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

/* ---- to a leader: replies to its first message ---- */

static const struct { uint32_t magic, kind; uint64_t n_bytes; size_t n_head, n_sent; int32_t status; const char *text; } to_leader[] = {
    {0x12345678, NODE_REPLY, 260, 16, 260, 0, "is lost"}, {MAGIC, NODE_REPLY, 260, 9, 0, 0, "is lost"},
    {MAGIC, NODE_REPLY, 260, 16, 100, 0, "is lost"},      {MAGIC, NODE_REPLY, 4, 16, 4, 0, "is lost"},
    {MAGIC, NODE_REPLY, 0, 16, 0, 0, "is lost"},          {MAGIC, NODE_REPLY, 268, 16, 268, 0, "is lost"},
    {MAGIC, NODE_REPLY, UINT64_MAX, 16, 260, 0, "is lost"}, {MAGIC, 99, 260, 16, 260, 0, "is lost"},
    {MAGIC, NODE_OPEN, 16, 16, 16, 0, "is lost"},         {MAGIC, NODE_EXCHANGE, 260, 16, 260, 0, "is lost"},
    {MAGIC, NODE_REPLY, 268, 16, 268, SITS_NOMEM, "is lost"}, {MAGIC, NODE_REPLY, 260, 16, 260, 12345, "rank 1: xxx"},
    {MAGIC, NODE_REPLY, 260, 16, 260, INT32_MIN, "rank 1: xxx"}, {MAGIC, NODE_REPLY, 260, 16, 260, SITS_NOMEM, "rank 1: xxx"}};

static void be_follower(size_t row, int32_t port)
{
  struct { struct head head; struct node_config config; } open;
  struct { struct node_reply reply; uint8_t more[64]; } body = {.reply.status = to_leader[row].status};
  const struct head head = {to_leader[row].magic, to_leader[row].kind,
                            {(uint32_t)to_leader[row].n_bytes, (uint32_t)(to_leader[row].n_bytes >> 32)}};
  struct head end;
  memset(body.reply.text, 'x', sizeof body.reply.text);
  const int fd = connect_as(1, port);
  if (take(fd, &open, sizeof open) != sizeof open || open.head.kind != NODE_OPEN) _exit(1);
  give(fd, &head, to_leader[row].n_head);
  give(fd, &body, to_leader[row].n_sent);
  if (to_leader[row].n_head < sizeof head || to_leader[row].n_sent < to_leader[row].n_bytes) (void)shutdown(fd, SHUT_WR);
  (void)take(fd, &end, sizeof end); /* nothing, or that it shall close */
  _exit(0);
}

static void test_leader(void **state)
{
  (void)state;
  log_set_level(LOG_OFF);
  for (size_t i = 0; i < sizeof to_leader / sizeof *to_leader; i++) {
    const int32_t port = free_port();
    const struct nodes_options options = options_of(0, 2, port);
    const struct backend_options own = {.n_threads = 1, .max_batch_tokens = MAX_TOKENS, .max_seqs = MAX_TOKENS, .n_ranks = 2,
                                        .collective_timeout_ms = 1000, .nodes = &options};
    struct backend *backend = NULL;
    struct sits_error err = {0};
    const pid_t child = fork();
    if (child == 0) be_follower(i, port);
    assert_int_not_equal(backend_nodes(backend_find("cpu"))->open(&own, &backend, &err), SITS_OK);
    if (strstr(err.text, to_leader[i].text) == NULL) fail_msg("row %zu: '%s'", i, err.text);
    const int status = exit_of(child);
    if (status != 0) fail_msg("row %zu: the hostile end ends with %d", i, status);
  }
  log_set_level(LOG_INFO);
}

/* A follower that is done with a step, it says, before the collectives in it. */
static void be_hasty_follower(int32_t port)
{
  static uint8_t body[1 << 20];
  const int fd = connect_as(1, port);
  for (struct head head; take(fd, &head, sizeof head) == sizeof head;) {
    const uint32_t n_more = head.kind == NODE_COMPILE ? sizeof(uint64_t) : 0;
    struct { struct answer answer; uint8_t more[8]; } done = {
        .answer = {{MAGIC, NODE_REPLY, {sizeof done.answer.reply + n_more, 0}}, {.status = SITS_OK}}};
    if (head.n_bytes[0] > sizeof body || take(fd, body, head.n_bytes[0]) != head.n_bytes[0]) break;
    (void)send(fd, &done, sizeof done.answer + n_more, MSG_NOSIGNAL);
  }
  _exit(0);
}

static void test_hasty_follower(void **state)
{
  (void)state;
  struct synth synth;
  struct rig rig;
  struct sits_error err = {0};
  const int32_t port = free_port(), token[1] = {1}, zero[2] = {0, 1}, len[1] = {1};
  const struct backend_batch batch = {.n_tokens = 1, .n_seqs = 1, .n_rows = 1, .tokens = token, .positions = zero, .seq_start = zero,
                                      .kv_len = len, .block_table = zero, .table_stride = 1, .row_token = zero};
  struct backend_result result;
  synth_init(&synth, &shape, 7);
  log_set_level(LOG_OFF);
  const pid_t child = fork();
  if (child == 0) be_hasty_follower(port);
  RIG_OK(lead(&rig, &synth, port, &err), err);
  enum sits_status status = rig.vt->submit(rig.compiled, rig.kv, &batch);
  if (status == SITS_OK) status = rig.vt->wait(rig.compiled, &result);
  assert_int_equal(status, SITS_DEVICE);
  assert_true(rig.vt->is_lost(rig.backend));
  rig_close(&rig);
  assert_int_equal(exit_of(child), 0);
  log_set_level(LOG_INFO);
  synth_fini(&synth);
}

/* ---- proofs ---- */

enum { CHALLENGE_BYTES = 48, PROOF_BYTES = 32, WELCOME_BYTES = 4 };

static struct sockaddr_in address_of(int32_t port)
{
  return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
}

static int call(int32_t port)
{
  const struct sockaddr_in a = address_of(port);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  for (int i = 0; fd < 0 || connect(fd, (const struct sockaddr *)&a, sizeof a) != 0; i++) {
    if (fd < 0 || i == WAIT_MS / 50) _exit(95);
    (void)poll(NULL, 0, 50);
  }
  return fd;
}

static int be_called(int32_t port)
{
  const struct sockaddr_in a = address_of(port);
  const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (fd < 0 || bind(fd, (const struct sockaddr *)&a, sizeof a) != 0 || listen(fd, 1) != 0) _exit(96);
  return accept(fd, NULL, NULL);
}

/* Stand between a follower and its leader, and then say the same to the next leader; then come as one ought to. */
static void be_replayer(int32_t own_port, int32_t first, int32_t second)
{
  uint8_t hello[512], challenge[CHALLENGE_BYTES], proof[PROOF_BYTES], welcome[WELCOME_BYTES];
  const int follower = be_called(own_port), leader = call(first);
  const ssize_t n_hello = recv(follower, hello, sizeof hello, 0); /* sent as one */
  if (n_hello <= 0) _exit(1);
  give(leader, hello, (size_t)n_hello);
  if (take(leader, challenge, sizeof challenge) != sizeof challenge) _exit(2);
  give(follower, challenge, sizeof challenge);
  if (take(follower, proof, sizeof proof) != sizeof proof) _exit(3);
  give(leader, proof, sizeof proof);
  if (take(leader, welcome, sizeof welcome) != sizeof welcome) _exit(4);
  give(follower, welcome, sizeof welcome);
  const int again = call(second);
  give(again, hello, (size_t)n_hello);
  if (take(again, challenge, sizeof challenge) != sizeof challenge) _exit(5);
  give(again, proof, sizeof proof);
  if (take(again, welcome, sizeof welcome) != 0) _exit(6); /* welcomed */
  (void)connect_as(1, second);
  _exit(0);
}

static void test_replay(void **state)
{
  (void)state;
  const int32_t between = free_port(), first = free_port(), second = free_port();
  log_set_level(LOG_OFF);
  const pid_t replayer = fork();
  if (replayer == 0) be_replayer(between, first, second);
  const pid_t follower = fork();
  if (follower == 0) {
    (void)connect_as(1, between);
    _exit(0);
  }
  for (int i = 0; i < 2; i++) {
    const struct nodes_options options = options_of(0, 2, i == 0 ? first : second);
    struct nodes *nodes = NULL;
    struct sits_error err = {0};
    RIG_OK(nodes_connect(&options, &nodes, &err), err);
    nodes_disconnect(nodes);
  }
  assert_int_equal(exit_of(follower), 0);
  assert_int_equal(exit_of(replayer), 0);
  log_set_level(LOG_INFO);
}

/* A leader with a wrong proof, one that stops short, and one whose bytes drip in for longer than they may: all would come, but late. */
static void test_false_leader(void **state)
{
  (void)state;
  static const struct { size_t n_bytes; enum sits_status status; const char *text; int every_ms; } rows[] = {
      {CHALLENGE_BYTES, SITS_UNAVAILABLE, "turned this process away", 250},
      {CHALLENGE_BYTES, SITS_CONFIG, "does not know the secret", 0},
      {CHALLENGE_BYTES - 1, SITS_UNAVAILABLE, "turned this process away", 0}};
  log_set_level(LOG_OFF);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const int32_t port = free_port();
    const struct nodes_options options = options_of(1, 2, port);
    struct nodes *nodes = NULL;
    struct sits_error err = {0};
    const pid_t child = fork();
    if (child == 0) {
      uint8_t bytes[512] = {0};
      const int fd = be_called(port);
      for (size_t k = 0; k < rows[i].n_bytes && rows[i].every_ms > 0; k++) {
        (void)send(fd, bytes, 1, MSG_NOSIGNAL);
        (void)poll(NULL, 0, rows[i].every_ms);
      }
      if (rows[i].every_ms == 0) give(fd, bytes, rows[i].n_bytes);
      while (recv(fd, bytes, sizeof bytes, 0) > 0) continue;
      _exit(0);
    }
    assert_int_equal(nodes_connect(&options, &nodes, &err), rows[i].status);
    if (strstr(err.text, rows[i].text) == NULL) fail_msg("row %zu: '%s'", i, err.text);
    assert_int_equal(exit_of(child), 0);
  }
  log_set_level(LOG_INFO);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_follower), cmocka_unit_test(test_ready_follower), cmocka_unit_test(test_leader),
                                     cmocka_unit_test(test_hasty_follower), cmocka_unit_test(test_replay),
                                     cmocka_unit_test(test_false_leader)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
