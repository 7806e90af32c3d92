/* Tokens of one KV head between an engine's blocks and an object's segment, checksummed on the way; no Python. */
#ifndef KVRELAY_PLANES_H
#define KVRELAY_PLANES_H

#include "xxh3.h"

/* How the items of one plane of one (block, head) lie: item (token, dim) at token_at[token] + dim_at[dim], in items. */
struct order {
    const size_t *token_at, *dim_at;
    int rows;    /* dims lie together: a token is one copy */
    int columns; /* tokens lie together, dims `stride` apart: a block is transposed */
    size_t stride;
};

struct plane {
    size_t dims;
    struct order paged;  /* in the engine's block */
    struct order packed; /* in an object's block; native packing only */
};

struct pages {
    uint8_t *base; /* of block 0, head 0 */
    size_t blocks, heads, block_stride, head_stride; /* bytes */
    size_t block_tokens, item; /* bytes of an item: 1, 2 or 4 */
    const struct plane *planes;
    size_t plane_count, token_bytes; /* of all planes */
    int native; /* the object holds whole blocks in `packed` order, else [plane][token][dim] */
    int alike;  /* native, and the engine's blocks have the same order: copied in one */
};

/* `count` tokens of an object of `tokens`, from its token `skip` on, and where they lie: from slot `first` on, counted
 * through the request's blocks. */
struct span {
    size_t tokens, skip, count, first;
};

size_t segment_bytes(const struct pages *pages, size_t tokens);

/* Segment to blocks; the XXH3-64 of the segment, also of tokens that are not wanted. No other slot is written.
 * `following`: the segment that is loaded next, if there is one; only its address is used. */
uint64_t load_segment(const struct xxh3_kernel *kernel, const struct pages *pages, size_t head, const uint64_t *blocks,
                      const struct span *span, const uint8_t *segment, const uint8_t *following, enum xxh3_store store);
/* Blocks to segment, all its tokens (`skip` is 0, `count` all); slots of other tokens are zeros. */
uint64_t save_segment(const struct xxh3_kernel *kernel, const struct pages *pages, size_t head, const uint64_t *blocks,
                      const struct span *span, uint8_t *segment, enum xxh3_store store);

#endif
