/* See actions.h. */
#include "daemon/actions.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "front/access/access.h"
#include "front/audit/audit_verify.h"

static int print(enum options_action action, const struct option_set *set)
{
  struct buf text;
  const char *bad = action == OPTIONS_PRINT_CONFIG ? option_not_utf8(set) : NULL;
  if (bad) {
    fprintf(stderr, "sits2026d: %s is not UTF-8, which YAML must be\n", bad);
    return 1;
  }
  buf_init(&text, OPTION_YAML_MAX_BYTES);
  bool ok = true;
  if (action == OPTIONS_VERSION) buf_append_text(&text, "sits2026d " SITS_VERSION "\n");
  else if (action == OPTIONS_HELP) ok = options_write_help(set, &text);
  else if (action == OPTIONS_PRINT_MAN) ok = options_write_man(set, &text);
  else if (action == OPTIONS_PRINT_COMPLETION) ok = options_write_completion(set, &text);
  else ok = option_write_yaml(set, action == OPTIONS_PRINT_SAMPLE, &text);
  if (ok && text.data) fputs(text.data, stdout);
  buf_fini(&text);
  return ok && !fflush(stdout) ? 0 : 1;
}

static int verify_audit(const struct options *options)
{
  struct audit_report report;
  struct sits_error err = {0};
  struct audit_mac *mac = NULL;
  enum sits_status status = options->audit_key_file ? audit_mac_open(options->audit_key_file, &mac, &err) : SITS_OK;
  if (!status) status = audit_verify((const char *const *)options->files, options->n_files, mac, &report, &err);
  audit_mac_close(mac);
  if (status) {
    fprintf(stderr, "sits2026d: %s\n", err.text);
    return 1;
  }
  printf("ok: %" PRId64 " lines in %" PRId64 " files, numbers %" PRIu64 " to %" PRIu64 ", last hash %s\n", report.n_lines, report.n_files,
         report.first_seq, report.last_seq, report.last_hash);
  if (report.n_lost) printf("gaps: %" PRIu64 " lines had no room and were never written, as the chain's lost lines tell\n", report.n_lost);
  if (report.n_not_closed)
    printf("gaps: %" PRId64 " times the log was begun again without having been closed (a crash, or a stop with a full disk): lines that "
           "waited then are missing\n", report.n_not_closed);
  return fflush(stdout) ? 1 : 0;
}

/* One key, a line of the standard input, as an entry of a key file. A key that is cut would be one that nobody has. */
static int hash_key(void)
{
  char key[1024], hash[ACCESS_HASH_BYTES];
  struct sits_error err = {0};
  size_t n = 0;
  int c;
  while (n < sizeof key && (c = getchar()) != EOF && c != '\n') key[n++] = (char)c;
  if (n && n < sizeof key && key[n - 1] == '\r') n--;
  enum sits_status status = n < sizeof key ? access_hash_key(key, n, hash, &err)
                                           : sits_fail(&err, SITS_INVALID_ARGUMENT, "the key has over %zu characters", sizeof key - 1);
  explicit_bzero(key, sizeof key);
  if (status) {
    fprintf(stderr, "sits2026d: %s\n", err.text);
    return 1;
  }
  printf("{\"hash\": \"%s\", \"tenant\": \"default\", \"roles\": [\"inference\"]}\n", hash);
  return fflush(stdout) ? 1 : 0;
}

int action_run(enum options_action action, const struct options *options, const struct option_set *set)
{
  if (action == OPTIONS_HASH_KEY) return hash_key();
  return action == OPTIONS_VERIFY_AUDIT ? verify_audit(options) : print(action, set);
}
