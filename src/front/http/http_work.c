/* The worker pool: what is too slow for an event loop's thread (JSON of megabytes, templates, tokenizers) happens here, in order of
 * arrival. A job holds a reference to its request. */
#include <string.h>

#include "base/mem.h"
#include "front/http/http_internal.h"

#define MAX_JOBS 8192

static void *work_main(void *argument)
{
  struct http_server *server = argument;
  pthread_mutex_lock(&server->work_mutex);
  for (;;) {
    while (!server->jobs && !server->is_work_stopping) pthread_cond_wait(&server->work_wake, &server->work_mutex);
    struct http_job *job = server->jobs;
    if (!job) break;
    server->jobs = job->next;
    if (!server->jobs) server->last_job = NULL;
    server->n_jobs--;
    metrics_reading(server->metrics, -1);
    pthread_mutex_unlock(&server->work_mutex);
    http_routes[job->request->route].answer(job->request);
    http_request_unref(job->request);
    mem_free(job);
    pthread_mutex_lock(&server->work_mutex);
  }
  pthread_mutex_unlock(&server->work_mutex);
  return NULL;
}

enum sits_status http_work_start(struct http_server *server, struct sits_error *err)
{
  int n = server->options.n_workers > 0 ? server->options.n_workers : 2;
  server->workers = mem_calloc((size_t)n, sizeof *server->workers);
  if (!server->workers) return sits_fail(err, SITS_NOMEM, "no memory for the HTTP workers");
  for (int i = 0; i < n; i++) {
    int failed = pthread_create(&server->workers[i], NULL, work_main, server);
    if (failed) return sits_fail(err, SITS_INTERNAL, "an HTTP worker could not be started: %s", strerror(failed));
    server->n_workers++;
  }
  return SITS_OK;
}

bool http_work_push(struct http_server *server, struct http_request *request)
{
  struct http_job *job = mem_alloc(sizeof *job);
  if (!job) return false;
  *job = (struct http_job){.request = request};
  pthread_mutex_lock(&server->work_mutex);
  bool has_room = server->n_jobs < MAX_JOBS && !server->is_work_stopping;
  if (has_room) {
    http_request_ref(request);
    if (server->last_job) server->last_job->next = job;
    else server->jobs = job;
    server->last_job = job;
    server->n_jobs++;
    metrics_reading(server->metrics, 1);
    pthread_cond_signal(&server->work_wake);
  }
  pthread_mutex_unlock(&server->work_mutex);
  if (!has_room) mem_free(job);
  return has_room;
}

void http_work_stop(struct http_server *server)
{
  pthread_mutex_lock(&server->work_mutex);
  server->is_work_stopping = true;
  pthread_cond_broadcast(&server->work_wake);
  pthread_mutex_unlock(&server->work_mutex);
  for (int i = 0; i < server->n_workers; i++) pthread_join(server->workers[i], NULL);
  mem_free(server->workers);
  server->workers = NULL;
  server->n_workers = 0;
}
