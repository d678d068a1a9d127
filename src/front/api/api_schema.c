/* See api_schema.h. Rows of the field table become properties; a reader's field has a function here. */
#include "front/api/api_schema.h"

#include <stdio.h>
#include <string.h>

#include "front/api/api_fields.h"

struct writer {
  enum api_kind kind;
  const struct api_limits *limits;
  const struct api_model *model;
  struct buf *out;
};

#define NO_NUL "\"pattern\":\"^[^\\\\u0000]*$\""

static void write_string(const struct writer *w, const char *text)
{
  buf_append_char(w->out, '"');
  buf_append_json_escaped(w->out, text, strlen(text));
  buf_append_char(w->out, '"');
}

/* ---- token ids ---- */

static int32_t last_token(const struct writer *w) { return w->model ? tokenizer_n_vocab(w->model->tokenizer) - 1 : INT32_MAX; }

static void write_ids(const struct writer *w, int64_t last, int64_t max_items, int least)
{
  buf_printf(w->out, "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":%lld},\"minItems\":%d",
             (long long)last, least);
  if (max_items) buf_printf(w->out, ",\"maxItems\":%lld", (long long)max_items);
  buf_append_char(w->out, '}');
}

/* A regular expression for the decimal numbers from 0 to last, without leading zeros. */
static void write_number_pattern(struct buf *out, int32_t last)
{
  char digits[12];
  int n = snprintf(digits, sizeof digits, "%d", last);
  buf_append_text(out, "^(?:");
  if (n > 1) buf_append_text(out, "[0-9]|");
  if (n > 2) buf_printf(out, "[1-9][0-9]{1,%d}|", n - 2);
  for (int i = 0; i < n; i++) { /* the same digits up to i, a smaller one there, anything after */
    int low = i == 0 && n > 1 ? 1 : 0;
    if (digits[i] - '0' <= low) continue;
    buf_printf(out, "%.*s[%d-%d]", i, digits, low, digits[i] - '0' - 1);
    if (n - i - 1) buf_printf(out, "[0-9]{%d}", n - i - 1);
    buf_append_char(out, '|');
  }
  buf_printf(out, "%s)$", digits);
}

static void write_logit_bias(const struct writer *w)
{
  buf_printf(w->out, "{\"type\":[\"object\",\"null\"],\"maxProperties\":%lld,\"propertyNames\":{\"pattern\":\"",
             (long long)w->limits->max_logit_bias);
  write_number_pattern(w->out, last_token(w));
  buf_append_text(w->out, "\"},\"additionalProperties\":{\"type\":\"number\",\"minimum\":-100,\"maximum\":100}}");
}

/* ---- prompts ---- */

static void write_prompt(const struct writer *w)
{
  if (w->kind == API_TOKENIZE) {
    buf_append_text(w->out, "{\"type\":[\"string\",\"null\"]}");
    return;
  }
  buf_append_text(w->out, "{\"anyOf\":[{\"type\":\"string\"},");
  write_ids(w, last_token(w), 0, 1);
  buf_append_text(w->out, ",{\"type\":\"array\",\"items\":{\"anyOf\":[{\"type\":\"string\"},");
  write_ids(w, last_token(w), 0, 1);
  buf_printf(w->out, "]},\"minItems\":1,\"maxItems\":%lld}]}", (long long)w->limits->max_prompts);
}

static void write_message(const struct writer *w, const char *roles, bool may_be_null)
{
  buf_printf(w->out,
             "{\"type\":\"object\",\"required\":[\"role\"%s],\"properties\":{\"role\":{\"enum\":[%s]},\"content\":{\"anyOf\":[%s"
             "{\"type\":\"string\"},{\"type\":\"array\",\"maxItems\":%lld,\"items\":{\"anyOf\":[{\"type\":\"string\"},"
             "{\"type\":\"object\",\"required\":[\"type\",\"text\"],\"properties\":{\"type\":{\"enum\":[\"text\",\"input_text\"]},"
             "\"text\":{\"type\":\"string\"}}},{\"type\":\"object\",\"required\":[\"type\",\"refusal\"],\"properties\":"
             "{\"type\":{\"const\":\"refusal\"},\"refusal\":{\"type\":\"string\"}}}]}}]},",
             may_be_null ? "" : ",\"content\"", roles, may_be_null ? "{\"type\":\"null\"}," : "", (long long)w->limits->max_parts);
  buf_printf(w->out,
             "\"name\":{\"type\":[\"string\",\"null\"],\"maxLength\":%lld},\"reasoning_content\":{\"type\":[\"string\",\"null\"]},"
             "\"tool_calls\":{\"enum\":[null,[]]},\"function_call\":{\"enum\":[null,[]]},\"audio\":{\"enum\":[null,[]]},"
             "\"tool_call_id\":{\"enum\":[null,[]]}}}",
             (long long)w->limits->max_name_chars);
}

