/* engine_vec_body.h compiled for avx512. */
#include "engine/engine_vec_body.h"

const struct engine_vec engine_vec_avx512 = {"avx512", max_of, exp_sum, collect};
