/* The audit log: 100,000 lines over many files verify; each kind of damage is named; a crash, a full disk and a full queue leave a chain
 * that verifies and says what happened. */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/audit/audit.h"
#include "front/audit/audit_verify.h"

enum { MOST_FILES = 512 };

struct log { char folder[64], path[96]; const char *files[MOST_FILES]; int n_files; glob_t found; struct metrics *metrics; };

static int setup(void **state)
{
  struct log *log = calloc(1, sizeof *log);
  snprintf(log->folder, sizeof log->folder, "/tmp/sits_audit_XXXXXX");
  if (!mkdtemp(log->folder) || metrics_create(&log->metrics)) return -1;
  snprintf(log->path, sizeof log->path, "%s/audit.log", log->folder);
  *state = log;
  return 0;
}

static int teardown(void **state)
{
  struct log *log = *state;
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", log->folder);
  if (log->found.gl_pathc) globfree(&log->found);
  metrics_destroy(log->metrics);
  free(log);
  return system(command);
}

/* The files in the order in which they were written, as a shell sorts PATH.0* PATH. */
static void list_files(struct log *log)
{
  char pattern[128];
  if (log->found.gl_pathc) globfree(&log->found);
  snprintf(pattern, sizeof pattern, "%s.0*", log->path);
  assert_in_range(glob(pattern, 0, NULL, &log->found), 0, GLOB_NOMATCH);
  log->n_files = 0;
  for (size_t i = 0; i < log->found.gl_pathc; i++) log->files[log->n_files++] = log->found.gl_pathv[i];
  log->files[log->n_files++] = log->path;
  assert_true(log->n_files < MOST_FILES);
}

static enum sits_status verify(struct log *log, struct audit_report *report, struct sits_error *err)
{
  list_files(log);
  return audit_verify(log->files, log->n_files, NULL, report, err);
}

static void assert_whole(struct log *log, struct audit_report *report)
{
  struct sits_error err = {0};
  if (verify(log, report, &err)) fail_msg("%s", err.text);
}

static void assert_bad(struct log *log, const char *what)
{
  struct audit_report report;
  struct sits_error err = {0};
  assert_int_equal(verify(log, &report, &err), SITS_FORMAT);
  if (!strstr(err.text, what)) fail_msg("'%s' does not say '%s'", err.text, what);
}

static struct audit *open_log(struct log *log, int64_t rotate_bytes, int64_t queue_bytes)
{
  struct audit_options options = {.path = log->path, .rotate_bytes = rotate_bytes, .rotate_us = 3600000000, .queue_bytes = queue_bytes};
  struct audit *audit = NULL;
  struct sits_error err = {0};
  if (audit_open(&options, log->metrics, &audit, &err)) fail_msg("%s", err.text);
  return audit;
}

static struct api_record record_of(const char *id)
{
  return (struct api_record){.transport = "http", .id = id, .route = "/v1/completions", .verb = "POST", .tenant = "a \"tenant\"",
                             .key = "k1", .peer = "127.0.0.1:5", .kind = API_COMPLETION, .code = 200, .started_unix_us = clock_unix_us(),
                             .started_us = 1000, .received_us = 1500, .ended_us = 3500};
}

static void write_lines(struct audit *audit, int n)
{
  char id[32];
  for (int i = 0; i < n; i++) {
    snprintf(id, sizeof id, "r%d", i);
    struct api_record record = record_of(id);
    audit_record(audit, &record);
  }
}

static int64_t counter(struct log *log, enum metrics_counter which) { return metrics_counter_value(log->metrics, which); }

/* ---- writing ---- */

static void *write_quarter(void *audit)
{
  write_lines(audit, 25000);
  return NULL;
}

static void test_100000_lines_over_rotations_verify(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 20, 256 << 20);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, write_quarter, audit), 0);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  audit_close(audit);
  assert_int_equal(counter(log, METRICS_AUDIT_LOST), 0);
  assert_int_equal(counter(log, METRICS_AUDIT_LINES), 100000);
  struct audit_report report;
  assert_whole(log, &report);
  assert_true(report.n_files > 20);
  assert_int_equal(report.n_lines, 100000 + 2 * report.n_files); /* begin and end of each */
  assert_int_equal(report.first_seq, 0);
  assert_int_equal(report.last_seq, report.n_lines - 1);
  struct stat info;
  assert_int_equal(stat(log->path, &info), 0);
  assert_int_equal(info.st_mode & 0777, 0600);
}

