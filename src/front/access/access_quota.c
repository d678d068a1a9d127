/* Quotas: buckets that a minute fills, calls at once, and what the headers tell of them. See access.h rules 4 and 5. */
#include <stdio.h>

#include "base/clock.h"
#include "front/access/access_internal.h"

#define MINUTE_US 60e6

/* Let the bucket fill up to now. A fresh one is full; a lower limit after a reload cuts what is over it. */
static void fill(struct access_bucket *bucket, int64_t limit, int64_t now_us)
{
  double level = bucket->at_us ? bucket->level + (double)limit * (double)(now_us - bucket->at_us) / MINUTE_US : (double)limit;
  bucket->level = level < (double)limit ? level : (double)limit;
  bucket->at_us = now_us;
}

static int64_t time_until(const struct access_bucket *bucket, int64_t limit, double level)
{
  return bucket->level >= level ? 0 : (int64_t)((level - bucket->level) * MINUTE_US / (double)limit) + 1;
}

/* One request of this minute's. */
static enum sits_status take_request(struct access_grant *grant, struct sits_error *err)
{
  if (!grant->requests_per_minute) return SITS_OK;
  struct access_account *account = grant->account;
  pthread_mutex_lock(&account->mutex);
  fill(&account->requests, grant->requests_per_minute, clock_monotonic_us());
  bool is_allowed = account->requests.level >= 1;
  if (is_allowed) account->requests.level -= 1;
  pthread_mutex_unlock(&account->mutex);
  if (is_allowed) return SITS_OK;
  return sits_fail(err, SITS_RATE_LIMITED, "this key's limit of %lld requests per minute is reached",
                   (long long)grant->requests_per_minute);
}

enum sits_status access_admit(struct access_grant *grant, unsigned roles, struct sits_error *err)
{
  if (!grant) return SITS_OK;
  enum sits_status status = take_request(grant, err);
  if (!status && !access_has_role(grant, roles))
    status = sits_fail(err, SITS_PERMISSION_DENIED, "this key's roles do not include what is asked for");
  return status;
}

enum sits_status access_start_call(struct access_grant *grant, int64_t n_prompt_tokens, struct sits_error *err)
{
  if (!grant) return SITS_OK;
  int64_t limit = grant->tokens_per_minute;
  if (limit && n_prompt_tokens > limit)
    return sits_fail(err, SITS_PERMISSION_DENIED, "the prompt has more tokens than this key's %lld per minute", (long long)limit);
  struct access_account *account = grant->account;
  pthread_mutex_lock(&account->mutex);
  if (limit) fill(&account->tokens, limit, clock_monotonic_us());
  bool has_tokens = !limit || account->tokens.level >= (double)(n_prompt_tokens > 0 ? n_prompt_tokens : 1);
  bool has_place = !grant->max_calls || account->n_calls < grant->max_calls;
  if (!has_tokens) account->wanted_tokens = n_prompt_tokens;
  if (has_tokens && has_place) {
    account->n_calls++;
    account->wanted_tokens = 0;
    if (limit) account->tokens.level -= (double)n_prompt_tokens;
  }
  pthread_mutex_unlock(&account->mutex);
  if (!has_tokens) return sits_fail(err, SITS_RATE_LIMITED, "this key's limit of %lld tokens per minute is reached", (long long)limit);
  if (has_place) return SITS_OK;
  return sits_fail(err, SITS_RATE_LIMITED, "this key's limit of %lld calls at once is reached", (long long)grant->max_calls);
}

void access_end_call(struct access_grant *grant, int64_t n_prompt_tokens, int64_t n_output_tokens, bool was_started)
{
  if (!grant) return;
  struct access_account *account = grant->account;
  pthread_mutex_lock(&account->mutex);
  account->n_calls--;
  if (grant->tokens_per_minute) {
    fill(&account->tokens, grant->tokens_per_minute, clock_monotonic_us());
    account->tokens.level += was_started ? -(double)n_output_tokens : (double)n_prompt_tokens;
  }
  pthread_mutex_unlock(&account->mutex);
}

static void look_locked(struct access_bucket *bucket, int64_t limit, int64_t now_us, struct access_window *out)
{
  *out = (struct access_window){.limit = limit};
  if (!limit) return;
  fill(bucket, limit, now_us);
  out->remaining = bucket->level > 0 ? (int64_t)bucket->level : 0;
  out->reset_us = time_until(bucket, limit, (double)limit);
}

void access_usage(struct access_grant *grant, struct access_usage *out)
{
  *out = (struct access_usage){0};
  if (!grant) return;
  int64_t now_us = clock_monotonic_us();
  pthread_mutex_lock(&grant->account->mutex);
  look_locked(&grant->account->requests, grant->requests_per_minute, now_us, &out->requests);
  look_locked(&grant->account->tokens, grant->tokens_per_minute, now_us, &out->tokens);
  pthread_mutex_unlock(&grant->account->mutex);
}

int32_t access_retry_after_s(struct access_grant *grant)
{
  if (!grant) return 1;
  struct access_account *account = grant->account;
  int64_t now_us = clock_monotonic_us(), wait_us = 0, more_us = 0;
  pthread_mutex_lock(&account->mutex);
  if (grant->requests_per_minute) {
    fill(&account->requests, grant->requests_per_minute, now_us);
    wait_us = time_until(&account->requests, grant->requests_per_minute, 1);
  }
  if (grant->tokens_per_minute) {
    fill(&account->tokens, grant->tokens_per_minute, now_us);
    more_us = time_until(&account->tokens, grant->tokens_per_minute, account->wanted_tokens > 1 ? (double)account->wanted_tokens : 1);
  }
  pthread_mutex_unlock(&account->mutex);
  if (more_us > wait_us) wait_us = more_us;
  return wait_us < 1000000 ? 1 : (int32_t)((wait_us + 999999) / 1000000);
}

static void write_window(const struct access_window *window, const char *const names[3], void (*add)(void *, const char *, const char *),
                         void *context)
{
  char text[32];
  if (!window->limit) return;
  snprintf(text, sizeof text, "%lld", (long long)window->limit);
  add(context, names[0], text);
  snprintf(text, sizeof text, "%lld", (long long)window->remaining);
  add(context, names[1], text);
  snprintf(text, sizeof text, "%.3fs", (double)window->reset_us / 1e6);
  add(context, names[2], text);
}

void access_write_headers(struct access_grant *grant, void (*add)(void *context, const char *name, const char *value), void *context)
{
  static const char *const request_names[] = {"x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"};
  static const char *const token_names[] = {"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"};
  struct access_usage usage;
  access_usage(grant, &usage);
  write_window(&usage.requests, request_names, add, context);
  write_window(&usage.tokens, token_names, add, context);
}
