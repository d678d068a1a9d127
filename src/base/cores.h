/* How many processor cores this process may use. */
#ifndef SITS_BASE_CORES_H
#define SITS_BASE_CORES_H

#include <stdint.h>

/* By the affinity mask, which containers and taskset set; where that is not told, all cores that are online. At least 1. */
int32_t cores_usable(void);

#endif
