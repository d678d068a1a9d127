/* A worker pool: what is too slow for a thread that serves connections (JSON of megabytes, templates, tokenizers) happens here, in order of
 * arrival. Jobs are part of what they belong to, so pushing needs no memory.
 *
 * Life: net_work_init -> net_work_start -> pushes -> net_work_stop (what is queued is run first) -> net_work_fini. */
#ifndef SITS_FRONT_NET_NET_WORK_H
#define SITS_FRONT_NET_NET_WORK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "sits2026/status.h"

#define NET_MAX_WORKERS 8
#define NET_MAX_JOBS 8192

/* In one queue once at a time; must live until run returns. */
struct net_job { void (*run)(void *owner); void *owner; struct net_job *next; };

struct net_work {
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  struct net_job *first, *last;      /* [mutex] */
  int64_t n_jobs;                    /* [mutex] */
  bool is_stopping;                  /* [mutex] */
  pthread_t workers[NET_MAX_WORKERS];/* [owner] */
  int n_workers;                     /* [owner] */
};

void net_work_init(struct net_work *work);
/* On failure some workers may run; net_work_stop ends them. */
enum sits_status net_work_start(struct net_work *work, int n_workers, struct sits_error *err) SITS_MUST_CHECK;
bool net_work_push(struct net_work *work, struct net_job *job); /* false: the queue is full, or stopped */
void net_work_stop(struct net_work *work);                      /* joins; twice is fine */
void net_work_fini(struct net_work *work);

#endif
