/* Files of results, which are written beside their place and then renamed into it: complete or not there at all. */
#ifndef SITS_BASE_OUTFILE_H
#define SITS_BASE_OUTFILE_H

#include "sits2026/status.h"

/* May a file be renamed to that path? A rename puts a plain file in the place of whatever stands there, so only nothing or a regular file
 * may (behind links, too): SITS_IO names a device, pipe or folder. */
enum sits_status outfile_check(const char *path, struct sits_error *err) SITS_MUST_CHECK;

#endif
