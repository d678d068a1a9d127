/* What sits2026d does instead of serving: print things, check files. */
#ifndef SITS_DAEMON_ACTIONS_H
#define SITS_DAEMON_ACTIONS_H

#include "config/options.h"

/* The exit status. action is not OPTIONS_RUN. */
int action_run(enum options_action action, const struct options *options, const struct option_set *set);

#endif
