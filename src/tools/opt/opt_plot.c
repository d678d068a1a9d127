/* DIR/report.png: the report's errors as a chart, drawn here so that the program needs nothing beside it. Left the weights' relative
 * Frobenius errors, measured (lines) and expected (dots), red where they break the bound; right the errors of products. Entry point:
 * opt_plot. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/png.h"
#include "opt.h"

enum { WIDTH = 1400, HEIGHT = 560, TOP = 70, BOTTOM = 490, PANEL = 560, GLYPH = 12 };
enum { WHITE, BLACK, GREY, RED, FIRST_COLOR, N_COLORS = FIRST_COLOR + 8 };

static const uint32_t palette[N_COLORS] = {0xFFFFFF, 0x202020, 0xD8D8D8, 0xE00000, 0x1F77B4, 0xFF7F0E, 0x2CA02C, 0x9467BD,
                                           0x8C564B, 0xE377C2, 0x17A2B8, 0x7F7F7F};

static const struct { const char *name, *gguf, *hf; } kinds[] = {
    {"q", "attn_q.", "q_proj"}, {"k", "attn_k.", "k_proj"}, {"v", "attn_v.", "v_proj"}, {"o", "attn_output", "o_proj"},
    {"gate", "ffn_gate", "gate_proj"}, {"up", "ffn_up", "up_proj"}, {"down", "ffn_down", "down_proj"}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

/* Five by seven points a character, a row in five bits. */
static const char alphabet[] = "0123456789abcdefghijklmnopqrstuvwxyz.,:%()-";
static const uint8_t glyphs[][7] = {
    {14, 17, 19, 21, 25, 17, 14}, {4, 12, 4, 4, 4, 4, 14}, {14, 17, 1, 2, 4, 8, 31}, {31, 2, 4, 2, 1, 17, 14},
    {2, 6, 10, 18, 31, 2, 2}, {31, 16, 30, 1, 1, 17, 14}, {6, 8, 16, 30, 17, 17, 14}, {31, 1, 2, 4, 8, 8, 8},
    {14, 17, 17, 14, 17, 17, 14}, {14, 17, 17, 15, 1, 2, 12}, {0, 0, 14, 1, 15, 17, 15}, {16, 16, 30, 17, 17, 17, 30},
    {0, 0, 14, 16, 16, 17, 14}, {1, 1, 15, 17, 17, 17, 15}, {0, 0, 14, 17, 31, 16, 14}, {6, 9, 8, 28, 8, 8, 8},
    {0, 15, 17, 17, 15, 1, 14}, {16, 16, 22, 25, 17, 17, 17}, {4, 0, 12, 4, 4, 4, 14}, {2, 0, 6, 2, 2, 18, 12},
    {16, 16, 18, 20, 24, 20, 18}, {12, 4, 4, 4, 4, 4, 14}, {0, 0, 26, 21, 21, 17, 17}, {0, 0, 22, 25, 17, 17, 17},
    {0, 0, 14, 17, 17, 17, 14}, {0, 0, 30, 17, 30, 16, 16}, {0, 0, 13, 19, 15, 1, 1}, {0, 0, 22, 25, 16, 16, 16},
    {0, 0, 14, 16, 14, 1, 30}, {8, 8, 28, 8, 8, 9, 6}, {0, 0, 17, 17, 17, 19, 13}, {0, 0, 17, 17, 17, 10, 4},
    {0, 0, 17, 17, 21, 21, 10}, {0, 0, 17, 10, 4, 10, 17}, {0, 0, 17, 17, 15, 1, 14}, {0, 0, 31, 2, 4, 8, 31},
    {0, 0, 0, 0, 0, 12, 12}, {0, 0, 0, 0, 12, 4, 8}, {0, 12, 12, 0, 12, 12, 0}, {24, 25, 2, 4, 8, 19, 3}, {2, 4, 8, 8, 8, 4, 2},
    {8, 4, 2, 2, 2, 4, 8}, {0, 0, 0, 31, 0, 0, 0}};

struct panel { uint8_t *pixels; int left; double most; int32_t n_layers; };

static void dot(uint8_t *pixels, int x, int y, uint8_t color)
{
  if (x >= 0 && x < WIDTH && y >= 0 && y < HEIGHT) pixels[y * WIDTH + x] = color;
}

static void square(uint8_t *pixels, int x, int y, int size, uint8_t color)
{
  for (int i = 0; i < size; i++)
    for (int k = 0; k < size; k++) dot(pixels, x + i, y + k, color);
}

static void line(uint8_t *pixels, double x0, double y0, double x1, double y1, uint8_t color)
{
  const int n = (int)fmax(fabs(x1 - x0), fabs(y1 - y0)) + 1;
  for (int i = 0; i <= n; i++) square(pixels, (int)(x0 + (x1 - x0) * i / n), (int)(y0 + (y1 - y0) * i / n), 2, color);
}

static void text(uint8_t *pixels, int x, int y, const char *words, uint8_t color)
{
  for (; *words; words++, x += GLYPH) {
    const char *at = strchr(alphabet, *words);
    for (int r = 0; r < 7 && at; r++)
      for (int c = 0; c < 5; c++)
        if (glyphs[at - alphabet][r] >> (4 - c) & 1) square(pixels, x + 2 * c, y + 2 * r, 2, color);
  }
}

static double x_of(const struct panel *p, double layer) { return p->left + PANEL * (layer + 0.5) / p->n_layers; }
static double y_of(const struct panel *p, double value) { return BOTTOM - (BOTTOM - TOP) * value / p->most; }

/* ---- data ---- */