static void test_a_finished_log_is_whole_whoever_still_records(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 20, 1 << 20);
  write_lines(audit, 3);
  audit_finish(audit);
  write_lines(audit, 2);
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_lines, 5);
  assert_int_equal(counter(log, METRICS_AUDIT_LOST), 2);
  audit_close(audit);
  audit_close(open_log(log, 1 << 20, 1 << 20));
  assert_whole(log, &report);
  assert_int_equal(report.n_not_closed, 0);
}

static void test_age_rotates(void **state)
{
  struct log *log = *state;
  struct audit_options options = {.path = log->path, .rotate_bytes = 1 << 30, .rotate_us = 200000, .queue_bytes = 1 << 20};
  struct audit *audit = NULL;
  assert_int_equal(audit_open(&options, log->metrics, &audit, NULL), SITS_OK);
  write_lines(audit, 1);
  usleep(700000);
  write_lines(audit, 1);
  usleep(1500000);
  audit_close(audit);
  struct audit_report report;
  assert_whole(log, &report);
  assert_in_range(report.n_files, 2, 4);
}

static void test_line_says_who_what_when_how_much(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 20, 1 << 20);
  struct api_request *request = NULL;
  static const char body[] = "{\"model\":\"m\",\"prompt\":\"secret\",\"max_tokens\":7,\"n\":2,\"stream\":true}";
  assert_int_equal(api_request_parse(API_COMPLETION, body, sizeof body - 1, &api_limits_default, &request, NULL), SITS_OK);
  request->service_class = SITS_CLASS_HIGH;
  struct api_trace_parent parent;
  api_trace_parent_parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", NULL, &parent);
  struct api_record record = record_of("abc");
  record.request = request;
  record.model = "m";
  record.parent = &parent;
  record.usage = (struct api_usage){.n_prompt_tokens = 3, .n_output_tokens = 14, .n_cached_tokens = 1, .n_cut = 2};
  audit_record(audit, &record);
  record.prompt = "\"secret\"";
  audit_record(audit, &record);
  record.is_public = true;
  audit_record(audit, &record); /* not written */
  audit_close(audit);
  FILE *file = fopen(log->path, "r");
  char line[8192];
  json_t *found[5] = {0};
  int n = 0;
  while (fgets(line, sizeof line, file)) {
    assert_true(n < 5);
    found[n] = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(found[n++]);
  }
  fclose(file);
  assert_int_equal(n, 4);
  json_t *first = found[1];
  assert_string_equal(json_string_value(json_object_get(first, "kind")), "request");
  assert_string_equal(json_string_value(json_object_get(first, "tenant")), "a \"tenant\"");
  assert_string_equal(json_string_value(json_object_get(first, "key")), "k1");
  assert_string_equal(json_string_value(json_object_get(first, "trace")), "0af7651916cd43dd8448eb211c80319c");
  assert_string_equal(json_string_value(json_object_get(first, "class")), "high");
  assert_string_equal(json_string_value(json_object_get(first, "outcome")), "OK");
  assert_int_equal(json_integer_value(json_object_get(first, "output_tokens")), 14);
  assert_int_equal(json_integer_value(json_object_get(first, "max_tokens")), 7);
  assert_null(json_object_get(first, "prompt"));
  assert_string_equal(json_string_value(json_object_get(found[2], "prompt")), "secret");
  assert_string_equal(json_string_value(json_object_get(found[3], "kind")), "end");
  for (int i = 0; i < n; i++) json_decref(found[i]);
  api_request_destroy(request);
}

/* ---- damage ---- */

static char *slurp(const char *path, size_t *n)
{
  FILE *file = fopen(path, "r");
  assert_non_null(file);
  fseek(file, 0, SEEK_END);
  *n = (size_t)ftell(file);
  rewind(file);
  char *bytes = malloc(*n + 1);
  assert_int_equal(fread(bytes, 1, *n, file), *n);
  bytes[*n] = '\0';
  fclose(file);
  return bytes;
}

static void spill(const char *path, const char *bytes, size_t n)
{
  FILE *file = fopen(path, "w");
  assert_int_equal(fwrite(bytes, 1, n, file), n);
  fclose(file);
}

static size_t offset_of_line(const char *bytes, int number)
{
  const char *at = bytes;
  for (int i = 1; i < number; i++) at = strchr(at, '\n') + 1;
  return (size_t)(at - bytes);
}

