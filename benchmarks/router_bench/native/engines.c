/* A mock prefill engine and a mock decode engine in one process: answers made beforehand, in vLLM's form.

     engines P_PORT D_PORT CHUNKS MODE

   The prefill engine answers every POST with a completion of one token and `kv_transfer_params`. The decode engine
   streams CHUNKS server-sent events and `[DONE]` if the request asks for a stream, and counts the requests that carry
   the parameters of the prefill engine's answer. MODE: `burst` writes a whole answer at once; `spread` writes each event
   by itself, one of each running stream in turn, as an engine's steps do; a number is the milliseconds between the events
   of a stream. GET /counts answers with what came so far as JSON; any other GET with an empty object. */
#include "net.h"

#define MAX_CHUNKS 1024

static const char HEAD[] = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                           "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
static const char PARAMS[] = "\"remote_engine_id\":\"mock-prefill-engine\"";
static const char PREFILLED[] =
    "{\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,"
    "\"text\":\" t\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":512,\"completion_tokens\":1,"
    "\"total_tokens\":513},\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
    "\"remote_block_ids\":[1,2,3,4,5,6,7,8],\"remote_engine_id\":\"mock-prefill-engine\",\"remote_host\":\"127.0.0.1\","
    "\"remote_port\":5600}}";
static const char WHOLE[] =
    "{\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,"
    "\"text\":\" whole\",\"logprobs\":null,\"finish_reason\":\"length\"}]}";

struct connection {
    int fd;
    int decode;
    char *in;
    size_t size, room, needed; /* `needed`: bytes of the whole request once its head is there, else 0 */
    size_t body;
    const char *out;
    size_t out_size;
    int chunk; /* the next one to send; -1: no stream */
    double due;
    struct connection *next; /* in the queue of running streams */
    int queued, dead;
};

static int epoll;
static char *chunks[MAX_CHUNKS];
static size_t chunk_sizes[MAX_CHUNKS];
static int num_chunks;
static char *burst;
static size_t burst_size;
static double interval_s = -1; /* below 0: burst; 0: spread */
static struct connection *first, *last;
static long prefills, decodes, carried, bytes;

static void forget(struct connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->dead = 1;
    if (!c->queued) {
        free(c->in);
        free(c);
    }
}

static int flush(struct connection *c) {
    while (c->out_size) {
        ssize_t sent = send(c->fd, c->out, c->out_size, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) {
                watch(epoll, EPOLL_CTL_MOD, c->fd, EPOLLIN | EPOLLOUT, c);
                return 1;
            }
            return 0;
        }
        c->out += sent;
        c->out_size -= (size_t)sent;
    }
    return 1;
}

static int say(struct connection *c, const char *data, size_t size) {
    c->out = data;
    c->out_size = size;
    return flush(c);
}

static void enqueue(struct connection *c) {
    c->queued = 1;
    c->next = NULL;
    if (last) last->next = c;
    else first = c;
    last = c;
}

static int begin_stream(struct connection *c) {
    if (interval_s < 0) return say(c, burst, burst_size);
    c->chunk = 0;
    c->due = now_s() + interval_s;
    if (!say(c, HEAD, sizeof HEAD - 1)) return 0;
    enqueue(c);
    return 1;
}

/* One event of every stream that is due: those that began later are due later. */
static void step(double now) {
    struct connection *stop = last, *c = NULL;
    while (first && c != stop && first->due <= now) {
        c = first;
        first = c->next;
        if (!first) last = NULL;
        c->queued = 0;
        if (c->dead) {
            free(c->in);
            free(c);
            continue;
        }
        if (c->out_size) { /* the reader is behind: it waits for its turn */
            enqueue(c);
            continue;
        }
        if (!say(c, chunks[c->chunk], chunk_sizes[c->chunk])) {
            forget(c);
            continue;
        }
        if (++c->chunk < num_chunks) {
            c->due = now + interval_s;
            enqueue(c);
        } else {
            c->chunk = -1;
        }
    }
}

static int answer_json(struct connection *c, const char *body) {
    static char message[4096]; /* small: always taken whole by an idle socket */
    int size = snprintf(message, sizeof message,
                        "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                        "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%s",
                        strlen(body), body);
    return say(c, message, (size_t)size) && !c->out_size;
}

static int answer(struct connection *c) {
    const char *body = c->in + c->needed - c->body;
    if (strncmp(c->in, "POST", 4) != 0) {
        char counts[256] = "{}";
        if (strncmp(c->in, "GET /counts ", 12) == 0)
            snprintf(counts, sizeof counts, "{\"prefills\":%ld,\"decodes\":%ld,\"carried\":%ld,\"bytes\":%ld}", prefills, decodes,
                     carried, bytes);
        return answer_json(c, counts);
    }
    bytes += (long)c->body;
    if (!c->decode) {
        prefills++;
        return answer_json(c, PREFILLED);
    }
    decodes++;
    /* The parameters are looked for at both ends of a long body. */
    size_t reach = c->body < 4096 ? c->body : 4096;
    if (memmem(body + c->body - reach, reach, PARAMS, sizeof PARAMS - 1) || memmem(body, reach, PARAMS, sizeof PARAMS - 1))
        carried++;
    int streamed = memmem(body + c->body - reach, reach, "\"stream\":true", 13) || memmem(body, reach, "\"stream\":true", 13);
    return streamed ? begin_stream(c) : answer_json(c, WHOLE);
}

