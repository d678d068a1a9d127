/* Connections without TLS: an accept loop of our own. The C core's listener (1.51) is never woken again once accept has failed for lack of
 * descriptors (CVE-2023-4785); here such a failure is waited out, connections are capped, and the core only gets sockets that work.
 *
 * The core does not tell when a connection ends, so at the cap the table of (descriptor, inode) is swept for those that are no more. The
 * same thread looks for changes of health while someone watches. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "front/grpc/rpc_internal.h"

#define LISTEN_BACKLOG 1024
#define BACK_OFF_US 50000
#define WATCH_INTERVAL_MS 50

struct rpc_connection { int fd; ino_t inode; };

static enum sits_status listen_on(struct rpc_server *server, struct sits_error *err)
{
  const char *host = server->options.host;
  char service[16];
  snprintf(service, sizeof service, "%d", server->options.port);
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
  int failed = getaddrinfo(host, service, &hints, &list);
  if (failed) return sits_fail_param(err, SITS_IO, "grpc-host", "%s: %s", host, gai_strerror(failed));
  int fd = -1, saved = 0, one = 1;
  for (struct addrinfo *at = list; at && fd < 0; at = at->ai_next) {
    fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) || bind(fd, at->ai_addr, at->ai_addrlen) ||
                    listen(fd, LISTEN_BACKLOG))) {
      saved = errno;
      close(fd);
      fd = -1;
    }
  }
  freeaddrinfo(list);
  if (fd < 0)
    return sits_fail_param(err, SITS_IO, "grpc-port", "cannot listen on %s port %d: %s", host, server->options.port,
                           strerror(saved ? saved : errno));
  struct sockaddr_storage bound = {0};
  socklen_t n = sizeof bound;
  getsockname(fd, (struct sockaddr *)&bound, &n);
  server->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port : ((struct sockaddr_in *)&bound)->sin_port);
  server->listen_fd = fd;
  return SITS_OK;
}

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

/* A silent peer sends no FIN: let the kernel find out. */
static void set_options(int fd)
{
  int one = 1, idle_s = 30, interval_s = 10, probes = 3, user_timeout_ms = 60000;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof user_timeout_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
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
  set_options(fd);
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
  return server->options.ssl_certfile ? SITS_OK : listen_on(server, err);
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