/* Bytes flipped in turn, wherever they are. */
static void test_flipped_bytes_are_found(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 2000, 1 << 20);
  write_lines(audit, 40);
  audit_close(audit);
  struct audit_report report;
  assert_whole(log, &report);
  list_files(log);
  assert_true(log->n_files > 3);
  char path[128];
  snprintf(path, sizeof path, "%s", log->files[1]);
  size_t n;
  char *bytes = slurp(path, &n);
  for (size_t i = 0; i < n; i += i < 700 ? 1 : 13) { /* every byte of a line, then here and there */
    bytes[i] ^= 1;
    spill(path, bytes, n);
    assert_bad(log, path); /* the file is named */
    bytes[i] ^= 1;
  }
  spill(path, bytes, n);
  assert_whole(log, &report);
  bytes[offset_of_line(bytes, 3) + 100] ^= 1;
  spill(path, bytes, n);
  assert_bad(log, "line 3");
  free(bytes);
}

static void test_removed_lines_are_found(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 2000, 1 << 20);
  write_lines(audit, 40);
  audit_close(audit);
  list_files(log);
  for (int f = 0; f < log->n_files; f++) {
    size_t n;
    char path[128];
    snprintf(path, sizeof path, "%s", log->files[f]);
    char *bytes = slurp(path, &n), *copy = malloc(n);
    int n_lines = 0;
    for (size_t i = 0; i < n; i++) n_lines += bytes[i] == '\n';
    for (int line = 1; line <= n_lines; line++) {
      size_t from = offset_of_line(bytes, line), to = offset_of_line(bytes, line + 1);
      memcpy(copy, bytes, from);
      memcpy(copy + from, bytes + to, n - to);
      spill(path, copy, n - (to - from));
      struct audit_report report;
      struct sits_error err = {0};
      assert_int_equal(verify(log, &report, &err), SITS_FORMAT);
    }
    spill(path, bytes, n);
    free(bytes);
    free(copy);
  }
}

static void test_cut_tail_is_found(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 20, 1 << 20);
  write_lines(audit, 10);
  audit_close(audit);
  size_t n;
  char *bytes = slurp(log->path, &n);
  spill(log->path, bytes, n - 10);
  assert_bad(log, "is cut");
  spill(log->path, bytes, offset_of_line(bytes, 12)); /* at a line's end: only the head knows */
  assert_bad(log, "its tail was cut");
  spill(log->path, bytes, offset_of_line(bytes, 8));
  assert_bad(log, "its tail was cut");
  char head[128];
  snprintf(head, sizeof head, "%s.head", log->path);
  unlink(head);
  assert_bad(log, "no end line");
  free(bytes);
}

static void test_swapped_missing_and_foreign_files_are_found(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 2000, 1 << 20);
  write_lines(audit, 40);
  audit_close(audit);
  list_files(log);
  struct audit_report report;
  struct sits_error err = {0};
  assert_true(log->n_files > 4);
  const char *swapped = log->files[1];
  log->files[1] = log->files[2];
  log->files[2] = swapped;
  assert_int_equal(audit_verify(log->files, log->n_files, NULL, &report, &err), SITS_FORMAT);
  assert_non_null(strstr(err.text, "swapped"));
  list_files(log);
  memmove(log->files + 2, log->files + 3, sizeof *log->files * (size_t)(log->n_files - 3));
  assert_int_equal(audit_verify(log->files, log->n_files - 1, NULL, &report, &err), SITS_FORMAT);
  list_files(log);
  assert_int_equal(audit_verify(log->files + 2, log->n_files - 2, NULL, &report, &err), SITS_OK); /* old files may be moved away */
  assert_true(report.first_seq > 0);
  const char *missing[] = {"/nonexistent"};
  assert_int_equal(audit_verify(missing, 1, NULL, &report, &err), SITS_NOT_FOUND);
  spill(log->path, "not\n", 4);
  assert_bad(log, "is no line of an audit log");
}

/* ---- under a key ---- */

