/* Telling systemd how the service is doing: sd_notify's protocol (readiness, stopping, watchdog) over the socket that NOTIFY_SOCKET names.
 * No library: one datagram a message, https://www.freedesktop.org/software/systemd/man/sd_notify.html. Without the variables nothing is
 * sent. One owner thread. */
#ifndef SITS_DAEMON_NOTIFY_H
#define SITS_DAEMON_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/un.h>

struct notify {
  int fd;                       /* -1: no one listens */
  struct sockaddr_un address;
  unsigned n_address;
  int64_t interval_us;          /* between two messages to the watchdog: half of what it waits; 0: there is none */
  int64_t fed_us;               /* monotonic: of the last one */
};

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, and takes them from the environment. */
void notify_init(struct notify *notify);
void notify_fini(struct notify *notify);
/* "READY=1\nSTATUS=serving", "STOPPING=1", ... */
void notify_send(const struct notify *notify, const char *state);
/* Feed the watchdog when it is due and is_alive; call at least every interval_us. */
void notify_feed(struct notify *notify, bool is_alive);

#endif
