#define _GNU_SOURCE
#include "slab.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

void *pages_alloc(size_t bytes) {
    size_t extra = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    uint8_t *start = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return NULL;
    if (extra) { /* give back what is before and behind an aligned range */
        size_t before = -(uintptr_t)start % HUGE_PAGE;
        if (before) munmap(start, before);
        start += before;
        if (extra - before) munmap(start + bytes, extra - before);
        madvise(start, bytes, MADV_HUGEPAGE);
    }
    return start;
}

void pages_free(void *pages, size_t bytes) {
    if (pages) munmap(pages, bytes);
}

void pages_drop(void *pages, size_t bytes) { madvise(pages, bytes, MADV_DONTNEED); }

int slab_reach(struct slab *slab, uint32_t number) {
    size_t chunk = number >> SLAB_BITS;
    while (slab->count <= chunk) {
        uint8_t **chunks = realloc(slab->chunks, (slab->count + 1) * sizeof *chunks);
        if (!chunks) return -1;
        slab->chunks = chunks;
        chunks[slab->count] = pages_alloc(slab->item_bytes * SLAB_ITEMS);
        if (!chunks[slab->count]) return -1;
        slab->count++;
    }
    return 0;
}

void slab_free(struct slab *slab) {
    while (slab->count) pages_free(slab->chunks[--slab->count], slab->item_bytes * SLAB_ITEMS);
    free(slab->chunks);
    slab->chunks = NULL;
}
