/* See nodes_wire.h.
 *
 * Connecting: the leader listens, each follower calls. hello (rank, number of ranks, build, a random number) -> challenge (the leader's
 * random number and its proof) -> proof -> welcome. A proof is HMAC-SHA256 of side, ranks and both random numbers under the secret. The
 * leader greets up to MOST_CALLERS side by side, each within HELLO_US; a further one takes the oldest's place. Who fails is turned away
 * and the leader waits on. Sockets are non-blocking; every wait is a poll of at most LOOK_MS, then a look at whether
 * a process is lost. Lost means: the connection has ended (a dead process's kernel says so at once), keep-alive probes or sent bytes went
 * unanswered (a dead machine, 6 s), or a bound on waiting has passed. */
#include "backend/nodes_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sha256.h"

enum { MAGIC = 0x53495453, VERSION = 1, LOOK_MS = 100, SEND_US = 10000000, HELLO_US = 5000000, NONCE = 16, BUILD = 64, LEAST_SECRET = 16,
       MOST_CALLERS = 64, RETRY_MS = 200, PROBE_IDLE_S = 2, PROBE_EVERY_S = 1, PROBES = 4, UNANSWERED_MS = 6000 };

struct hello { uint32_t magic, version; int32_t rank, n_ranks; uint32_t batch_bytes, abi; char build[BUILD]; uint8_t nonce[NONCE]; };
struct challenge { uint8_t nonce[NONCE], proof[SHA256_BYTES]; };
struct head { uint32_t magic, kind; uint64_t n_bytes; };

/* ---- bytes ---- */

/* poll events on fd, in looks, until the deadline (0: none), which also ends a wait for bytes that drip in. False: too late, or lost. */
static bool await(const struct nodes *nodes, int fd, short events, int64_t deadline_us)
{
  for (;;) {
    if (deadline_us > 0 && clock_monotonic_us() > deadline_us) return false;
    struct pollfd p = {.fd = fd, .events = events};
    const int n = poll(&p, 1, LOOK_MS);
    if (n > 0) return true; /* errors show in the call that follows */
    if (n < 0 && errno != EINTR) return false;
    if (nodes != NULL && atomic_load(&nodes->is_lost)) return false;
  }
}

/* What has arrived is read even where a process is lost: it may say why. */
static bool read_all(const struct nodes *nodes, int fd, void *to, size_t n_bytes, int64_t deadline_us)
{
  for (size_t at = 0; at < n_bytes;) {
    const ssize_t n = recv(fd, (uint8_t *)to + at, n_bytes - at, 0);
    if (n > 0) {
      at += (size_t)n;
      continue;
    }
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return false;
    if (!await(nodes, fd, POLLIN, deadline_us)) return false;
  }
  return true;
}

static bool write_all(const struct nodes *nodes, int fd, const void *from, size_t n_bytes, int64_t deadline_us)
{
  for (size_t at = 0; at < n_bytes;) {
    const ssize_t n = send(fd, (const uint8_t *)from + at, n_bytes - at, MSG_NOSIGNAL);
    if (n > 0) at += (size_t)n;
    else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
    else if (!await(nodes, fd, POLLOUT, deadline_us)) return false;
  }
  return true;
}

bool nodes_send(struct nodes *nodes, int32_t rank, enum node_message kind, const void *head, size_t head_bytes, const void *body,
                size_t body_bytes)
{
  const struct head h = {MAGIC, (uint32_t)kind, head_bytes + body_bytes};
  const int64_t deadline_us = clock_monotonic_us() + nodes->message_us;
  const int fd = nodes->fd[rank];
  if (!atomic_load(&nodes->is_lost) && write_all(nodes, fd, &h, sizeof h, deadline_us) &&
      write_all(nodes, fd, head, head_bytes, deadline_us) && write_all(nodes, fd, body, body_bytes, deadline_us))
    return true;
  nodes_lose(nodes, "a message could not be sent");
  return false;
}