/* What who may write the files can do: change a line, hash it and all that follow anew, and the head. */
static void forge(const struct log *log)
{
  size_t n;
  char *bytes = slurp(log->path, &n), prev[65] = "", head[128], text[128];
  memcpy(strstr(bytes, "\"id\":\"r3\"") + 6, "XX", 2);
  int number = -1;
  for (char *line = bytes, *end; line < bytes + n; line = end + 1, number++) {
    end = strchr(line, '\n');
    if (prev[0]) memcpy(strstr(line, "\"prev\":\"") + 8, prev, 64);
    char *tail = end - 2 - 64 - 9;
    assert_memory_equal(tail, ",\"hash\":\"", 9);
    sha256_hex(line, (size_t)(tail - line), prev);
    memcpy(tail + 9, prev, 64);
  }
  spill(log->path, bytes, n);
  snprintf(head, sizeof head, "%s.head", log->path);
  spill(head, text, (size_t)snprintf(text, sizeof text, "%020d %s\n", number, prev));
  free(bytes);
}

static enum sits_status verify_keyed(struct log *log, const char *key, struct sits_error *err)
{
  char path[128];
  struct audit_mac *mac = NULL;
  struct audit_report report;
  snprintf(path, sizeof path, "%s/key", log->folder);
  spill(path, key, strlen(key));
  assert_int_equal(audit_mac_open(path, &mac, err), SITS_OK);
  list_files(log);
  enum sits_status status = audit_verify(log->files, log->n_files, mac, &report, err);
  audit_mac_close(mac);
  return status;
}

static enum sits_status write_keyed(struct log *log, const char *key, struct sits_error *err)
{
  char path[128];
  struct audit *audit = NULL;
  snprintf(path, sizeof path, "%s/key", log->folder);
  spill(path, key, strlen(key));
  struct audit_options options = {.path = log->path, .key_file = path, .rotate_bytes = 1 << 20, .rotate_us = 3600000000,
                                  .queue_bytes = 1 << 20};
  enum sits_status status = audit_open(&options, log->metrics, &audit, err);
  if (status) return status;
  write_lines(audit, 10);
  audit_close(audit);
  return SITS_OK;
}

static void test_who_edits_cannot_chain_anew_without_the_key(void **state)
{
  static const char key[] = "0123456789abcdef0123456789abcdef\n", other[] = "0123456789abcdef0123456789abcdeg\n";
  struct log *log = *state;
  struct audit_report report;
  struct sits_error err = {0};
  struct audit *audit = open_log(log, 1 << 20, 1 << 20);
  write_lines(audit, 10);
  audit_close(audit);
  forge(log);
  assert_whole(log, &report); /* without a key the forgery is perfect */
  assert_int_equal(write_keyed(log, key, &err), SITS_FORMAT);
  assert_non_null(strstr(err.text, "under this key"));
  char head[128];
  snprintf(head, sizeof head, "%s.head", log->path);
  unlink(log->path);
  unlink(head);
  for (int i = 0; i < 2; i++) assert_int_equal(write_keyed(log, key, &err), SITS_OK); /* and a start that goes on */
  assert_int_equal(verify_keyed(log, key, &err), SITS_OK);
  assert_int_equal(verify_keyed(log, other, &err), SITS_FORMAT);
  assert_int_equal(write_keyed(log, other, &err), SITS_FORMAT);
  assert_bad(log, "under a key");
  size_t n, n_head;
  char *bytes = slurp(log->path, &n), *old_head = slurp(head, &n_head), link[256];
  forge(log);
  assert_int_equal(verify_keyed(log, key, &err), SITS_FORMAT);
  spill(head, old_head, n_head);
  assert_int_equal(verify_keyed(log, key, &err), SITS_FORMAT);
  assert_non_null(strstr(err.text, "line 1 was changed"));
  size_t cut = offset_of_line(bytes, 8); /* a tail cut, and the head set to the line before the cut with what stands in that line */
  spill(log->path, bytes, cut);
  assert_int_equal(verify_keyed(log, key, &err), SITS_FORMAT);
  snprintf(link, sizeof link, "%020d %.64s %.64s\n", 6, bytes + cut - 3 - 64, old_head + 86);
  spill(head, link, strlen(link));
  assert_int_equal(verify_keyed(log, key, &err), SITS_FORMAT);
  assert_non_null(strstr(err.text, "it was changed"));
  spill(log->path, bytes, n);
  spill(head, old_head, n_head);
  assert_int_equal(verify_keyed(log, key, &err), SITS_OK);
  free(bytes);
  free(old_head);
}

