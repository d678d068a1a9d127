/* A model cut over two processes with a device each (backend/nodes.h, NCCL between them): the same greedy ids as one process, or parting at
 * a near tie; and a process that is killed while steps run, which must end them within 10 s. Skipped where there are not two devices.
 * stories260K, against one device, comes from SITS_SHARED_DATA or ../shared/data; a synthetic model, whose ranks draw weights of their own,
 * is compared with two ranks of one process. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/nodes.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/runner.h"
#include "free_port.h"
#include "gpu_test.h"

enum { N_PROMPT = 20, N_NEW = 60, PAGES = 2 };
static const char secret[] = "a secret of the tests";

static struct nodes_options nodes_of(int32_t rank, int32_t port)
{
  return (struct nodes_options){.rank = rank, .n_ranks = 2, .address = "127.0.0.1", .port = port, .secret = secret,
                                .connect_timeout_us = 90000000};
}

/* Before this process touches a device. */
static pid_t fork_follower(const char *model, int32_t port)
{
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const struct nodes_options nodes = nodes_of(1, port);
  const struct runner_options options = {.model_path = model, .device = "cuda", .backend = {.device = 1, .nodes = &nodes}};
  struct sits_error err = {0};
  const enum sits_status status = runner_follow(&options, &err);
  if (status) fprintf(stderr, "follower: %s\n", err.text);
  _exit(status ? 1 : 0);
}

static bool open_runner(struct runner *runner, const char *model, int32_t n_ranks, const struct nodes_options *nodes)
{
  struct sits_error err = {0};
  const struct runner_options options = {
      .model_path = model, .device = "cuda", .kv_codec = "f16",
      .backend = {.max_batch_tokens = 512, .max_seqs = 8, .n_ranks = n_ranks, .nodes = nodes, .collective_timeout_ms = 3000}};
  enum sits_status status = runner_open(runner, &options, &err);
  if (!status) status = runner_kv_create(runner, PAGES, &err);
  if (status) printf("      %s: %s\n", model, err.text);
  return status == SITS_OK;
}

/* n tokens from position p0 on; the best of the last one's logits, and how far it is before the second. */
static enum sits_status step(struct runner *r, const int32_t *tokens, int32_t n, int32_t p0, int32_t *best, float *gap)
{
  int32_t positions[N_PROMPT], start[2] = {0, n}, kv_len[1] = {p0 + n}, row[1] = {n - 1}, table[PAGES] = {1, 0};
  for (int32_t i = 0; i < n; i++) positions[i] = p0 + i;
  const struct backend_batch batch = {.n_tokens = n, .n_seqs = 1, .n_rows = 1, .tokens = tokens, .positions = positions,
                                      .seq_start = start, .kv_len = kv_len, .block_table = table, .table_stride = PAGES, .row_token = row};
  struct backend_result result;
  enum sits_status status = r->vtable->submit(r->compiled, r->kv, &batch);
  if (!status) status = r->vtable->wait(r->compiled, &result);
  if (status) return status;
  float second = -INFINITY;
  *best = 0;
  for (int32_t i = 1; i < r->model->config.n_vocab; i++) {
    if (result.logits[i] > result.logits[*best]) second = result.logits[*best], *best = i;
    else if (result.logits[i] > second) second = result.logits[i];
  }
  *gap = result.logits[*best] - second;
  return SITS_OK;
}

static bool run_greedy(struct runner *r, int32_t *ids, float *gaps)
{
  int32_t prompt[N_PROMPT];
  for (int32_t i = 0; i < N_PROMPT; i++) prompt[i] = (i * 37 + 5) % r->model->config.n_vocab;
  if (step(r, prompt, N_PROMPT, 0, &ids[0], &gaps[0])) return false;
  for (int32_t i = 1; i < N_NEW; i++)
    if (step(r, &ids[i - 1], 1, N_PROMPT + i - 1, &ids[i], &gaps[i])) return false;
  return true;
}

static void run_model(const char *model, const char *name, int32_t n_ranks, pid_t child, int32_t port)
{
  int32_t one[N_NEW], two[N_NEW], same = 0;
  float gaps[N_NEW], gaps_two[N_NEW];
  struct runner runner;
  const struct nodes_options nodes = nodes_of(0, port);
  bool ok = open_runner(&runner, model, n_ranks, NULL) && run_greedy(&runner, one, gaps);
  runner_close(&runner);
  ok = ok && open_runner(&runner, model, 2, &nodes) && run_greedy(&runner, two, gaps_two);
  while (ok && same < N_NEW && one[same] == two[same]) same++;
  float mean = 0;
  for (int32_t i = 0; i < N_NEW; i++) mean += gaps[i] / N_NEW;
  verdict(ok && (same == N_NEW || gaps[same] < mean / 10), "%s over two processes: %d of %d ids equal, gap there %.4f of %.4f", name, same,
          N_NEW, ok && same < N_NEW ? (double)gaps[same] : 0., (double)mean);
  /* The follower dies between two steps; the next one must end. */
  int32_t best;
  float gap;
  const int64_t start_us = clock_monotonic_us();
  kill(child, SIGKILL);
  enum sits_status status = SITS_OK;
  for (int32_t i = 0; ok && i < 3 && status == SITS_OK; i++) status = step(&runner, two, 1, N_PROMPT + N_NEW + i, &best, &gap);
  const double seconds = (double)(clock_monotonic_us() - start_us) / 1e6;
  verdict(ok && status == SITS_DEVICE && seconds < 10 && runner.vtable->is_lost(runner.backend),
          "%s: a killed process ends steps after %.2f s", name, seconds);
  if (ok) runner_close(&runner);
  (void)waitpid(child, NULL, 0);
}

int main(void)
{
  char path[1024];
  const char *shared = getenv("SITS_SHARED_DATA"), *synthetic = "synthetic:llama3-1b";
  snprintf(path, sizeof path, "%s/models/stories260K/stories260K.gguf", shared ? shared : "../shared/data");
  const bool has_stories = access(path, R_OK) == 0;
  const int32_t ports[2] = {free_port(), free_port()};
  const pid_t first = has_stories ? fork_follower(path, ports[0]) : -1, second = fork_follower(synthetic, ports[1]);
  int n_devices = 0;
  if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices < 2) {
    if (first > 0) kill(first, SIGKILL);
    kill(second, SIGKILL);
    printf("skipped: two devices are needed\n");
    return 77;
  }
  (void)gpu_open();
  if (has_stories) run_model(path, "stories260K", 1, first, ports[0]);
  run_model(synthetic, "llama3-1b shapes", 2, second, ports[1]);
  return gpu_finish();
}
