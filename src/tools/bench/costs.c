/* `sits2026-bench costs`: the constants by which the stitcher weighs fusions, measured on this machine (graph/graph_costs.h), beside those
 * that the backend assumes; --out keeps them for `throughput --print-plan --plan-costs FILE`. */
#include <stdio.h>

#include "backend/backend.h"
#include "graph/graph_costs.h"
#include "tools/bench/bench.h"

struct costs_options { const char *device, *isa, *out; int64_t threads; };

#define AT(field) offsetof(struct costs_options, field)
static const struct option_spec specs[] = {
    {"device", OPTION_ENUM, AT(device), "auto", 0, 0, "", 0, "auto|cpu|cuda", "Options", "Backend."},
    {"isa", OPTION_ENUM, AT(isa), "auto", 0, 0, "", 0, "auto|scalar|avx2|avx512", "Options", "CPU instruction set."},
    {"threads", OPTION_INT, AT(threads), "0", 0, 1024, "threads", 0, NULL, "Options", "CPU threads; 0 = one per core."},
    {"out", OPTION_STRING, AT(out), "", 0, 0, "", 0, NULL, "Options", "File for the costs."},
};

int bench_costs(int argc, char **argv)
{
  struct costs_options options = {0};
  struct option_set set;
  struct sits_error err = {0};
  int exit_status;
  if (!bench_parse("costs", "what plain ops cost on this machine", &set, specs, sizeof specs / sizeof specs[0], &options, argc, argv,
                   &exit_status))
    return exit_status;
  const struct backend_vtable *vtable = backend_find(options.device);
  struct backend *backend = NULL;
  struct backend_costs costs;
  enum sits_status status = SITS_OK;
  if (!vtable) status = sits_fail_param(&err, SITS_UNSUPPORTED, "device", "device '%.32s' is not here", options.device);
  if (!status) {
    const struct backend_options open = {.n_threads = (int32_t)options.threads, .isa = options.isa, .max_seqs = 1,
                                         .max_batch_tokens = vtable->costs.tokens > 0 ? vtable->costs.tokens : 1};
    status = vtable->open(&open, &backend, &err);
  }
  if (!status) status = graph_costs_measure(vtable, backend, &costs, &err);
  if (!status) {
    const struct backend_costs *assumed = &vtable->costs;
    printf("%s, steps of %d tokens\n%-28s %10s %10s\n", vtable->name, costs.tokens, "", "measured", "assumed");
    printf("%-28s %10.1f %10.1f\n", "an op, ns", (double)costs.op_ns, (double)assumed->op_ns);
    printf("%-28s %10.4f %10.4f\n", "a byte read or written, ns", (double)costs.byte_ns, (double)assumed->byte_ns);
    printf("%-28s %10.4f %10.4f\n", "normalising a value, ns", (double)costs.norm_ns, (double)assumed->norm_ns);
    if (options.out) status = graph_costs_save(options.out, vtable, &costs, &err);
  }
  if (status) fprintf(stderr, "sits2026-bench costs: %s\n", err.text);
  if (backend) vtable->close(backend);
  option_set_fini(&set);
  return status ? 1 : 0;
}
