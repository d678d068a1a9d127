/* See net_work.h. */
#include "front/net/net_work.h"

#include <string.h>

static void *work_main(void *argument)
{
  struct net_work *work = argument;
  pthread_mutex_lock(&work->mutex);
  for (;;) {
    while (!work->first && !work->is_stopping) pthread_cond_wait(&work->wake, &work->mutex);
    struct net_job *job = work->first;
    if (!job) break;
    work->first = job->next;
    if (!work->first) work->last = NULL;
    work->n_jobs--;
    pthread_mutex_unlock(&work->mutex);
    job->run(job->owner);
    pthread_mutex_lock(&work->mutex);
  }
  pthread_mutex_unlock(&work->mutex);
  return NULL;
}

void net_work_init(struct net_work *work)
{
  *work = (struct net_work){.first = NULL};
  pthread_mutex_init(&work->mutex, NULL);
  pthread_cond_init(&work->wake, NULL);
}

enum sits_status net_work_start(struct net_work *work, int n_workers, struct sits_error *err)
{
  for (int i = 0; i < n_workers && i < NET_MAX_WORKERS; i++) {
    int failed = pthread_create(&work->workers[i], NULL, work_main, work);
    if (failed) return sits_fail(err, SITS_INTERNAL, "a worker could not be started: %s", strerror(failed));
    work->n_workers++;
  }
  return SITS_OK;
}

bool net_work_push(struct net_work *work, struct net_job *job)
{
  pthread_mutex_lock(&work->mutex);
  bool has_room = work->n_jobs < NET_MAX_JOBS && !work->is_stopping;
  if (has_room) {
    job->next = NULL;
    if (work->last) work->last->next = job;
    else work->first = job;
    work->last = job;
    work->n_jobs++;
    pthread_cond_signal(&work->wake);
  }
  pthread_mutex_unlock(&work->mutex);
  return has_room;
}

void net_work_stop(struct net_work *work)
{
  pthread_mutex_lock(&work->mutex);
  work->is_stopping = true;
  pthread_cond_broadcast(&work->wake);
  pthread_mutex_unlock(&work->mutex);
  for (int i = 0; i < work->n_workers; i++) pthread_join(work->workers[i], NULL);
  work->n_workers = 0;
}

void net_work_fini(struct net_work *work)
{
  pthread_cond_destroy(&work->wake);
  pthread_mutex_destroy(&work->mutex);
}
