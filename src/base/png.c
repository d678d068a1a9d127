/* See png.h. The compressed stream (RFC 1950, 1951) is one block with the fixed codes, whose matches look back one byte or one row: enough
 * for charts, which are flat. Entry point: png_write. */
#include "base/png.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"

/* ---- checksums ---- */

static uint32_t crc32_of(const unsigned char *bytes, size_t n)
{
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < n; i++) {
    crc ^= bytes[i];
    for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

static uint32_t adler32_of(const unsigned char *bytes, size_t n)
{
  uint32_t a = 1, b = 0;
  for (size_t i = 0; i < n; i++) {
    a = (a + bytes[i]) % 65521;
    b = (b + a) % 65521;
  }
  return b << 16 | a;
}

/* ---- deflate ---- */

struct bits { struct buf *out; uint32_t held; int n; };

static void put_bits(struct bits *b, uint32_t value, int n) /* lowest first */
{
  b->held |= value << b->n;
  b->n += n;
  for (; b->n >= 8; b->n -= 8, b->held >>= 8) {
    const unsigned char byte = (unsigned char)b->held;
    buf_append(b->out, &byte, 1);
  }
}

static void put_code(struct bits *b, uint32_t code, int n) /* highest first */
{
  for (int i = n - 1; i >= 0; i--) put_bits(b, code >> i & 1, 1);
}

static void put_symbol(struct bits *b, int symbol)
{
  if (symbol < 144) put_code(b, (uint32_t)(0x30 + symbol), 8);
  else if (symbol < 256) put_code(b, (uint32_t)(0x190 + symbol - 144), 9);
  else if (symbol < 280) put_code(b, (uint32_t)(symbol - 256), 7);
  else put_code(b, (uint32_t)(0xC0 + symbol - 280), 8);
}

/* Lengths 3..258: eight without extra bits, then four a class with one more bit each, and 258 by itself. */
static void put_length(struct bits *b, int length)
{
  if (length == 258) {
    put_symbol(b, 285);
  } else if (length < 11) {
    put_symbol(b, 254 + length);
  } else {
    int extra = 1, base = 11;
    while (length >= base + (4 << extra)) base += 4 << extra++;
    put_symbol(b, 261 + 4 * extra + ((length - base) >> extra));
    put_bits(b, (uint32_t)(length - base) & ((1u << extra) - 1), extra);
  }
}

/* Distances 1..32,768: four without extra bits, then two a class. */
static void put_distance(struct bits *b, int distance)
{
  if (distance < 5) {
    put_code(b, (uint32_t)(distance - 1), 5);
  } else {
    int extra = 1, base = 5;
    while (distance >= base + (2 << extra)) base += 2 << extra++;
    put_code(b, (uint32_t)(2 + 2 * extra + ((distance - base) >> extra)), 5);
    put_bits(b, (uint32_t)(distance - base) & ((1u << extra) - 1), extra);
  }
}

static int match_length(const unsigned char *bytes, size_t at, size_t n, size_t distance)
{
  int length = 0;
  if (distance > at) return 0;
  while (length < 258 && at + (size_t)length < n && bytes[at + (size_t)length] == bytes[at + (size_t)length - distance]) length++;
  return length;
}

static void deflate_rows(const unsigned char *bytes, size_t n, size_t row, struct buf *out)
{
  struct bits b = {.out = out};
  put_bits(&b, 1, 1); /* the last block */
  put_bits(&b, 1, 2); /* fixed codes */
  for (size_t at = 0; at < n;) {
    const int beside = match_length(bytes, at, n, 1), above = match_length(bytes, at, n, row);
    const int length = above > beside ? above : beside;
    if (length < 3) {
      put_symbol(&b, bytes[at++]);
      continue;
    }
    put_length(&b, length);
    put_distance(&b, above > beside ? (int)row : 1);
    at += (size_t)length;
  }
  put_symbol(&b, 256);
  put_bits(&b, 0, 7); /* to a whole byte */
}

/* ---- chunks ---- */

static void store32(unsigned char *at, uint32_t v)
{
  for (int i = 0; i < 4; i++) at[i] = (unsigned char)(v >> (24 - 8 * i));
}

static void put32(struct buf *out, uint32_t v)
{
  unsigned char bytes[4];
  store32(bytes, v);
  buf_append(out, bytes, sizeof bytes);
}

static void put_chunk(struct buf *out, const char *type, const void *data, size_t n)
{
  put32(out, (uint32_t)n);
  const size_t at = out->size;
  buf_append(out, type, 4);
  buf_append(out, data, n);
  if (!out->failed) put32(out, crc32_of((const unsigned char *)out->data + at, n + 4));
}

static void put_pixels(struct buf *out, const uint8_t *pixels, int32_t width, int32_t height)
{
  const size_t row = (size_t)width + 1, n = row * (size_t)height;
  unsigned char *rows = mem_calloc(n, 1); /* each begins with its filter, none */
  struct buf packed;
  buf_init(&packed, n * 2 + 64);
  if (!rows) out->failed = true;
  for (int32_t y = 0; y < height && rows; y++) memcpy(rows + (size_t)y * row + 1, pixels + (size_t)y * (size_t)width, (size_t)width);
  if (rows) {
    buf_append(&packed, "\x78\x01", 2);
    deflate_rows(rows, n, row, &packed);
    put32(&packed, adler32_of(rows, n));
    if (packed.failed) out->failed = true;
    else put_chunk(out, "IDAT", packed.data, packed.size);
  }
  buf_fini(&packed);
  mem_free(rows);
}

enum sits_status png_write(const char *path, const uint8_t *pixels, int32_t width, int32_t height, const uint32_t *palette,
                           int32_t n_colors, struct sits_error *err)
{
  unsigned char header[13] = {[8] = 8, [9] = 3}, colors[256 * 3]; /* 8 bits, with a palette */
  char part[4112];
  struct buf out;
  if (width < 1 || width >= 32768 || height < 1 || n_colors < 1 || n_colors > 256 || strlen(path) > 4000)
    return sits_fail(err, SITS_INVALID_ARGUMENT, "%.150s: no picture has such a size", path);
  buf_init(&out, (size_t)width * (size_t)height * 2 + 4096);
  store32(header, (uint32_t)width);
  store32(header + 4, (uint32_t)height);
  for (int32_t i = 0; i < n_colors; i++)
    for (int k = 0; k < 3; k++) colors[3 * i + k] = (unsigned char)(palette[i] >> (16 - 8 * k));
  buf_append(&out, "\x89PNG\r\n\x1a\n", 8);
  put_chunk(&out, "IHDR", header, sizeof header);
  put_chunk(&out, "PLTE", colors, (size_t)n_colors * 3);
  put_pixels(&out, pixels, width, height);
  put_chunk(&out, "IEND", "", 0);
  enum sits_status status = out.failed ? sits_fail(err, SITS_NOMEM, "out of memory") : SITS_OK;
  snprintf(part, sizeof part, "%s.part", path);
  FILE *file = status ? NULL : fopen(part, "wb");
  const bool is_written = file && fwrite(out.data, 1, out.size, file) == out.size;
  if (!status && ((file && fclose(file) != 0) || !is_written || rename(part, path) != 0)) {
    status = sits_fail(err, SITS_IO, "%.150s: cannot be written: %s", path, strerror(errno));
    unlink(part);
  }
  buf_fini(&out);
  return status;
}