bool nodes_next(struct nodes *nodes, int32_t rank, int64_t timeout_us, enum node_message *kind, size_t *n_bytes)
{
  struct head h;
  if (read_all(nodes, nodes->fd[rank], &h, sizeof h, timeout_us > 0 ? clock_monotonic_us() + timeout_us : 0) && h.magic == MAGIC) {
    *kind = (enum node_message)h.kind;
    *n_bytes = (size_t)h.n_bytes;
    return true;
  }
  nodes_lose(nodes, "no message came");
  return false;
}

bool nodes_read(struct nodes *nodes, int32_t rank, void *to, size_t n_bytes)
{
  if (read_all(nodes, nodes->fd[rank], to, n_bytes, clock_monotonic_us() + nodes->message_us)) return true;
  nodes_lose(nodes, "a message was cut off");
  return false;
}

/* ---- proofs ---- */

static void prove(const char *secret, bool is_leader, const struct hello *hello, const uint8_t nonce[NONCE], uint8_t out[SHA256_BYTES])
{
  struct { uint8_t side[NONCE], nonce[NONCE]; struct hello hello; } text = {.hello = *hello};
  struct hmac_sha256 hmac;
  memcpy(text.side, is_leader ? "sits2026 leader" : "sits2026 follow", NONCE);
  memcpy(text.nonce, nonce, NONCE);
  hmac_sha256_init(&hmac, secret, strlen(secret));
  hmac_sha256(&hmac, &text, sizeof text, out);
  explicit_bzero(&hmac, sizeof hmac);
}

static bool is_same(const uint8_t *a, const uint8_t *b, size_t n)
{
  uint8_t difference = 0;
  for (size_t i = 0; i < n; i++) difference |= a[i] ^ b[i];
  return difference == 0;
}

/* ---- connecting ---- */

static void set_up(int fd)
{
  const int on = 1, idle = PROBE_IDLE_S, every = PROBE_EVERY_S, probes = PROBES;
  const unsigned unanswered = UNANSWERED_MS;
  (void)fcntl(fd, F_SETFL, O_NONBLOCK);
  (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof unanswered);
}

static struct hello own_hello(const struct nodes_options *o)
{
  return (struct hello){.magic = MAGIC, .version = VERSION, .rank = o->rank, .n_ranks = o->n_ranks,
                        .batch_bytes = sizeof(struct backend_batch), .abi = BACKEND_ABI, .build = SITS_VERSION " " SITS_COMMIT};
}

static bool is_same_build(const struct hello *a, const struct hello *b)
{
  return a->version == b->version && a->batch_bytes == b->batch_bytes && a->abi == b->abi && memcmp(a->build, b->build, BUILD) == 0;
}

static enum sits_status resolve(const struct nodes_options *o, bool is_passive, struct addrinfo **out, struct sits_error *err)
{
  char port[16];
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = is_passive ? AI_PASSIVE : 0};
  snprintf(port, sizeof port, "%d", (int)o->port);
  const int e = getaddrinfo(o->address, port, &hints, out);
  if (e == 0) return SITS_OK;
  return sits_fail_param(err, SITS_UNAVAILABLE, "leader-address", "leader-address %.128s: %s", o->address != NULL ? o->address : "*",
                         gai_strerror(e));
}

/* One that has called and is not known yet. */
struct caller {
  int fd;
  bool is_challenged;                /* it owes its proof, else its hello */
  int64_t deadline_us;
  size_t n_bytes;                    /* of what it owes */
  struct hello hello;
  uint8_t proof[SHA256_BYTES], want[SHA256_BYTES];
};

enum progress { CALLER_WAITS, CALLER_IS_HERE, CALLER_FAILS };

/* Little, to a fresh connection: it fits the socket's buffer, or the other end is odd. */
static bool send_now(int fd, const void *from, size_t n_bytes) { return send(fd, from, n_bytes, MSG_NOSIGNAL) == (ssize_t)n_bytes; }

