/* What the mock engines and the load generator share: sockets, buffers, heads of HTTP messages. */
#ifndef ROUTER_BENCH_NET_H
#define ROUTER_BENCH_NET_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define READ_BYTES (256 << 10)

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void allow_many_files(void) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static inline void no_delay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static inline void watch(int epoll, int operation, int fd, uint32_t events, void *data) {
    struct epoll_event event = {.events = events, .data.ptr = data};
    if (epoll_ctl(epoll, operation, fd, &event) < 0) die("epoll_ctl");
}

static inline char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*size + 1);
    if (fread(data, 1, *size, file) != *size) die(path);
    data[*size] = 0;
    fclose(file);
    return data;
}

/* The value of a header in a head of `size` bytes, or NULL. `name` with its colon, and a line end before it. */
static inline const char *header(const char *head, size_t size, const char *name) {
    size_t length = strlen(name);
    for (const char *at = head; at + length < head + size; at++) {
        at = memchr(at, '\r', (size_t)(head + size - at));
        if (!at || at + length >= head + size) return NULL;
        if (strncasecmp(at, name, length) == 0) {
            at += length;
            while (*at == ' ') at++;
            return at;
        }
    }
    return NULL;
}

#endif
