/* Scales of the KV codecs; see cpu_kv_code.h. The quantisers are vector primitives (cpu_ops_body.h). */
#include "backend/cpu/cpu_kv_code.h"

#include <math.h>
#include <pthread.h>
#include <string.h>


float cpu_kv_scale_table[256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void)
{
  for (int i = 0; i < 256; i++) cpu_kv_scale_table[i] = i < 16 ? ldexpf((float)i, -16) : ldexpf((float)(16 + i % 16), i / 16 - 17);
}

void cpu_kv_code_init(void) { (void)pthread_once(&table_once, fill_table); }

uint8_t cpu_kv_scale_code(float scale)
{
  if (!(scale < 7.875f)) return 0xff;
  if (scale < 0x1p-12f) return (uint8_t)nearbyintf(scale * 0x1p16f); /* without a leading one; 16 is the first with one */
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  bits += 0x3ffff + (bits >> 19 & 1); /* nearest, ties to even, of the 19 mantissa bits that go; may carry into the exponent */
  return (uint8_t)((bits >> 19) - ((127 - 13) << 4));
}
