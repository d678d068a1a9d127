/* The watcher: one thread with an epoll set of the sockets whose requests are being served.
 *
 * libmicrohttpd does not look at a suspended connection, so a client that leaves while it waits would go unnoticed until the next write.
 * The set holds each socket with EPOLLRDHUP once; a hang-up ends the request's call within a step. So does the end of the client's sending
 * side where a whole answer is made, for nothing can be written that would tell who reads on from who has left. A stream is sent a comment:
 * who has left resets the connection, who reads on gets the rest. Events carry the request's number, never a pointer. A few times a second
 * the thread also sends a comment on streams that have been silent for long, so that proxies and clients see life, and on silent ones whose
 * client reads on, for it may leave later; and cuts requests whose body takes too long to arrive.
 *
 * A request whose body is still expected is watched too. libmicrohttpd polls edge-triggered and takes a read that fills less than its
 * buffer for the last one: the end of a connection that came together with the bytes before it is never looked at, and the request would
 * stay until the idle timeout. Shutting the reading side down, which the peer has ended anyway, makes a new edge; what has arrived is still
 * read. The end that came together with the last bytes of a request is shown in the same way once the answer has been sent. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "front/http/http_internal.h"

#define TICK_MS 250
#define STOP_NUMBER 0 /* request numbers start at 1 */

static struct http_request **bucket(struct http_server *server, uint64_t number) { return &server->watched[number % HTTP_WATCH_BUCKETS]; }

/* With a reference, or NULL when it is not watched any more. */
static struct http_request *find(struct http_server *server, uint64_t number)
{
  pthread_mutex_lock(&server->mutex);
  struct http_request *request = *bucket(server, number);
  while (request && request->number != number) request = request->hash_next;
  if (request) http_request_ref(request);
  pthread_mutex_unlock(&server->mutex);
  return request;
}

void http_watch_probe_locked(struct http_request *request)
{
  if (request->is_finished || request->is_gone) return;
  buf_append_text(&request->out, ": ping\n\n");
  http_wake_locked(request, HTTP_WAIT_BYTES);
}

static void ping_locked(struct http_request *request, int64_t now_us)
{
  int64_t after_us = request->server->options.ping_us;
  if (request->is_half_closed) after_us = TICK_MS * 1000; /* its leaving sends nothing any more: only an answer to bytes tells it */
  if (request->wait != HTTP_WAIT_BYTES || after_us == 0 || now_us - request->last_write_us < after_us) return;
  http_watch_probe_locked(request);
}

/* Make libmicrohttpd read again. The edge may come before a read that is under way, so it is made at each tick until the request ends. */
static void nudge_locked(struct http_request *request)
{
  if (request->has_hung_up && !request->is_begun && !request->is_completed) shutdown(request->fd, SHUT_RD);
}

/* The sending side of a client has ended whose request needs the engine. Whether that ends it: not if its answer is a stream, or if it is
 * not known yet what it is (attach_call looks again). From now on the set tells of resets only. */
static bool ends_half_closed_locked(struct http_request *request)
{
  struct epoll_event event = {.events = EPOLLONESHOT, .data.u64 = request->number};
  request->is_half_closed = true;
  if (request->has_reply && !request->is_stream) return true;
  if (!request->is_completed) epoll_ctl(request->server->epoll_fd, EPOLL_CTL_MOD, request->fd, &event);
  if (request->has_reply) http_watch_probe_locked(request);
  return false;
}

/* The client left, or has ended its sending side. A request that is not complete yet is completed or dropped by who reads it, and one that
 * needs no engine is answered. */
static void hung_up(struct http_request *request, bool is_reset)
{
  pthread_mutex_lock(&request->mutex);
  bool ends = request->is_begun && (http_routes[request->route].kind & API_GENERATE);
  request->has_hung_up = !request->is_begun;
  nudge_locked(request);
  if (ends && !is_reset) ends = ends_half_closed_locked(request);
  pthread_mutex_unlock(&request->mutex);
  if (ends) http_request_abandon(request);
}

