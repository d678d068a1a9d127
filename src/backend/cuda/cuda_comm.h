/* Collectives of a rank (a model cut over several devices, backend/ranks.c): receive memory that peers write, NCCL where it is there,
 * and the choice between them by size. Files: cuda_comm.c, cuda_comm_measure.c (the table made at start), cuda_nccl.c, cuda_topology.c.
 *
 * Rules: 1. All ranks make the same calls in the same order, from compile on. 2. Nothing is allocated after cuda_comm_open. 3. NVLink
 * multicast is never used. 4. Ranks that share a device use peer memory only (NCCL refuses two ranks on one), take few CTAs for waiting and
 * no programmatic edges, so that the others' kernels find room. 5. Ranks in other processes (a group with a link) are reached by NCCL only.
 */
#ifndef SITS_BACKEND_CUDA_COMM_H
#define SITS_BACKEND_CUDA_COMM_H

#include <pthread.h>
#include <stdatomic.h>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/cuda_nccl.h"
#include "backend/group.h"

#define COMM_PUSH_ROWS 256          /* largest T of the push protocol */
#define COMM_SLAB_TOKENS 256        /* up to here the GEMM before gives f32 sums, above (mostly) f16 */
#define COMM_MAX_MEASURES 20

enum comm_way { COMM_PUSH, COMM_BULK, COMM_NCCL, COMM_S8, COMM_WAYS };

/* One size of the table: microseconds of an all-reduce with residual and norm; 0 = not possible at this size. */
struct comm_measure { int32_t n_tokens; double us[COMM_WAYS], nccl_alone_us; enum comm_way best; int32_t split; /* of push: CTAs a row */ };

struct cuda_comm {
  struct backend *backend;
  struct group *group;              /* borrowed */
  int32_t rank, n_ranks, max_tokens, width;
  bool is_shared;                   /* two ranks on one device */
  bool is_linked;                   /* the other ranks are other processes */
  bool compresses;                  /* steps of more than BACKEND_COMPRESS_TOKENS go by COMM_S8 */
  struct k_reduce reduce;           /* a call's arguments but for the step's */
  struct k_gather gather;
  float *local_logits;              /* [R][V / n_ranks] */
  float *gathered;                  /* [n_ranks][R][V / n_ranks]; linked only */
  void *half;                       /* [T][E] f16 */
  volatile int32_t *abort_word, *lost_word; /* pinned */
  struct nccl_comm *_Atomic nccl;   /* NULL: not there; taken away by whoever aborts the group */
  pthread_t aborter;                /* runs nccl_comm_abort */
  bool has_aborter;
  struct comm_measure table[COMM_MAX_MEASURES]; /* ascending n_tokens */
  int32_t n_measures;
  int64_t n_steps;
};

/* Last part of compile, on all ranks. p->comm is set where the backend is a rank; freed by cuda_comm_close. */
enum sits_status cuda_comm_open(struct backend_program *p, struct sits_error *err) SITS_MUST_CHECK;
void cuda_comm_close(struct backend_program *p);

#define COMM_HALF (-1)              /* as n_slabs: the rank's share lies in comm->half, f16 */
#define COMM_EMBED (-2)             /* one slab, and h is the sum alone; never compressed */
/* h += sum over ranks of the slabs' sums, then out = form(norm(h) * gain); out NULL: no norm. */
enum sits_status cuda_comm_reduce(struct backend_program *p, int32_t n_tokens, int32_t n_slabs, const float *gain, const struct k_act *out,
                                  struct k_stream at) SITS_MUST_CHECK;
/* The same in a given way; split: CTAs that share a row (push). */
enum sits_status cuda_comm_reduce_by(struct backend_program *p, enum comm_way way, int32_t split, int32_t n_tokens, int32_t n_slabs,
                                     const float *gain, const struct k_act *out, struct k_stream at) SITS_MUST_CHECK;
/* Can `split` CTAs share a row of a step of n_tokens? */
bool cuda_comm_splits(const struct cuda_comm *comm, int32_t split, int32_t n_tokens);
bool cuda_comm_takes(const struct cuda_comm *comm, enum comm_way way, int32_t n_tokens);
/* p->logits of all ranks from their local_logits. */
enum sits_status cuda_comm_gather(struct backend_program *p, int32_t n_rows, struct k_stream at) SITS_MUST_CHECK;
/* After a step: did a rank fail to come? Marks the backend failed. */
enum sits_status cuda_comm_check(struct backend_program *p) SITS_MUST_CHECK;
/* Fault injection for tests: SITS_CUDA_STALL=RANK:STEP launches a kernel that hangs before that step (from 1) of that rank. */
enum sits_status cuda_comm_stall_if_due(struct backend_program *p) SITS_MUST_CHECK;

/* All ranks give n_bytes; all [n_ranks][n_bytes]. NULL, 0, NULL: only wait. During compile. */
enum sits_status cuda_comm_exchange(struct cuda_comm *comm, const void *mine, size_t n_bytes, void *all, struct sits_error *err)
    SITS_MUST_CHECK;

/* cuda_comm_measure.c: fill the table, all ranks together; every rank keeps rank 0's choice. */
enum sits_status cuda_comm_measure(struct backend_program *p, struct sits_error *err) SITS_MUST_CHECK;
int32_t cuda_comm_table(const struct backend_program *p, struct backend_collective *rows, int32_t max);

/* cuda_topology.c: n devices from `first` on, each next one the best linked to the last of those that reach all before it. */
enum sits_status cuda_choose_devices(int32_t first, int32_t n, int32_t *devices, struct sits_error *err);
/* The same by distances [from][to], smaller is better; devices[0] is given. Returns how many were found. */
#define CUDA_UNREACHABLE (1 << 20)
int32_t cuda_choose_linked(const int *distances, int32_t n_devices, int32_t n, int32_t *devices);

#endif
