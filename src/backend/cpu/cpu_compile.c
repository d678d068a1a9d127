/* Compiling a program for the CPU: pack each distinct weight once (all workers together), expand gains and biases, lay out the arena,
 * and resolve every op to pointers and row ranges. Entry points: cpu_compile, cpu_program_destroy. */
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu_program.h"
#include "backend/group.h"
#include "base/mapfile.h"
#include "base/mem.h"
#include "tensor/dequant.h"

#define PACK_JOB_BYTES (512 << 10)   /* of a weight packed by one claim */
#define ALIGN 64

static size_t round_up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

/* ---- weights ---- */

static struct cpu_weight_entry *find_weight(const struct backend_program *p, const struct sits_utd *utd)
{
  for (int32_t i = 0; i < p->n_weights; i++)
    if (p->weights[i].utd == utd) return &p->weights[i];
  return NULL;
}

/* A table in the caller's memory that is only looked up stays there: the caller may change its rows between batches. */
static bool is_read_in_place(const struct program_op *op)
{
  const struct sits_utd *table = op->parts[0].weight;
  return op->kind == PROGRAM_EMBED && table->dtype == SITS_DTYPE_F32 && table->place == SITS_PLACE_HOST && table->data != NULL &&
         table->layout == SITS_LAYOUT_ROW_MAJOR && sits_utd_row_major_bytes(table) <= (int64_t)table->n_bytes;
}

