/* sits2026-bench: shared by its subcommands. Each subcommand is one file with one entry point `int bench_<name>(int argc, char **argv)`
 * that takes its own words (argv[0] is the subcommand) and returns the exit status. */
#ifndef SITS_TOOLS_BENCH_BENCH_H
#define SITS_TOOLS_BENCH_BENCH_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "config/option.h"
#include "sits2026/status.h"

int bench_throughput(int argc, char **argv);
int bench_kernels(int argc, char **argv); /* [file for the result] */
int bench_serve(int argc, char **argv);
int bench_simulate(int argc, char **argv);
int bench_engine(int argc, char **argv);
int bench_steps(int argc, char **argv);
int bench_costs(int argc, char **argv);

/* Parse argv[1..] over a table; prints help (exit 0) or the error (exit 2). True: go on. */
bool bench_parse(const char *name, const char *summary, struct option_set *set, const struct option_spec *specs, int n_specs, void *values,
                 int argc, char **argv, int *exit_status);

/* "1,8,32" into out, each from 1 to INT32_MAX; returns the count, 0 on a bad list. */
int bench_parse_list(const char *text, int64_t *out, int most);

/* "2023-11-16 18:15:46.6805900", as traces have it, at the beginning of text: days since 1970 and seconds of the day. False: no such
 * time. */
bool bench_parse_stamp(const char *text, int64_t *day, double *seconds);

/* Value at a percentile (0..100) of n values; sorts them. 0 when n is 0. */
double bench_percentile(double *values, int64_t n, double percent);

/* {"p50": ..., "p90": ..., "p99": ..., "mean": ..., "max": ..., "n": ...}; sorts values. */
json_t *bench_summary(double *values, int64_t n);

/* Header fields of every results file: date, tool, version, command line (an API key masked), machine (CPU model, cores). */
json_t *bench_header(const char *name, int argc, char **argv);

/* Write to a file (or stdout for NULL or "-"). Takes the reference. False after printing an error. */
bool bench_write_json(json_t *value, const char *path);

#endif
