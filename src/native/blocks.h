/* The arena as a list of blocks, the free ones filed by size: kvrelay.pool.core.blocks, which explains it, in C. */
#ifndef KVRELAY_BLOCKS_H
#define KVRELAY_BLOCKS_H

#include "slab.h"

#define PAGE_BYTES 4096
#define GRANULE_BYTES 64
#define MAX_BINS 4096

enum block_state { BLOCK_UNUSED, BLOCK_FREE, BLOCK_LIVE };

struct block {
    uint64_t place; /* offset in the arena, and the state in its lowest bits */
    uint64_t length;
    uint32_t before, after; /* in the arena; 0: none */
    uint32_t up;            /* in its bin; of a live block: whose it is */
    uint32_t down;          /* in its bin; of an unused number: the next unused one */
};

struct blocks {
    uint64_t size, free_bytes;
    struct slab slab; /* block 0 is nobody's: it stands for both ends */
    uint32_t count, unused;
    uint32_t bins;
    uint32_t heads[MAX_BINS];
    uint64_t filled[MAX_BINS / 64]; /* a bit a bin that is not empty */
};

int blocks_init(struct blocks *blocks, uint64_t size); /* -1: no memory */
void blocks_clear(struct blocks *blocks);

/* See that the next `blocks_allocate` has the numbers it may need; -1: no memory. */
int blocks_prepare(struct blocks *blocks);
uint32_t blocks_allocate(struct blocks *blocks, uint64_t size, uint32_t owner); /* 0: no room */
void blocks_free(struct blocks *blocks, uint32_t block);
uint64_t blocks_largest(const struct blocks *blocks);

/* What is wrong, or NULL. */
const char *blocks_check(const struct blocks *blocks);

static inline struct block *block_at(const struct blocks *blocks, uint32_t number) {
    return SLAB_AT(struct block, blocks->slab, number);
}
static inline uint64_t block_offset(const struct block *block) { return block->place & ~(uint64_t)(GRANULE_BYTES - 1); }
static inline int block_state(const struct block *block) { return block->place & (GRANULE_BYTES - 1); }

static inline uint64_t rounded(uint64_t size) {
    uint64_t to = size <= PAGE_BYTES - GRANULE_BYTES ? GRANULE_BYTES : PAGE_BYTES;
    return (size + to - 1) & ~(to - 1);
}

/* The largest rounded size that fits into [start, end). */
static inline uint64_t room(uint64_t start, uint64_t end) {
    uint64_t first = (start + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1), last = end & ~(uint64_t)(PAGE_BYTES - 1);
    if (last > first) return last - first;
    return end - start < PAGE_BYTES - GRANULE_BYTES ? end - start : PAGE_BYTES - GRANULE_BYTES;
}

#endif
