/* See audit_file.h. Order of writes: the lines, then the head. So the head may be behind by what a crash interrupted, but never ahead of
 * what was written, unless lines were taken away. */
#include "front/audit/audit_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

#define MAX_OUT_BYTES (8u << 20)
#define HEAD_BYTES (20 + 1 + 64 + 1)
#define KEYED_HEAD_BYTES (HEAD_BYTES + 64 + 1)
static const char zeros[] = "0000000000000000000000000000000000000000000000000000000000000000";
static const char head_of_line[] = "{\"seq\":", head_of_prev[] = ",\"prev\":\"", head_of_hash[] = ",\"hash\":\"", end_of_line[] = "\"}";
enum { HASH_TAIL_BYTES = sizeof head_of_hash - 1 + 64 + sizeof end_of_line - 1 };

/* ---- the form of a line ---- */

static bool is_hash(const char *text)
{
  for (int i = 0; i < 64; i++)
    if (!strchr("0123456789abcdef", text[i]) || !text[i]) return false;
  return true;
}

bool audit_line_parse(struct audit_mac *mac, const char *line, size_t n_bytes, uint64_t *seq, char prev[SHA256_HEX_BYTES],
                      char hash[SHA256_HEX_BYTES], bool *is_intact)
{
  size_t at = sizeof head_of_line - 1, n_digits = 0;
  if (n_bytes < at + HASH_TAIL_BYTES || memcmp(line, head_of_line, at)) return false;
  uint64_t number = 0;
  for (; at < n_bytes && line[at] >= '0' && line[at] <= '9' && n_digits < 19; at++, n_digits++)
    number = number * 10 + (uint64_t)(line[at] - '0');
  size_t n_prev = sizeof head_of_prev - 1, n_hashed = n_bytes - HASH_TAIL_BYTES;
  if (!n_digits || at + n_prev + 65 > n_hashed || memcmp(line + at, head_of_prev, n_prev) || line[at + n_prev + 64] != '"') return false;
  const char *tail = line + n_hashed;
  const char *given = tail + sizeof head_of_hash - 1;
  if (memcmp(tail, head_of_hash, sizeof head_of_hash - 1) || memcmp(given + 64, end_of_line, sizeof end_of_line - 1)) return false;
  if (!is_hash(line + at + n_prev) || !is_hash(given)) return false;
  *seq = number;
  snprintf(prev, SHA256_HEX_BYTES, "%.64s", line + at + n_prev);
  audit_mac_hex(mac, line, n_hashed, hash);
  *is_intact = !memcmp(hash, given, 64);
  return true;
}

/* "NUMBER HASH\n"; under a key another field, the keyed hash of these two, so that who cuts the tail cannot set the head back. Returns the
 * length. */
static int head_format(struct audit_mac *mac, const struct audit_link *link, char text[KEYED_HEAD_BYTES + 1])
{
  char hash[SHA256_HEX_BYTES];
  int n = snprintf(text, KEYED_HEAD_BYTES + 1, "%020" PRIu64 " %.64s\n", link->seq, link->hash);
  if (!mac) return n;
  audit_mac_hex(mac, text, (size_t)n, hash);
  text[n - 1] = ' ';
  return n + snprintf(text + n, (size_t)(KEYED_HEAD_BYTES + 1 - n), "%s\n", hash);
}

