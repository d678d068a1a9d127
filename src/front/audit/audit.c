/* See audit.h. A record's members are written on the caller's thread (microseconds); the rest is the writer's. */
#include "front/audit/audit.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/blob_queue.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "front/audit/audit_file.h"

#define BATCH_BYTES (1u << 20)
#define SYNC_US 1000000
#define RETRY_US 1000000
#define TURN_US 100000
#define COMPLAIN_US 10000000

struct audit {
  struct audit_options options;     /* [init] */
  struct metrics *metrics;          /* [init] */
  struct blob_queue queue;
  _Atomic uint64_t n_lost;          /* [atomic] lines without room, not told in the log yet */
  pthread_t thread;
  struct audit_mac *mac;            /* [writer] NULL without a key */
  struct audit_file file;           /* [writer] */
  struct blob *pending;             /* [writer] taken from the queue, not in `file.out` yet */
  int64_t n_added;                  /* [writer] request lines in `file.out` */
  int64_t synced_us, complained_us; /* [writer] */
  bool is_dirty;                    /* [writer] written since the last sync that went well */
  bool has_unwritten, has_unsynced; /* [writer] the last write, the last sync failed */
  int64_t rotate_after_us;          /* [writer] monotonic: no rotation before, since one failed */
  bool is_finished;                 /* [owner] */
};

/* ---- a record's members ---- */

static void append_text(struct buf *out, const char *name, const char *text)
{
  buf_printf(out, ",\"%s\":\"", name);
  buf_append_json_escaped(out, text, strlen(text));
  buf_append_char(out, '"');
}

static const char *class_name(enum sits_class service_class)
{
  static const char *const names[SITS_CLASS_COUNT] = {"high", "normal", "low"};
  return service_class < SITS_CLASS_COUNT ? names[service_class] : "?";
}

static void append_call(struct buf *out, const struct api_record *record)
{
  const struct api_request *request = record->request;
  const struct api_usage *usage = &record->usage;
  if (!request) return;
  append_text(out, "model", record->model ? record->model : "");
  append_text(out, "class", class_name(request->service_class));
  buf_printf(out, ",\"stream\":%s,\"n\":%lld,\"max_tokens\":%lld", request->stream ? "true" : "false", (long long)request->n,
             (long long)api_request_max_tokens(request));
  buf_printf(out, ",\"prompt_tokens\":%lld,\"cached_tokens\":%lld,\"output_tokens\":%lld,\"stopped\":%d,\"cut\":%d",
             (long long)usage->n_prompt_tokens, (long long)usage->n_cached_tokens, (long long)usage->n_output_tokens, usage->n_stopped,
             usage->n_cut);
  if (record->prompt) buf_printf(out, ",\"prompt\":%s", record->prompt);
  else if (record->is_prompt_omitted) buf_append_text(out, ",\"prompt\":null,\"prompt_omitted\":true");
}

static void append_trace(struct buf *out, const struct api_trace_parent *parent)
{
  if (!parent || !parent->is_set) return;
  buf_append_text(out, ",\"trace\":\"");
  for (int i = 0; i < 16; i++) buf_printf(out, "%02x", parent->trace_id[i]);
  buf_append_char(out, '"');
}

static void append_record(struct buf *out, const struct api_record *record)
{
  char time[32];
  clock_format_utc(record->started_unix_us, time);
  buf_printf(out, "\"kind\":\"request\",\"time\":\"%s\"", time);
  append_text(out, "id", record->id);
  append_text(out, "transport", record->transport);
  append_text(out, "route", record->route);
  if (record->verb) append_text(out, "verb", record->verb);
  append_text(out, "tenant", record->tenant);
  append_text(out, "key", record->key);
  append_text(out, "peer", record->peer);
  append_trace(out, record->parent);
  buf_printf(out, ",\"status\":%d,\"outcome\":\"%s\",\"client_left\":%s,\"ms\":%.3f", record->code, sits_status_info(record->status)->name,
             record->client_left ? "true" : "false", (double)(record->ended_us - record->started_us) / 1000);
  append_call(out, record);
}

void audit_record(struct audit *audit, const struct api_record *record)
{
  if (record->is_public) return;
  struct buf members;
  buf_init(&members, AUDIT_MAX_LINE_BYTES - 512);
  append_record(&members, record);
  if (members.failed || !blob_queue_put(&audit->queue, members.data, members.size)) {
    atomic_fetch_add(&audit->n_lost, 1);
    metrics_add(audit->metrics, METRICS_AUDIT_LOST, 1);
  }
  buf_fini(&members);
}

/* ---- the writer ---- */

static void complain(struct audit *audit, const char *what)
{
  int64_t now_us = clock_monotonic_us();
  int saved = errno;
  metrics_add(audit->metrics, METRICS_AUDIT_ERRORS, 1);
  if (audit->complained_us && now_us - audit->complained_us < COMPLAIN_US) return;
  audit->complained_us = now_us;
  log_error("audit", "%s: %s: %s; lines are kept while there is room", audit->options.path, what, strerror(saved));
}

static void tell(struct audit *audit) { metrics_set_audit(audit->metrics, !audit->has_unwritten && !audit->has_unsynced); }

static bool flush(struct audit *audit)
{
  audit->has_unwritten = !audit_file_flush(&audit->file);
  if (audit->has_unwritten) complain(audit, "cannot write");
  tell(audit);
  if (audit->has_unwritten) return false;
  metrics_add(audit->metrics, METRICS_AUDIT_LINES, audit->n_added);
  audit->is_dirty |= audit->n_added > 0;
  audit->n_added = 0;
  return true;
}

