/* Costs of ops: measured on the CPU they are those of a machine, the file gives them back, and what is wrong in one is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"
#include "graph/graph_costs.h"

static char path[64];

static void write_text(const char *text)
{
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
  assert_int_equal(fclose(file), 0);
}

static void measured_and_kept(void **state)
{
  (void)state;
  const struct backend_vtable *cpu = backend_find("cpu");
  const struct backend_options options = {.n_threads = 2, .max_batch_tokens = 4, .max_seqs = 1};
  struct backend *backend;
  struct backend_costs costs, back;
  struct sits_error err = {0};
  if (cpu->open(&options, &backend, &err)) fail_msg("%s", err.text);
  if (graph_costs_measure(cpu, backend, &costs, &err)) fail_msg("%s", err.text);
  cpu->close(backend);
  assert_true(costs.op_ns >= 1 && costs.op_ns < 1e8F);
  assert_true(costs.byte_ns >= 0 && costs.byte_ns < 1e3F && costs.norm_ns >= 0 && costs.norm_ns < 1e4F);
  assert_true(costs.norm_repeats == cpu->costs.norm_repeats && costs.f32_fusions == cpu->costs.f32_fusions);
  if (graph_costs_save(path, cpu, &costs, &err)) fail_msg("%s", err.text);
  if (graph_costs_load(path, cpu, &back, &err)) fail_msg("%s", err.text);
  assert_memory_equal(&costs, &back, sizeof costs);
  assert_int_equal(graph_costs_save("/nowhere/costs.json", cpu, &costs, &err), SITS_IO);
  assert_non_null(strstr(err.text, "/nowhere/costs.json"));
}

static void mistakes_are_named(void **state)
{
  (void)state;
  static const struct { const char *text, *param; enum sits_status status; } cases[] = {
      {"{\"device\": \"cpu\", \"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 0}", NULL, SITS_OK},
      {"{\"device\": \"cuda\", \"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 0}", "device", SITS_CONFIG},
      {"{\"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 0}", "device", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 0, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 0}", "tokens", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 1.5, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 0}", "tokens", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 1, \"op_ns\": 0, \"byte_ns\": 0.1, \"norm_ns\": 0}", "op_ns", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": -1, \"norm_ns\": 0}", "byte_ns", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": \"1\", \"norm_ns\": 0}", "byte_ns", SITS_CONFIG},
      {"{\"device\": \"cpu\", \"tokens\": 1, \"op_ns\": 1e3, \"byte_ns\": 0.1, \"norm_ns\": 1e10}", "norm_ns", SITS_CONFIG},
      {"[]", "device", SITS_CONFIG},
      {"{", NULL, SITS_INVALID_JSON},
  };
  const struct backend_vtable *cpu = backend_find("cpu");
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct backend_costs costs = {0};
    struct sits_error err = {0};
    write_text(cases[i].text);
    const enum sits_status status = graph_costs_load(path, cpu, &costs, &err);
    if (status != cases[i].status) fail_msg("case %zu: status %d, %s", i, status, err.text);
    if (cases[i].param) assert_string_equal(err.param, cases[i].param);
    if (status) assert_true(costs.op_ns == 0); /* untouched */
    else assert_true(costs.op_ns == 1e3F && costs.tokens == 1 && costs.f32_fusions == cpu->costs.f32_fusions);
  }
}

static void allocation_failures(void **state)
{
  (void)state;
  const struct backend_vtable *cpu = backend_find("cpu");
  const struct backend_options options = {.n_threads = 1, .max_batch_tokens = 1, .max_seqs = 1};
  struct backend *backend;
  struct backend_costs costs;
  struct sits_error err = {0};
  if (cpu->open(&options, &backend, &err)) fail_msg("%s", err.text);
  const int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 24; n++) { /* the first chain's; the others are made like it */
    mem_fault_arm(n);
    const enum sits_status status = graph_costs_measure(cpu, backend, &costs, &err);
    const int fired = mem_fault_fired();
    mem_fault_arm(0);
    if (fired) assert_int_equal(status, SITS_NOMEM);
    assert_int_equal(mem_live_blocks(), before);
    if (!fired) break;
  }
  cpu->close(backend);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(measured_and_kept), cmocka_unit_test(mistakes_are_named),
                                     cmocka_unit_test(allocation_failures)};
  snprintf(path, sizeof path, "/tmp/sits2026-costs-%ld.json", (long)getpid());
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  unlink(path);
  return failed;
}
