/* Connections without TLS: an accept loop of our own. The C core's listener (1.51) is never woken again once accept has failed for lack of
 * descriptors (CVE-2023-4785); here such a failure is waited out, connections are capped, and the core only gets sockets that work.
 *
 * The core does not tell when a connection ends, so at the cap the table of (descriptor, inode) is swept for those that are no more. The
 * same thread looks for changes of health while someone watches. */
#include <errno.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "front/grpc/rpc_internal.h"
#include "front/net/net_listen.h"

#define BACK_OFF_US 50000
#define WATCH_INTERVAL_MS 50

struct rpc_connection { int fd; ino_t inode; };

/* Forget the connections that are closed: their descriptor is gone, or is something else by now. */
static void sweep(struct rpc_server *server)
{
  int n = 0;
  for (int i = 0; i < server->n_connections; i++) {
    struct stat info;
    if (!fstat(server->connections[i].fd, &info) && info.st_ino == server->connections[i].inode)
      server->connections[n++] = server->connections[i];
  }
  server->n_connections = n;
}

static void take_connection(struct rpc_server *server, int fd, grpc_server_credentials *credentials)
{
  struct stat info;
  if (server->n_connections == server->options.max_connections) sweep(server);
  if (server->n_connections == server->options.max_connections || fstat(fd, &info)) {
    log_warn("grpc", "a connection was refused: %d are open", server->n_connections);
    close(fd);
    return;
  }
  net_prepare(fd);
  server->connections[server->n_connections++] = (struct rpc_connection){fd, info.st_ino};
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
  while (!atomic_load(&server->is_stopping)) {
    struct pollfd fds[2] = {{.fd = server->wake_fd, .events = POLLIN}, {.fd = server->listen_fd, .events = POLLIN}};
    poll(fds, server->listen_fd >= 0 ? 2 : 1, atomic_load(&server->n_watchers) > 0 ? WATCH_INTERVAL_MS : -1);
    uint64_t n_wakes;
    if (fds[0].revents && read(server->wake_fd, &n_wakes, sizeof n_wakes) < 0) log_debug("grpc", "the wake-up was read already");
    if (server->listen_fd >= 0 && atomic_load(&server->is_accept_stopping)) close_listener(server);
    else if (server->listen_fd >= 0 && fds[1].revents) accept_all(server, credentials);
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
