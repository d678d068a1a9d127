/* Shared by the option*.c files only. */
#ifndef SITS_CONFIG_OPTION_INTERNAL_H
#define SITS_CONFIG_OPTION_INTERNAL_H

#include <stddef.h>

#define OPTION_MASK "********" /* printed in place of a secret; never taken as one */

/* "max-num-seqs" -> "SITS_MAX_NUM_SEQS". */
void option_env_name(const char *name, char *out, size_t n_bytes);

#endif
