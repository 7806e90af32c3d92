/* Which object to evict next: kvrelay.pool.core.order, which explains it, over the rows of `struct books`. */
#ifndef KVRELAY_ORDER_H
#define KVRELAY_ORDER_H

#include "ghosts.h"

struct books;

enum standing { FRESH, TRIAL, PROVEN, STANDINGS };

struct fifo {
    uint32_t oldest, newest, count;
    uint32_t idle, clean_idle; /* how many of them can be evicted, and how many of these are clean */
};

struct order {
    struct fifo queues[STANDINGS]; /* by standing */
    struct ghosts ghosts, proven_ghosts;
    double share;
};

void order_init(struct order *order, uint64_t secret);
void order_clear(struct order *order);
void order_add(struct books *books, struct order *order, uint32_t row, uint32_t mark);
void order_remove(struct books *books, struct order *order, uint32_t row);
void order_evict(struct books *books, struct order *order, uint32_t row, uint32_t mark);
/* The one to evict next of those not pinned (and, with `clean`, clean); it stays queued. NO_ROW: none. */
uint32_t order_victim(struct books *books, struct order *order, int clean);
int order_spares(const struct books *books, uint32_t row);

/* Every row once, about in the order in which they would go: begin with `*queue` -1 and `row` NO_ROW. */
uint32_t order_next(const struct books *books, const struct order *order, int *queue, uint32_t row);

static inline uint64_t order_count(const struct order *order) {
    return (uint64_t)order->queues[FRESH].count + order->queues[TRIAL].count + order->queues[PROVEN].count;
}

#endif
