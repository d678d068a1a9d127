/* engine_vec_body.h compiled for avx2. */
#include "engine/engine_vec_body.h"

const struct engine_vec engine_vec_avx2 = {"avx2", max_of, exp_sum, collect};