static enum sits_status collect_weights(struct backend_program *p, struct sits_error *err)
{
  const struct program *program = p->program;
  size_t n = 0;
  for (int32_t i = 0; i < program->n_ops; i++) n += (size_t)program->ops[i].n_parts;
  p->weights = mem_calloc(n + 1, sizeof *p->weights);
  if (p->weights == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  for (int32_t i = 0; i < program->n_ops; i++)
    for (int k = 0; k < program->ops[i].n_parts; k++)
      if (!is_read_in_place(&program->ops[i]) && find_weight(p, program->ops[i].parts[k].weight) == NULL)
        p->weights[p->n_weights++].utd = program->ops[i].parts[k].weight;

  size_t total = 0;
  for (int32_t i = 0; i < p->n_weights; i++) total += cpu_weight_packed_bytes(p->weights[i].utd, p->backend->isa);
  if (total > 0) {
    p->region = cpu_weight_region(total);
    if (p->region == NULL) return sits_fail(err, SITS_NOMEM, "compile: no memory for %zu bytes of weights", total);
  }
  unsigned char *at = p->region;
  for (int32_t i = 0; i < p->n_weights; i++) {
    const enum sits_status status = cpu_weight_create_in(p->weights[i].utd, p->backend->isa, at, &p->weights[i].weight, err);
    if (status != SITS_OK) return status;
    at += cpu_weight_packed_bytes(p->weights[i].utd, p->backend->isa);
  }
  p->n_bytes += total;
  return SITS_OK;
}

struct pack_run { struct backend_program *p; _Atomic int64_t next; };

static int64_t job_rows(const struct cpu_weight_entry *entry)
{
  const int64_t rows = cpu_weight_rows(entry->weight), tile = cpu_weight_row_tile(entry->weight);
  const int64_t row_bytes = (int64_t)entry->utd->n_bytes / (rows > 0 ? rows : 1) + 1;
  const int64_t wanted = PACK_JOB_BYTES / row_bytes / tile * tile;
  return wanted < tile ? tile : wanted;
}

/* The copy of these rows is made: their file pages need not stay in this process. */
static void drop_rows(const struct cpu_weight_entry *entry, int64_t r0, int64_t r1)
{
  if (entry->utd->place != SITS_PLACE_MAPPED_FILE || entry->utd->dims[0] < 1) return;
  const size_t row_bytes = entry->utd->n_bytes / (size_t)entry->utd->dims[0];
  const uint8_t *first = sits_utd_row(entry->utd, 0), *from = sits_utd_row(entry->utd, r0);
  const uint8_t *end = (const uint8_t *)sits_utd_row(entry->utd, r1 - 1) + row_bytes;
  const uint8_t *last = (const uint8_t *)sits_utd_row(entry->utd, entry->utd->dims[0] - 1) + row_bytes;
  const struct mapfile map = {first, (size_t)(last - first)};
  mapfile_drop(&map, (size_t)(from - first), (size_t)(end - from));
}

/* Jobs are numbered through all weights; a worker walks the list as its claims grow. */
static void pack_worker(void *arg, int32_t worker)
{
  (void)worker;
  struct pack_run *run = arg;
  int64_t first_job = 0;
  int32_t i = 0;
  for (int64_t job = atomic_fetch_add(&run->next, 1); i < run->p->n_weights;) {
    const struct cpu_weight_entry *entry = &run->p->weights[i];
    const int64_t rows = cpu_weight_rows(entry->weight), step = job_rows(entry), n_jobs = (rows + step - 1) / step;
    if (job >= first_job + n_jobs) {
      first_job += n_jobs;
      i++;
      continue;
    }
    const int64_t r0 = (job - first_job) * step, r1 = r0 + step < rows ? r0 + step : rows;
    cpu_weight_pack(entry->weight, entry->utd, r0, r1);
    drop_rows(entry, r0, r1);
    job = atomic_fetch_add(&run->next, 1);
  }
}

static enum sits_status pack_weights(struct backend_program *p, struct sits_error *err)
{
  const enum sits_status status = collect_weights(p, err);
  if (status != SITS_OK) return status;
  struct pack_run run = {.p = p};
  const struct cpu_job job = {pack_worker, &run};
  cpu_pool_help(p->backend->pool, &job);
  cpu_pool_quiesce(p->backend->pool);
  for (int32_t i = 0; i < p->n_weights; i++) drop_rows(&p->weights[i], 0, cpu_weight_rows(p->weights[i].weight)); /* pages at seams */
  return SITS_OK;
}

/* ---- gains and biases, as f32 ---- */

static size_t vector_floats(const struct sits_utd *utd) { return utd == NULL ? 0 : round_up((size_t)sits_utd_elements(utd)); }

static const float *expand(float **at, const struct sits_utd *utd)
{
  if (utd == NULL) return NULL;
  float *out = *at;
  dequant_row(utd->dtype, utd->data, sits_utd_elements(utd), out);
  *at += vector_floats(utd);
  return out;
}

static enum sits_status expand_vectors(struct backend_program *p, struct sits_error *err)
{
  size_t n = 0;
  for (int32_t i = 0; i < p->program->n_ops; i++) {
    const struct program_op *op = &p->program->ops[i];
    n += vector_floats(op->gain) + vector_floats(op->q_gain) + vector_floats(op->k_gain);
    for (int k = 0; k < op->n_parts; k++) n += vector_floats(op->parts[k].bias);
  }
  p->vectors = mem_aligned(ALIGN, (n + ALIGN) * sizeof *p->vectors);
  if (p->vectors == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  p->n_bytes += n * sizeof *p->vectors;
  float *at = p->vectors;
  for (int32_t i = 0; i < p->n_steps; i++) {
    struct cpu_step *step = &p->steps[i];
    step->gain = expand(&at, step->op->gain);
    step->q_gain = expand(&at, step->op->q_gain);
    step->k_gain = expand(&at, step->op->k_gain);
    for (int k = 0; k < step->n_parts; k++) step->parts[k].bias = expand(&at, step->op->parts[k].bias);
  }
  return SITS_OK;
}

/* ---- steps ---- */

static int32_t gcd(int32_t a, int32_t b) { return b == 0 ? a : gcd(b, a % b); }

/* Cut the parts of a LINEAR into ranges of about CPU_BYTES_PER_ITEM, at multiples of the unit, the same number for each thread. With SWIGLU
 * the parts share their cuts. Returns the number of ranges; writes them when `out` is not NULL. */
static int32_t cut_ranges(struct cpu_step *step, int32_t n_threads, struct cpu_range *out)
{
  const int n_lists = (step->op->fused & PROGRAM_FUSE_SWIGLU) ? 1 : step->n_parts;
  int32_t n = 0;
  for (int k = 0; k < n_lists; k++) {
    const int64_t rows = step->parts[k].rows, n_units = (rows + step->unit - 1) / step->unit;
    const int64_t bytes = (int64_t)cpu_weight_bytes(step->parts[k].weight) * (step->n_parts > n_lists ? 2 : 1);
    int64_t n_ranges = bytes / CPU_BYTES_PER_ITEM + 1;
    if (n_ranges > n_threads) n_ranges = (n_ranges + n_threads - 1) / n_threads * n_threads;
    if (n_ranges > n_units) n_ranges = n_units;
    for (int64_t i = 0; i < n_ranges; i++, n++) {
      const int64_t r0 = n_units * i / n_ranges * step->unit, r1 = n_units * (i + 1) / n_ranges * step->unit;
      if (out != NULL) out[n] = (struct cpu_range){k, r0, r1 < rows ? r1 : rows};
    }
  }
  return n;
}

/* Panels and ranges are cut at multiples of every part's row tile, and of whole heads where the epilogue works on heads. */
static void set_unit(const struct backend_program *p, struct cpu_step *step)
{
  step->unit = (step->op->fused & PROGRAM_FUSE_QKV) ? p->program->dims.head_dim : 1;
  for (int k = 0; k < step->n_parts && step->parts[k].weight; k++) {
    const int32_t tile = cpu_weight_row_tile(step->parts[k].weight);
    step->unit = step->unit / gcd(step->unit, tile) * tile;
  }
}

static enum sits_status make_ranges(struct backend_program *p, struct sits_error *err)
{
  size_t n = 0;
  for (int32_t i = 0; i < p->n_steps; i++)
    if (p->steps[i].op->kind == PROGRAM_LINEAR) n += (size_t)cut_ranges(&p->steps[i], p->backend->n_threads, NULL);
  p->ranges = mem_calloc(n + 1, sizeof *p->ranges);
  if (p->ranges == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  struct cpu_range *at = p->ranges;
  for (int32_t i = 0; i < p->n_steps; i++) {
    if (p->steps[i].op->kind != PROGRAM_LINEAR) continue;
    p->steps[i].ranges = at;
    p->steps[i].n_ranges = cut_ranges(&p->steps[i], p->backend->n_threads, at);
    at += p->steps[i].n_ranges;
  }
  return SITS_OK;
}

static enum sits_status make_phases(struct backend_program *p, struct sits_error *err)
{
  p->phases = mem_calloc(2 * (size_t)p->n_steps, sizeof *p->phases);
  p->shares = mem_aligned(128, (size_t)p->backend->n_threads * sizeof *p->shares);
  p->pause.rest = mem_calloc((size_t)p->backend->n_threads, sizeof *p->pause.rest);
  p->pause.index = -1;
  if (p->phases == NULL || p->shares == NULL || p->pause.rest == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  for (int32_t w = 0; w < p->backend->n_threads; w++) atomic_init(&p->shares[w].word, 0);
  for (int32_t i = 0; i < p->n_steps; i++) {
    const struct cpu_step *step = &p->steps[i];
    const enum program_op_kind kind = step->op->kind;
    if (kind == PROGRAM_LINEAR) p->phases[p->n_phases++] = (struct cpu_phase){step, CPU_PHASE_PREPARE};
    if (kind != PROGRAM_KV_APPEND) p->phases[p->n_phases++] = (struct cpu_phase){step, CPU_PHASE_MAIN};
    if (kind == PROGRAM_KV_APPEND || (kind == PROGRAM_ROPE && (step->op->fused & PROGRAM_FUSE_ROPE)))
      p->phases[p->n_phases++] = (struct cpu_phase){step, CPU_PHASE_APPEND};
  }
  return SITS_OK;
}

static enum sits_status make_steps(struct backend_program *p, struct sits_error *err)
{
  const struct program *program = p->program;
  p->steps = mem_calloc((size_t)program->n_ops, sizeof *p->steps);
  if (p->steps == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  p->n_steps = program->n_ops;
  for (int32_t i = 0; i < program->n_ops; i++) {
    const struct program_op *op = &program->ops[i];
    struct cpu_step *step = &p->steps[i];
    step->op = op;
    step->is_rows = program->buffers[op->out[0] != PROGRAM_NONE ? op->out[0] : op->in[0]].is_rows;
    step->in_width = op->in[0] == PROGRAM_NONE ? 0 : program->buffers[op->in[0]].width;
    step->out_width = op->out[0] == PROGRAM_NONE ? 0 : program->buffers[op->out[0]].width;
    step->n_parts = op->n_parts;
    for (int k = 0; k < op->n_parts; k++) {
      const struct cpu_weight_entry *entry = find_weight(p, op->parts[k].weight); /* NULL: a table read in place */
      step->parts[k].weight = entry ? entry->weight : NULL;
      step->parts[k].rows = op->parts[k].weight->dims[0];
    }
    set_unit(p, step);
  }
  const enum sits_status status = make_ranges(p, err);
  return status != SITS_OK ? status : make_phases(p, err);
}

/* ---- activations ---- */

static enum sits_status plan_activations(struct backend_program *p, struct sits_error *err)
{
  size_t n = 0;
  for (int32_t i = 0; i < p->n_steps; i++) {
    struct cpu_step *step = &p->steps[i];
    if (step->op->kind != PROGRAM_LINEAR || step->op->act == NULL) continue;
    step->act = step->op->act->kind;
    for (int k = 0; k < step->n_parts; k++) {
      const struct cpu_weight *w = step->parts[k].weight;
      const enum sits_status status = cpu_act_check(w, step->op->parts[k].weight->name, step->op->act, err);
      if (status != SITS_OK) return status;
      if (step->act == ACT_FLOAT && cpu_expand_bytes(w) > p->expand_bytes) p->expand_bytes = cpu_expand_bytes(w);
    }
    if (step->act == ACT_INT4) n += (size_t)step->in_width;
  }
  p->has_int4 = n > 0;
  p->outlier_flags = mem_calloc(n, 1);
  if (p->outlier_flags == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  uint8_t *at = p->outlier_flags;
  for (int32_t i = 0; i < p->n_steps; i++) {
    struct cpu_step *step = &p->steps[i];
    if (step->act != ACT_INT4) continue;
    for (int32_t k = 0; k < step->op->act->n_outliers; k++) at[step->op->act->outliers[k]] = 1;
    step->is_outlier = at;
    at += step->in_width;
  }
  return SITS_OK;
}

/* ---- arena: two passes over the same walk, the first to measure, the second to hand out ---- */

struct layout { unsigned char *base; size_t used; };

static void *carve(struct layout *l, size_t n_bytes)
{
  void *at = l->base == NULL ? NULL : l->base + l->used;
  l->used += round_up(n_bytes);
  return at;
}

static float *carve_floats(struct layout *l, size_t n) { return carve(l, n * sizeof(float)); }

/* Bytes of the largest activation in each format for n tokens, and the widest input of a LINEAR. */
static void activation_sizes(const struct backend_program *p, int32_t n, size_t bytes[CPU_ACT_FORMATS], int32_t *widest)
{
  for (int f = 0; f < CPU_ACT_FORMATS; f++) bytes[f] = 0;
  *widest = 1;
  for (int32_t i = 0; i < p->n_steps; i++) {
    const struct cpu_step *step = &p->steps[i];
    if (step->op->kind != PROGRAM_LINEAR) continue;
    if (step->in_width > *widest) *widest = step->in_width;
    for (int k = 0; k < step->n_parts; k++) {
      const struct cpu_weight *w = step->parts[k].weight;
      const size_t size = cpu_act_bytes_as(w, step->act, n);
      const enum cpu_act_format format = cpu_act_format_as(w, step->act);
      if (size > bytes[format]) bytes[format] = size;
      if (step->act == ACT_INT4 && size > bytes[CPU_ACT_SIDE]) bytes[CPU_ACT_SIDE] = size;
    }
  }
}

/* The strip holds at least the smallest panel of the largest batch, and all rows of a worker for a single token. */
static size_t strip_floats(const struct backend_program *p, int32_t n)
{
  size_t most = 64 << 10;
  for (int32_t i = 0; i < p->n_steps; i++) {
    const struct cpu_step *step = &p->steps[i];
    if (step->op->kind != PROGRAM_LINEAR) continue;
    const size_t wanted = 2u * (size_t)step->unit * (size_t)n;
    if (wanted > most) most = wanted;
  }
  return most;
}

static void lay_out_worker(struct backend_program *p, struct layout *l, struct cpu_worker *w)
{
  const struct program_dims *dims = &p->program->dims;
  const size_t rows = (size_t)p->block_tokens * (size_t)(dims->n_heads / dims->n_kv_heads);
  const size_t dv = (size_t)cpu_kv_padded(dims->head_dim);
  size_t act[CPU_ACT_FORMATS];
  int32_t widest;
  activation_sizes(p, CPU_PRIVATE_TOKENS, act, &widest);
  for (int f = 0; f < CPU_ACT_FORMATS; f++) w->act[f] = carve(l, act[f]);
  w->normed = carve_floats(l, (size_t)widest * CPU_PRIVATE_TOKENS);
  w->strip = carve_floats(l, p->strip_floats);
  if (p->has_int4) w->side = carve_floats(l, p->strip_floats);
  w->rows_f32 = carve(l, p->expand_bytes);
  w->scratch = carve(l, CPU_MATMUL_SCRATCH_BYTES);
  w->q = carve_floats(l, rows * (size_t)dims->head_dim);
  w->scores = carve_floats(l, rows * CPU_CHUNK_TOKENS);
  w->acc = carve_floats(l, rows * dv);
  w->total = carve_floats(l, rows * dv);
  w->max = carve_floats(l, rows);
  w->sum = carve_floats(l, rows);
  w->total_max = carve_floats(l, rows);
  w->total_sum = carve_floats(l, rows);
  w->page_sums = carve_floats(l, rows * (size_t)p->max_chunks * CPU_CHUNK_RECORD);
  w->expanded = carve_floats(l, CPU_KV_SCRATCH_FLOATS(dims->head_dim));
  carve(l, 128); /* neighbours' prefetchers */
}

/* Floats that all ranks give in the largest collective, where they are other processes. */
static size_t exchange_floats(const struct backend_program *p)
{
  const struct group *group = p->backend->options.group;
  size_t most = 0;
  for (int32_t i = 0; group != NULL && group_is_linked(group) && i < p->program->n_ops; i++) {
    const struct program_op *op = &p->program->ops[i];
    if (op->kind != PROGRAM_ALL_REDUCE && op->kind != PROGRAM_ALL_GATHER) continue;
    const struct program_buffer *x = &p->program->buffers[op->in[0]];
    const size_t n = (size_t)(x->is_rows ? p->max_rows : p->max_tokens) * (size_t)x->width;
    if (n > most) most = n;
  }
  return most * (size_t)program_n_ranks(p->program);
}

static void lay_out(struct backend_program *p, struct layout *l)
{
  const struct program *program = p->program;
  const struct program_dims *dims = &program->dims;
  const size_t T = (size_t)p->max_tokens, R = (size_t)p->max_rows, most = T > R ? T : R;
  const size_t dv = (size_t)cpu_kv_padded(dims->head_dim);
  size_t act[CPU_ACT_FORMATS];
  int32_t widest;
  activation_sizes(p, (int32_t)most, act, &widest);
  for (int32_t b = 0; b < program->n_buffers; b++)
    p->buffers[b] = carve_floats(l, (program->buffers[b].is_rows ? R : T) * (size_t)program->buffers[b].width);
  for (int f = 0; f < CPU_ACT_FORMATS; f++) p->act[f] = carve(l, act[f]);
  p->normed = carve_floats(l, most * (size_t)widest);
  p->exchanged = carve_floats(l, exchange_floats(p));
  p->partial = carve_floats(l, (size_t)p->split_rows * (size_t)p->max_chunks * (dv + 2 + CPU_CHUNK_RECORD));
  p->finished = carve(l, (size_t)p->split_rows * sizeof *p->finished);
  p->batch.blocks = carve(l, (T / (size_t)p->block_tokens + T / 32 + 3 * R + 1) * sizeof *p->batch.blocks);
  p->batch.page = carve(l, T * sizeof(int32_t));
  p->batch.slot = carve(l, T * sizeof(int32_t));
  p->batch.tile = carve(l, T * sizeof(int32_t));
  p->batch.cosines = carve_floats(l, T * (size_t)program->rope.dims);
  p->batch.sines = carve_floats(l, T * (size_t)program->rope.dims);
  for (int32_t w = 0; w < p->backend->n_threads; w++) lay_out_worker(p, l, &p->workers[w]);
}

static enum sits_status make_arena(struct backend_program *p, struct sits_error *err)
{
  const struct program_dims *dims = &p->program->dims;
  const int32_t group = dims->n_heads / dims->n_kv_heads;
  p->block_tokens = (p->is_lane ? CPU_LANE_ROWS : CPU_ATTENTION_ROWS) / group;
  if (p->block_tokens < 1) p->block_tokens = 1;
  p->split_rows = 4 * p->backend->n_threads * (group > 4 ? group : 4);
  if (p->split_rows < CPU_SPLIT_TOKENS * dims->n_heads) p->split_rows = CPU_SPLIT_TOKENS * dims->n_heads;
  p->max_chunks = dims->max_context / CPU_CHUNK_TOKENS + 1;
  p->strip_floats = strip_floats(p, p->max_tokens > p->max_rows ? p->max_tokens : p->max_rows);
  p->buffers = mem_calloc((size_t)p->program->n_buffers, sizeof *p->buffers);
  p->workers = mem_calloc((size_t)p->backend->n_threads, sizeof *p->workers);
  if (p->buffers == NULL || p->workers == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  struct layout l = {NULL, 0};
  lay_out(p, &l);
  l.base = p->arena = mem_aligned(ALIGN, l.used); /* not cleared: what a small batch does not touch costs no memory */
  if (p->arena == NULL) return sits_fail(err, SITS_NOMEM, "compile: no memory for %zu bytes of workspace", l.used);
  p->n_bytes += l.used;
  l.used = 0;
  lay_out(p, &l);
  for (int32_t i = 0; i < p->split_rows; i++) atomic_init(&p->finished[i], 0);
  for (int32_t i = 0; i < p->n_steps; i++) {
    struct cpu_step *step = &p->steps[i];
    for (int k = 0; k < 3; k++) {
      step->in[k] = step->op->in[k] == PROGRAM_NONE ? NULL : p->buffers[step->op->in[k]];
      step->out[k] = step->op->out[k] == PROGRAM_NONE ? NULL : p->buffers[step->op->out[k]];
    }
  }
  return SITS_OK;
}

static struct backend_program *new_program(struct backend *backend, const struct program *program, int32_t max_tokens, int32_t max_rows)
{
  struct backend_program *p = mem_aligned(128, sizeof *p);
  if (p == NULL) return NULL;
  memset(p, 0, sizeof *p);
  p->job = (struct cpu_job){cpu_run_worker, p};
  p->backend = backend;
  p->program = program;
  p->max_tokens = max_tokens;
  p->max_rows = max_rows;
  return p;
}

/* Everything behind the weights. */
static enum sits_status assemble(struct backend_program *p, struct sits_error *err)
{
  enum sits_status status = make_steps(p, err);
  if (status == SITS_OK) status = plan_activations(p, err);
  if (status == SITS_OK) status = expand_vectors(p, err);
  if (status == SITS_OK) status = make_arena(p, err);
  return status;
}

enum sits_status cpu_compile(struct backend *backend, const struct program *program, struct backend_program **out, struct sits_error *err)
{
  enum sits_status status = program_check(program, err);
  if (status != SITS_OK) return status;
  struct backend_program *p = new_program(backend, program, backend->options.max_batch_tokens, backend->options.max_seqs);
  if (p == NULL) return sits_fail(err, SITS_NOMEM, "compile: out of memory");
  status = pack_weights(p, err);
  if (status == SITS_OK) status = assemble(p, err);
  if (status == SITS_OK) *out = p;
  else cpu_program_destroy(p);
  return status;
}

enum sits_status cpu_compile_lane(struct backend_program *program, int32_t max_tokens, struct backend_program **out, struct sits_error *err)
{
  struct backend_program *p = new_program(program->backend, program->program, max_tokens, 1);
  if (p == NULL) return sits_fail(err, SITS_NOMEM, "lane: out of memory");
  p->is_lane = true;
  p->weights = program->weights;
  p->n_weights = program->n_weights;
  const enum sits_status status = assemble(p, err);
  if (status == SITS_OK) *out = p;
  else cpu_program_destroy(p);
  return status;
}

void cpu_program_destroy(struct backend_program *p)
{
  if (p == NULL) return;
  cpu_pool_quiesce(p->backend->pool); /* late workers may still look at the run */
  for (int32_t i = 0; i < p->n_weights && !p->is_lane; i++) cpu_weight_destroy(p->weights[i].weight);
  if (!p->is_lane) mem_free(p->weights);
  mem_free(p->region);
  mem_free(p->steps);
  mem_free(p->ranges);
  mem_free(p->phases);
  mem_free(p->shares);
  mem_free(p->pause.rest);
  mem_free(p->vectors);
  mem_free(p->outlier_flags);
  mem_free(p->buffers);
  mem_free(p->workers);
  mem_free(p->arena);
  mem_free(p);
}
