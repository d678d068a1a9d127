/* What ThreadSanitizer makes of a completion queue of gRPC's C core, with none of our code: jobs are written here, started as empty
 * batches, and read by the thread that takes their tags. The library orders the two (a batch's completion comes after its start), but it
 * was not compiled for the sanitizer, which therefore reports each job as a race. With ANNOTATE the hand-over is told to it in the two
 * places where src/front/grpc tells it. With PLANT a job is also written after its start: a real race, which must be reported all the same.
 */
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef ANNOTATE
#include <sanitizer/tsan_interface.h>
#define TAG_OUT(tag) __tsan_release(tag)
#define TAG_BACK(tag) __tsan_acquire(tag)
#else
#define TAG_OUT(tag) ((void)(tag))
#define TAG_BACK(tag) ((void)(tag))
#endif

enum { JOBS = 20000 };
struct job { int value; };
static struct job jobs[JOBS];
static grpc_completion_queue *queue;

static void *take(void *sum)
{
  for (;;) {
    grpc_event event = grpc_completion_queue_next(queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    if (event.type == GRPC_QUEUE_SHUTDOWN) return NULL;
    struct job *job = event.tag;
    TAG_BACK(job);
    *(long *)sum += job->value;
  }
}

int main(void)
{
  long sum = 0;
  pthread_t thread;
  grpc_init();
  queue = grpc_completion_queue_create_for_next(NULL);
  grpc_channel *channel = grpc_channel_create("127.0.0.1:1", grpc_insecure_credentials_create(), NULL);
  grpc_call *call = grpc_channel_create_call(channel, NULL, 0, queue, grpc_slice_from_static_string("/a"), NULL,
                                             gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
  if (pthread_create(&thread, NULL, take, &sum)) return 2;
  for (int i = 0; i < JOBS; i++) {
    jobs[i].value = i;
    TAG_OUT(&jobs[i]);
    if (grpc_call_start_batch(call, NULL, 0, &jobs[i], NULL)) return 2;
#ifdef PLANT
    jobs[i].value = i;
#endif
  }
  grpc_call_unref(call);
  grpc_channel_destroy(channel);
  grpc_completion_queue_shutdown(queue);
  pthread_join(thread, NULL);
  grpc_completion_queue_destroy(queue);
  grpc_shutdown();
  printf("%ld\n", sum);
  return 0;
}
