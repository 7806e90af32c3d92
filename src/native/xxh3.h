/* XXH3-64, seed 0, default secret: whole buffers, buffers that fill up over time, and copies that hash what they move. */
#ifndef KVRELAY_XXH3_H
#define KVRELAY_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH3_BLOCK 1024 /* bytes between two scrambles: 16 stripes of 64 */
#define XXH3_MID_MAX 240

/* How stores are done. STREAMED ones bypass the caches, as far as a kernel can at the destination's alignment. */
enum xxh3_store { XXH3_CACHED, XXH3_STREAMED };

/* What will be copied or read after this: addresses only, or NULL. */
struct xxh3_next {
    const uint8_t *from, *to;
};

/* One implementation of the two loops that cost time; all give the same results. */
struct xxh3_kernel {
    const char *name;
    /* Consume `count` blocks at `from`. */
    void (*blocks)(uint64_t acc[8], const uint8_t *from, size_t count, const struct xxh3_next *next);
    /* The same, and store the very bytes that were consumed at `to`. */
    void (*copy_blocks)(uint64_t acc[8], uint8_t *to, const uint8_t *from, size_t count, const struct xxh3_next *next,
                        enum xxh3_store store);
};

/* Those this processor can run, the fastest first; ends with a NULL name. */
extern struct xxh3_kernel xxh3_kernels[4];
void xxh3_find_kernels(void); /* call once before anything else */

uint64_t xxh3(const struct xxh3_kernel *kernel, const uint8_t *data, size_t size);

/* Copy `size` bytes that do not overlap and hash what was copied. `store`: for the bulk of it. */
uint64_t xxh3_copy(const struct xxh3_kernel *kernel, uint8_t *to, const uint8_t *from, size_t size,
                   const struct xxh3_next *next, enum xxh3_store store);
void xxh3_copy_fence(void); /* after the last STREAMED copy, before anybody is told */

/* The hash of `size` bytes at one place that arrive from the front on. */
struct xxh3_progress {
    uint64_t acc[8];
    size_t done; /* bytes consumed, whole blocks */
};
void xxh3_begin(struct xxh3_progress *progress);
/* `there` of the `size` bytes at `data` have arrived: consume what can be. */
void xxh3_advance(const struct xxh3_kernel *kernel, struct xxh3_progress *progress, const uint8_t *data, size_t size,
                  size_t there);
/* All have arrived. */
uint64_t xxh3_finish(const struct xxh3_kernel *kernel, struct xxh3_progress *progress, const uint8_t *data,
                     size_t size);

#endif
