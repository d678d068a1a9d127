/* See notify.h. */
#include "daemon/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

static void find_watchdog(struct notify *notify)
{
  const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
  long long us = usec ? strtoll(usec, NULL, 10) : 0;
  if (us <= 0 || (pid && strtoll(pid, NULL, 10) != getpid())) return; /* meant for another process */
  notify->interval_us = us / 2 > 1000 ? us / 2 : 1000;
}

void notify_init(struct notify *notify)
{
  *notify = (struct notify){.fd = -1, .address.sun_family = AF_UNIX};
  const char *path = getenv("NOTIFY_SOCKET");
  size_t n = path ? strlen(path) : 0;
  if (n > 1 && n < sizeof notify->address.sun_path && (path[0] == '/' || path[0] == '@')) {
    memcpy(notify->address.sun_path, path, n);
    if (path[0] == '@') notify->address.sun_path[0] = '\0'; /* the abstract namespace */
    notify->n_address = (unsigned)(offsetof(struct sockaddr_un, sun_path) + n);
    notify->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (notify->fd < 0) log_warn("daemon", "no socket to tell systemd: %s", strerror(errno));
    else find_watchdog(notify);
  }
  unsetenv("NOTIFY_SOCKET");
  unsetenv("WATCHDOG_USEC");
  unsetenv("WATCHDOG_PID");
}

void notify_fini(struct notify *notify)
{
  if (notify->fd >= 0) close(notify->fd);
  notify->fd = -1;
}

void notify_send(const struct notify *notify, const char *state)
{
  if (notify->fd < 0) return;
  ssize_t n = sendto(notify->fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&notify->address, notify->n_address);
  if (n < 0) log_warn("daemon", "systemd cannot be told '%s': %s", state, strerror(errno));
}

void notify_feed(struct notify *notify, bool is_alive)
{
  int64_t now_us = clock_monotonic_us();
  if (!notify->interval_us || !is_alive || now_us - notify->fed_us < notify->interval_us) return;
  notify->fed_us = now_us;
  notify_send(notify, "WATCHDOG=1");
}
