#define _GNU_SOURCE
#include "names.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "siphash.h"
#include "slab.h"

#define LEAST 1024
#define STEP 16 /* slots emptied with each addition: of those that are left, a sixteenth more are taken meanwhile */
#define PART (((size_t)2 << 20) / sizeof(uint64_t)) /* slots whose memory is given back together */

void siphash_secret(uint64_t secret[2]) {
    if (getrandom(secret, 16, GRND_NONBLOCK) == 16) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    secret[0] = (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15ull;
    secret[1] = (uint64_t)(uintptr_t)secret ^ (uint64_t)now.tv_sec;
}

int names_init(struct names *names) {
    memset(names, 0, sizeof *names);
    siphash_secret(names->secret);
    names->table = (struct name_table){pages_alloc(LEAST * sizeof(uint64_t)), LEAST};
    return names->table.slots ? 0 : -1;
}

static void free_table(struct name_table *table) {
    pages_free(table->slots, table->capacity * sizeof *table->slots);
    *table = (struct name_table){NULL, 0};
}

void names_clear(struct names *names) {
    free_table(&names->table);
    free_table(&names->old);
}

uint32_t names_tag(const struct names *names, uint32_t holding, const uint8_t *key, size_t size) {
    uint64_t hash = siphash(names->secret[0] ^ holding, names->secret[1], key, size);
    return (uint32_t)(hash ^ hash >> 32);
}

/* --- the table --- */

static uint64_t slot_of(uint32_t tag, uint32_t row) { return (uint64_t)tag << 32 | (row + 1); }

static void put(const struct name_table *table, uint64_t slot) {
    size_t at = names_home(table, (uint32_t)(slot >> 32));
    while (table->slots[at]) at = (at + 1) & (table->capacity - 1);
    table->slots[at] = slot;
}

void names_add(struct names *names, uint32_t tag, uint32_t row) {
    put(names_of(names, tag), slot_of(tag, row));
    names->used++;
}

/* Empty some slots of the old table, up to one that was empty: no search that begins behind it went past it. */
static void move_some(struct names *names) {
    struct name_table *old = &names->old;
    size_t mask = old->capacity - 1;
    for (size_t done = 0;; done++) {
        size_t at = (names->first + names->moved) & mask;
        if (!old->slots[at] && (done >= STEP || names->moved >= old->capacity)) break;
        if (old->slots[at]) {
            put(&names->table, old->slots[at]);
            old->slots[at] = 0;
        }
        names->moved++;
        if ((at + 1) % PART == 0 && at >= PART) pages_drop(old->slots + at + 1 - PART, PART * sizeof *old->slots);
    }
    if (names->moved >= old->capacity) free_table(old);
}

int names_prepare(struct names *names) {
    struct name_table *table = &names->table;
    if (!names->old.slots) {
        if (names->used < table->capacity / 4 * 3) return 0;
        struct name_table larger = {pages_alloc(2 * table->capacity * sizeof *table->slots), 2 * table->capacity};
        if (!larger.slots) return names->used < table->capacity / 16 * 15 ? 0 : -1;
        names->old = *table;
        names->table = larger;
        names->moved = 0;
        for (names->first = 0; names->old.slots[names->first];) names->first++;
    }
    move_some(names);
    return 0;
}

void names_remove(struct names *names, uint32_t tag, uint32_t row) {
    const struct name_table *table = names_of(names, tag);
    size_t mask = table->capacity - 1, at = names_home(table, tag);
    while (table->slots[at] != slot_of(tag, row)) at = (at + 1) & mask;
    /* Move up what follows and began its search at or before the hole: no markers of former names are left. */
    for (size_t next = (at + 1) & mask; table->slots[next]; next = (next + 1) & mask) {
        size_t start = names_home(table, (uint32_t)(table->slots[next] >> 32));
        if (((next - start) & mask) >= ((next - at) & mask)) {
            table->slots[at] = table->slots[next];
            at = next;
        }
    }
    table->slots[at] = 0;
    names->used--;
}

static const char *check_table(const struct names *names, const struct name_table *table, size_t *found) {
    for (size_t i = 0; i < table->capacity; i++) {
        if (!table->slots[i]) continue;
        ++*found;
        if (names_of(names, (uint32_t)(table->slots[i] >> 32)) != table) return "a name is in the wrong table";
    }
    return NULL;
}

const char *names_check(const struct names *names) {
    size_t found = 0;
    const char *wrong = check_table(names, &names->table, &found);
    if (!wrong) wrong = check_table(names, &names->old, &found);
    return wrong || found == names->used ? wrong : "names are counted wrong";
}
