/* Batches of copies between places that are known to be valid and disjoint; no Python. */
#ifndef KVRELAY_MOVES_H
#define KVRELAY_MOVES_H

#include "xxh3.h"

#define MAX_THREADS 64

struct move {
    uint8_t *to; /* NULL where nothing is copied */
    const uint8_t *from;
    size_t size;
};

enum work {
    WORK_COPY,
    WORK_SUM,
    WORK_COPY_SUM,
};

struct batch {
    enum work work;
    const struct xxh3_kernel *kernel;
    const struct move *moves;
    size_t count;
    size_t bytes;            /* of all moves */
    uint8_t *sums;           /* u64 a move, written; or NULL */
    const uint8_t *expected; /* u64 a move, compared; or NULL */
    int threads;             /* at most this many, the caller's included */
};

/* Do all of it; how many moves matched before the first that did not (`count`: all). Moves after that may be undone. */
size_t run_batch(const struct batch *batch);

#endif
