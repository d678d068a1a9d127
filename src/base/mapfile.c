/* See mapfile.h. */
#include "base/mapfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum sits_status mapfile_open(struct mapfile *file, const char *path, struct sits_error *err)
{
  *file = (struct mapfile){0};
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* opening a FIFO must not wait for its writer: it is refused below */
  if (fd < 0) return sits_fail(err, errno == ENOENT ? SITS_NOT_FOUND : SITS_IO, "%s: %s", path, strerror(errno));
  struct stat st;
  enum sits_status status = SITS_OK;
  if (fstat(fd, &st) != 0) {
    status = sits_fail(err, SITS_IO, "%s: %s", path, strerror(errno));
  } else if (!S_ISREG(st.st_mode)) {
    status = sits_fail(err, SITS_IO, "%s: not a regular file", path);
  } else if (st.st_size > 0) {
    void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) status = sits_fail(err, SITS_IO, "%s: cannot map: %s", path, strerror(errno));
    else *file = (struct mapfile){.data = data, .n_bytes = (size_t)st.st_size};
  }
  close(fd);
  return status;
}

void mapfile_close(struct mapfile *file)
{
  if (file->data) munmap((void *)(uintptr_t)file->data, file->n_bytes);
  *file = (struct mapfile){0};
}

void mapfile_drop(const struct mapfile *file, size_t offset, size_t n_bytes)
{
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)file->data;
  if (file->data == NULL || offset > file->n_bytes || n_bytes > file->n_bytes - offset) return;
  const uintptr_t first = (start + offset + page - 1) / page * page, last = (start + offset + n_bytes) / page * page;
  if (last > first) madvise((void *)first, last - first, MADV_DONTNEED);
}
