/* The ranks of one model, seen from the host: where they meet, and how they learn that one is lost.
 *
 * A group has n ranks: threads of one process (backend/ranks.c), or one here and the others in other processes (backend/nodes.c: a group
 * with a link). Ranks meet at numbered places in the same order; meeting passes bytes, or inside a process one pointer, from each to all.
 * A rank that does not come within the time that the others grant it is lost: the group is aborted, every
 * meeting from then on fails at once, and words that ranks have registered (which their devices look at) are set.
 *
 * Rules: 1. A rank meets from one thread at a time. 2. What a rank wrote before a meeting the others may read after it. 3. An aborted
 * group stays so.
 */
#ifndef SITS_BACKEND_GROUP_H
#define SITS_BACKEND_GROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sits2026/status.h"

struct group;

/* timeout_us: the longest wait for another rank in group_meet. */
enum sits_status group_create(int32_t n_ranks, int64_t timeout_us, struct group **out, struct sits_error *err) SITS_MUST_CHECK;
void group_destroy(struct group *group); /* NULL is fine; no rank may be inside */

int32_t group_size(const struct group *group);
int64_t group_timeout_us(const struct group *group);

/* A group of which only `rank` is here; the link carries what ranks give each other. */
struct group_link {
  /* As group_exchange. timeout_us 0: patient. False: give up. */
  bool (*exchange)(void *user, const void *mine, size_t n_bytes, void *all, int64_t timeout_us);
  void *user;
};
enum sits_status group_create_linked(int32_t n_ranks, int64_t timeout_us, const struct group_link *link, struct group **out,
                                     struct sits_error *err) SITS_MUST_CHECK;
bool group_is_linked(const struct group *group);

/* Wait for all ranks and give each a copy of what all gave: all [n_ranks][n_bytes], in rank order. n_bytes 0: only wait. */
bool group_exchange(struct group *group, int32_t rank, const void *mine, size_t n_bytes, void *all, bool is_patient);

/* Wait for all ranks of this process (no link); all[r] is what rank r passed. all may be NULL. is_patient: no limit of
 * time (ranks load weights of their own sizes).
 * False: the group is aborted. */
bool group_meet(struct group *group, int32_t rank, const void *mine, const void **all, bool is_patient);

void group_abort(struct group *group);
bool group_is_aborted(const struct group *group);
/* *word becomes 1 when the group is aborted; NULL takes it back. One word a rank. */
void group_watch(struct group *group, int32_t rank, volatile int32_t *word);
/* fn is called once when the group is aborted, on the thread that aborts it, and must not block; NULL takes it back, after which it is not
 * running. */
void group_on_abort(struct group *group, int32_t rank, void (*fn)(void *user), void *user);

#endif
