/* See audit_verify.h. */
#include "front/audit/audit_verify.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mapfile.h"
#include "front/audit/audit_file.h"

struct chain {
  struct audit_report *report;
  struct audit_mac *mac;
  bool has_link;
  struct audit_link link;          /* the newest line that was right */
  bool has_head, is_head_met;
  struct audit_link head;          /* of the last file */
  bool ends;                       /* the newest line is an end line */
};

static bool has_kind(const char *line, size_t n_bytes, const char *kind)
{
  const char *at = memmem(line, n_bytes, "\",\"kind\":\"", 10); /* behind seq and prev, whose values hold no quote */
  size_t n = strlen(kind);
  return at && (size_t)(line + n_bytes - at) > 10 + n && !memcmp(at + 10, kind, n) && at[10 + n] == '"';
}

/* What a right chain tells of lines that are not in it. */
static void note_gaps(struct chain *chain, const char *line, size_t n_bytes)
{
  static const char member[] = "\"lines\":";
  chain->report->n_not_closed += chain->has_link && !chain->ends && has_kind(line, n_bytes, "begin");
  const char *at = has_kind(line, n_bytes, "lost") ? memmem(line, n_bytes, member, sizeof member - 1) : NULL;
  if (at) chain->report->n_lost += strtoull(at + sizeof member - 1, NULL, 10); /* ends at the hash, which every line has */
}

static enum sits_status check_line(struct chain *chain, const char *path, int64_t number, const char *line, size_t n_bytes,
                                   struct sits_error *err)
{
  uint64_t seq;
  char prev[SHA256_HEX_BYTES], hash[SHA256_HEX_BYTES];
  bool is_intact;
#define BAD(...) return sits_fail(err, SITS_FORMAT, __VA_ARGS__)
  if (!audit_line_parse(chain->mac, line, n_bytes, &seq, prev, hash, &is_intact))
    BAD("%s: line %" PRId64 " is no line of an audit log", path, number);
  if (!is_intact)
    BAD("%s: line %" PRId64 " was changed: its hash is not that of its bytes%s", path, number,
        chain->mac ? " under this key" : memmem(line, n_bytes, "\"mac_key\":", 10) ? " (it names a key: give --audit-key-file)" : "");
  if (chain->has_link && seq != chain->link.seq + 1)
    BAD("%s: line %" PRId64 " has number %" PRIu64 " where %" PRIu64 " must follow: lines were removed, or files are missing or swapped",
        path, number, seq, chain->link.seq + 1);
  if (chain->has_link && strcmp(prev, chain->link.hash)) BAD("%s: line %" PRId64 " does not follow the line before it", path, number);
  if (number == 1 && !has_kind(line, n_bytes, "begin")) BAD("%s: line 1 is no begin line: lines before it were removed", path);
#undef BAD
  note_gaps(chain, line, n_bytes);
  chain->link.seq = seq;
  memcpy(chain->link.hash, hash, sizeof hash);
  chain->ends = has_kind(line, n_bytes, "end");
  if (!chain->has_link) chain->report->first_seq = seq;
  chain->has_link = true;
  if (chain->has_head && chain->head.seq == seq) chain->is_head_met = !strcmp(chain->head.hash, hash);
  chain->report->n_lines++;
  chain->report->last_seq = seq;
  memcpy(chain->report->last_hash, hash, sizeof hash);
  return SITS_OK;
}

static enum sits_status check_file(struct chain *chain, const char *path, struct sits_error *err)
{
  struct mapfile file;
  enum sits_status status = mapfile_open(&file, path, err);
  if (status) return status;
  const char *at = (const char *)file.data, *end = at + file.n_bytes;
  if (!file.n_bytes) status = sits_fail(err, SITS_FORMAT, "%s: the file is empty", path);
  for (int64_t number = 1; !status && at < end; number++) {
    const char *stop = memchr(at, '\n', (size_t)(end - at));
    if (!stop) status = sits_fail(err, SITS_FORMAT, "%s: line %" PRId64 " is cut", path, number);
    else status = check_line(chain, path, number, at, (size_t)(stop - at), err);
    at = stop ? stop + 1 : end;
  }
  mapfile_close(&file);
  if (!status) chain->report->n_files++;
  return status;
}

/* Read before the file itself, so that what is written meanwhile is behind it. */
static enum sits_status read_head(struct chain *chain, const char *path, struct sits_error *err)
{
  struct buf head_path;
  buf_init(&head_path, 8192);
  if (!buf_printf(&head_path, "%s.head", path)) return sits_fail(err, SITS_NOMEM, "no memory");
  struct sits_error reason;
  enum sits_status status = audit_head_read(chain->mac, head_path.data, &chain->head, &reason);
  chain->has_head = !status;
  buf_fini(&head_path);
  if (!status || status == SITS_NOT_FOUND) return SITS_OK;
  *err = reason;
  return status;
}

enum sits_status audit_verify(const char *const *paths, int n_paths, struct audit_mac *mac, struct audit_report *report,
                              struct sits_error *err)
{
  struct chain chain = {.report = report, .mac = mac};
  *report = (struct audit_report){0};
  for (int i = 0; i < n_paths; i++) {
    enum sits_status status = i + 1 == n_paths ? read_head(&chain, paths[i], err) : SITS_OK;
    if (!status) status = check_file(&chain, paths[i], err);
    if (status) return status;
  }
  const char *last = paths[n_paths - 1];
  if (chain.has_head && !chain.is_head_met)
    return sits_fail(err, SITS_FORMAT, "%s: its last line has number %" PRIu64 ", but %" PRIu64 " was written (%s.head): its tail was cut",
                     last, chain.link.seq, chain.head.seq, last);
  if (!chain.has_head && !chain.ends)
    return sits_fail(err, SITS_FORMAT, "%s: no end line and no %s.head: whether its tail was cut cannot be told", last, last);
  return SITS_OK;
}