static void test_keys_that_are_none(void **state)
{
  struct log *log = *state;
  struct sits_error err = {0};
  struct audit_mac *mac = NULL;
  char path[128];
  static char bytes[4200];
  snprintf(path, sizeof path, "%s/key", log->folder);
  assert_int_equal(audit_mac_open(path, &mac, &err), SITS_IO);
  memset(bytes, 'k', sizeof bytes);
  bytes[32] = '\n';
  const struct { size_t n; enum sits_status status; } cases[] = {{0, SITS_CONFIG}, {31, SITS_CONFIG}, {32, SITS_OK}, {33, SITS_OK},
                                                                  {4096, SITS_OK}, {4097, SITS_CONFIG}, {4200, SITS_CONFIG}};
  char id[AUDIT_KEY_ID_BYTES] = "";
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    spill(path, bytes, cases[i].n);
    assert_int_equal(audit_mac_open(path, &mac, &err), cases[i].status);
    if (cases[i].status) continue;
    assert_int_equal(strlen(audit_mac_key_id(mac)), 16);
    if (cases[i].n == 33) assert_string_equal(audit_mac_key_id(mac), id); /* the newline is no part of it */
    snprintf(id, sizeof id, "%s", audit_mac_key_id(mac));
    char hex[SHA256_HEX_BYTES], again[SHA256_HEX_BYTES];
    audit_mac_hex(mac, "what", 4, hex);
    audit_mac_hex(mac, "what", 4, again);
    assert_string_equal(hex, again);
    audit_mac_close(mac);
  }
}

/* RFC 4231, case 7: a key longer than a block, which is hashed first. */
static void test_the_hash_is_hmac_sha256(void **state)
{
  static const char data[] = "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
                             "hashed before being used by the HMAC algorithm.";
  struct log *log = *state;
  struct sits_error err;
  struct audit_mac *mac = NULL;
  char path[128], key[131], hex[SHA256_HEX_BYTES];
  memset(key, 0xaa, sizeof key);
  snprintf(path, sizeof path, "%s/key", log->folder);
  spill(path, key, sizeof key);
  assert_int_equal(audit_mac_open(path, &mac, &err), SITS_OK);
  audit_mac_hex(mac, data, sizeof data - 1, hex);
  assert_string_equal(hex, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
  audit_mac_close(mac);
}

/* ---- going on ---- */

static void test_chain_goes_on_after_a_stop_and_a_crash(void **state)
{
  struct log *log = *state;
  for (int run = 0; run < 3; run++) {
    struct audit *audit = open_log(log, 1 << 20, 1 << 20);
    write_lines(audit, 5);
    struct audit_options options = {.path = log->path, .rotate_bytes = 1 << 20, .rotate_us = 1000000, .queue_bytes = 1 << 20};
    struct audit *second = NULL;
    struct sits_error err = {0};
    assert_int_equal(audit_open(&options, log->metrics, &second, &err), SITS_CONFIG);
    audit_close(audit);
  }
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_lines, 3 * 7);
  FILE *file = fopen(log->path, "a"); /* what a crash leaves of a line */
  fputs("{\"seq\":21,\"prev\":\"00", file);
  fclose(file);
  assert_bad(log, "is cut");
  audit_close(open_log(log, 1 << 20, 1 << 20));
  assert_whole(log, &report);
  size_t n;
  char *bytes = slurp(log->path, &n);
  assert_non_null(strstr(bytes, "\"torn_bytes\":20"));
  spill(log->path, bytes, offset_of_line(bytes, 20)); /* whole lines are gone: going on does not hide it */
  audit_close(open_log(log, 1 << 20, 1 << 20));
  assert_bad(log, "where 19 must follow");
  free(bytes);
}

static void test_files_that_are_none_of_ours_are_left_alone(void **state)
{
  struct log *log = *state;
  struct audit_options options = {.path = log->path, .rotate_bytes = 1 << 20, .rotate_us = 1000000, .queue_bytes = 1 << 20};
  struct audit *audit = NULL;
  struct sits_error err = {0};
  static const char *const texts[] = {"root:x:0:0\n", "no newline"};
  for (int i = 0; i < 2; i++) {
    spill(log->path, texts[i], strlen(texts[i]));
    assert_int_equal(audit_open(&options, log->metrics, &audit, &err), SITS_FORMAT);
    size_t n;
    char *bytes = slurp(log->path, &n);
    assert_string_equal(bytes, texts[i]);
    free(bytes);
  }
  options.path = "/nonexistent/audit.log";
  assert_int_equal(audit_open(&options, log->metrics, &audit, &err), SITS_IO);
  options.path = "/dev/null";
  assert_int_equal(audit_open(&options, log->metrics, &audit, &err), SITS_IO);
}

