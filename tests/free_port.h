/* A TCP port of the loopback address that was free just now: for tests whose processes must know one before any of them listens. None of
 * those that the kernel gives out by itself: a client of a test beside could be given it meanwhile, and who connects before somebody
 * listens could meet itself. A process is given none twice. */
#ifndef SITS_TESTS_FREE_PORT_H
#define SITS_TESTS_FREE_PORT_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FREE_PORT_LOWEST = 2048 };

static inline bool free_port_binds(int32_t port)
{
  const struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) {
    perror("no free port");
    exit(1);
  }
  const bool is_free = !bind(fd, (const struct sockaddr *)&a, sizeof a);
  close(fd);
  return is_free;
}

static inline int32_t free_port(void)
{
  static uint32_t at, n;
  int32_t port, end = 0;
  if (!n) {
    FILE *file = fopen("/proc/sys/net/ipv4/ip_local_port_range", "r");
    if (!file || fscanf(file, "%d", &end) != 1 || end <= FREE_PORT_LOWEST) end = 65536;
    if (file) fclose(file);
    if (getrandom(&at, sizeof at, 0) != (ssize_t)sizeof at) exit(1);
    n = (uint32_t)(end - FREE_PORT_LOWEST);
  }
  do port = FREE_PORT_LOWEST + (int32_t)(at++ % n);
  while (!free_port_binds(port));
  return port;
}

#endif
