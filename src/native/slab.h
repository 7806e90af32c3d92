/* Arrays that grow without moving: items by number, in chunks of 65,536. */
#ifndef KVRELAY_SLAB_H
#define KVRELAY_SLAB_H

#include <stddef.h>
#include <stdint.h>

#define SLAB_BITS 16
#define SLAB_ITEMS (1u << SLAB_BITS)

struct slab {
    uint8_t **chunks;
    size_t count;      /* of chunks */
    size_t item_bytes;
};

/* See that there is an item `number`, zero when it is new; -1: no memory. */
int slab_reach(struct slab *slab, uint32_t number);
void slab_free(struct slab *slab);

/* Zeroed memory for large tables, in huge pages where the kernel gives them; NULL: none. */
void *pages_alloc(size_t bytes);
void pages_free(void *pages, size_t bytes);
void pages_drop(void *pages, size_t bytes); /* a part of them, which is zero again */

#define SLAB_AT(type, slab, number) \
    ((type *)(slab).chunks[(number) >> SLAB_BITS] + ((number) & (SLAB_ITEMS - 1)))

#endif
