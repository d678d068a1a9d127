/* Fuzz target: any bytes as a configuration file. Refusals must carry text; accepted values must be written back and read again. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "config/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  struct options options = {0};
  struct option_set set;
  struct sits_error err = {0};
  if (option_set_init(&set, options_table, options_table_size, &options, &err)) abort();
  if (option_parse_yaml(&set, (const char *)data, size, "fuzz.yaml", &err)) {
    if (!err.text[0]) abort();
  } else {
    struct options again = {0};
    struct option_set other;
    struct buf out;
    buf_init(&out, 1 << 20);
    if (!option_write_yaml(&set, false, &out) || option_set_init(&other, options_table, options_table_size, &again, &err)) abort();
    if (!options.api_key && option_parse_yaml(&other, out.data, out.size, "again.yaml", &err)) abort();
    option_set_fini(&other);
    buf_fini(&out);
  }
  option_set_fini(&set);
  return 0;
}
