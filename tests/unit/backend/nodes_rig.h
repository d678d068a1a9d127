/* What the tests of models cut over processes share: a small model, where processes of this machine find each other, and children. */
#ifndef SITS_TESTS_NODES_RIG_H
#define SITS_TESTS_NODES_RIG_H

#include "rig.h"
#include "synth.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "backend/nodes_step.h"
#include "free_port.h"

#define SECRET "a secret of the tests"

static const struct synth_shape shape = {"nodes", 2, 64, 8, 4, 16, 96, 52, 0, 0, true, false, false, true};
enum { MAX_TOKENS = 96, N_PAGES = 4 };

static struct nodes_options options_of(int32_t rank, int32_t n_ranks, int32_t port)
{
  return (struct nodes_options){.rank = rank, .n_ranks = n_ranks, .address = "127.0.0.1", .port = port, .secret = SECRET,
                                .connect_timeout_us = 60000000};
}

static enum sits_status make_program(void *user, int32_t rank, int32_t n_ranks, struct program **out, struct sits_error *err)
{
  return program_for_rank(user, backend_find("cpu")->fusions, NULL, rank, n_ranks, out, err);
}

static int exit_of(pid_t pid)
{
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#endif