static void write_messages(const struct writer *w)
{
  buf_printf(w->out, "{\"type\":%s,\"minItems\":1,\"maxItems\":%lld,\"items\":{\"anyOf\":[",
             w->kind == API_CHAT ? "\"array\"" : "[\"array\",\"null\"]", (long long)w->limits->max_messages);
  write_message(w, "\"system\",\"developer\",\"user\"", false);
  buf_append_char(w->out, ',');
  write_message(w, "\"assistant\"", true);
  buf_append_text(w->out, "]}}");
}

/* ---- other fields with structure ---- */

static void write_stop(const struct writer *w)
{
  char one[160];
  snprintf(one, sizeof one, "{\"type\":\"string\",\"minLength\":1,\"maxLength\":%lld," NO_NUL "}", (long long)w->limits->max_stop_chars);
  buf_printf(w->out, "{\"anyOf\":[{\"type\":\"null\"},%s,{\"type\":\"array\",\"maxItems\":%lld,\"items\":%s}]}", one,
             (long long)w->limits->max_stops, one);
}

static void write_stream_options(const struct writer *w)
{
  buf_append_text(w->out, "{\"type\":[\"object\",\"null\"],\"properties\":{\"include_usage\":{\"type\":[\"boolean\",\"null\"]},"
                          "\"continuous_usage_stats\":{\"type\":[\"boolean\",\"null\"]}}}");
}

static void write_template_kwargs(const struct writer *w)
{
  buf_printf(w->out,
             "{\"type\":[\"object\",\"null\"],\"maxProperties\":%lld,\"propertyNames\":{\"not\":{\"enum\":[\"messages\",\"tools\","
             "\"documents\",\"add_generation_prompt\",\"bos_token\",\"eos_token\"]}}}",
             (long long)w->limits->max_template_kwargs);
}

static void write_stop_ids(const struct writer *w)
{
  buf_append_text(w->out, "{\"anyOf\":[{\"type\":\"null\"},");
  write_ids(w, INT32_MAX, w->limits->max_stop_ids, 0);
  buf_append_text(w->out, "]}");
}

static void write_tokens(const struct writer *w) { write_ids(w, last_token(w), 0, 0); }

