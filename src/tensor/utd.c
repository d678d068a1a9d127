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

const void *sits_utd_row(const struct sits_utd *u, int64_t row)
{
  const struct sits_dtype_info *info = sits_dtype_info(u->dtype);
  const int64_t stride = u->row_stride != 0 ? u->row_stride : u->dims[1] / info->block_elements * info->block_bytes;
  return (const uint8_t *)u->data + row * stride;
}

/* Row `row` of values that lie beside the tensor's, one a group. */
static const void *side_row(const struct sits_utd *u, const void *values, int64_t row)
{
  const int64_t n = u->quant == SITS_QUANT_GROUP ? (u->dims[1] + u->group_size - 1) / u->group_size : 1;
  const int64_t stride = u->scale_stride != 0 ? u->scale_stride : n * sits_dtype_info(u->scale_dtype)->block_bytes;
  return (const uint8_t *)values + row * stride;
}

const void *sits_utd_row_scales(const struct sits_utd *u, int64_t row) { return side_row(u, u->scales, row); }
const void *sits_utd_row_minimums(const struct sits_utd *u, int64_t row)
{
  return u->minimums == NULL ? NULL : side_row(u, u->minimums, row);
}

const char *act_kind_name(enum act_kind kind)
{
  static const char *const names[ACT_KINDS] = {"backend", "float", "int8", "int4"};
  return names[kind];
}