static int take(struct connection *c) {
    for (;;) {
        if (c->room - c->size < READ_BYTES) {
            c->room = c->size + READ_BYTES > 2 * c->room ? c->size + READ_BYTES : 2 * c->room;
            c->in = realloc(c->in, c->room + 1);
        }
        ssize_t got = recv(c->fd, c->in + c->size, c->room - c->size, 0);
        if (got == 0) return 0;
        if (got < 0) return errno == EAGAIN;
        c->size += (size_t)got;
        c->in[c->size] = 0;
        if (!c->needed) {
            const char *end = memmem(c->in, c->size, "\r\n\r\n", 4);
            if (!end) continue;
            const char *length = header(c->in, (size_t)(end - c->in) + 2, "\r\ncontent-length:");
            c->body = length ? strtoul(length, NULL, 10) : 0;
            c->needed = (size_t)(end - c->in) + 4 + c->body;
        }
        if (c->size < c->needed) continue;
        if (!answer(c)) return 0;
        memmove(c->in, c->in + c->needed, c->size - c->needed);
        c->size -= c->needed;
        c->needed = 0;
        if (!c->size && c->room > 4 * READ_BYTES) { /* ten thousand of these may be open */
            c->in = realloc(c->in, READ_BYTES + 1);
            c->room = READ_BYTES;
        }
        if ((size_t)got < READ_BYTES) return 1;
    }
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(port);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0) die("listen");
    return fd;
}

static void make_chunks(int count) {
    num_chunks = count + 1; /* the last carries [DONE] and the end of the body */
    burst = malloc(512 + 400 * (size_t)num_chunks);
    memcpy(burst, HEAD, sizeof HEAD - 1);
    burst_size = sizeof HEAD - 1;
    for (int i = 0; i < num_chunks; i++) {
        char event[400];
        int size = i < count ? snprintf(event, sizeof event,
                                        "data: {\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":"
                                        "\"mock\",\"choices\":[{\"index\":0,\"text\":\" t%d\",\"logprobs\":null,\"finish_reason\":%s,"
                                        "\"stop_reason\":null}],\"usage\":null}\n\n",
                                        i, i == count - 1 ? "\"length\"" : "null")
                             : snprintf(event, sizeof event, "data: [DONE]\n\n");
        chunks[i] = malloc(512);
        chunk_sizes[i] = (size_t)snprintf(chunks[i], 512, "%x\r\n%s\r\n%s", size, event, i == count ? "0\r\n\r\n" : "");
        memcpy(burst + burst_size, chunks[i], chunk_sizes[i]);
        burst_size += chunk_sizes[i];
    }
}

int main(int argc, char **argv) {
    if (argc != 5 || atoi(argv[3]) < 1 || atoi(argv[3]) >= MAX_CHUNKS) {
        fprintf(stderr, "usage: engines P_PORT D_PORT CHUNKS burst|spread|MILLISECONDS\n");
        return 2;
    }
    allow_many_files();
    make_chunks(atoi(argv[3]));
    interval_s = strcmp(argv[4], "burst") == 0 ? -1 : strcmp(argv[4], "spread") == 0 ? 0 : atof(argv[4]) / 1e3;
    epoll = epoll_create1(0);
    struct connection listeners[2] = {{.fd = listen_on(atoi(argv[1]))}, {.fd = listen_on(atoi(argv[2])), .decode = 1}};
    for (int i = 0; i < 2; i++) watch(epoll, EPOLL_CTL_ADD, listeners[i].fd, EPOLLIN, &listeners[i]);
    static struct epoll_event events[512];
    for (;;) {
        double now = first ? now_s() : 0;
        int wait_ms = !first ? -1 : first->due <= now ? 0 : (int)((first->due - now) * 1e3) + 1;
        int count = epoll_wait(epoll, events, 512, wait_ms);
        for (int i = 0; i < count; i++) {
            struct connection *c = events[i].data.ptr;
            if (c == &listeners[0] || c == &listeners[1]) {
                int fd;
                while ((fd = accept4(c->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    no_delay(fd);
                    struct connection *made = calloc(1, sizeof *made);
                    made->fd = fd;
                    made->decode = c->decode;
                    made->chunk = -1;
                    watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN, made);
                }
                continue;
            }
            if (events[i].events & EPOLLOUT) {
                watch(epoll, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
                if (!flush(c)) {
                    forget(c);
                    continue;
                }
            }
            if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && !take(c)) forget(c);
        }
        if (first) step(now_s());
    }
}