static int kind_of(const char *tensor)
{
  for (int k = 0; k < KINDS; k++)
    if (strstr(tensor, kinds[k].gguf) || strstr(tensor, kinds[k].hf)) return k;
  return -1;
}

static int layer_of(const char *tensor)
{
  for (const char *at = tensor; at; at = strchr(at, '.') ? strchr(at, '.') + 1 : NULL) {
    int layer, n = 0;
    if (sscanf(at, "%d%n", &layer, &n) == 1 && at[n] == '.') return layer;
  }
  return -1;
}

/* Percent; negative: not there. */
static double value_of(const json_t *row, const char *key)
{
  const bool is_weight = strcmp(key, "output_error") != 0;
  const json_t *value = json_object_get(row, key);
  if (!value || (is_weight && json_is_true(json_object_get(row, "kept")))) return -1;
  return 100 * json_number_value(value);
}

/* The least of 1, 2, 5 times a power of ten that is no less. */
static double round_up(double v)
{
  const double power = pow(10, floor(log10(v > 0 ? v : 1)));
  for (int k = 0; k < 3; k++)
    if (v <= (double[]){1, 2, 5}[k] * power * (1 + 1e-9)) return (double[]){1, 2, 5}[k] * power;
  return 10 * power;
}

static void draw_frame(struct panel *p, const char *title, const json_t *rows, const char *key, const char *other)
{
  const json_t *row;
  size_t index;
  double most = 0;
  char label[32];
  json_array_foreach(rows, index, row) most = fmax(most, fmax(value_of(row, key), other ? value_of(row, other) : 0));
  p->most = round_up(most);
  for (int i = 0; i <= 5; i++) {
    const int y = (int)y_of(p, p->most * i / 5);
    for (int x = p->left; x < p->left + PANEL; x++) dot(p->pixels, x, y, i ? GREY : BLACK);
    snprintf(label, sizeof label, "%.3g", p->most * i / 5);
    text(p->pixels, p->left - 8 - GLYPH * (int)strlen(label), y - 7, label, BLACK);
  }
  for (int y = TOP; y <= BOTTOM; y++) dot(p->pixels, p->left, y, BLACK);
  const int step = p->n_layers > 10 ? (p->n_layers + 9) / 10 : 1;
  for (int i = 0; i < p->n_layers; i += step) {
    snprintf(label, sizeof label, "%d", i);
    text(p->pixels, (int)x_of(p, i) - GLYPH * (int)strlen(label) / 2, BOTTOM + 8, label, BLACK);
  }
  text(p->pixels, p->left, TOP - 50, title, BLACK);
  text(p->pixels, p->left + PANEL / 2 - 30, BOTTOM + 28, "layer", BLACK);
}

/* Measured points joined in the order of layers; `expected` as dots beside them. */
static void draw_kind(const struct panel *p, const json_t *rows, int kind, const char *key, const char *expected)
{
  const uint8_t color = (uint8_t)(FIRST_COLOR + kind);
  double last_x = 0, last_y = 0;
  int last = -1;
  for (int32_t layer = 0; layer < p->n_layers; layer++) {
    const json_t *row;
    size_t index;
    json_array_foreach(rows, index, row) {
      const char *name = json_string_value(json_object_get(row, "tensor"));
      const double value = value_of(row, key), beside = expected ? value_of(row, expected) : -1;
      if (!name || kind_of(name) != kind || layer_of(name) != layer || value < 0) continue;
      const double x = x_of(p, layer), y = y_of(p, value);
      const bool is_broken = expected && json_is_true(json_object_get(row, "above_bound"));
      if (last >= 0) line(p->pixels, last_x, last_y, x, y, color);
      square(p->pixels, (int)x - 3, (int)y - 3, is_broken ? 9 : 7, is_broken ? RED : color);
      if (beside >= 0) square(p->pixels, (int)x - 1, (int)y_of(p, beside) - 1, 3, color);
      last = layer;
      last_x = x;
      last_y = y;
    }
  }
}

static void draw(uint8_t *pixels, const json_t *rows, int32_t n_layers)
{
  struct panel weights = {pixels, 90, 0, n_layers}, products = {pixels, 790, 0, n_layers};
  draw_frame(&weights, "weights, % : lines measured, dots expected", rows, "relative_error", "expected");
  draw_frame(&products, "products, % : weights and inputs rounded", rows, "output_error", NULL);
  for (int k = 0; k < KINDS; k++) {
    draw_kind(&weights, rows, k, "relative_error", "expected");
    draw_kind(&products, rows, k, "output_error", NULL);
    square(pixels, 90 + 110 * k, HEIGHT - 24, 12, (uint8_t)(FIRST_COLOR + k));
    text(pixels, 110 + 110 * k, HEIGHT - 25, kinds[k].name, BLACK);
  }
  square(pixels, 90 + 110 * KINDS, HEIGHT - 24, 12, RED);
  text(pixels, 110 + 110 * KINDS, HEIGHT - 25, "above the bound", BLACK);
}

enum sits_status opt_plot(const struct opt_run *run, struct sits_error *err)
{
  char from[4096], to[4096];
  json_t *report;
  opt_path(run, "report.json", from);
  opt_path(run, "report.png", to);
  enum sits_status status = json_parse_file(from, &json_limits_file, &report, err);
  if (status) return status;
  uint8_t *pixels = mem_calloc((size_t)WIDTH * HEIGHT, 1);
  if (!pixels) status = sits_fail(err, SITS_NOMEM, "out of memory");
  if (!status) {
    draw(pixels, json_object_get(report, "matrices"), run->n_layers);
    status = png_write(to, pixels, WIDTH, HEIGHT, palette, N_COLORS, err);
  }
  mem_free(pixels);
  json_decref(report);
  return status;
}