/* What it owes, as far as it has come. */
static enum progress receive(struct caller *c, void *to, size_t n_bytes)
{
  while (c->n_bytes < n_bytes) {
    const ssize_t n = recv(c->fd, (uint8_t *)to + c->n_bytes, n_bytes - c->n_bytes, 0);
    if (n > 0) c->n_bytes += (size_t)n;
    else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return CALLER_WAITS;
    else return CALLER_FAILS;
  }
  return CALLER_IS_HERE;
}

static enum progress challenge_caller(const struct nodes *nodes, const struct nodes_options *o, struct caller *c, const char **why)
{
  const struct hello mine = own_hello(o);
  struct challenge challenge;
  *why = "it does not speak this protocol";
  if (c->hello.magic != MAGIC) return CALLER_FAILS;
  *why = "it is another build";
  if (!is_same_build(&c->hello, &mine)) return CALLER_FAILS;
  *why = "the number of processes differs";
  if (c->hello.n_ranks != o->n_ranks) return CALLER_FAILS;
  *why = "its rank is taken or too large";
  if (c->hello.rank < 1 || c->hello.rank >= o->n_ranks || nodes->fd[c->hello.rank] >= 0) return CALLER_FAILS;
  *why = "no random numbers";
  if (getrandom(challenge.nonce, NONCE, 0) != NONCE) return CALLER_FAILS;
  prove(o->secret, true, &c->hello, challenge.nonce, challenge.proof);
  prove(o->secret, false, &c->hello, challenge.nonce, c->want);
  c->is_challenged = true;
  c->n_bytes = 0;
  *why = "it went away";
  return send_now(c->fd, &challenge, sizeof challenge) ? CALLER_WAITS : CALLER_FAILS;
}

/* Go on with a caller that has sent something. */
static enum progress greet(const struct nodes *nodes, const struct nodes_options *o, struct caller *c, const char **why)
{
  const uint32_t welcome = MAGIC;
  enum progress progress;
  *why = "it does not speak this protocol";
  if (!c->is_challenged) {
    progress = receive(c, &c->hello, sizeof c->hello);
    return progress == CALLER_IS_HERE ? challenge_caller(nodes, o, c, why) : progress;
  }
  *why = "it does not know the secret";
  progress = receive(c, c->proof, sizeof c->proof);
  if (progress != CALLER_IS_HERE) return progress;
  if (!is_same(c->proof, c->want, sizeof c->want)) return CALLER_FAILS;
  *why = "its rank is taken or too large";
  if (nodes->fd[c->hello.rank] >= 0) return CALLER_FAILS;
  *why = "it went away";
  return send_now(c->fd, &welcome, sizeof welcome) ? CALLER_IS_HERE : CALLER_FAILS;
}

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000L}, NULL); }

/* The own name may not be known yet. */
static enum sits_status open_listener(const struct nodes_options *o, int64_t deadline_us, int *out, struct sits_error *err)
{
  struct addrinfo *found = NULL;
  const int on = 1;
  enum sits_status status;
  while ((status = resolve(o, true, &found, err)) != SITS_OK && clock_monotonic_us() < deadline_us) nap();
  if (status != SITS_OK) return status;
  int fd = -1, e = 0;
  for (const struct addrinfo *a = found; a != NULL && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, MOST_CALLERS) == 0) break;
    e = errno;
    (void)close(fd);
    fd = -1;
  }
  freeaddrinfo(found);
  if (fd < 0) return sits_fail_param(err, SITS_UNAVAILABLE, "leader-port",
                                     "leader-address %.128s, port %d: %s", o->address != NULL ? o->address : "*", (int)o->port,
                                     strerror(e));
  *out = fd;
  return SITS_OK;
}

/* Callers, the oldest first. */
struct queue { struct caller callers[MOST_CALLERS]; int32_t n; };

static void drop(struct queue *queue, int32_t i, const char *why)
{
  if (why != NULL) {
    log_warn("nodes", "a process was turned away: %s", why);
    (void)close(queue->callers[i].fd);
  }
  queue->n--;
  memmove(&queue->callers[i], &queue->callers[i + 1], (size_t)(queue->n - i) * sizeof *queue->callers);
}