enum sits_status audit_head_read(struct audit_mac *mac, const char *head_path, struct audit_link *out, struct sits_error *err)
{
  char text[KEYED_HEAD_BYTES + 1] = "", right[KEYED_HEAD_BYTES + 1];
  int fd = open(head_path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return sits_fail(err, SITS_NOT_FOUND, "%s: there is no such file", head_path);
  ssize_t n = fd < 0 ? -1 : read(fd, text, KEYED_HEAD_BYTES);
  int saved = errno;
  if (fd >= 0) close(fd);
  if (n < 0) return sits_fail(err, SITS_IO, "%s: %s", head_path, strerror(saved));
  struct audit_link link;
  if (n < HEAD_BYTES || sscanf(text, "%20" SCNu64 " %64s", &link.seq, link.hash) != 2 || strlen(link.hash) != 64 || !is_hash(link.hash))
    return sits_fail(err, SITS_FORMAT, "%s: no head of an audit log", head_path);
  if (n != head_format(mac, &link, right) || memcmp(text, right, (size_t)n))
    return sits_fail(err, SITS_FORMAT, "%s: the head of an audit log that is kept %s, or it was changed", head_path,
                     mac ? "without this key" : "under a key (audit-key-file)");
  *out = link;
  return SITS_OK;
}

/* ---- adding and writing ---- */

bool audit_file_add(struct audit_file *file, const char *members, size_t n_bytes)
{
  size_t before = file->out.size;
  uint64_t seq = file->has_next_link ? file->next_link.seq + 1 : 0;
  const char *prev = file->has_next_link ? file->next_link.hash : zeros;
  if (n_bytes > AUDIT_MAX_LINE_BYTES - 512 || file->out.failed) return false;
  buf_printf(&file->out, "%s%" PRIu64 "%s%s\",", head_of_line, seq, head_of_prev, prev);
  buf_append(&file->out, members, n_bytes);
  if (!buf_reserve(&file->out, HASH_TAIL_BYTES + 1)) {
    buf_truncate(&file->out, before);
    file->out.failed = false;
    return false;
  }
  audit_mac_hex(file->mac, file->out.data + before, file->out.size - before, file->next_link.hash);
  file->next_link.seq = seq;
  file->has_next_link = true;
  buf_printf(&file->out, "%s%s%s\n", head_of_hash, file->next_link.hash, end_of_line);
  return true;
}

static bool write_all(int fd, const char *bytes, size_t n_bytes)
{
  while (n_bytes) {
    ssize_t n = write(fd, bytes, n_bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes += n;
    n_bytes -= (size_t)n;
  }
  return true;
}

static bool write_head(struct audit_file *file)
{
  char text[KEYED_HEAD_BYTES + 1];
  int n = head_format(file->mac, &file->link, text);
  return pwrite(file->head_fd, text, (size_t)n, 0) == n;
}

bool audit_file_flush(struct audit_file *file)
{
  if (!file->out.size) return true;
  if (!write_all(file->fd, file->out.data, file->out.size)) {
    int saved = errno;
    if (ftruncate(file->fd, file->n_bytes)) log_error("audit", "%s: cannot take a half line back: %s", file->path, strerror(errno));
    errno = saved;
    return false;
  }
  file->n_bytes += (int64_t)file->out.size;
  buf_clear(&file->out);
  file->link = file->next_link;
  file->has_link = true;
  if (!write_head(file)) log_warn("audit", "%s: %s", file->head_path, strerror(errno)); /* the next one tries again; the lines are safe */
  return true;
}

void audit_file_discard(struct audit_file *file)
{
  buf_clear(&file->out);
  file->next_link = file->link;
  file->has_next_link = file->has_link;
}

bool audit_file_sync(struct audit_file *file) { return !fdatasync(file->fd) && !fdatasync(file->head_fd); }

/* ---- files ---- */

static bool add_kind(struct audit_file *file, const char *kind, int64_t n_torn_bytes)
{
  struct buf members;
  char time[32];
  int64_t now_us = clock_unix_us();
  buf_init(&members, 8192);
  clock_format_utc(now_us, time);
  buf_printf(&members, "\"kind\":\"%s\",\"time\":\"%s\",\"file\":\"", kind, time);
  buf_append_json_escaped(&members, file->name, strlen(file->name));
  buf_printf(&members, "\",\"version\":\"" SITS_VERSION "\",\"unix_us\":%lld", (long long)now_us);
  if (file->mac) buf_printf(&members, ",\"mac\":\"hmac-sha256\",\"mac_key\":\"%s\"", audit_mac_key_id(file->mac));
  if (n_torn_bytes) buf_printf(&members, ",\"torn_bytes\":%lld", (long long)n_torn_bytes);
  bool ok = !members.failed && audit_file_add(file, members.data, members.size);
  buf_fini(&members);
  return ok;
}

static bool add_begin(struct audit_file *file, int64_t n_torn_bytes)
{
  file->first_seq = file->has_next_link ? file->next_link.seq + 1 : 0;
  file->begun_us = clock_unix_us();
  return add_kind(file, "begin", n_torn_bytes);
}

bool audit_file_rotate(struct audit_file *file)
{
  char to[4096];
  uint64_t first = file->first_seq;
  if (snprintf(to, sizeof to, "%s.%012" PRIu64, file->path, first) >= (int)sizeof to) {
    errno = ENAMETOOLONG;
    return false;
  }
  if (!audit_file_flush(file)) return false;
  if (!add_kind(file, "end", 0) || !audit_file_flush(file) || !audit_file_sync(file)) {
    audit_file_discard(file);
    return false;
  }
  if (renameat2(AT_FDCWD, file->path, AT_FDCWD, to, RENAME_NOREPLACE)) return false; /* the next goes behind the end line: one chain */
  int fd = open(file->path, O_RDWR | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB)) { /* no inode, no descriptor: the old file gets its name back and goes on */
    int saved = errno;
    if (fd >= 0) close(fd);
    if (rename(to, file->path)) log_error("audit", "%s cannot be named %s again: %s", to, file->path, strerror(errno));
    errno = saved;
    return false;
  }
  close(file->fd);
  file->fd = fd;
  file->n_bytes = 0;
  log_info("audit", "%s ends with line %" PRIu64 " hash %s", to, file->link.seq, file->link.hash); /* a copy that others keep */
  return add_begin(file, 0) && audit_file_flush(file);
}

/* The last whole line of the file into *link; *n_bytes: where whole lines end. An empty file has none. */
static enum sits_status read_tail(struct audit_file *file, int64_t size, bool *found, int64_t *n_bytes, struct sits_error *err)
{
  int64_t from = size > 2 * (int64_t)AUDIT_MAX_LINE_BYTES ? size - 2 * (int64_t)AUDIT_MAX_LINE_BYTES : 0;
  size_t n = (size_t)(size - from);
  char *bytes = mem_alloc(n + 1);
  if (!bytes) return sits_fail(err, SITS_NOMEM, "%s: no memory", file->path);
  enum sits_status status = SITS_OK;
  if (pread(file->fd, bytes, n, from) != (ssize_t)n) status = sits_fail(err, SITS_IO, "%s: cannot be read", file->path);
  const char *end = status ? NULL : memrchr(bytes, '\n', n);
  *found = false;
  *n_bytes = from ? size : 0;
  if (!status && end) {
    const char *before = memrchr(bytes, '\n', (size_t)(end - bytes));
    const char *line = before ? before + 1 : bytes;
    char prev[SHA256_HEX_BYTES];
    bool is_intact = false;
    *found = audit_line_parse(file->mac, line, (size_t)(end - line), &file->link.seq, prev, file->link.hash, &is_intact) && is_intact;
    *n_bytes = from + (end + 1 - bytes);
  }
  size_t n_same = n < sizeof head_of_line - 1 ? n : sizeof head_of_line - 1;
  bool is_alien = end ? !*found : from > 0 || memcmp(bytes, head_of_line, n_same) != 0; /* a torn first line may go, nothing else */
  if (!status && is_alien)
    status = sits_fail(err, SITS_FORMAT, "%s: its last line is no line of an audit log%s, or was changed; verify it and move it away",
                       file->path, file->mac ? " under this key" : "");
  mem_free(bytes);
  return status;
}

/* Number and time of the file's first line, for its later name and its age. */
static void read_first(struct audit_file *file)
{
  char line[8192], prev[SHA256_HEX_BYTES], hash[SHA256_HEX_BYTES];
  ssize_t n = pread(file->fd, line, sizeof line - 1, 0);
  line[n > 0 ? n : 0] = '\0';
  char *end = strchr(line, '\n');
  bool is_intact;
  file->first_seq = file->link.seq;
  file->begun_us = clock_unix_us();
  if (!end || !audit_line_parse(file->mac, line, (size_t)(end - line), &file->first_seq, prev, hash, &is_intact)) return;
  *end = '\0';
  const char *at = strstr(line, "\"unix_us\":");
  long long begun;
  if (at && sscanf(at, "\"unix_us\":%lld", &begun) == 1) file->begun_us = begun;
}

/* Find where the chain stands. */
static enum sits_status resume(struct audit_file *file, struct sits_error *err)
{
  struct stat info;
  if (fstat(file->fd, &info) || !S_ISREG(info.st_mode)) return sits_fail(err, SITS_IO, "%s: no regular file", file->path);
  bool found = false;
  int64_t n_whole = 0;
  struct audit_link head;
  enum sits_status status = info.st_size ? read_tail(file, info.st_size, &found, &n_whole, err) : SITS_OK;
  if (status) return status;
  struct sits_error head_error;
  enum sits_status head_status = audit_head_read(file->mac, file->head_path, &head, &head_error);
  if (head_status && head_status != SITS_NOT_FOUND && !(head_status == SITS_FORMAT && !found)) {
    *err = head_error;
    return head_status;
  }
  file->head_fd = open(file->head_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (file->head_fd < 0) return sits_fail_param(err, SITS_IO, "audit-log", "%s: %s", file->head_path, strerror(errno));
  if (n_whole < info.st_size && ftruncate(file->fd, n_whole)) return sits_fail(err, SITS_IO, "%s: %s", file->path, strerror(errno));
  file->n_bytes = n_whole;
  if (found) read_first(file);
  if (!head_status && (!found || head.seq > file->link.seq)) {
    if (found) log_error("audit", "%s: lines %" PRIu64 " to %" PRIu64 " are missing", file->path, file->link.seq + 1, head.seq);
    file->link = head;
    found = true;
  }
  file->has_link = file->has_next_link = found;
  file->next_link = file->link;
  bool ok = add_begin(file, info.st_size - n_whole);
  if (n_whole) read_first(file); /* the file keeps its name and age */
  if (ok && audit_file_flush(file)) return SITS_OK;
  return sits_fail(err, SITS_IO, "%s: %s", file->path, strerror(errno));
}

static void release(struct audit_file *file)
{
  if (file->fd >= 0) close(file->fd);
  if (file->head_fd >= 0) close(file->head_fd);
  file->fd = file->head_fd = -1;
  buf_fini(&file->out);
  mem_free(file->path);
  mem_free(file->head_path);
  file->path = file->head_path = NULL;
}

enum sits_status audit_file_open(struct audit_file *file, const char *path, struct audit_mac *mac, struct sits_error *err)
{
  *file = (struct audit_file){.fd = -1, .head_fd = -1, .path = mem_strdup(path), .mac = mac};
  buf_init(&file->out, MAX_OUT_BYTES);
  struct buf head_path;
  buf_init(&head_path, 4096);
  bool ok = buf_printf(&head_path, "%s.head", path);
  file->head_path = ok ? buf_take(&head_path, NULL) : NULL;
  enum sits_status status = SITS_OK;
  if (!file->path || !file->head_path) {
    status = sits_fail(err, SITS_NOMEM, "no memory for the audit log");
    goto done;
  }
  const char *slash = strrchr(file->path, '/');
  file->name = slash ? file->path + (slash + 1 - file->path) : file->path;
  file->fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
  if (file->fd < 0) status = sits_fail_param(err, SITS_IO, "audit-log", "%s: %s", path, strerror(errno));
  else if (flock(file->fd, LOCK_EX | LOCK_NB))
    status = sits_fail_param(err, SITS_CONFIG, "audit-log", "%s: another process writes it", path);
  if (status) goto done;
  status = resume(file, err);
done:
  if (status) release(file);
  return status;
}

void audit_file_close(struct audit_file *file)
{
  if (file->fd >= 0 && file->head_fd >= 0 && audit_file_flush(file) && add_kind(file, "end", 0) && audit_file_flush(file) &&
      !audit_file_sync(file))
    log_error("audit", "%s: cannot sync: %s; the last lines may not outlive a power failure", file->path, strerror(errno));
  release(file);
}