/* A body that trickles in keeps its connection from idling; the whole request has as long as an idle connection has. */
static void cut_late_body_locked(struct http_request *request, int64_t now_us)
{
  if (request->is_begun || request->is_completed || request->response) return;
  if (now_us - request->started_us > request->server->options.idle_timeout_s * 1000000) shutdown(request->fd, SHUT_RDWR);
}

static void tick(struct http_server *server)
{
  int64_t now_us = clock_monotonic_us();
  pthread_mutex_lock(&server->mutex);
  for (struct http_request *request = server->requests; request; request = request->next) {
    pthread_mutex_lock(&request->mutex);
    ping_locked(request, now_us);
    cut_late_body_locked(request, now_us);
    nudge_locked(request);
    pthread_mutex_unlock(&request->mutex);
  }
  pthread_mutex_unlock(&server->mutex);
}

static void *watch_main(void *argument)
{
  struct http_server *server = argument;
  int64_t next_tick_us = clock_monotonic_us() + TICK_MS * 1000;
  for (;;) {
    struct epoll_event events[256];
    int n = epoll_wait(server->epoll_fd, events, sizeof events / sizeof *events, TICK_MS);
    for (int i = 0; i < n; i++) {
      if (events[i].data.u64 == STOP_NUMBER) return NULL;
      struct http_request *request = find(server, events[i].data.u64);
      if (!request) continue;
      hung_up(request, events[i].events & (EPOLLHUP | EPOLLERR));
      http_request_unref(request);
    }
    if (clock_monotonic_us() >= next_tick_us) {
      tick(server);
      next_tick_us = clock_monotonic_us() + TICK_MS * 1000;
    }
  }
}

enum sits_status http_watch_start(struct http_server *server, struct sits_error *err)
{
  server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  server->stop_fd = eventfd(0, EFD_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.u64 = STOP_NUMBER};
  if (server->epoll_fd < 0 || server->stop_fd < 0 || epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->stop_fd, &event))
    return sits_fail(err, SITS_INTERNAL, "the watcher of connections could not be set up: %s", strerror(errno));
  int failed = pthread_create(&server->watcher, NULL, watch_main, server);
  if (failed) return sits_fail(err, SITS_INTERNAL, "the watcher of connections could not be started: %s", strerror(failed));
  server->has_watcher = true;
  return SITS_OK;
}

void http_watch_add(struct http_request *request)
{
  struct http_server *server = request->server;
  if (!request->is_watched) {
    pthread_mutex_lock(&server->mutex);
    struct http_request **head = bucket(server, request->number);
    request->hash_next = *head;
    *head = request;
    pthread_mutex_unlock(&server->mutex);
    request->is_watched = true;
  }
  struct epoll_event event = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = request->number};
  if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, request->fd, &event) && errno == EEXIST)
    epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, request->fd, &event);
}

void http_watch_remove(struct http_request *request)
{
  struct http_server *server = request->server;
  if (!request->is_watched) return;
  request->is_watched = false;
  epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, request->fd, NULL);
  pthread_mutex_lock(&server->mutex);
  struct http_request **link = bucket(server, request->number);
  while (*link && *link != request) link = &(*link)->hash_next;
  if (*link) *link = request->hash_next;
  pthread_mutex_unlock(&server->mutex);
}

void http_watch_show_end(int fd)
{
  char byte;
  if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) shutdown(fd, SHUT_RD);
}

void http_watch_stop(struct http_server *server)
{
  if (server->has_watcher) {
    uint64_t one = 1;
    ssize_t written = write(server->stop_fd, &one, sizeof one);
    if (written == (ssize_t)sizeof one) pthread_join(server->watcher, NULL);
    server->has_watcher = false;
  }
  if (server->epoll_fd >= 0) close(server->epoll_fd);
  if (server->stop_fd >= 0) close(server->stop_fd);
  server->epoll_fd = server->stop_fd = -1;
}
