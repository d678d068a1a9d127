/* What a failing device does to its owner: set-up that runs out of memory at every allocation, a refused launch, a kernel that traps.
 *
 * Each case is a child process, because a trap ends the device for the process that had it; the parent never touches the device. In builds
 * without SITS_DEBUG_CHECKS nothing fails on demand, and the program skips itself.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/runner.h"

enum { MOST_ALLOCATIONS = 400, STEPS = 6, FAULTY = 3 };
enum { GOOD = 0, BAD = 1, REFUSED = 2, NO_DEVICE = 77 };

static const struct runner_options options = {
    .model_path = "synthetic:tiny", .device = "cuda", .kv_codec = "int4",
    .backend = {.max_batch_tokens = 64, .max_seqs = 4, .prefill_weights = "resident"}};

static enum sits_status one_step(struct runner *runner, int32_t position)
{
  const int32_t token = 5, start[2] = {0, 1}, kv_len = position + 1, page = 0, row = 0;
  const struct backend_batch batch = {.n_tokens = 1, .n_seqs = 1, .n_rows = 1, .tokens = &token, .positions = &position,
                                      .seq_start = start, .kv_len = &kv_len, .block_table = &page, .table_stride = 1, .row_token = &row};
  struct backend_result result;
  const enum sits_status status = runner->vtable->submit(runner->compiled, runner->kv, &batch);
  return status ? status : runner->vtable->wait(runner->compiled, &result);
}

/* Open; REFUSED when that fails in words, and half-built things are given back. */
static int open_and_close(void)
{
  struct runner runner = {0};
  struct sits_error err = {0};
  enum sits_status status = runner_open(&runner, &options, &err);
  if (!status) status = runner_kv_create(&runner, 4, &err);
  if (!status) status = one_step(&runner, 0);
  runner_close(&runner);
  if (!status) return GOOD;
  if (status == SITS_NOMEM && strlen(err.text) > 10) return REFUSED;
  printf("      status %d, \"%s\"\n", status, err.text);
  return BAD;
}

/* Steps before the fault work, the faulty one and all later ones answer SITS_DEVICE, and closing returns. */
static int run_into_fault(void)
{
  struct runner runner = {0};
  struct sits_error err = {0};
  int bad = runner_open(&runner, &options, &err) || runner_kv_create(&runner, 4, &err);
  for (int32_t i = 0; i < STEPS && !bad; i++) {
    const enum sits_status status = one_step(&runner, i), want = i + 1 < FAULTY ? SITS_OK : SITS_DEVICE;
    if (status != want) printf("      step %d: status %d, not %d\n", i + 1, status, want), bad = 1;
  }
  if (err.text[0]) printf("      %s\n", err.text);
  runner_close(&runner);
  return bad ? BAD : GOOD;
}

static int has_device(void)
{
  const struct backend_vtable *cuda = backend_find("cuda");
  struct backend *backend = NULL;
  struct sits_error err = {0};
  const struct backend_options o = {.max_batch_tokens = 1, .max_seqs = 1};
  if (cuda == NULL || cuda->open(&o, &backend, &err)) return NO_DEVICE;
  cuda->close(backend);
  return GOOD;
}

/* Exit status of `what` in a child with the fault in its environment; BAD when it died of a signal. */
static int child(int (*what)(void), const char *fault)
{
  fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    if (fault) setenv("SITS_CUDA_FAULT", fault, 1);
    alarm(120); /* nothing may hang */
    const int status = what();
    fflush(stdout);
    _exit(status);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) < 0) return BAD;
  if (WIFSIGNALED(status)) printf("      killed by signal %d\n", WTERMSIG(status));
  return WIFEXITED(status) ? WEXITSTATUS(status) : BAD;
}

int main(void)
{
#ifndef SITS_DEBUG_CHECKS
  printf("SKIP  faults are injected in builds with SITS_DEBUG_CHECKS only\n");
  return NO_DEVICE;
#endif
  char fault[32];
  int n_refused = 0, bad = 0, status = child(has_device, NULL);
  if (status == NO_DEVICE) printf("SKIP  no usable device\n");
  if (status != GOOD) return status;
  /* Every allocation in turn, until one number is beyond the last; the early ones singly, later ones (a program has one for each vector
   * of each layer) in strides. */
  for (int i = 1; i < MOST_ALLOCATIONS; i += i < 12 ? 1 : 7) {
    snprintf(fault, sizeof fault, "alloc:%d", i);
    status = child(open_and_close, fault);
    if (status == GOOD) break;
    n_refused += status == REFUSED;
    if (status != REFUSED) printf("FAIL  %s: exit status %d\n", fault, status), bad++;
  }
  printf("%s  %d refused allocations end in a refusal each, and one beyond the last in none\n", bad ? "FAIL" : "ok  ", n_refused);
  if (status != GOOD || n_refused < 20) printf("FAIL  the last allocation was not reached\n"), bad++;
  for (int trap = 0; trap < 2; trap++) {
    snprintf(fault, sizeof fault, "%s:%d", trap ? "trap" : "launch", FAULTY);
    status = child(run_into_fault, fault);
    printf("%s  %s: exit status %d\n", status == GOOD ? "ok  " : "FAIL", fault, status);
    bad += status != GOOD;
  }
  return bad ? 1 : 0;
}
