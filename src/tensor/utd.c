/* The dtype table and shape arithmetic of include/sits2026/utd.h, and the names of act_format.h. */
#include "sits2026/utd.h"

#include "tensor/act_format.h"

static const struct sits_dtype_info dtype_table[SITS_DTYPE_COUNT] = {
#define ROW(name, text, elements, bytes) [SITS_DTYPE_##name] = {text, elements, bytes},
    SITS_DTYPE_MAP(ROW)
#undef ROW
};

const struct sits_dtype_info *sits_dtype_info(enum sits_dtype dtype) { return &dtype_table[dtype]; }

int64_t sits_utd_elements(const struct sits_utd *utd)
{
  int64_t n = 1;
  for (int i = 0; i < utd->n_dims; i++)
    if (utd->dims[i] < 0 || __builtin_mul_overflow(n, utd->dims[i], &n)) return -1;
  return n;
}

int64_t sits_utd_row_major_bytes(const struct sits_utd *utd)
{
  const struct sits_dtype_info *info = sits_dtype_info(utd->dtype);
  int64_t n = sits_utd_elements(utd), bytes;
  int64_t row = utd->n_dims > 0 ? utd->dims[utd->n_dims - 1] : 1;
  if (n < 0 || row % info->block_elements != 0) return -1;
  if (__builtin_mul_overflow(n / info->block_elements, (int64_t)info->block_bytes, &bytes)) return -1;
  return bytes;
}

const char *act_kind_name(enum act_kind kind)
{
  static const char *const names[ACT_KINDS] = {"backend", "float", "int8", "int4"};
  return names[kind];
}
