/* Connections without TLS: an accept loop of our own. The C core's listener (1.51) is never woken again once accept has failed for lack of
 * descriptors (CVE-2023-4785); here such a failure is waited out, connections are capped, and the core only gets sockets that work.
 *
 * The core does not tell when a connection ends, so at the cap the table of (descriptor, inode) is swept for those that are no more. The
 * same thread looks for changes of health while someone watches. */
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <netinet/in.h>
#include <linux/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/grpc/rpc_internal.h"
#include "front/net/net_listen.h"

#define BACK_OFF_US 50000

#define LOOK_INTERVAL_MS 20               /* at health, and at connections of which no key is known yet */
#define UNKNOWN_FREE (INT64_C(128) << 10) /* what one may have sent: headers, and of a message its first window (64 KiB) */
#define UNKNOWN_CALL 512                  /* what a call adds to that: its headers and a small message */
#define UNKNOWN_BYTES (INT64_C(16) << 20) /* that all which sent more may have sent together */
#define MOST_DISCARDS 64                  /* reads */
#define MOST_CALLS (2 * RPC_STREAMS_PER_CONNECTION) /* of a connection at once: as many streams may be open, others may be ending */

struct rpc_connection {
  int fd;
  ino_t inode;
  bool is_known;                          /* a call came on it with a right key, or where no key is asked */
  bool is_cut;
  int64_t n_allowed;                      /* bytes that its calls account for */
  int64_t n_received;                     /* bytes beyond these at the last look, 0 up to UNKNOWN_FREE; only of those that are not known */
  int64_t second, n_taken_back;           /* calls taken back in that second of the monotonic clock */
  int64_t n_calls;                        /* begun and not freed */
};

/* Is the descriptor still this connection's? */
static bool is_open(const struct rpc_connection *connection)
{
  struct stat info;
  return !fstat(connection->fd, &info) && info.st_ino == connection->inode;
}

/* Forget the connections that are closed: their descriptor is gone, or is something else by now. */
static void sweep_locked(struct rpc_server *server)
{
  int n = 0;
  for (int i = 0; i < server->n_connections; i++)
    if (is_open(&server->connections[i])) server->connections[n++] = server->connections[i];
  server->n_connections = n;
}

static struct rpc_connection *find_locked(struct rpc_server *server, int fd)
{
  for (int i = server->n_connections - 1; i >= 0; i--) /* the last one with a number is the one that has it now */
    if (server->connections[i].fd == fd) return &server->connections[i];
  return NULL;
}

/* The library sees the end of it, and closes and frees what it holds of it. What the kernel has received is thrown away first, for the
 * library would go on reading it. */
static void cut_locked(struct rpc_connection *connection, const char *why)
{
  if (connection->is_cut || !is_open(connection)) return;
  connection->is_cut = true;
  shutdown(connection->fd, SHUT_RDWR);
  for (int i = 0; i < MOST_DISCARDS && recv(connection->fd, NULL, 1 << 30, MSG_TRUNC | MSG_DONTWAIT) > 0;) i++;
  log_warn("grpc", "a connection was cut: %s", why);
}

static int64_t bytes_received(const struct rpc_connection *connection)
{
  struct tcp_info info = {0};
  socklen_t n = sizeof info;
  return getsockopt(connection->fd, IPPROTO_TCP, TCP_INFO, &info, &n) ? 0 : (int64_t)info.tcpi_bytes_received;
}

/* Nobody tells where in a connection's bytes a call began, and what follows it may have been received when it is looked at. So a call
 * accounts for little, whatever has come by then, or a call that is refused would hide what is sent right behind it. */
static void allow_call_locked(struct rpc_connection *connection)
{
  if (connection->is_known || !is_open(connection)) return;
  const int64_t n_received = bytes_received(connection);
  const int64_t n_allowed = connection->n_allowed + UNKNOWN_CALL;
  connection->n_allowed = n_allowed < n_received ? n_allowed : n_received;
}

/* A call that its client takes back costs a begin and an end, and the library no longer counts it among the open streams. So more calls
 * than streams may be open at once, or more taken back in a second than that, are no client's need. */
