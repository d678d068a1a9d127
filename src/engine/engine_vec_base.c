/* engine_vec_body.h compiled for any x86-64. */
#include "engine/engine_vec_body.h"

const struct engine_vec engine_vec_base = {"base", max_of, exp_sum, collect};