static void take_callers(struct queue *queue, int listener)
{
  int fd;
  for (int32_t i = 0; i < MOST_CALLERS && (fd = accept(listener, NULL, NULL)) >= 0; i++) {
    if (queue->n == MOST_CALLERS) drop(queue, 0, "too many call at once");
    set_up(fd);
    queue->callers[queue->n++] = (struct caller){.fd = fd, .deadline_us = clock_monotonic_us() + HELLO_US};
  }
}

/* One look at all that call. The number of followers that are here now. */
static int32_t look(struct nodes *nodes, const struct nodes_options *o, struct queue *queue, int listener)
{
  struct pollfd polls[MOST_CALLERS + 1];
  int32_t n_new = 0;
  const int32_t n_polled = queue->n;
  for (int32_t i = 0; i < n_polled; i++) polls[i] = (struct pollfd){.fd = queue->callers[i].fd, .events = POLLIN};
  polls[n_polled] = (struct pollfd){.fd = listener, .events = POLLIN};
  const int n_ready = poll(polls, (nfds_t)n_polled + 1, LOOK_MS);
  for (int32_t i = n_polled - 1; i >= 0; i--) { /* from the back: who goes moves the later ones */
    struct caller *c = &queue->callers[i];
    const char *why = "it took too long";
    enum progress progress = clock_monotonic_us() > c->deadline_us ? CALLER_FAILS : CALLER_WAITS;
    if (progress == CALLER_WAITS && n_ready > 0 && polls[i].revents != 0) progress = greet(nodes, o, c, &why);
    if (progress == CALLER_WAITS) continue;
    if (progress == CALLER_IS_HERE) {
      nodes->fd[c->hello.rank] = c->fd;
      n_new++;
      log_info("nodes", "rank %d of %d is here", (int)c->hello.rank, (int)o->n_ranks);
    }
    drop(queue, i, progress == CALLER_FAILS ? why : NULL);
  }
  if (n_ready > 0 && polls[n_polled].revents != 0) take_callers(queue, listener);
  return n_new;
}

/* A follower that ends while others are awaited frees its place: started again, it is let in. The number of those that have left. */
static int32_t forget_left(struct nodes *nodes)
{
  int32_t n_left = 0;
  for (int32_t r = 1; r < nodes->n_ranks; r++) {
    char byte;
    if (nodes->fd[r] < 0) continue;
    const ssize_t n = recv(nodes->fd[r], &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) continue;
    log_warn("nodes", "rank %d has left before all were here", (int)r);
    (void)close(nodes->fd[r]);
    nodes->fd[r] = -1;
    n_left++;
  }
  return n_left;
}

static enum sits_status lead(struct nodes *nodes, const struct nodes_options *o, struct sits_error *err)
{
  const int64_t deadline_us = clock_monotonic_us() + o->connect_timeout_us;
  int listener = -1;
  const enum sits_status status = open_listener(o, deadline_us, &listener, err);
  if (status != SITS_OK) return status;
  log_info("nodes", "waiting for %d processes on port %d", (int)o->n_ranks - 1, (int)o->port);
  struct queue queue = {.n = 0};
  int32_t n_here = 1;
  while (n_here < o->n_ranks && clock_monotonic_us() < deadline_us) {
    n_here -= forget_left(nodes);
    n_here += look(nodes, o, &queue, listener);
  }
  while (queue.n > 0) drop(&queue, queue.n - 1, n_here == o->n_ranks ? "all are here" : "it took too long");
  (void)close(listener);
  if (n_here == o->n_ranks) return SITS_OK;
  return sits_fail(err, SITS_UNAVAILABLE, "%d of %d processes came within %lld s", (int)n_here, (int)o->n_ranks,
                   (long long)(o->connect_timeout_us / 1000000));
}

