#include "moves.h"

#include <pthread.h>
#include <string.h>

/* From this many bytes on a batch goes past the caches: it would push out more than what is read back of it. */
#define STREAM_BYTES (2u << 20)
/* What a second thread must have to do before it is worth starting. */
#define THREAD_BYTES (2u << 20)

struct share {
    const struct batch *batch;
    size_t begin, end, matched;
};

static void do_share(struct share *share) {
    const struct batch *batch = share->batch;
    const struct move *moves = batch->moves;
    enum xxh3_store store = batch->bytes >= STREAM_BYTES ? XXH3_STREAMED : XXH3_CACHED;
    size_t i;
    for (i = share->begin; i < share->end; i++) {
        const struct move *move = moves + i;
        if (batch->work == WORK_COPY) {
            if (move->size) memcpy(move->to, move->from, move->size);
            continue;
        }
        struct xxh3_next next = {NULL, NULL};
        if (i + 1 < share->end) next = (struct xxh3_next){moves[i + 1].from, moves[i + 1].to};
        uint64_t sum = batch->work == WORK_SUM ? xxh3(batch->kernel, move->from, move->size)
                                               : xxh3_copy(batch->kernel, move->to, move->from, move->size, &next, store);
        if (batch->sums) memcpy(batch->sums + 8 * i, &sum, 8);
        if (batch->expected && memcmp(batch->expected + 8 * i, &sum, 8)) break;
    }
    if (batch->work == WORK_COPY_SUM && store == XXH3_STREAMED) xxh3_copy_fence();
    share->matched = i;
}

static void *thread_main(void *share) {
    do_share(share);
    return NULL;
}

size_t run_batch(const struct batch *batch) {
    size_t useful = batch->bytes / THREAD_BYTES, threads = batch->threads;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > useful) threads = useful;
    if (threads > batch->count) threads = batch->count;
    if (threads < 2) {
        struct share all = {batch, 0, batch->count, 0};
        do_share(&all);
        return all.matched;
    }
    struct share shares[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    size_t begun = 0, at = 0, bytes = 0;
    for (size_t t = 0; t < threads; t++) {
        size_t begin = at, goal = batch->bytes / threads * (t + 1);
        while (at < batch->count && (bytes < goal || t == threads - 1)) bytes += batch->moves[at++].size;
        shares[t] = (struct share){batch, begin, at, 0};
    }
    while (begun < threads - 1 && !pthread_create(&ids[begun], NULL, thread_main, &shares[begun + 1])) begun++;
    do_share(&shares[0]);
    for (size_t t = begun + 1; t < threads; t++) do_share(&shares[t]); /* no thread to be had: this one does it */
    for (size_t t = 0; t < begun; t++) pthread_join(ids[t], NULL);
    for (size_t t = 0; t < threads; t++)
        if (shares[t].matched < shares[t].end) return shares[t].matched;
    return batch->count;
}
