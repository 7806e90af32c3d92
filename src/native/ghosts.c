#include "ghosts.h"

#include <string.h>

#include "slab.h"

#define LEAST 64
#define STEP 8 /* places moved with each addition; a new table has room for a quarter of its size when it begins */

void ghosts_init(struct ghosts *ghosts, uint64_t secret) {
    memset(ghosts, 0, sizeof *ghosts);
    ghosts->secret = secret | 1;
}

/* --- one table --- */

static void free_table(struct ghost_table *table) {
    pages_free(table->ring, table->ring_size * sizeof *table->ring);
    pages_free(table->slots, 2 * (size_t)table->ring_size * sizeof *table->slots);
    *table = (struct ghost_table){0};
}

void ghosts_clear(struct ghosts *ghosts) {
    free_table(&ghosts->table);
    free_table(&ghosts->old);
}

static size_t start_of(const struct ghosts *ghosts, const struct ghost_table *table, uint32_t mark) {
    return (size_t)(mark * ghosts->secret >> 32) & (2 * (size_t)table->ring_size - 1);
}

/* The slot of a mark, or the empty one where it would go. */
static size_t slot_of(const struct ghosts *ghosts, const struct ghost_table *table, uint32_t mark) {
    size_t mask = 2 * (size_t)table->ring_size - 1, at = start_of(ghosts, table, mark);
    while (table->slots[at] && table->slots[at] >> 32 != mark) at = (at + 1) & mask;
    return at;
}

static int has(const struct ghosts *ghosts, const struct ghost_table *table, uint32_t mark) {
    return table->ring && table->slots[slot_of(ghosts, table, mark)];
}

static uint64_t slot_for(uint32_t mark, uint32_t place) { return (uint64_t)mark << 32 | place; }

static uint32_t mark_at(const struct ghost_table *table, uint32_t place) {
    return table->ring[place & (table->ring_size - 1)];
}

static int is_there(const struct ghosts *ghosts, const struct ghost_table *table, uint32_t place) {
    uint32_t mark = mark_at(table, place);
    return mark && table->slots[slot_of(ghosts, table, mark)] == slot_for(mark, place);
}

static void put(const struct ghosts *ghosts, struct ghost_table *table, uint32_t place, uint32_t mark) {
    table->ring[place & (table->ring_size - 1)] = mark;
    table->slots[slot_of(ghosts, table, mark)] = slot_for(mark, place);
}

static int take(const struct ghosts *ghosts, struct ghost_table *table, uint32_t mark) {
    if (!has(ghosts, table, mark)) return 0;
    size_t mask = 2 * (size_t)table->ring_size - 1, at = slot_of(ghosts, table, mark);
    for (size_t next = (at + 1) & mask; table->slots[next]; next = (next + 1) & mask) {
        size_t start = start_of(ghosts, table, (uint32_t)(table->slots[next] >> 32));
        if (((next - start) & mask) >= ((next - at) & mask)) {
            table->slots[at] = table->slots[next];
            at = next;
        }
    }
    table->slots[at] = 0;
    return 1;
}

/* The oldest of the places up to `end`, which is left out from now on; 0: none of them has a mark. */
static uint32_t oldest(const struct ghosts *ghosts, struct ghost_table *table, uint32_t end) {
    while (table->first != end) {
        uint32_t place = table->first++;
        if (is_there(ghosts, table, place)) return mark_at(table, place);
    }
    return 0;
}

/* --- both --- */

int ghosts_has(const struct ghosts *ghosts, uint32_t mark) {
    return ghosts->count && (has(ghosts, &ghosts->table, mark) || has(ghosts, &ghosts->old, mark));
}

void ghosts_remove(struct ghosts *ghosts, uint32_t mark) {
    if (!ghosts->count) return;
    if (take(ghosts, &ghosts->table, mark) || take(ghosts, &ghosts->old, mark)) ghosts->count--;
}

/* Move what has some of the oldest places left. */
static void move_some(struct ghosts *ghosts) {
    struct ghost_table *old = &ghosts->old;
    for (int step = 0; step < STEP && old->first != old->next; step++) {
        uint32_t place = old->first++, mark = mark_at(old, place);
        if (!is_there(ghosts, old, place)) continue;
        take(ghosts, old, mark);
        put(ghosts, &ghosts->table, ghosts->moved++, mark);
    }
    if (old->first == old->next) free_table(old);
}

/* See that there is a place behind the latest: a new table drops what is void, and is larger if that is not much. -1: no
 * memory. */
static int make_place(struct ghosts *ghosts) {
    struct ghost_table *table = &ghosts->table, new = {0};
    if (ghosts->old.ring) move_some(ghosts);
    if (table->ring && table->next - table->first < table->ring_size) return 0;
    new.ring_size = !table->ring ? LEAST : table->ring_size;
    if (table->ring && ghosts->count > table->ring_size / 4 * 3) new.ring_size *= 2;
    new.ring = pages_alloc(new.ring_size * sizeof *new.ring);
    new.slots = pages_alloc(2 * (size_t)new.ring_size * sizeof *new.slots);
    if (!new.ring || !new.slots) {
        free_table(&new);
        return -1;
    }
    new.next = ghosts->count;
    ghosts->moved = 0;
    ghosts->old = *table;
    *table = new;
    if (ghosts->old.ring) move_some(ghosts);
    return 0;
}

void ghosts_add(struct ghosts *ghosts, uint32_t mark) {
    ghosts_remove(ghosts, mark);
    if (make_place(ghosts) < 0) return;
    put(ghosts, &ghosts->table, ghosts->table.next++, mark);
    ghosts->count++;
}

void ghosts_pop(struct ghosts *ghosts) {
    if (!ghosts->count) return;
    uint32_t mark = oldest(ghosts, &ghosts->table, ghosts->old.ring ? ghosts->moved : ghosts->table.next);
    if (!mark && ghosts->old.ring) mark = oldest(ghosts, &ghosts->old, ghosts->old.next);
    if (!mark) mark = oldest(ghosts, &ghosts->table, ghosts->table.next);
    ghosts_remove(ghosts, mark);
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
