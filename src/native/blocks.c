#include "blocks.h"

#include <string.h>

#define FINE_BITS 6
#define PROBES 16

static uint32_t bin_of(uint64_t size) {
    uint64_t granules = size / GRANULE_BYTES;
    int shift = (granules ? 64 - __builtin_clzll(granules) : 0) - FINE_BITS - 1;
    return shift <= 0 ? (uint32_t)granules : ((uint32_t)shift << FINE_BITS) + (uint32_t)(granules >> shift);
}

static uint64_t room_in(const struct block *block) {
    return room(block_offset(block), block_offset(block) + block->length);
}

static void set_state(struct block *block, enum block_state state) { block->place = block_offset(block) | state; }

/* --- bins --- */

static void file(struct blocks *blocks, uint32_t number) {
    struct block *block = block_at(blocks, number);
    uint32_t bin = bin_of(room_in(block)), head = blocks->heads[bin];
    set_state(block, BLOCK_FREE);
    block->up = 0;
    block->down = head;
    if (head) block_at(blocks, head)->up = number;
    else blocks->filled[bin / 64] |= 1ull << bin % 64;
    blocks->heads[bin] = number;
}

static void unfile(struct blocks *blocks, uint32_t number) {
    struct block *block = block_at(blocks, number);
    if (block->down) block_at(blocks, block->down)->up = block->up;
    if (block->up) {
        block_at(blocks, block->up)->down = block->down;
        return;
    }
    uint32_t bin = bin_of(room_in(block));
    blocks->heads[bin] = block->down;
    if (!block->down) blocks->filled[bin / 64] &= ~(1ull << bin % 64);
}

/* The first bin from `bin` on that is not empty; `bins`: none. */
static uint32_t next_filled(const struct blocks *blocks, uint32_t bin) {
    for (uint32_t word = bin / 64; word <= (blocks->bins - 1) / 64 && bin < blocks->bins; word++, bin = word * 64) {
        uint64_t bits = blocks->filled[word] >> bin % 64;
        if (bits) return bin + (uint32_t)__builtin_ctzll(bits);
    }
    return blocks->bins;
}

static uint32_t find(const struct blocks *blocks, uint64_t need) {
    uint32_t bin = bin_of(need), block;
    if (bin >= blocks->bins) return 0;
    block = blocks->heads[bin];
    for (int probe = 0; block && probe < PROBES; probe++, block = block_at(blocks, block)->down)
        if (room_in(block_at(blocks, block)) >= need) return block;
    bin = next_filled(blocks, bin + 1);
    return bin < blocks->bins ? blocks->heads[bin] : 0;
}

/* --- the list in address order --- */

static uint32_t insert(struct blocks *blocks, uint32_t before, uint64_t offset, uint64_t length) {
    uint32_t number = blocks->unused;
    if (number) blocks->unused = block_at(blocks, number)->down;
    else number = blocks->count++;
    struct block *block = block_at(blocks, number);
    uint32_t after = block_at(blocks, before)->after;
    *block = (struct block){offset, length, before, after, 0, 0};
    block_at(blocks, before)->after = number;
    block_at(blocks, after)->before = number;
    return number;
}

static void drop(struct blocks *blocks, uint32_t number) {
    struct block *block = block_at(blocks, number);
    block_at(blocks, block->before)->after = block->after;
    block_at(blocks, block->after)->before = block->before;
    set_state(block, BLOCK_UNUSED);
    block->down = blocks->unused;
    blocks->unused = number;
}

/* --- the interface --- */

int blocks_init(struct blocks *blocks, uint64_t size) {
    memset(blocks, 0, sizeof *blocks);
    blocks->size = blocks->free_bytes = size & ~(uint64_t)(PAGE_BYTES - 1);
    blocks->slab.item_bytes = sizeof(struct block);
    blocks->bins = bin_of(blocks->size < PAGE_BYTES ? PAGE_BYTES : blocks->size) + 1;
    if (slab_reach(&blocks->slab, 1) < 0) return -1;
    block_at(blocks, 0)->place = BLOCK_LIVE;
    blocks->count = 1;
    if (blocks->size) file(blocks, insert(blocks, 0, 0, blocks->size));
    return 0;
}

void blocks_clear(struct blocks *blocks) { slab_free(&blocks->slab); }

int blocks_prepare(struct blocks *blocks) { return slab_reach(&blocks->slab, blocks->count + 2); }

