/* Constants of the engine file that reader and writer share; see engine_file.h. */
#ifndef SITS_TENSOR_ENGINE_FORMAT_H
#define SITS_TENSOR_ENGINE_FORMAT_H

#include <stdint.h>

#define ENGINE_ORDER_MARK 0x01020304u
#define ENGINE_PREFIX_BYTES 40
#define ENGINE_SECTION_KEYS 3

struct engine_prefix {
  char magic[8];
  uint32_t version, order;
  uint64_t header_bytes, file_bytes, header_checksum;
};
_Static_assert(sizeof(struct engine_prefix) == ENGINE_PREFIX_BYTES, "the prefix is written as it lies in memory");

extern const char engine_magic[8];
extern const char *const engine_quant_names[3];   /* by enum sits_quant */
extern const char *const engine_section_keys[ENGINE_SECTION_KEYS];

/* Free text that jansson allocated. */
void engine_free_json_text(char *text);

#endif
