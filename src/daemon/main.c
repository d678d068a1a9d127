/* sits2026d: parse options, listen, load, serve until SIGTERM or SIGINT, drain, stop.
 *
 * Signals are blocked in every thread and taken here with sigtimedwait. The first SIGTERM or SIGINT starts the drain, a second one ends it
 * at once. SIGHUP has keys and certificates read again. SIGUSR1 is how the loading thread says that it is done. Exit status: 0 after a stop
 * that was asked for, 1 when starting failed.
 * Of the processes of a multi-node model only the first serves; the others follow it (daemon/ranks.h) and end with it. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "daemon/actions.h"
#include "daemon/notify.h"
#include "daemon/ranks.h"
#include "daemon/secrets.h"
#include "daemon/service.h"

struct loader {
  struct service *service;
  pthread_t main_thread;
  atomic_bool is_done;      /* a SIGUSR1 from elsewhere must not make the main thread wait for it */
  enum sits_status status;  /* valid after the join */
  struct sits_error err;
};

static void *load_main(void *argument)
{
  struct loader *loader = argument;
  loader->status = service_load(loader->service, &loader->err);
  atomic_store(&loader->is_done, true);
  pthread_kill(loader->main_thread, SIGUSR1);
  return NULL;
}

static enum log_level level_of(const char *name)
{
  static const char *const names[] = {"debug", "info", "warn", "error"};
  for (int i = 0; i < 4; i++)
    if (!strcmp(name, names[i])) return (enum log_level)i;
  return LOG_INFO;
}

/* Each stream needs a descriptor; take what the hard limit gives. */
static void raise_descriptor_limit(int64_t wanted)
{
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= (rlim_t)wanted) return;
  limit.rlim_cur = limit.rlim_max < (rlim_t)wanted ? limit.rlim_max : (rlim_t)wanted;
  if (setrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur < (rlim_t)wanted)
    log_warn("daemon", "only %llu file descriptors are allowed, max-connections wants %lld", (unsigned long long)limit.rlim_cur,
             (long long)wanted);
}

/* Wait for a signal; 0 when the time is up. timeout_us < 0: for ever. */
static int wait_signal(const sigset_t *set, int64_t timeout_us)
{
  struct timespec timeout = {.tv_sec = timeout_us / 1000000, .tv_nsec = timeout_us % 1000000 * 1000};
  int signal_number;
  do signal_number = timeout_us < 0 ? sigwaitinfo(set, NULL) : sigtimedwait(set, NULL, &timeout);
  while (signal_number < 0 && timeout_us < 0);
  return signal_number > 0 ? signal_number : 0;
}

static void drain(struct service *service, const sigset_t *set, double grace_s, struct notify *notify)
{
  log_info("daemon", "draining: %lld requests in flight, at most %.1f s", (long long)api_n_active(service->api), grace_s);
  notify_send(notify, "STOPPING=1\nSTATUS=draining");
  service_drain(service);
  int64_t end_us = clock_monotonic_us() + (int64_t)(grace_s * 1e6);
  while (clock_monotonic_us() < end_us && !service_wait_idle(service, 20000)) {
    notify_feed(notify, health_is_live(&service->health));
    int signal_number = wait_signal(set, 0);
    if (signal_number == SIGTERM || signal_number == SIGINT) {
      log_info("daemon", "second signal: ending what is left");
      break;
    }
  }
}

/* What would not end may still use what it was given: leave it all to the kernel. */
static void close_or_leave(struct service *service)
{
  if (service_close(service)) return;
  log_error("daemon", "not everything could be stopped");
  service_leave(service);
  _exit(1);
}

/* 0 or 1: the exit status. */
static int serve(const struct options *options)
{
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGUSR1);
  sigaddset(&set, SIGHUP);
  sigaddset(&set, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  raise_descriptor_limit(options->max_connections + (options->grpc_port ? options->grpc_max_connections : 0) + 256);
  static struct service service;
  struct notify notify;
  notify_init(&notify); /* before any thread: it changes the environment */
  struct loader loader = {.service = &service, .main_thread = pthread_self()};
  pthread_t thread;
  enum sits_status status = service_open(&service, options, &loader.err);
  int failed = status ? 0 : pthread_create(&thread, NULL, load_main, &loader);
  if (failed) status = sits_fail(&loader.err, SITS_INTERNAL, "no thread to load the model: %s", strerror(failed));
  if (status) {
    log_error("daemon", "cannot start: %s", loader.err.text);
    close_or_leave(&service);
    return 1;
  }
  bool is_loaded = false;
  int signal_number;
  while ((signal_number = wait_signal(&set, notify.interval_us ? notify.interval_us / 2 : -1)) != SIGTERM && signal_number != SIGINT) {
    notify_feed(&notify, health_is_live(&service.health));
    if (signal_number == SIGHUP) service_reload(&service);
    if (signal_number == SIGUSR2) service_wedge(&service);
    if (signal_number != SIGUSR1 || is_loaded || !atomic_load(&loader.is_done)) continue;
    pthread_join(thread, NULL);
    if (loader.status) {
      health_set(&service.health, HEALTH_FAILED);
      log_error("daemon", "cannot load the model: %s", loader.err.text);
      close_or_leave(&service);
      return 1;
    }
    is_loaded = true;
    notify_send(&notify, "READY=1\nSTATUS=serving");
  }
  if (!is_loaded) { /* nothing is served yet and reading a model cannot be interrupted: there is nothing to drain */
    service_leave(&service);
    log_info("daemon", "stopped while loading");
    _exit(0);
  }
  drain(&service, &set, options->shutdown_timeout_s, &notify);
  close_or_leave(&service);
  notify_fini(&notify);
  log_info("daemon", "stopped");
  return 0;
}

int main(int argc, char **argv)
{
  static struct options options;
  struct option_set set;
  struct sits_error err = {0};
  enum options_action action;
  if (options_load(&options, &set, argc, argv, &action, &err)) {
    fprintf(stderr, "sits2026d: %s\nTry sits2026d --help.\n", err.text);
    return 1;
  }
  log_set_level(level_of(options.log_level));
  json_object_seed(0); /* before any thread */
  int result;
  if (action == OPTIONS_RUN) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit on the size of files is a write that fails, as a full disk is */
    secrets_check(&options);
  }
  if (action != OPTIONS_RUN) result = action_run(action, &options, &set);
  else result = ranks_follows(&options) ? ranks_follow(&options) : serve(&options);
  option_set_fini(&set);
  return result;
}
