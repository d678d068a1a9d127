/* Fuzz target: an engine file whose header is the input (its prefix is made to fit), followed by some pages of data. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "tensor/engine_file.h"
#include "tensor/engine_format.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  size_t header_room = (ENGINE_PREFIX_BYTES + size + ENGINE_FILE_ALIGN - 1) / ENGINE_FILE_ALIGN * ENGINE_FILE_ALIGN;
  size_t n_bytes = header_room + 4 * ENGINE_FILE_ALIGN;
  unsigned char *bytes = mem_calloc(1, n_bytes);
  struct engine_prefix prefix = {.version = ENGINE_FILE_VERSION, .order = ENGINE_ORDER_MARK, .header_bytes = size, .file_bytes = n_bytes,
                                 .header_checksum = hash_bulk(0, data, size)};
  memcpy(prefix.magic, engine_magic, sizeof prefix.magic);
  memcpy(bytes, &prefix, sizeof prefix);
  if (size) memcpy(bytes + sizeof prefix, data, size);
  struct engine_file *file = NULL;
  struct sits_error err = {0};
  if (engine_file_parse(bytes, n_bytes, "fuzz.bin", &file, &err)) {
    if (!err.text[0]) abort();
  } else {
    enum sits_status status = engine_file_verify(file, 0, -1, &err);
    if (status && !err.text[0]) abort();
    engine_file_close(file);
  }
  mem_free(bytes);
  return 0;
}
