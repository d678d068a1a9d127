/* See outfile.h. */
#include "base/outfile.h"

#include <sys/stat.h>

enum sits_status outfile_check(const char *path, struct sits_error *err)
{
  struct stat st;
  if (stat(path, &st) != 0 || S_ISREG(st.st_mode)) return SITS_OK; /* what else is wrong with it, writing tells */
  return sits_fail(err, SITS_IO, "%.200s: not a regular file, cannot be written as one", path);
}