static void write_read_field(const struct writer *w, const struct api_field *field)
{
  static const struct { api_field_reader *reader; void (*write)(const struct writer *w); } rows[] = {
    {api_read_messages, write_messages}, {api_read_prompt, write_prompt},
    {api_read_tokens, write_tokens},     {api_read_stop, write_stop},
    {api_read_stop_ids, write_stop_ids}, {api_read_logit_bias, write_logit_bias},
    {api_read_stream_options, write_stream_options}, {api_read_template_kwargs, write_template_kwargs}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    if (rows[i].reader == field->reader) rows[i].write(w);
}

/* ---- plain fields ---- */

static void write_integer(const struct writer *w, const struct api_field *field)
{
  double min = field->min, max = field->max;
  int64_t cap = api_field_cap(field, w->limits);
  if (cap >= 0) max = (double)cap;
  if (api_field_is_token_limit(field) && w->kind == API_CHAT) min = 1; /* 0 is for echo only */
  buf_append_text(w->out, "{\"type\":[\"integer\",\"null\"]");
  /* The ends of 64 bits are the type's own; JSON has no larger integers here. */
  if (min > -9e18) buf_printf(w->out, ",\"minimum\":%.0f", min);
  else buf_append_text(w->out, ",\"minimum\":-9223372036854775808");
  if (max < 9e18) buf_printf(w->out, ",\"maximum\":%.0f}", max);
  else buf_append_text(w->out, ",\"maximum\":9223372036854775807}");
}

static void write_name(const struct writer *w, const struct api_field *field)
{
  if (strcmp(field->name, "model") || !w->model) {
    buf_printf(w->out, "{\"type\":[\"string\",\"null\"],\"maxLength\":%lld," NO_NUL "}", (long long)w->limits->max_name_chars);
    return;
  }
  buf_append_text(w->out, "{\"enum\":[null");
  for (int32_t i = 0; i < w->model->n_names; i++) {
    buf_append_char(w->out, ',');
    write_string(w, w->model->names[i]);
  }
  buf_append_text(w->out, "]}");
}

static void write_field(const struct writer *w, const struct api_field *field)
{
  switch (field->type) {
  case FIELD_BOOL: buf_append_text(w->out, "{\"type\":[\"boolean\",\"null\"]}"); break;
  case FIELD_INT: write_integer(w, field); break;
  case FIELD_REAL:
    buf_printf(w->out, "{\"type\":[\"number\",\"null\"],\"minimum\":%g,\"maximum\":%g}", field->min, field->max);
    break;
  case FIELD_STRING: write_name(w, field); break;
  case FIELD_READER: write_read_field(w, field); break;
  case FIELD_HARMLESS: buf_append_text(w->out, "{}"); break;
  }
}

/* Fields that are refused but for values that ask for nothing; and those that only the other kind of completion knows. */
static void write_refused(const struct writer *w)
{
  const char *name, *allowed;
  for (size_t i = 0; (name = api_field_refused(i, &allowed)); i++) {
    if (api_field_find(name, w->kind)) continue;
    buf_printf(w->out, ",\"%s\":{\"enum\":[null", name);
    if (allowed[0]) buf_printf(w->out, ",%.*s", (int)strlen(allowed) - 2, allowed + 1);
    buf_append_text(w->out, "]}");
  }
  for (size_t i = 0; (w->kind & API_GENERATE) && i < api_n_fields; i++)
    if ((api_field_table[i].kinds & API_GENERATE) && !api_field_find(api_field_table[i].name, w->kind))
      buf_printf(w->out, ",\"%s\":{\"enum\":[null,false]}", api_field_table[i].name);
}

void api_schema_write(enum api_kind kind, const struct api_limits *limits, const struct api_model *model, struct buf *out)
{
  static const struct { enum api_kind kind; const char *text; } tails[] = {
    {API_CHAT, ",\"required\":[\"messages\"]"},
    {API_COMPLETION, ",\"required\":[\"prompt\"]"},
    {API_DETOKENIZE, ",\"required\":[\"tokens\"]"},
    {API_TOKENIZE, ",\"oneOf\":[{\"required\":[\"prompt\"],\"properties\":{\"prompt\":{\"type\":\"string\"},"
                   "\"messages\":{\"type\":\"null\"}}},"
                   "{\"required\":[\"messages\"],\"properties\":{\"messages\":{\"type\":\"array\"},\"prompt\":{\"type\":\"null\"}}}]"}};
  const struct writer w = {kind, limits, model, out};
  buf_append_text(out, "{\"type\":\"object\",\"properties\":{");
  for (size_t i = 0, n = 0; i < api_n_fields; i++) {
    const struct api_field *field = &api_field_table[i];
    if (!(field->kinds & kind)) continue;
    buf_printf(out, "%s\"%s\":", n++ ? "," : "", field->name);
    write_field(&w, field);
  }
  write_refused(&w);
  buf_append_char(out, '}');
  for (size_t i = 0; i < sizeof tails / sizeof *tails; i++)
    if (tails[i].kind == kind) buf_append_text(out, tails[i].text);
  if (kind & API_GENERATE)
    buf_append_text(out, ",\"allOf\":[{\"if\":{\"required\":[\"stream_options\"],\"properties\":{\"stream_options\":"
                         "{\"type\":\"object\"}}},\"then\":{\"required\":[\"stream\"],\"properties\":{\"stream\":{\"const\":true}}}}");
  if (kind == API_CHAT)
    buf_append_text(out, ",{\"if\":{\"required\":[\"top_logprobs\"],\"properties\":{\"top_logprobs\":{\"type\":\"integer\","
                         "\"minimum\":1}}},\"then\":{\"required\":[\"logprobs\"],\"properties\":{\"logprobs\":{\"const\":true}}}}");
  if (kind & API_GENERATE) buf_append_char(out, ']');
  buf_append_char(out, '}');
}
