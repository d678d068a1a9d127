/* Listening sockets and what every accepted one is told, the same for all transports. Thread-safe. */
#ifndef SITS_FRONT_NET_NET_LISTEN_H
#define SITS_FRONT_NET_NET_LISTEN_H

#include "sits2026/status.h"

/* A bound, listening, non-blocking socket. host: a numeric address or a name; port 0: any free one. *bound_port gets the port.
 * SITS_IO names the option that is wrong: host_option or port_option. */
enum sits_status net_listen(const char *host, int port, const char *host_option, const char *port_option, int *fd, int *bound_port,
                            struct sits_error *err) SITS_MUST_CHECK;

/* A silent peer (power loss) sends no FIN: let the kernel find out within a minute. No delay of small writes. */
void net_prepare(int fd);

#endif
