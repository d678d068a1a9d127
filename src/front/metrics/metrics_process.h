/* The process's own figures under the names that Prometheus clients share (no prefix): memory, processor time, descriptors, start. */
#ifndef SITS_FRONT_METRICS_METRICS_PROCESS_H
#define SITS_FRONT_METRICS_METRICS_PROCESS_H

#include "base/buf.h"

/* Reads /proc/self/stat; what cannot be read is left out. */
void metrics_process_render(struct buf *out);

#endif
