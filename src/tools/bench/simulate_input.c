/* The files that the simulation reads: a request trace and a device's cost model. See simulate.h. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tools/bench/bench.h"
#include "tools/bench/simulate.h"

enum { MOST_TOKENS = 1 << 24 };

int64_t simulate_read_trace(const char *path, int64_t n_most, struct simulate_arrival **out)
{
  char line[256];
  double first = 0, seconds;
  int64_t capacity = 0, n = 0, first_day = 0, day;
  struct simulate_arrival *arrivals = NULL;
  FILE *file = fopen(path, "r");
  if (!file) {
    fprintf(stderr, "sits2026-bench simulate: %s: %s\n", path, strerror(errno));
    return 0;
  }
  for (int64_t row = 0; fgets(line, sizeof line, file) && (n_most == 0 || n < n_most); row++) {
    char *comma = strchr(line, ',');
    long n_prompt, n_output;
    const bool has_stamp = bench_parse_stamp(line, &day, &seconds);
    if (row == 0 && !has_stamp) continue; /* heading */
    if (!comma || !has_stamp || sscanf(comma + 1, "%ld,%ld", &n_prompt, &n_output) != 2 || n_prompt < 0 || n_output < 0 ||
        n_prompt > MOST_TOKENS || n_output > MOST_TOKENS) {
      fprintf(stderr, "sits2026-bench simulate: %s: line %lld is not TIMESTAMP,ContextTokens,GeneratedTokens\n", path, (long long)row + 1);
      fclose(file);
      mem_free(arrivals);
      return 0;
    }
    if (n == capacity) {
      capacity = capacity ? capacity * 2 : 4096;
      struct simulate_arrival *more = mem_realloc(arrivals, (size_t)capacity * sizeof *more);
      if (!more) break;
      arrivals = more;
    }
    if (n == 0) first_day = day, first = seconds;
    const double after = (double)(day - first_day) * 86400 + (seconds - first);
    arrivals[n++] = (struct simulate_arrival){.at_us = fmax(0, after) * 1e6, .n_prompt = n_prompt > 0 ? (int32_t)n_prompt : 1,
                                              .n_output = n_output > 0 ? (int32_t)n_output : 1};
  }
  fclose(file);
  if (n == 0) fprintf(stderr, "sits2026-bench simulate: %s has no requests\n", path);
  *out = arrivals;
  return n;
}

/* Pairs of tokens and microseconds, ascending; none is fine. */
static bool read_points(const char *path, json_t *root, const char *key, struct simulate_points *p)
{
  json_t *points = json_object_get(root, key);
  if (points && !json_is_array(points)) {
    fprintf(stderr, "sits2026-bench simulate: %s: %s must be a list\n", path, key);
    return false;
  }
  for (size_t i = 0; i < json_array_size(points); i++) {
    json_t *pair = json_array_get(points, i);
    double tokens = json_number_value(json_array_get(pair, 0)), us = json_number_value(json_array_get(pair, 1));
    if (i >= SIMULATE_POINTS || !(us > 0) || !(tokens > (i ? p->tokens[i - 1] : 0))) {
      fprintf(stderr, "sits2026-bench simulate: %s: %s must be up to %d ascending pairs of tokens and microseconds\n", path, key,
              SIMULATE_POINTS);
      return false;
    }
    p->tokens[i] = tokens;
    p->us[i] = us;
    p->n++;
  }
  return true;
}

bool simulate_read_cost(const char *path, struct simulate_cost *c)
{
  const struct { const char *key; double *value; } keys[] = {
      {"weight_bytes", &c->weight_bytes}, {"head_bytes", &c->head_bytes}, {"kv_bytes_per_token", &c->kv_bytes_per_token},
      {"linear_flops_per_token", &c->linear_flops_per_token}, {"head_flops_per_row", &c->head_flops_per_row},
      {"attention_flops_per_pair", &c->attention_flops_per_pair}, {"read_bytes_per_s", &c->read_bytes_per_s},
      {"weight_read_share", &c->weight_read_share}, {"head_read_share", &c->head_read_share}, {"kv_read_share", &c->kv_read_share},
      {"small_batch_tokens", &c->small_batch_tokens}, {"small_batch_flops", &c->small_batch_flops},
      {"large_batch_flops", &c->large_batch_flops}, {"attention_flops", &c->attention_flops}, {"fixed_us", &c->fixed_us},
      {"kv_memory_bytes", &c->kv_memory_bytes}, {"max_batch_tokens", &c->max_batch_tokens},
  };
  const struct { const char *key; double *value; } options[] = {{"tile_tokens", &c->tile_tokens}, {"lane_tokens", &c->lane_tokens},
                                                                {"lane_pieces", &c->lane_pieces}, {"piece_us", &c->piece_us}};
  json_error_t error;
  json_t *root = json_load_file(path, 0, &error);
  if (!root) {
    fprintf(stderr, "sits2026-bench simulate: %s:%d: %s\n", path, error.line, error.text);
    return false;
  }
  bool is_good = read_points(path, root, "points", &c->points);
  is_good = read_points(path, root, "prompt_points", &c->prompt_points) && is_good;
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    json_t *value = json_object_get(root, keys[i].key);
    *keys[i].value = json_number_value(value);
    if (!json_is_number(value) || !(*keys[i].value > 0)) {
      fprintf(stderr, "sits2026-bench simulate: %s: %s must be a positive number\n", path, keys[i].key);
      is_good = false;
    }
  }
  for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
    json_t *value = json_object_get(root, options[i].key);
    *options[i].value = json_number_value(value);
    if (!value || (json_is_number(value) && *options[i].value >= 0)) continue;
    fprintf(stderr, "sits2026-bench simulate: %s: %s must be a number, 0 or more\n", path, options[i].key);
    is_good = false;
  }
  if (c->lane_tokens > 0 && c->lane_pieces < 1) {
    fprintf(stderr, "sits2026-bench simulate: %s: lane_tokens needs lane_pieces\n", path);
    is_good = false;
  }
  json_decref(root);
  return is_good;
}
