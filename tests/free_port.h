/* A TCP port of the loopback address that was free just now: for tests whose processes must know one before any of them listens. */
#ifndef SITS_TESTS_FREE_PORT_H
#define SITS_TESTS_FREE_PORT_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static inline int32_t free_port(void)
{
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t n = sizeof a;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || getsockname(fd, (struct sockaddr *)&a, &n)) {
    perror("no free port");
    exit(1);
  }
  close(fd);
  return ntohs(a.sin_port);
}

#endif