static int call(const struct nodes_options *o, int64_t deadline_us, struct sits_error *err)
{
  while (clock_monotonic_us() < deadline_us) {
    struct addrinfo *found = NULL;
    if (resolve(o, false, &found, err) == SITS_OK) { /* a name may not be known yet */
      for (const struct addrinfo *a = found; a != NULL; a = a->ai_next) {
        const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        set_up(fd);
        int e = 0;
        socklen_t size = sizeof e;
        const bool is_under_way = connect(fd, a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS;
        if (is_under_way && await(NULL, fd, POLLOUT, clock_monotonic_us() + HELLO_US) &&
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size) == 0 && e == 0) {
          freeaddrinfo(found);
          return fd;
        }
        (void)sits_fail_param(err, SITS_UNAVAILABLE, "leader-address", "leader-address %.128s, port %d: %s", o->address, (int)o->port,
                              strerror(e != 0 ? e : errno));
        (void)close(fd);
      }
      freeaddrinfo(found);
    }
    nap();
  }
  return -1;
}

static enum sits_status join(struct nodes *nodes, const struct nodes_options *o, struct sits_error *err)
{
  const int fd = call(o, clock_monotonic_us() + o->connect_timeout_us, err);
  if (fd < 0) return SITS_UNAVAILABLE;
  const int64_t deadline_us = clock_monotonic_us() + HELLO_US;
  struct hello hello = own_hello(o);
  struct challenge challenge;
  uint8_t proof[SHA256_BYTES];
  uint32_t welcome = 0;
  nodes->fd[0] = fd;
  if (getrandom(hello.nonce, NONCE, 0) != NONCE) return sits_fail(err, SITS_INTERNAL, "no random numbers");
  if (!write_all(NULL, fd, &hello, sizeof hello, deadline_us) || !read_all(NULL, fd, &challenge, sizeof challenge, deadline_us))
    return sits_fail(err, SITS_UNAVAILABLE, "the leader turned this process away: another build, or a rank or number of processes that "
                                            "does not fit");
  prove(o->secret, true, &hello, challenge.nonce, proof);
  if (!is_same(proof, challenge.proof, sizeof proof))
    return sits_fail_param(err, SITS_CONFIG, "node-secret", "the leader does not know the secret");
  prove(o->secret, false, &hello, challenge.nonce, proof);
  if (!write_all(NULL, fd, proof, sizeof proof, deadline_us) || !read_all(NULL, fd, &welcome, sizeof welcome, deadline_us) ||
      welcome != MAGIC)
    return sits_fail(err, SITS_UNAVAILABLE, "the leader turned this process away");
  return SITS_OK;
}

enum sits_status nodes_connect(const struct nodes_options *o, struct nodes **out, struct sits_error *err)
{
  if (o->n_ranks < 2 || o->n_ranks > BACKEND_MAX_RANKS || o->rank < 0 || o->rank >= o->n_ranks)
    return sits_fail_param(err, SITS_CONFIG, "node-rank",
                           "node-rank %d of node-count %d: ranks are 0 to node-count - 1, of 2 to %d", (int)o->rank, (int)o->n_ranks,
                           BACKEND_MAX_RANKS);
  if (o->secret == NULL || strlen(o->secret) < LEAST_SECRET || strlen(o->secret) > NODES_SECRET_BYTES)
    return sits_fail_param(err, SITS_CONFIG, "node-secret", "node-secret must have %d to %d bytes, the same for all processes",
                           LEAST_SECRET, NODES_SECRET_BYTES);
  struct nodes *nodes = mem_calloc(1, sizeof *nodes);
  if (nodes == NULL) return sits_fail(err, SITS_NOMEM, "nodes: out of memory");
  nodes->rank = o->rank;
  nodes->n_ranks = o->n_ranks;
  nodes->message_us = SEND_US;
  for (int32_t r = 0; r < BACKEND_MAX_RANKS; r++) nodes->fd[r] = -1;
  const enum sits_status status = o->rank == 0 ? lead(nodes, o, err) : join(nodes, o, err);
  if (status != SITS_OK) {
    nodes_disconnect(nodes);
    return status;
  }
  *out = nodes;
  return SITS_OK;
}

