/* sits2026-bench: measurements. Dispatches to the subcommands and holds what they share. */
#include "tools/bench/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct { const char *name; int (*run)(int argc, char **argv); const char *help; } commands[] = {
    {"throughput", bench_throughput, "prefill and decode speed of a model on this machine's backend, no server"},
    {"steps", bench_steps, "one step of the backend: decodes beside a chunk of a prompt at a depth, or beside a draft"},
    {"engine", bench_engine, "the engine with a real model, in process: stalls, speculation, prefix cache"},
    {"simulate", bench_simulate, "the planner's policies on a request trace and a modelled device, in virtual time"},
    {"costs", bench_costs, "what plain ops cost on this machine, for --plan-costs: how the stitcher weighs fusions"},
    {"kernels", bench_kernels, "each CUDA kernel at the shapes of a Llama-3-8B step, against the memory rate of the same run"},
    {"serve", bench_serve, "load on a running server: time to first token, inter-token latency, throughput"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void usage(FILE *out)
{
  fprintf(out, "usage: sits2026-bench COMMAND [options]   (COMMAND --help lists them)\n");
  for (int i = 0; i < N_COMMANDS; i++) fprintf(out, "  %-12s %s\n", commands[i].name, commands[i].help);
}

bool bench_parse(const char *name, const char *summary, struct option_set *set, const struct option_spec *specs, int n_specs, void *values,
                 int argc, char **argv, int *exit_status)
{
  struct sits_error err;
  *exit_status = 2;
  if (option_set_init(set, specs, n_specs, values, &err)) {
    fprintf(stderr, "%s: %s\n", name, err.text);
    return false;
  }
  bool wants_help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
  if (!wants_help && option_parse_args(set, argc, argv, 1, NULL, &err) == SITS_OK) return true;
  if (wants_help) {
    struct buf text;
    buf_init(&text, 1 << 16);
    option_write_help(set, &text);
    printf("sits2026-bench %s: %s\n%s", name, summary, text.data ? text.data : "");
    buf_fini(&text);
    *exit_status = 0;
  } else {
    fprintf(stderr, "sits2026-bench %s: %s\n", name, err.text);
  }
  option_set_fini(set);
  return false;
}

int bench_parse_list(const char *text, int64_t *out, int most)
{
  int n = 0;
  while (text && *text) {
    char *end;
    long long value = strtoll(text, &end, 10);
    if (end == text || value <= 0 || value > INT32_MAX || n == most || (*end && *end != ',')) return 0;
    out[n++] = value;
    text = *end ? end + 1 : end;
  }
  return n;
}

bool bench_parse_stamp(const char *text, int64_t *day, double *seconds)
{
  int year, month, date, hour, minute;
  double second;
  if (sscanf(text, "%4d-%2d-%2d %2d:%2d:%lf", &year, &month, &date, &hour, &minute, &second) != 6) return false;
  struct tm at = {.tm_year = year - 1900, .tm_mon = month - 1, .tm_mday = date};
  const int64_t midnight = timegm(&at);
  if (at.tm_mon != month - 1 || at.tm_mday != date || year < 1970 || hour < 0 || hour > 23 || minute < 0 || minute > 59 ||
      !(second >= 0 && second < 61))
    return false;
  *day = midnight / 86400;
  *seconds = (hour * 60 + minute) * 60 + second;
  return true;
}

static int by_value(const void *a, const void *b)
{
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double bench_percentile(double *values, int64_t n, double percent)
{
  if (n == 0) return 0;
  qsort(values, (size_t)n, sizeof *values, by_value);
  int64_t index = (int64_t)ceil(percent / 100 * (double)n) - 1;
  return values[index < 0 ? 0 : index];
}

json_t *bench_summary(double *values, int64_t n)
{
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += values[i];
  return json_pack("{s:f, s:f, s:f, s:f, s:f, s:I}", "p50", bench_percentile(values, n, 50), "p90", bench_percentile(values, n, 90), "p99",
                   bench_percentile(values, n, 99), "mean", n ? sum / (double)n : 0.0, "max", bench_percentile(values, n, 100), "n",
                   (json_int_t)n);
}

/* "model name" of /proc/cpuinfo. */
static void cpu_model(char *out, size_t n_bytes)
{
  char line[256];
  snprintf(out, n_bytes, "unknown processor");
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file && fgets(line, sizeof line, file)) {
    char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !colon) continue;
    colon[1 + strcspn(colon + 1, "\n")] = '\0';
    snprintf(out, n_bytes, "%.200s", colon + 2);
    break;
  }
  if (file) fclose(file);
}

/* Results are kept and shown around: what a key is stays out of them. */
static json_t *shown_word(char **argv, int i)
{
  static const char option[] = "--api-key", mask[] = "********";
  if (i > 0 && strcmp(argv[i - 1], option) == 0) return json_string(mask);
  const size_t n = sizeof option - 1;
  return strncmp(argv[i], option, n) == 0 && argv[i][n] == '=' ? json_sprintf("%s=%s", option, mask) : json_string(argv[i]);
}

json_t *bench_header(const char *name, int argc, char **argv)
{
  char date[32], machine[256];
  time_t now = time(NULL);
  struct tm utc;
  strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  cpu_model(machine, sizeof machine);
  json_t *words = json_array();
  for (int i = 0; i < argc; i++) json_array_append_new(words, shown_word(argv, i));
  return json_pack("{s:s, s:s, s:s, s:s, s:I, s:o}", "date", date, "bench", name, "version", SITS_VERSION, "cpu", machine, "cores",
                   (json_int_t)sysconf(_SC_NPROCESSORS_ONLN), "command", words);
}

bool bench_write_json(json_t *value, const char *path)
{
  bool to_stdout = !path || strcmp(path, "-") == 0;
  int flags = JSON_INDENT(1) | JSON_REAL_PRECISION(7);
  bool ok = value && (to_stdout ? json_dumpf(value, stdout, flags) : json_dump_file(value, path, flags)) == 0;
  if (ok && to_stdout) putchar('\n');
  if (!ok) fprintf(stderr, "cannot write %s\n", to_stdout ? "the result" : path);
  json_decref(value);
  return ok;
}

int main(int argc, char **argv)
{
  for (int i = 0; argc > 1 && i < N_COMMANDS; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
  bool wants_help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
  usage(wants_help ? stdout : stderr);
  return wants_help ? 0 : 2;
}
