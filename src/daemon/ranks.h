/* Which devices and processes share the model, from the options and a launcher's environment; and what a process does that does not
 * lead. */
#ifndef SITS_DAEMON_RANKS_H
#define SITS_DAEMON_RANKS_H

#include "backend/nodes.h"
#include "config/options.h"
#include "engine/instance.h"

/* Ranks, devices and time-outs into out. With multi-node *nodes is filled (strings borrowed from options or the environment) and
 * out->nodes points at it. */
enum sits_status ranks_read(const struct options *options, struct nodes_options *nodes, struct instance_options *out,
                            struct sits_error *err) SITS_MUST_CHECK;

/* Is this process a rank other than 0? Errors of the options show in ranks_read. */
bool ranks_follows(const struct options *options);
/* Serve the leader until it closes. The exit status. Connected, the first SIGTERM or SIGINT is left to the leader. */
int ranks_follow(const struct options *options);

#endif