void rpc_accept_begun(struct rpc_server *server, int fd)
{
  if (fd < 0) return;
  pthread_mutex_lock(&server->connection_mutex);
  struct rpc_connection *connection = find_locked(server, fd);
  if (connection) allow_call_locked(connection);
  if (connection && ++connection->n_calls > MOST_CALLS) cut_locked(connection, "it has more calls than streams may be open");
  pthread_mutex_unlock(&server->connection_mutex);
}

void rpc_accept_known(struct rpc_server *server, int fd)
{
  if (fd < 0) return;
  pthread_mutex_lock(&server->connection_mutex);
  struct rpc_connection *connection = find_locked(server, fd);
  if (connection) connection->is_known = true;
  pthread_mutex_unlock(&server->connection_mutex);
}

void rpc_accept_freed(struct rpc_server *server, int fd)
{
  if (fd < 0) return;
  pthread_mutex_lock(&server->connection_mutex);
  struct rpc_connection *connection = find_locked(server, fd); /* a later one, if the call outlived its own: then it counts too few */
  if (connection && connection->n_calls > 0) connection->n_calls--;
  pthread_mutex_unlock(&server->connection_mutex);
}

void rpc_accept_taken_back(struct rpc_server *server, int fd)
{
  if (fd < 0) return;
  const int64_t second = clock_monotonic_us() / 1000000;
  pthread_mutex_lock(&server->connection_mutex);
  struct rpc_connection *connection = find_locked(server, fd);
  if (connection && connection->second != second) {
    connection->second = second;
    connection->n_taken_back = 0;
  }
  if (connection && ++connection->n_taken_back > RPC_STREAMS_PER_CONNECTION) cut_locked(connection, "it opens calls and takes them back");
  pthread_mutex_unlock(&server->connection_mutex);
}

/* What a connection sends outside of calls, as headers that do not end, lies in the library's memory, without a limit of the library's.
 * While all connections without a known key that sent more than a client can need together may hold too much, the one that sent most is
 * cut. (A client whose key is wrong and whose messages are large is counted too: it loses a connection on which it was refused.) False:
 * all connections are known. */
static bool look_at_unknown(struct rpc_server *server)
{
  int64_t n_bytes = 0, n_unknown = 0;
  pthread_mutex_lock(&server->connection_mutex);
  for (int i = 0; i < server->n_connections; i++) {
    struct rpc_connection *connection = &server->connections[i];
    connection->n_received = 0;
    if (connection->is_known || connection->is_cut || !is_open(connection)) continue;
    connection->n_received = bytes_received(connection) - connection->n_allowed;
    if (connection->n_received <= UNKNOWN_FREE) connection->n_received = 0;
    n_bytes += connection->n_received;
    n_unknown++;
  }
  while (n_bytes > UNKNOWN_BYTES) {
    struct rpc_connection *most = &server->connections[0];
    for (int i = 1; i < server->n_connections; i++)
      if (server->connections[i].n_received > most->n_received) most = &server->connections[i];
    n_bytes -= most->n_received;
    most->n_received = 0;
    cut_locked(most, "it sends much without a call that is let in");
  }
  pthread_mutex_unlock(&server->connection_mutex);
  return n_unknown > 0;
}

/* Calls may begin after their connection's descriptor is closed, and the library names them by its number only: a new connection gets a
 * number that none in the table has had, or it would answer for them. Where none is free, the one it came with. */
static int choose_number_locked(struct rpc_server *server, int fd)
{
  int highest = fd;
  if (!find_locked(server, fd)) return fd;
  for (int i = 0; i < server->n_connections; i++) highest = server->connections[i].fd > highest ? server->connections[i].fd : highest;
  const int other = fcntl(fd, F_DUPFD_CLOEXEC, highest + 1);
  if (other < 0) return fd;
  close(fd);
  return other;
}