static void rotate_if_due(struct audit *audit)
{
  const struct audit_file *file = &audit->file;
  bool is_full = file->n_bytes >= audit->options.rotate_bytes;
  bool is_old = clock_unix_us() - file->begun_us >= audit->options.rotate_us && file->link.seq > file->first_seq;
  if ((!is_full && !is_old) || clock_monotonic_us() < audit->rotate_after_us) return;
  if (audit_file_rotate(&audit->file)) return;
  complain(audit, "cannot rotate");
  audit->rotate_after_us = clock_monotonic_us() + COMPLAIN_US;
}

static void add_lost(struct audit *audit)
{
  uint64_t n = atomic_exchange(&audit->n_lost, 0);
  if (!n) return;
  struct buf members;
  char time[32];
  buf_init(&members, 512);
  clock_format_utc(clock_unix_us(), time);
  buf_printf(&members, "\"kind\":\"lost\",\"time\":\"%s\",\"lines\":%" PRIu64, time, n);
  if (members.failed || !audit_file_add(&audit->file, members.data, members.size)) atomic_fetch_add(&audit->n_lost, n);
  buf_fini(&members);
}

/* Chain what is pending, a batch or a file's worth at a time. False: the disk refuses; what is left stays pending. */
static bool write_pending(struct audit *audit)
{
  struct audit_file *file = &audit->file;
  if (file->out.size && !flush(audit)) return false;
  add_lost(audit);
  while (audit->pending) {
    if (!audit_file_add(file, audit->pending->bytes, audit->pending->n_bytes)) {
      atomic_fetch_add(&audit->n_lost, 1);
      metrics_add(audit->metrics, METRICS_AUDIT_LOST, 1);
    } else {
      audit->n_added++;
    }
    audit->pending = blob_free_first(audit->pending);
    bool is_batch = file->out.size >= BATCH_BYTES || file->n_bytes + (int64_t)file->out.size >= audit->options.rotate_bytes;
    if (!is_batch) continue;
    if (!flush(audit)) return false;
    rotate_if_due(audit);
  }
  if (!flush(audit)) return false;
  rotate_if_due(audit);
  return true;
}

static void sync_if_due(struct audit *audit)
{
  int64_t now_us = clock_monotonic_us();
  if (!audit->is_dirty || now_us - audit->synced_us < SYNC_US) return;
  audit->has_unsynced = audit->is_dirty = !audit_file_sync(&audit->file); /* tried again in a second, whether or not more is written */
  if (audit->has_unsynced) complain(audit, "cannot sync");
  audit->synced_us = now_us;
  tell(audit);
}

static int64_t count(const struct blob *list)
{
  int64_t n = 0;
  for (; list; list = list->next) n++;
  return n;
}

static void *writer_main(void *argument)
{
  struct audit *audit = argument;
  for (;;) {
    bool is_closing = blob_queue_is_closed(&audit->queue); /* asked before taking: nothing comes after a close */
    if (!audit->pending) audit->pending = blob_queue_take(&audit->queue, SYNC_US);
    bool is_written = write_pending(audit);
    sync_if_due(audit);
    if (is_closing && is_written && (audit->pending = blob_queue_take(&audit->queue, 0))) continue; /* what came while the disk was full */
    if (is_closing) break;
    blob_queue_wait_close(&audit->queue, is_written ? TURN_US : RETRY_US); /* lines gather meanwhile: fewer, larger writes */
  }
  int64_t n_left = audit->n_added + count(audit->pending);
  struct blob *queued = blob_queue_take(&audit->queue, 0);
  n_left += count(queued);
  blob_free_list(queued);
  if (n_left) log_error("audit", "%s: %lld lines could not be written", audit->options.path, (long long)n_left);
  return NULL;
}

enum sits_status audit_open(const struct audit_options *options, struct metrics *metrics, struct audit **out, struct sits_error *err)
{
  struct audit *audit = mem_calloc(1, sizeof *audit);
  if (!audit) return sits_fail(err, SITS_NOMEM, "no memory for the audit log");
  audit->options = *options;
  audit->metrics = metrics;
  enum sits_status status = options->key_file ? audit_mac_open(options->key_file, &audit->mac, err) : SITS_OK;
  if (!status) status = audit_file_open(&audit->file, options->path, audit->mac, err);
  if (status) {
    audit_mac_close(audit->mac);
    mem_free(audit);
    return status;
  }
  audit->options.path = audit->file.path;
  metrics_set_audit(metrics, true); /* the begin line is written */
  blob_queue_init(&audit->queue, (size_t)options->queue_bytes);
  int failed = pthread_create(&audit->thread, NULL, writer_main, audit);
  if (failed) {
    audit_file_close(&audit->file);
    blob_queue_fini(&audit->queue);
    audit_mac_close(audit->mac);
    mem_free(audit);
    return sits_fail(err, SITS_INTERNAL, "the audit log's thread could not be started: %s", strerror(failed));
  }
  *out = audit;
  return SITS_OK;
}

void audit_finish(struct audit *audit)
{
  if (!audit || audit->is_finished) return;
  audit->is_finished = true;
  blob_queue_close(&audit->queue);
  pthread_join(audit->thread, NULL);
  audit_file_close(&audit->file);
}

void audit_close(struct audit *audit)
{
  if (!audit) return;
  audit_finish(audit);
  blob_free_list(audit->pending);
  blob_queue_fini(&audit->queue);
  audit_mac_close(audit->mac);
  mem_free(audit);
}
