/* See net_listen.h. */
#include "front/net/net_listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LISTEN_BACKLOG 1024
#define USER_TIMEOUT_MS 60000

static int port_of(int fd)
{
  struct sockaddr_storage bound = {0};
  socklen_t n = sizeof bound;
  getsockname(fd, (struct sockaddr *)&bound, &n);
  return ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port : ((struct sockaddr_in *)&bound)->sin_port);
}

enum sits_status net_listen(const char *host, int port, const char *host_option, const char *port_option, int *fd, int *bound_port,
                            struct sits_error *err)
{
  char service[16];
  snprintf(service, sizeof service, "%d", port);
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
  int failed = getaddrinfo(host, service, &hints, &list);
  if (failed) return sits_fail_param(err, SITS_IO, host_option, "%s: %s", host, gai_strerror(failed));
  int found = -1, saved = 0, one = 1;
  for (struct addrinfo *at = list; at && found < 0; at = at->ai_next) {
    found = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (found >= 0 && (setsockopt(found, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) || bind(found, at->ai_addr, at->ai_addrlen) ||
                       listen(found, LISTEN_BACKLOG))) {
      saved = errno;
      close(found);
      found = -1;
    }
  }
  freeaddrinfo(list);
  if (found < 0)
    return sits_fail_param(err, SITS_IO, port_option, "cannot listen on %s port %d: %s", host, port, strerror(saved ? saved : errno));
  *bound_port = port_of(found);
  *fd = found;
  return SITS_OK;
}

void net_prepare(int fd)
{
  int one = 1, idle_s = 30, interval_s = 10, probes = 3, user_timeout_ms = USER_TIMEOUT_MS;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof user_timeout_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}