static void take_connection(struct rpc_server *server, int fd, grpc_server_credentials *credentials)
{
  struct stat info;
  pthread_mutex_lock(&server->connection_mutex);
  if (server->n_connections == server->options.max_connections) sweep_locked(server);
  fd = choose_number_locked(server, fd);
  const int n_open = server->n_connections;
  const bool has_room = n_open < server->options.max_connections && !fstat(fd, &info);
  if (has_room) server->connections[server->n_connections++] = (struct rpc_connection){.fd = fd, .inode = info.st_ino};
  pthread_mutex_unlock(&server->connection_mutex);
  if (!has_room) {
    log_warn("grpc", "a connection was refused: %d are open", n_open);
    close(fd);
    return;
  }
  net_prepare(fd);
  grpc_server_add_channel_from_fd(server->core, fd, credentials); /* the descriptor is the library's now */
}

static void accept_all(struct rpc_server *server, grpc_server_credentials *credentials)
{
  while (!atomic_load(&server->is_accept_stopping)) {
    int fd = accept4(server->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      take_connection(server, fd, credentials);
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      log_warn("grpc", "a connection could not be accepted: %s", strerror(errno));
      usleep(BACK_OFF_US); /* no descriptor is free: the client waits in the backlog */
    }
    return;
  }
}

static void close_listener(struct rpc_server *server)
{
  pthread_mutex_lock(&server->mutex);
  if (server->listen_fd >= 0) close(server->listen_fd);
  server->listen_fd = -1;
  pthread_cond_broadcast(&server->change);
  pthread_mutex_unlock(&server->mutex);
}

static void *accept_main(void *argument)
{
  struct rpc_server *server = argument;
  grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
  bool has_unknown = false;
  while (!atomic_load(&server->is_stopping)) {
    struct pollfd fds[2] = {{.fd = server->wake_fd, .events = POLLIN}, {.fd = server->listen_fd, .events = POLLIN}};
    const bool waits = !has_unknown && atomic_load(&server->n_watchers) == 0;
    poll(fds, server->listen_fd >= 0 ? 2 : 1, waits ? -1 : LOOK_INTERVAL_MS);
    uint64_t n_wakes;
    if (fds[0].revents && read(server->wake_fd, &n_wakes, sizeof n_wakes) < 0) log_debug("grpc", "the wake-up was read already");
    if (server->listen_fd >= 0 && atomic_load(&server->is_accept_stopping)) close_listener(server);
    else if (server->listen_fd >= 0 && fds[1].revents) accept_all(server, credentials);
    has_unknown = look_at_unknown(server);
    if (atomic_load(&server->n_watchers) > 0) rpc_health_broadcast(server);
  }
  grpc_server_credentials_release(credentials);
  return NULL;
}

enum sits_status rpc_accept_prepare(struct rpc_server *server, struct sits_error *err)
{
  server->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  server->connections = mem_calloc((size_t)server->options.max_connections, sizeof *server->connections);
  if (server->wake_fd < 0 || !server->connections) return sits_fail(err, SITS_NOMEM, "no memory or descriptor for the gRPC acceptor");
  const struct rpc_options *options = &server->options;
  if (options->tls) return SITS_OK; /* the library listens */
  return net_listen(options->host, options->port, "grpc-host", "grpc-port", &server->listen_fd, &server->port, err);
}

enum sits_status rpc_accept_start(struct rpc_server *server, struct sits_error *err)
{
  int failed = pthread_create(&server->acceptor, NULL, accept_main, server);
  if (failed) return sits_fail(err, SITS_INTERNAL, "the gRPC acceptor could not be started: %s", strerror(failed));
  server->has_acceptor = true;
  return SITS_OK;
}

void rpc_accept_wake(struct rpc_server *server)
{
  uint64_t one = 1;
  if (server->wake_fd >= 0 && write(server->wake_fd, &one, sizeof one) < 0) log_debug("grpc", "the acceptor is awake already");
}

void rpc_accept_stop(struct rpc_server *server)
{
  atomic_store(&server->is_stopping, true);
  rpc_accept_wake(server);
  if (server->has_acceptor) pthread_join(server->acceptor, NULL);
  server->has_acceptor = false;
  if (server->listen_fd >= 0) close(server->listen_fd);
  if (server->wake_fd >= 0) close(server->wake_fd);
  server->listen_fd = server->wake_fd = -1;
  mem_free(server->connections);
  server->connections = NULL;
}
