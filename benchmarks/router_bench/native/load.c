/* A closed-loop load generator: each of CONNECTIONS slots sends a request, reads the answer, compares it with what is
   expected byte by byte, and begins again.

     load CONNECTIONS REQUESTS SECONDS HOP [HOP ...]
     HOP: PORT:REQUEST_FILE:BODY_FILE

   Stops after REQUESTS (0: no bound) or SECONDS (0: no bound). A slot with several hops asks one after the other, each on
   a connection of its own, and counts them as one request: the legs of a hand-over, without a router. REQUEST_FILE is a
   whole message; BODY_FILE the body it is answered with, free of its framing. Prints JSON: seconds, requests, errors, and
   percentiles of the time to the end and to the body's first byte, in microseconds. */
#include "net.h"

#define MAX_HOPS 2
#define MAX_CONNECTING 256

struct hop {
    int port;
    char *request, *body;
    size_t request_size, body_size;
};

struct slot {
    int fd[MAX_HOPS];
    int hop, running, connecting;
    size_t sent;
    enum { HEAD, LENGTH, SIZE, DATA, DATA_END, TRAILER, DONE } state;
    char head[8192];
    size_t head_size, left, matched;
    int chunk_size_seen;
    int wrong;
    double began, first;
};

static struct hop hops[MAX_HOPS];
static int num_hops, epoll, connecting;
static long errors, finished, started, limit;
static double *totals, *firsts;
static size_t num_samples, room;

static void sample(double total, double first) {
    if (num_samples == room) {
        room = room ? 2 * room : 1 << 16;
        totals = realloc(totals, room * sizeof *totals);
        firsts = realloc(firsts, room * sizeof *firsts);
    }
    totals[num_samples] = total;
    firsts[num_samples++] = first;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(const double *sorted, double percent) {
    if (!num_samples) return 0;
    size_t at = (size_t)(percent / 100 * (double)num_samples);
    return sorted[at < num_samples ? at : num_samples - 1] * 1e6;
}

static int connect_to(struct slot *s) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0) die("socket");
    no_delay(fd);
    struct sockaddr_in address = loopback(hops[s->hop].port);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) die("connect");
    s->fd[s->hop] = fd;
    s->connecting = 1;
    connecting++;
    watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT, s);
    return 0;
}

static void push(struct slot *s) {
    struct hop *hop = &hops[s->hop];
    int fd = s->fd[s->hop];
    while (s->sent < hop->request_size) {
        ssize_t sent = send(fd, hop->request + s->sent, hop->request_size - s->sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) {
                watch(epoll, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT, s);
                return;
            }
            s->wrong = 1;
            return;
        }
        s->sent += (size_t)sent;
    }
}

static void begin_hop(struct slot *s) {
    s->sent = s->head_size = s->left = s->matched = 0;
    s->state = HEAD;
    if (s->fd[s->hop] < 0) connect_to(s);
    else push(s);
}

static void begin(struct slot *s) {
    started++;
    s->running = 1;
    s->hop = s->wrong = 0;
    s->first = 0;
    s->began = now_s();
    begin_hop(s);
}

static void body(struct slot *s, const char *data, size_t size) {
    struct hop *hop = &hops[s->hop];
    if (!s->first && s->hop == num_hops - 1) s->first = now_s();
    if (s->matched + size > hop->body_size || memcmp(hop->body + s->matched, data, size) != 0) s->wrong = 1;
    s->matched += size;
}

static void parse(struct slot *s, const char *at, const char *end) {
    while (at < end && s->state != DONE) {
        switch (s->state) {
        case HEAD: {
            size_t take = (size_t)(end - at), room_left = sizeof s->head - 1 - s->head_size;
            if (take > room_left) take = room_left;
            memcpy(s->head + s->head_size, at, take);
            size_t before = s->head_size;
            s->head_size += take;
            char *blank = memmem(s->head, s->head_size, "\r\n\r\n", 4);
            if (!blank) {
                if (s->head_size == sizeof s->head - 1) s->wrong = 1, s->state = DONE;
                return;
            }
            size_t head = (size_t)(blank - s->head) + 4;
            at += head - before;
            if (memcmp(s->head, "HTTP/1.1 200", 12) != 0) s->wrong = 1;
            const char *length = header(s->head, head - 2, "\r\ncontent-length:");
            s->left = length ? strtoul(length, NULL, 10) : 0;
            s->state = length ? LENGTH : SIZE;
            s->chunk_size_seen = 0;
            if (length && !s->left) s->state = DONE;
            break;
        }
        case LENGTH:
        case DATA: {
            size_t take = (size_t)(end - at) < s->left ? (size_t)(end - at) : s->left;
            body(s, at, take);
            at += take;
            s->left -= take;
            if (!s->left) s->state = s->state == LENGTH ? DONE : DATA_END;
            break;
        }
        case SIZE: {
            char c = *at++;
            if (c == '\n') {
                if (s->left) s->state = DATA;
                else s->state = TRAILER;
            } else if (c != '\r') {
                s->left = 16 * s->left + (size_t)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
            }
            break;
        }
        case DATA_END:
            if (*at++ == '\n') s->state = SIZE, s->left = 0;
            break;
        case TRAILER: /* none is expected: the blank line ends the message */
            if (*at++ == '\n') s->state = DONE;
            break;
        case DONE:
            break;
        }
    }
}

