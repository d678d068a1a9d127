/* Files with secrets that more people can read than need to: one rule for all of them. */
#ifndef SITS_DAEMON_SECRETS_H
#define SITS_DAEMON_SECRETS_H

#include "config/options.h"

/* A warning for each file of ssl-keyfile, api-key-file, audit-key-file, and of config where it holds a key, that others than its owner
 * may read or change. Where the owner is root and the daemon is not, its group may read: that is how orchestrators hand secrets to a
 * process. */
void secrets_check(const struct options *options);

#endif