/* ---- the group, and watching ---- */

void nodes_lose(struct nodes *nodes, const char *why)
{
  if (!atomic_exchange(&nodes->is_lost, true) && !atomic_load(&nodes->is_closing))
    log_error("nodes", "rank %d: a process is lost: %s", (int)nodes->rank, why);
  if (nodes->group != NULL) group_abort(nodes->group);
}

static void *watch(void *arg)
{
  struct nodes *nodes = arg;
  while (!atomic_load(&nodes->is_closing) && !atomic_load(&nodes->is_lost)) {
    struct pollfd polls[BACKEND_MAX_RANKS];
    nfds_t n = 0;
    for (int32_t r = 0; r < nodes->n_ranks; r++)
      if (nodes->fd[r] >= 0) polls[n++] = (struct pollfd){.fd = nodes->fd[r], .events = POLLRDHUP};
    if (poll(polls, n, LOOK_MS) > 0) {
      if (!atomic_load(&nodes->is_closing)) nodes_lose(nodes, "its connection has ended");
      return NULL;
    }
  }
  return NULL;
}

/* A step of all ranks giving to all: through the leader. */
static bool exchange(void *user, const void *mine, size_t n_bytes, void *all, int64_t timeout_us)
{
  struct nodes *nodes = user;
  enum node_message kind;
  size_t size;
  const size_t whole = n_bytes * (size_t)nodes->n_ranks;
  if (nodes->rank > 0)
    return nodes_send(nodes, 0, NODE_EXCHANGE, mine, n_bytes, NULL, 0) && nodes_next(nodes, 0, timeout_us, &kind, &size) &&
           kind == NODE_EXCHANGE && size == whole && nodes_read(nodes, 0, all, size);
  if (n_bytes > 0) memcpy(all, mine, n_bytes);
  for (int32_t r = 1; r < nodes->n_ranks; r++) {
    if (!nodes_next(nodes, r, timeout_us, &kind, &size)) return false;
    if (kind == NODE_REPLY && size == sizeof nodes->early[r])
      nodes->has_early[r] = nodes_read(nodes, r, &nodes->early[r], size);
    if (kind != NODE_EXCHANGE || size != n_bytes || !nodes_read(nodes, r, (uint8_t *)all + (size_t)r * n_bytes, size)) return false;
  }
  for (int32_t r = 1; r < nodes->n_ranks; r++)
    if (!nodes_send(nodes, r, NODE_EXCHANGE, all, whole, NULL, 0)) return false;
  return true;
}

enum sits_status nodes_start(struct nodes *nodes, int32_t collective_timeout_ms, struct sits_error *err)
{
  const struct group_link link = {.exchange = exchange, .user = nodes};
  if (collective_timeout_ms > SEND_US / 1000) nodes->message_us = (int64_t)collective_timeout_ms * 1000;
  const enum sits_status status = group_create_linked(nodes->n_ranks, (int64_t)collective_timeout_ms * 1000, &link, &nodes->group, err);
  if (status != SITS_OK) return status;
  nodes->has_watcher = pthread_create(&nodes->watcher, NULL, watch, nodes) == 0;
  return nodes->has_watcher ? SITS_OK : sits_fail(err, SITS_NOMEM, "nodes: no thread to watch the connections");
}

void nodes_disconnect(struct nodes *nodes)
{
  if (nodes == NULL) return;
  atomic_store(&nodes->is_closing, true);
  if (nodes->has_watcher) pthread_join(nodes->watcher, NULL);
  for (int32_t r = 0; r < BACKEND_MAX_RANKS; r++)
    if (nodes->fd[r] >= 0) (void)close(nodes->fd[r]);
  if (nodes->group != NULL) group_destroy(nodes->group);
  mem_free(nodes);
}
