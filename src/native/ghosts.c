#include "ghosts.h"

#include <stdlib.h>
#include <string.h>

#define LEAST 64

void ghosts_init(struct ghosts *ghosts, uint64_t secret) {
    memset(ghosts, 0, sizeof *ghosts);
    ghosts->secret = secret | 1;
}

void ghosts_clear(struct ghosts *ghosts) {
    free(ghosts->ring);
    free(ghosts->slots);
}

static size_t start_of(const struct ghosts *ghosts, uint32_t mark) {
    return (size_t)(mark * ghosts->secret >> 32) & (2 * (size_t)ghosts->ring_size - 1);
}

/* The slot of a mark, or the empty one where it would go. */
static size_t slot_of(const struct ghosts *ghosts, uint32_t mark) {
    size_t mask = 2 * (size_t)ghosts->ring_size - 1, at = start_of(ghosts, mark);
    while (ghosts->slots[at] && ghosts->slots[at] >> 32 != mark) at = (at + 1) & mask;
    return at;
}

int ghosts_has(const struct ghosts *ghosts, uint32_t mark) {
    return ghosts->count && ghosts->slots[slot_of(ghosts, mark)];
}

void ghosts_remove(struct ghosts *ghosts, uint32_t mark) {
    if (!ghosts->count) return;
    size_t mask = 2 * (size_t)ghosts->ring_size - 1, at = slot_of(ghosts, mark);
    if (!ghosts->slots[at]) return;
    for (size_t next = (at + 1) & mask; ghosts->slots[next]; next = (next + 1) & mask) {
        size_t start = start_of(ghosts, (uint32_t)(ghosts->slots[next] >> 32));
        if (((next - start) & mask) >= ((next - at) & mask)) {
            ghosts->slots[at] = ghosts->slots[next];
            at = next;
        }
    }
    ghosts->slots[at] = 0;
    ghosts->count--;
}

static uint64_t slot_for(uint32_t mark, uint32_t place) { return (uint64_t)mark << 32 | place; }

static int is_there(const struct ghosts *ghosts, uint32_t place) {
    uint32_t mark = ghosts->ring[place & (ghosts->ring_size - 1)];
    return ghosts->slots[slot_of(ghosts, mark)] == slot_for(mark, place);
}

/* See that there is a place behind the latest: drop what is void, and grow if that is not much. -1: no memory. */
static int make_place(struct ghosts *ghosts) {
    if (ghosts->ring && ghosts->next - ghosts->first < ghosts->ring_size) return 0;
    struct ghosts grown = *ghosts;
    if (!ghosts->ring) grown.ring_size = LEAST;
    else if (ghosts->count > ghosts->ring_size / 4 * 3) grown.ring_size *= 2;
    grown.ring = malloc(grown.ring_size * sizeof *grown.ring);
    grown.slots = calloc(2 * (size_t)grown.ring_size, sizeof *grown.slots);
    if (!grown.ring || !grown.slots) {
        ghosts_clear(&grown);
        return -1;
    }
    grown.first = grown.next = grown.count = 0;
    for (uint32_t place = ghosts->first; place != ghosts->next; place++) {
        if (!is_there(ghosts, place)) continue;
        uint32_t mark = ghosts->ring[place & (ghosts->ring_size - 1)];
        grown.ring[grown.next] = mark;
        grown.slots[slot_of(&grown, mark)] = slot_for(mark, grown.next++);
        grown.count++;
    }
    ghosts_clear(ghosts);
    *ghosts = grown;
    return 0;
}

void ghosts_add(struct ghosts *ghosts, uint32_t mark) {
    ghosts_remove(ghosts, mark);
    if (make_place(ghosts) < 0) return;
    ghosts->ring[ghosts->next & (ghosts->ring_size - 1)] = mark;
    ghosts->slots[slot_of(ghosts, mark)] = slot_for(mark, ghosts->next++);
    ghosts->count++;
}

void ghosts_pop(struct ghosts *ghosts) {
    while (ghosts->count) {
        uint32_t place = ghosts->first++;
        if (!is_there(ghosts, place)) continue;
        ghosts_remove(ghosts, ghosts->ring[place & (ghosts->ring_size - 1)]);
        return;
    }
}

/* --- CRC-32 (reflected, 0xEDB88320), four bytes a step --- */

uint32_t mark_of(const uint8_t *data, size_t size) {
    static uint32_t tables[4][256];
    static int made;
    uint32_t crc = ~0u;
    if (!made) { /* under the interpreter lock */
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
            tables[0][i] = value;
        }
        for (int t = 1; t < 4; t++)
            for (int i = 0; i < 256; i++) tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
        made = 1;
    }
    for (; size >= 4; size -= 4, data += 4) {
        uint32_t word;
        memcpy(&word, data, 4);
        crc ^= word;
        crc = tables[3][crc & 255] ^ tables[2][crc >> 8 & 255] ^ tables[1][crc >> 16 & 255] ^ tables[0][crc >> 24];
    }
    for (; size; size--, data++) crc = crc >> 8 ^ tables[0][(crc ^ *data) & 255];
    return crc == ~0u ? ~0u : ~crc; /* 0 is no mark here */
}
