#include "order.h"

#include "books.h"

#define FRESH_SHARE 0.1
#define LEAST_SHARE 0.02

void order_init(struct order *order, uint64_t secret) {
    for (int i = 0; i < STANDINGS; i++) order->queues[i] = (struct fifo){NO_ROW, NO_ROW, 0, 0, 0};
    ghosts_init(&order->ghosts, secret);
    ghosts_init(&order->proven_ghosts, secret);
    order->share = 0.5;
}

void order_clear(struct order *order) {
    ghosts_clear(&order->ghosts);
    ghosts_clear(&order->proven_ghosts);
}

/* --- the three queues --- */

static void push(struct books *books, struct order *order, uint32_t number, enum standing standing) {
    struct fifo *fifo = &order->queues[standing];
    struct row *row = row_at(books, number);
    struct cold_row *cold = cold_at(books, number);
    row->flags = (uint8_t)((row->flags & ~STANDING) | standing << STANDING_SHIFT);
    cold->older = fifo->newest;
    cold->newer = NO_ROW;
    if (fifo->newest == NO_ROW) fifo->oldest = number;
    else cold_at(books, fifo->newest)->newer = number;
    fifo->newest = number;
    fifo->count++;
}

void order_remove(struct books *books, struct order *order, uint32_t number) {
    struct fifo *fifo = &order->queues[standing_of(row_at(books, number))];
    struct cold_row *cold = cold_at(books, number);
    if (cold->older == NO_ROW) fifo->oldest = cold->newer;
    else cold_at(books, cold->older)->newer = cold->newer;
    if (cold->newer == NO_ROW) fifo->newest = cold->older;
    else cold_at(books, cold->newer)->older = cold->older;
    cold->older = cold->newer = NO_ROW;
    fifo->count--;
}

/* Take the oldest of a queue to the end of another, or of the same. */
static uint32_t move_oldest(struct books *books, struct order *order, enum standing from, enum standing to) {
    uint32_t number = order->queues[from].oldest;
    const struct row *row = row_at(books, number);
    order_remove(books, order, number);
    push(books, order, number, to);
    if (row->flags & COUNTED) {
        uint32_t clean = row->flags & CLEAN ? 1 : 0;
        order->queues[from].idle--;
        order->queues[from].clean_idle -= clean;
        order->queues[to].idle++;
        order->queues[to].clean_idle += clean;
    }
    return number;
}

/* --- the interface --- */

static void adjust(struct order *order, double steps) {
    double share = order->share + steps / (double)(order_count(order) + 1);
    share = share < LEAST_SHARE ? LEAST_SHARE : share;
    order->share = share > 1 - LEAST_SHARE ? 1 - LEAST_SHARE : share;
}

static double at_least_1(double a, double b) { return a / b > 1.0 ? a / b : 1.0; }

void order_add(struct books *books, struct order *order, uint32_t number, uint32_t mark) {
    double ghosts = order->ghosts.count, proven_ghosts = order->proven_ghosts.count;
    enum standing standing = PROVEN;
    books_unvisit(books, number);
    if (ghosts_has(&order->ghosts, mark)) {
        ghosts_remove(&order->ghosts, mark);
        adjust(order, at_least_1(proven_ghosts, ghosts));
    } else if (ghosts_has(&order->proven_ghosts, mark)) {
        ghosts_remove(&order->proven_ghosts, mark);
        adjust(order, -at_least_1(ghosts, proven_ghosts));
    } else {
        standing = FRESH;
    }
    push(books, order, number, standing);
    while (order->queues[FRESH].count > FRESH_SHARE * (double)order_count(order)) {
        books_unvisit(books, order->queues[FRESH].oldest);
        move_oldest(books, order, FRESH, TRIAL);
    }
}

void order_evict(struct books *books, struct order *order, uint32_t number, uint32_t mark) {
    int proven = standing_of(row_at(books, number)) == PROVEN;
    struct ghosts *ghosts = proven ? &order->proven_ghosts : &order->ghosts;
    order_remove(books, order, number);
    double most = (double)order_count(order) * (proven ? 1 - order->share : 1.0);
    ghosts_add(ghosts, mark);
    while (ghosts->count > most) ghosts_pop(ghosts);
}

int order_spares(const struct books *books, uint32_t number) {
    const struct row *row = row_at(books, number);
    return standing_of(row) == FRESH || books_visited(books, number);
}

static int unproven_give(const struct order *order) {
    double unproven = (double)order->queues[FRESH].count + order->queues[TRIAL].count;
    return unproven >= order->share * (double)order_count(order) || !order->queues[PROVEN].count;
}

static int may_go(const struct row *row, int clean) { return !row->pins && (!clean || row->flags & CLEAN); }

/* Whether a queue has none to evict: with nearly all in use, every victim would cost a walk over everything. */
static int is_busy(const struct order *order, enum standing standing, int clean) {
    const struct fifo *fifo = &order->queues[standing];
    return !(clean ? fifo->clean_idle : fifo->idle);
}

static uint32_t from_trial(struct books *books, struct order *order, int clean) {
    if (is_busy(order, TRIAL, clean)) return NO_ROW;
    for (uint32_t left = order->queues[TRIAL].count; left; left--) {
        struct row *row = row_at(books, order->queues[TRIAL].oldest);
        if (books_visited(books, order->queues[TRIAL].oldest)) {
            books_unvisit(books, order->queues[TRIAL].oldest);
            move_oldest(books, order, TRIAL, PROVEN);
            continue;
        }
        uint32_t number = move_oldest(books, order, TRIAL, TRIAL);
        if (may_go(row, clean)) return number;
    }
    return NO_ROW;
}

static uint32_t from_proven(struct books *books, struct order *order, int clean) {
    if (is_busy(order, PROVEN, clean)) return NO_ROW;
    for (uint64_t left = 2 * (uint64_t)order->queues[PROVEN].count; left; left--) {
        uint32_t number = move_oldest(books, order, PROVEN, PROVEN);
        struct row *row = row_at(books, number);
        if (!may_go(row, clean)) continue;
        if (!books_visited(books, number)) return number;
        books_unvisit(books, number);
    }
    return NO_ROW;
}

static uint32_t from_fresh(struct books *books, struct order *order, int clean) {
    if (is_busy(order, FRESH, clean)) return NO_ROW;
    for (uint32_t left = order->queues[FRESH].count; left; left--) {
        uint32_t number = move_oldest(books, order, FRESH, FRESH);
        if (may_go(row_at(books, number), clean)) return number;
    }
    return NO_ROW;
}

uint32_t order_victim(struct books *books, struct order *order, int clean) {
    int unproven_first = unproven_give(order);
    uint32_t found = (unproven_first ? from_trial : from_proven)(books, order, clean);
    if (found == NO_ROW) found = (unproven_first ? from_proven : from_trial)(books, order, clean);
    if (found == NO_ROW && !unproven_first) found = from_proven(books, order, clean); /* trial may have proved some */
    return found == NO_ROW ? from_fresh(books, order, clean) : found;
}

uint32_t order_next(const struct books *books, const struct order *order, int *queue, uint32_t row) {
    static const enum standing turns[2][STANDINGS] = {{PROVEN, TRIAL, FRESH}, {TRIAL, PROVEN, FRESH}};
    uint32_t next = row == NO_ROW ? NO_ROW : cold_at(books, row)->newer;
    while (next == NO_ROW && ++*queue < STANDINGS) next = order->queues[turns[unproven_give(order)][*queue]].oldest;
    return next;
}
