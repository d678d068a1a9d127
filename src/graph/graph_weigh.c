/* What fusions are worth, by the backend's costs. Most take ops and passes over memory away and cost nothing; around a norm they compete:
 *
 *   y = LINEAR(..)   x = ADD(y, r)   n = RMSNORM(x)   LINEAR(n)
 *
 * the ADD can go into the LINEAR before it or take the norm along (ADD_NORM), and the norm can go into the LINEAR behind it, where it may
 * be computed several times. For each norm all ways that the backend offers are priced, and those that the cheapest one does not use are
 * barred. With B one pass over x: LINEAR writes y and ADD is an op: op + 4B; ADD in the LINEAR: 2B; a norm on its own: op + 3B + N; in its
 * reader: B + repeats N; ADD_NORM: op + 6B + N for both. Entry points: graph_weigh, graph_take. */
#include "graph/graph_internal.h"

static double pass_ns(const struct graph *g, graph_value value)
{
  return (double)g->costs->byte_ns * 4 * (double)g->costs->tokens * (double)g->values[value].width;
}

static double norm_ns(const struct graph *g, graph_value value)
{
  return (double)g->costs->norm_ns * (double)g->costs->tokens * (double)g->values[value].width;
}

double graph_saved(const struct graph *g, graph_value value, int times)
{
  return g->costs == NULL ? 0 : (double)g->costs->op_ns + times * pass_ns(g, value);
}

double graph_repeated(const struct graph *g, graph_value value)
{
  return g->costs == NULL ? 0 : ((double)g->costs->norm_repeats - 1) * norm_ns(g, value);
}

bool graph_is_f32(const struct graph *g, uint32_t fusion) { return g->costs == NULL || (g->costs->f32_fusions & fusion) != 0; }

bool graph_take(struct graph *g, uint32_t fusion, const struct graph_node *node, double saved_ns)
{
  struct program_choice *choice = &g->choices[__builtin_ctz(fusion)];
  choice->n_possible++;
  if (g->costs != NULL && (saved_ns <= 0 || (node->barred & fusion) != 0)) return false;
  choice->n_taken++;
  choice->saved_ns += saved_ns;
  return true;
}

/* All readers are LINEARs of one rounding, which grouping makes one op. */
static bool has_one_reader(const struct graph *g, const struct graph_node *norm, bool can_group)
{
  const struct act_format *act = NULL;
  int32_t n = 0, n_linear = 0;
  bool is_same = true;
  for (int32_t i = 0; i < g->n_nodes; i++)
    for (int k = 0; k < 3; k++) {
      if (g->nodes[i].is_dead || g->nodes[i].in[k] != norm->out[0]) continue;
      is_same &= n == 0 || g->nodes[i].act == act;
      act = g->nodes[i].act;
      n_linear += g->nodes[i].kind == PROGRAM_LINEAR;
      n++;
    }
  return n == n_linear && norm->out[0] != g->output && (n == 1 || (n > 1 && n <= PROGRAM_MAX_PARTS && is_same && can_group));
}

/* Can the ADD that reads this value go into the LINEAR that makes it (or its share of it, with REDUCE)? */
static bool is_of_linear(const struct graph *g, graph_value value, uint32_t fusions)
{
  if (graph_sole_producer(g, value, PROGRAM_LINEAR) >= 0) return true;
  const int32_t reduce = (fusions & PROGRAM_FUSE_REDUCE) ? graph_sole_producer(g, value, PROGRAM_ALL_REDUCE) : -1;
  return reduce >= 0 && graph_sole_producer(g, g->nodes[reduce].in[0], PROGRAM_LINEAR) >= 0;
}

struct junction { bool can_add, can_norm, can_both; double op, pass, norm, repeats; };

/* Price of one way; negative: not possible. */
static double price(const struct junction *j, bool has_add, bool adds_early, bool norms_late, bool joins)
{
  if ((adds_early && !j->can_add) || (norms_late && !j->can_norm) || (joins && !j->can_both)) return -1;
  if (joins) return j->op + 6 * j->pass + j->norm;
  const double add = !has_add ? 0 : adds_early ? 2 * j->pass : j->op + 4 * j->pass;
  return add + (norms_late ? j->pass + j->repeats * j->norm : j->op + 3 * j->pass + j->norm);
}

/* The norm at i, and the ADD before it where there is one. */
static void weigh_norm(struct graph *g, int32_t i, uint32_t fusions)
{
  struct graph_node *norm = &g->nodes[i];
  const int32_t from = graph_producer(g, norm->in[0]);
  struct graph_node *add = from >= 0 && g->nodes[from].kind == PROGRAM_ADD ? &g->nodes[from] : NULL;
  struct junction j = {.can_norm = (fusions & PROGRAM_FUSE_NORM) && graph_is_f32(g, PROGRAM_FUSE_NORM) &&
                                   has_one_reader(g, norm, (fusions & PROGRAM_FUSE_GROUP) != 0),
                       .can_both = add != NULL && (fusions & PROGRAM_FUSE_ADD_NORM) && graph_is_f32(g, PROGRAM_FUSE_ADD_NORM),
                       .op = (double)g->costs->op_ns, .pass = pass_ns(g, norm->in[0]), .norm = norm_ns(g, norm->in[0]),
                       .repeats = (double)g->costs->norm_repeats};
  for (int side = 0; add != NULL && side < 2; side++)
    j.can_add |= (fusions & PROGRAM_FUSE_ADD) && is_of_linear(g, add->in[side], fusions);
  double least = price(&j, add != NULL, false, false, false);
  uint32_t used = 0;
  for (uint32_t way = 1; way < 5; way++) {
    const bool adds_early = way == 1 || way == 2, norms_late = way == 2 || way == 3, joins = way == 4;
    const double cost = price(&j, add != NULL, adds_early, norms_late, joins);
    if (cost < 0 || cost > least) continue;
    least = cost;
    used = (adds_early ? PROGRAM_FUSE_ADD : 0U) | (norms_late ? PROGRAM_FUSE_NORM : 0U) | (joins ? PROGRAM_FUSE_ADD_NORM : 0U);
  }
  norm->barred |= ~used & (uint32_t)(PROGRAM_FUSE_NORM | PROGRAM_FUSE_ADD_NORM);
  if (add != NULL) add->barred |= ~used & (uint32_t)PROGRAM_FUSE_ADD;
}

void graph_weigh(struct graph *g, uint32_t fusions)
{
  for (int32_t i = 0; i < g->n_nodes; i++)
    if (!g->nodes[i].is_dead && g->nodes[i].kind == PROGRAM_RMSNORM) weigh_norm(g, i, fusions);
}