/* A file-size limit stands for a full disk: the same short write and failing write. */
static void test_full_disk_is_told_and_counted_and_passes(void **state)
{
  struct log *log = *state;
  struct rlimit before, low;
  signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct audit *audit = open_log(log, 1 << 30, 16 << 20);
  low = before;
  low.rlim_cur = 20000;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
  write_lines(audit, 200);
  for (int i = 0; i < 400 && !counter(log, METRICS_AUDIT_ERRORS); i++) usleep(10000);
  assert_true(counter(log, METRICS_AUDIT_ERRORS) > 0);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (int i = 0; i < 600 && counter(log, METRICS_AUDIT_LINES) < 200; i++) usleep(10000);
  assert_int_equal(counter(log, METRICS_AUDIT_LINES), 200);
  assert_int_equal(counter(log, METRICS_AUDIT_LOST), 0);
  audit_close(audit);
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_lines, 202);
}

/* Stands for the C library's: a disk that takes writes and cannot keep them. */
static atomic_int sync_error, n_syncs;

int fdatasync(int fd)
{
  atomic_fetch_add(&n_syncs, 1);
  errno = atomic_load(&sync_error);
  return errno ? -1 : (int)syscall(SYS_fdatasync, fd);
}

static bool is_audit_writing(struct log *log)
{
  struct metrics_now now = {0};
  struct buf text;
  buf_init(&text, 1 << 20);
  metrics_render(log->metrics, &now, &text);
  buf_append_char(&text, '\0');
  const char *at = strstr(text.data, "\nsits2026:audit_writing{");
  assert_non_null(at);
  bool is_one = strtod(strchr(at, '}') + 1, NULL) == 1;
  buf_fini(&text);
  return is_one;
}

/* Each second again, and shown until one succeeds, though no line was added meanwhile. */
static void test_a_sync_that_fails_is_told_and_counted_and_tried_again(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 30, 16 << 20);
  assert_true(is_audit_writing(log));
  atomic_store(&sync_error, EIO);
  write_lines(audit, 10);
  for (int i = 0; i < 600 && counter(log, METRICS_AUDIT_ERRORS) < 2; i++) usleep(10000);
  assert_true(counter(log, METRICS_AUDIT_ERRORS) >= 2); /* the second is a second try */
  assert_int_equal(counter(log, METRICS_AUDIT_LINES), 10);
  assert_false(is_audit_writing(log));
  atomic_store(&sync_error, 0);
  for (int i = 0; i < 600 && !is_audit_writing(log); i++) usleep(10000);
  assert_true(is_audit_writing(log));
  int n = atomic_load(&n_syncs);
  usleep(1500000);
  assert_int_equal(atomic_load(&n_syncs), n); /* clean: no more tries */
  audit_close(audit);
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_lines, 12);
}

/* Lines that were queued while the disk was full are written too when there is room again at the end. */
static void test_what_a_full_disk_held_back_is_written_at_the_end(void **state)
{
  struct log *log = *state;
  struct rlimit before, low;
  signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct audit *audit = open_log(log, 1 << 30, 16 << 20);
  low = before;
  low.rlim_cur = 2000;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
  write_lines(audit, 5000); /* over a batch, so that some wait outside the queue */
  for (int i = 0; i < 400 && !counter(log, METRICS_AUDIT_ERRORS); i++) usleep(10000);
  write_lines(audit, 200);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  audit_close(audit);
  assert_int_equal(counter(log, METRICS_AUDIT_LINES), 5200);
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_lines, 5202);
}

/* No descriptor for the next file: the old one keeps its name and goes on, and a later rotation works. */
static void test_a_rotation_that_fails_halfway_is_taken_back(void **state)
{
  struct log *log = *state;
  struct rlimit before, low;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct audit *audit = open_log(log, 8192, 16 << 20);
  low = before;
  low.rlim_cur = 3;
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
  write_lines(audit, 100);
  for (int i = 0; i < 400 && !counter(log, METRICS_AUDIT_ERRORS); i++) usleep(10000);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
  assert_true(counter(log, METRICS_AUDIT_ERRORS) > 0);
  audit_close(audit);
  struct audit_report report;
  assert_whole(log, &report);
  assert_int_equal(report.n_files, 1);
  audit = open_log(log, 8192, 16 << 20);
  write_lines(audit, 100);
  audit_close(audit);
  assert_whole(log, &report);
  assert_true(report.n_files > 1);
}