static void drop(struct slot *s) {
    for (int i = 0; i < num_hops; i++) {
        if (s->fd[i] >= 0) close(s->fd[i]);
        s->fd[i] = -1;
    }
    if (s->connecting) connecting--;
    s->connecting = 0;
}

/* One request is over; whether the slot may begin another. */
static void finish(struct slot *s) {
    double now = now_s();
    if (s->wrong || s->matched != hops[s->hop].body_size) {
        if (!errors++) fprintf(stderr, "first wrong answer: %.200s\n", s->head);
        drop(s);
    } else if (s->hop + 1 < num_hops) {
        s->hop++;
        begin_hop(s);
        return;
    } else {
        sample(now - s->began, s->first - s->began);
    }
    finished++;
    s->running = 0;
}

static void readable(struct slot *s) {
    static char buffer[READ_BYTES];
    int fd = s->fd[s->hop];
    ssize_t got = recv(fd, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        s->wrong = 1;
        if (s->running) finish(s);
        else drop(s);
        return;
    }
    if (!s->running) return; /* nothing was asked */
    parse(s, buffer, buffer + got);
    if (s->state == DONE) finish(s);
}

static void parse_hop(char *text) {
    struct hop *hop = &hops[num_hops++];
    char *request = strchr(text, ':');
    char *answer = request ? strchr(request + 1, ':') : NULL;
    if (!answer) die("HOP");
    *request = *answer = 0;
    hop->port = atoi(text);
    hop->request = read_file(request + 1, &hop->request_size);
    hop->body = read_file(answer + 1, &hop->body_size);
}

int main(int argc, char **argv) {
    if (argc < 5 || argc > 4 + MAX_HOPS) {
        fprintf(stderr, "usage: load CONNECTIONS REQUESTS SECONDS PORT:REQUEST_FILE:BODY_FILE [...]\n");
        return 2;
    }
    allow_many_files();
    int count = atoi(argv[1]);
    limit = atol(argv[2]);
    double seconds = atof(argv[3]);
    for (int i = 4; i < argc; i++) parse_hop(argv[i]);
    epoll = epoll_create1(0);
    struct slot *slots = calloc((size_t)count, sizeof *slots);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < MAX_HOPS; j++) slots[i].fd[j] = -1;
    static struct epoll_event events[512];
    double began = now_s(), end = seconds > 0 ? began + seconds : 1e300;
    int opened = 0;
    for (;;) {
        int more = (!limit || started < limit) && now_s() < end;
        while (more && opened < count && connecting < MAX_CONNECTING) {
            begin(&slots[opened++]);
            more = !limit || started < limit;
        }
        if (!more && finished == started) break;
        int ready = epoll_wait(epoll, events, 512, 1000);
        for (int i = 0; i < ready; i++) {
            struct slot *s = events[i].data.ptr;
            if (s->fd[s->hop] < 0) continue;
            if (events[i].events & EPOLLOUT) {
                if (s->connecting) s->connecting = 0, connecting--;
                watch(epoll, EPOLL_CTL_MOD, s->fd[s->hop], EPOLLIN, s);
                push(s);
            }
            if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) readable(s);
            if (!s->running && (!limit || started < limit) && now_s() < end) begin(s);
        }
    }
    double took = now_s() - began;
    qsort(totals, num_samples, sizeof *totals, by_size);
    qsort(firsts, num_samples, sizeof *firsts, by_size);
    printf("{\"seconds\":%.6f,\"requests\":%zu,\"errors\":%ld,\"p50_us\":%.1f,\"p90_us\":%.1f,\"p99_us\":%.1f,"
           "\"first_p50_us\":%.1f,\"first_p99_us\":%.1f}\n",
           took, num_samples, errors, percentile(totals, 50), percentile(totals, 90), percentile(totals, 99),
           percentile(firsts, 50), percentile(firsts, 99));
    return 0;
}