uint32_t blocks_allocate(struct blocks *blocks, uint64_t size, uint32_t owner) {
    uint64_t need = rounded(size);
    uint32_t number = find(blocks, need);
    if (!number) return 0;
    unfile(blocks, number);
    struct block *block = block_at(blocks, number);
    uint64_t start = block_offset(block), end = start + block->length;
    uint64_t at = (start + PAGE_BYTES - 1) & ~(uint64_t)(PAGE_BYTES - 1);
    if (need < PAGE_BYTES) at = end - start < PAGE_BYTES || at - start >= need ? start : end - need;
    if (at > start) file(blocks, insert(blocks, block->before, start, at - start));
    if (at + need < end) file(blocks, insert(blocks, number, at + need, end - at - need));
    block->place = at | BLOCK_LIVE;
    block->length = need;
    block->up = owner;
    blocks->free_bytes -= need;
    return number;
}

void blocks_free(struct blocks *blocks, uint32_t number) {
    struct block *block = block_at(blocks, number);
    blocks->free_bytes += block->length;
    uint32_t neighbour = block->before;
    if (block_state(block_at(blocks, neighbour)) == BLOCK_FREE) {
        unfile(blocks, neighbour);
        block->place = block_at(blocks, neighbour)->place;
        block->length += block_at(blocks, neighbour)->length;
        drop(blocks, neighbour);
    }
    neighbour = block->after;
    if (block_state(block_at(blocks, neighbour)) == BLOCK_FREE) {
        unfile(blocks, neighbour);
        block->length += block_at(blocks, neighbour)->length;
        drop(blocks, neighbour);
    }
    file(blocks, number);
}

uint64_t blocks_largest(const struct blocks *blocks) {
    uint64_t largest = 0;
    for (uint32_t bin = blocks->bins; bin-- > 0 && !largest;)
        for (uint32_t block = blocks->heads[bin]; block; block = block_at(blocks, block)->down)
            if (room_in(block_at(blocks, block)) > largest) largest = room_in(block_at(blocks, block));
    return largest;
}

const char *blocks_check(const struct blocks *blocks) {
    uint64_t end = 0, free_bytes = 0;
    uint32_t known = 1, filed = 0, free_blocks = 0;
    int was_free = 0;
    for (uint32_t number = block_at(blocks, 0)->after; number; number = block_at(blocks, number)->after) {
        const struct block *block = block_at(blocks, number);
        int is_free = block_state(block) == BLOCK_FREE;
        if (block_offset(block) != end) return "blocks overlap or leave a gap";
        if (!block->length || block->length % GRANULE_BYTES) return "a block of a crooked length";
        if (block_at(blocks, block->before)->after != number) return "the list of blocks is broken";
        if (is_free && was_free) return "two free blocks touch";
        if (!is_free && block_state(block) != BLOCK_LIVE) return "an unused block is in the list";
        if (!is_free && block->length >= PAGE_BYTES && (block->length | end) % PAGE_BYTES) return "a crooked live block";
        free_bytes += is_free ? block->length : 0;
        free_blocks += is_free;
        end += block->length;
        was_free = is_free;
        known++;
        if (known > blocks->count) return "the list of blocks has a loop";
    }
    if (end != blocks->size) return "blocks do not cover the arena";
    if (free_bytes != blocks->free_bytes) return "free bytes are counted wrong";
    for (uint32_t bin = 0; bin < blocks->bins; bin++) {
        if ((blocks->heads[bin] != 0) != (blocks->filled[bin / 64] >> bin % 64 & 1)) return "a bin's bit is wrong";
        for (uint32_t number = blocks->heads[bin], up = 0; number; up = number, number = block_at(blocks, number)->down) {
            const struct block *block = block_at(blocks, number);
            if (block_state(block) != BLOCK_FREE || block->up != up || bin_of(room_in(block)) != bin)
                return "a block is filed wrong";
            if (++filed > free_blocks) return "a bin has a loop";
        }
    }
    if (filed != free_blocks) return "a free block is not filed";
    for (uint32_t number = blocks->unused; number; number = block_at(blocks, number)->down)
        if (++known > blocks->count || block_state(block_at(blocks, number)) != BLOCK_UNUSED)
            return "the unused numbers are wrong";
    return known == blocks->count ? NULL : "a block's number is lost";
}