static void test_full_queue_loses_lines_counts_and_tells(void **state)
{
  struct log *log = *state;
  struct audit *audit = open_log(log, 1 << 30, 8192);
  int64_t start_us = clock_monotonic_us();
  write_lines(audit, 5000);
  assert_true(clock_monotonic_us() - start_us < 5000000); /* the disk is never waited for */
  usleep(300000);
  write_lines(audit, 1);
  audit_close(audit);
  int64_t n_lost = counter(log, METRICS_AUDIT_LOST);
  assert_true(n_lost > 0);
  struct audit_report report;
  assert_whole(log, &report);
  size_t n;
  char *bytes = slurp(log->path, &n);
  int64_t told = 0;
  for (const char *at = bytes; (at = strstr(at, "\"kind\":\"lost\"")); at++) told += atoll(strstr(at, "\"lines\":") + 8);
  assert_int_equal(told, n_lost);
  assert_int_equal(report.n_lost, n_lost);
  assert_int_equal(report.n_not_closed, 0);
  assert_int_equal(counter(log, METRICS_AUDIT_LINES) + n_lost, 5001);
  free(bytes);
}

static void test_allocation_failures(void **state)
{
#ifndef SITS_DEBUG_CHECKS
  skip();
#endif
  struct log *log = *state;
  struct audit_options options = {.path = log->path, .rotate_bytes = 1 << 20, .rotate_us = 1000000, .queue_bytes = 1 << 20};
  int64_t before = mem_live_blocks();
  for (uint64_t n = 1; n < 200; n++) {
    struct audit *audit = NULL;
    mem_fault_arm(n);
    enum sits_status status = audit_open(&options, log->metrics, &audit, NULL);
    if (!status) write_lines(audit, 1);
    int fired = mem_fault_fired();
    mem_fault_arm(0);
    audit_close(audit);
    assert_int_equal(mem_live_blocks(), before);
    if (!fired) return;
  }
  fail_msg("never ran out of faults");
}

static void test_traceparent(void **state)
{
  static const struct { const char *text; bool is_valid, is_sampled; } cases[] = {
    {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", true, true},
    {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", true, false},
    {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03", true, true},
    {"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", true, true},
    {"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more", false, false},
    {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", false, false},
    {"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", false, false},
    {"00-00000000000000000000000000000000-b7ad6b7169203331-01", false, false},
    {"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", false, false},
    {"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", false, false},
    {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0", false, false},
    {"00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01", false, false},
    {"", false, false}, {NULL, false, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct api_trace_parent parent;
    api_trace_parent_parse(cases[i].text, "a=b", &parent);
    assert_int_equal(parent.is_set, cases[i].is_valid);
    assert_int_equal(parent.is_sampled, cases[i].is_sampled);
    assert_string_equal(parent.state, cases[i].is_valid ? "a=b" : "");
  }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
int main(void)
{
  log_set_level(LOG_OFF);
  const struct CMUnitTest tests[] = {
    TEST(test_100000_lines_over_rotations_verify), TEST(test_age_rotates), TEST(test_line_says_who_what_when_how_much),
    TEST(test_flipped_bytes_are_found), TEST(test_removed_lines_are_found), TEST(test_cut_tail_is_found),
    TEST(test_swapped_missing_and_foreign_files_are_found), TEST(test_chain_goes_on_after_a_stop_and_a_crash),
    TEST(test_files_that_are_none_of_ours_are_left_alone),
    TEST(test_who_edits_cannot_chain_anew_without_the_key), TEST(test_keys_that_are_none), TEST(test_the_hash_is_hmac_sha256),
    TEST(test_full_disk_is_told_and_counted_and_passes), TEST(test_a_sync_that_fails_is_told_and_counted_and_tried_again),
    TEST(test_what_a_full_disk_held_back_is_written_at_the_end), TEST(test_a_rotation_that_fails_halfway_is_taken_back),
    TEST(test_a_finished_log_is_whole_whoever_still_records),
    TEST(test_full_queue_loses_lines_counts_and_tells), TEST(test_allocation_failures), cmocka_unit_test(test_traceparent)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
