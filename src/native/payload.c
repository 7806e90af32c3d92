/* Bytes in many places, moved by system calls that may stop anywhere, and hashed as they pass.
 *
 * A window at a time: the bytes that are hashed have just come from the socket, or go to it next, and are in the second
 * level cache. So memory is read once, and a checksum costs a few percent of the copy the kernel makes. */
#include "payload.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MAX_VECTORS 1024
/* A loopback interface takes 65,483 bytes in a packet. 128 KiB are two of them and a tiny one, which costs as much as
 * a whole one, on both sides; 120 KiB are two. */
#define SEND_WINDOW (120u << 10)
#define RECEIVE_WINDOW (512u << 10)
#define SINK_BYTES (64u << 10)

static uint8_t sink[SINK_BYTES]; /* what is not wanted; never read */

struct piece {
    uint8_t *data; /* NULL: not wanted */
    size_t size;
    int summed;
};

struct place {
    size_t piece, within;
};

typedef struct {
    PyObject_HEAD
    struct piece *pieces;
    size_t count;
    Py_buffer *views;
    size_t view_count;
    Py_ssize_t left; /* bytes not moved yet */
    struct place moved, hashed;
    size_t ahead; /* bytes hashed and not moved yet */
    const struct xxh3_kernel *kernel;
    struct xxh3_progress progress;
    uint8_t *sums; /* u64 a summed piece */
    size_t sum_count, sums_done;
    uint8_t *trailer; /* what follows the pieces */
    size_t trailer_bytes;
    int wakes_at; /* the socket's low water mark */
    char incoming, busy;
} Payload;

/* --- moving --- */

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void step_over(const Payload *self, struct place *place, size_t count) {
    while (count) {
        size_t step = smaller(count, self->pieces[place->piece].size - place->within);
        place->within += step;
        count -= step;
        if (place->within == self->pieces[place->piece].size) *place = (struct place){place->piece + 1, 0};
    }
}

static void advance(Payload *self, size_t count) {
    step_over(self, &self->moved, count);
    self->left -= count;
}

/* Hash the next `count` bytes: they are there. */
static void hash(Payload *self, size_t count) {
    struct place *place = &self->hashed;
    self->ahead += count;
    while (place->piece < self->count && (count || !self->pieces[place->piece].size)) {
        const struct piece *piece = self->pieces + place->piece;
        size_t step = smaller(count, piece->size - place->within);
        place->within += step;
        count -= step;
        int whole = place->within == piece->size;
        if (piece->summed && whole) {
            uint64_t sum = xxh3_finish(self->kernel, &self->progress, piece->data, piece->size);
            memcpy(self->sums + 8 * self->sums_done++, &sum, 8);
            xxh3_begin(&self->progress);
        } else if (piece->summed) {
            xxh3_advance(self->kernel, &self->progress, piece->data, piece->size, place->within);
        }
        if (whole) *place = (struct place){place->piece + 1, 0};
    }
}

/* The next bytes, up to `*bytes` of them; how many vectors, and in `*bytes` how many bytes. */
static size_t next_vectors(const Payload *self, struct iovec *vectors, size_t *bytes) {
    struct place place = self->moved;
    size_t count = 0, total = 0;
    while (place.piece < self->count && total < *bytes) {
        const struct piece *piece = self->pieces + place.piece;
        size_t step = smaller(piece->size - place.within, *bytes - total);
        uint8_t *data = piece->data ? piece->data + place.within : sink;
        if (!piece->data) step = smaller(step, SINK_BYTES);
        if (step) {
            struct iovec *before = count ? vectors + count - 1 : NULL;
            if (before && piece->data && (uint8_t *)before->iov_base + before->iov_len == data) {
                before->iov_len += step;
            } else {
                if (count == MAX_VECTORS) break;
                vectors[count++] = (struct iovec){data, step};
            }
        }
        total += step;
        place.within += step;
        if (place.within == piece->size) place = (struct place){place.piece + 1, 0};
    }
    *bytes = total;
    return count;
}

/* The bytes of the next call to send: hashed, up to `*bytes`. */
static size_t outgoing_vectors(Payload *self, struct iovec *vectors, size_t *bytes) {
    if (self->sum_count && !self->ahead) hash(self, smaller(*bytes, self->left));
    if (self->sum_count) *bytes = smaller(*bytes, self->ahead);
    return next_vectors(self, vectors, bytes);
}

static void sent(Payload *self, size_t count) {
    if (self->sum_count) self->ahead -= count;
    advance(self, count);
}

static void received(Payload *self, size_t count) {
    if (self->sum_count) {
        hash(self, count);
        self->ahead = 0;
    }
    advance(self, count);
}

/* Have the socket be readable from so many bytes on, of what is to come. */
static void wake_at(Payload *self, int descriptor, int bytes) {
    if (bytes == self->wakes_at) return;
    setsockopt(descriptor, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    self->wakes_at = bytes;
}

/* Move up to `most` bytes until the socket blocks; how many were. errno is set when that was an error, else 0.
 * `low_water`: the socket need not be readable again before it has so many, or all that is left. */
static size_t move(Payload *self, int descriptor, size_t most, size_t low_water) {
    struct iovec vectors[MAX_VECTORS];
    size_t total = 0;
    errno = 0;
    while (total < most && self->left) {
        size_t bytes = smaller(most - total, self->incoming ? RECEIVE_WINDOW : SEND_WINDOW);
        struct msghdr message = {.msg_iov = vectors};
        message.msg_iovlen = self->incoming ? next_vectors(self, vectors, &bytes) : outgoing_vectors(self, vectors, &bytes);
        ssize_t step = self->incoming ? recvmsg(descriptor, &message, MSG_DONTWAIT)
                                      : sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (step < 0 && errno == EINTR) continue;
        if (step <= 0) break;
        if (self->incoming) received(self, step);
        else sent(self, step);
        total += step;
        if (!self->incoming && (size_t)step < bytes) break; /* it takes no more */
        errno = 0;
    }
    int error = errno;
    if (self->incoming && low_water) wake_at(self, descriptor, self->left ? smaller(self->left, low_water) : 1);
    errno = error;
    return total;
}

/* --- methods --- */

static int take(Payload *self) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a payload is moved by one thread at a time");
        return -1;
    }
    return 0;
}

static PyObject *method_move(Payload *self, PyObject *args) {
    int descriptor;
    Py_ssize_t most, low_water = 0;
    size_t moved;
    int error;
    if (!PyArg_ParseTuple(args, "in|n:move", &descriptor, &most, &low_water) || take(self) < 0) return NULL;
    self->busy = 1;
    Py_BEGIN_ALLOW_THREADS;
    moved = move(self, descriptor, most > 0 ? most : 0, low_water > 0 ? smaller(low_water, 1u << 30) : 0);
    error = errno;
    Py_END_ALLOW_THREADS;
    self->busy = 0;
    /* A broken connection is told at once, whatever it still gave: an event loop may wake for it only once. */
    if (!error || (moved && (error == EAGAIN || error == EWOULDBLOCK))) return PyLong_FromSize_t(moved);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *method_window(Payload *self, PyObject *args) {
    struct iovec vectors[MAX_VECTORS];
    Py_ssize_t most;
    if (!PyArg_ParseTuple(args, "n:window", &most) || take(self) < 0) return NULL;
    size_t bytes = most > 0 ? most : 0;
    size_t count = self->incoming ? next_vectors(self, vectors, &bytes) : outgoing_vectors(self, vectors, &bytes);
    PyObject *window = PyList_New(count);
    for (size_t i = 0; window && i < count; i++) {
        PyObject *view =
            PyMemoryView_FromMemory(vectors[i].iov_base, vectors[i].iov_len, self->incoming ? PyBUF_WRITE : PyBUF_READ);
        if (!view) Py_CLEAR(window);
        else PyList_SET_ITEM(window, i, view);
    }
    return window;
}

static PyObject *method_advance(Payload *self, PyObject *args) {
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "n:advance", &count) || take(self) < 0) return NULL;
    if (count < 0 || count > self->left) {
        PyErr_Format(PyExc_ValueError, "advance(%zd) with %zd bytes left", count, self->left);
        return NULL;
    }
    if (self->incoming) {
        received(self, count);
    } else {
        if (self->sum_count && self->ahead < (size_t)count) hash(self, count - self->ahead);
        sent(self, count);
    }
    Py_RETURN_NONE;
}

static PyObject *method_fill(Payload *self, PyObject *data) {
    Py_buffer view;
    if (take(self) < 0) return NULL;
    if (!self->incoming) {
        PyErr_SetString(PyExc_ValueError, "fill() of a payload that is sent");
        return NULL;
    }
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    size_t total = 0;
    while (total < (size_t)view.len && self->left) {
        struct iovec vector;
        size_t bytes = view.len - total;
        const struct piece *piece = self->pieces + self->moved.piece;
        bytes = smaller(bytes, piece->size - self->moved.within);
        vector = (struct iovec){piece->data ? piece->data + self->moved.within : NULL, bytes};
        if (vector.iov_base) memcpy(vector.iov_base, (const uint8_t *)view.buf + total, bytes);
        if (bytes) received(self, bytes);
        else self->moved = (struct place){self->moved.piece + 1, 0};
        total += bytes;
    }
    PyBuffer_Release(&view);
    return PyLong_FromSize_t(total);
}

static PyObject *get_sums(Payload *self, void *closure) {
    (void)closure;
    if (self->busy || self->sums_done != self->sum_count) {
        PyErr_Format(PyExc_RuntimeError, "%zd bytes have not been moved: there are no sums yet", self->left);
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)self->sums, 8 * self->sum_count);
}

static PyObject *get_trailer(Payload *self, void *closure) {
    (void)closure;
    if (self->busy || self->left) {
        PyErr_Format(PyExc_RuntimeError, "%zd bytes have not been moved: there is no trailer yet", self->left);
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)self->trailer, self->trailer_bytes);
}

/* --- making and ending --- */

static void payload_dealloc(Payload *self) {
    for (size_t i = 0; i < self->view_count; i++) PyBuffer_Release(self->views + i);
    PyMem_Free(self->views);
    PyMem_Free(self->pieces);
    if (self->trailer != self->sums) PyMem_Free(self->trailer);
    PyMem_Free(self->sums);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Room for so many views, pieces and sums. */
static Payload *allocate(PyTypeObject *type, size_t views, size_t pieces, size_t sums) {
    Payload *self = (Payload *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->views = PyMem_New(Py_buffer, views + 1);
    self->pieces = PyMem_New(struct piece, pieces + 1);
    self->sums = PyMem_New(uint8_t, 8 * sums + 1);
    if (!self->views || !self->pieces || !self->sums) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->kernel = chosen_kernel;
    self->wakes_at = 1;
    xxh3_begin(&self->progress);
    return self;
}

static int add(Payload *self, uint8_t *data, size_t size, int summed) {
    if (size > (size_t)(PY_SSIZE_T_MAX - self->left)) {
        PyErr_SetString(bad_request, "a payload of more bytes than there are addresses");
        return -1;
    }
    self->pieces[self->count++] = (struct piece){data, size, summed};
    self->left += size;
    self->sum_count += summed;
    return 0;
}

static PyObject *payload_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffers", "incoming", "sums", "trailer", NULL};
    PyObject *buffers;
    int incoming = 0, sums = 0, trailer = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$ppp:Payload", names, &buffers, &incoming, &sums, &trailer))
        return NULL;
    if (trailer && (incoming || !sums)) {
        PyErr_SetString(PyExc_ValueError, "a trailer is made of the sums of a payload that is sent");
        return NULL;
    }
    PyObject *items = PySequence_Fast(buffers, "a payload is a sequence of buffers");
    if (!items) return NULL;
    size_t count = PySequence_Fast_GET_SIZE(items);
    Payload *self = allocate(type, count, count, sums ? count : 0);
    for (size_t i = 0; self && i < count; i++) {
        Py_buffer *view = self->views + i;
        int flags = incoming ? PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS : PyBUF_C_CONTIGUOUS;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(items, i), view, flags) < 0) {
            Py_CLEAR(self);
        } else {
            self->view_count++;
            if (add(self, view->buf, view->len, sums) < 0) Py_CLEAR(self);
        }
    }
    Py_DECREF(items);
    if (!self) return NULL;
    self->incoming = incoming;
    if (trailer) {
        self->trailer = self->sums;
        self->trailer_bytes = 8 * count;
        if (add(self, self->trailer, self->trailer_bytes, 0) < 0) Py_CLEAR(self);
    }
    if (self && self->sum_count) hash(self, 0);
    return (PyObject *)self;
}

static uint64_t in_column(const Py_buffer *column, size_t i) {
    uint64_t value;
    memcpy(&value, (const uint8_t *)column->buf + 8 * i, 8);
    return value;
}

/* The pieces of one run of the arena. */
static int add_run(Payload *self, uint64_t offset, uint64_t size, const Py_buffer *offsets, const Py_buffer *sizes) {
    const Py_buffer *arena = self->views;
    uint64_t room = arena->len;
    if (size > room || offset > room - size) {
        PyErr_Format(bad_request, "%llu bytes at offset %llu are not within a buffer of %zd bytes",
                     (unsigned long long)size, (unsigned long long)offset, arena->len);
        return -1;
    }
    for (uint64_t end = offset + size; offset < end;) {
        size_t i = self->sum_count;
        uint64_t length = i < (size_t)sizes->len / 8 ? in_column(sizes, i) : 0;
        if (!length || length > end - offset || in_column(offsets, i) != offset) {
            PyErr_Format(bad_request, "piece %zu is not at offset %llu and within %llu bytes", i,
                         (unsigned long long)offset, (unsigned long long)(end - offset));
            return -1;
        }
        if (add(self, (uint8_t *)arena->buf + offset, length, 1) < 0) return -1;
        offset += length;
    }
    return 0;
}

static int add_target(Payload *self, PyObject *target, const Py_buffer *offsets, const Py_buffer *sizes) {
    PyObject *offset;
    unsigned long long size;
    if (!PyTuple_Check(target)) {
        PyErr_SetString(PyExc_TypeError, "a target is a pair of offset and size");
        return -1;
    }
    if (!PyArg_ParseTuple(target, "OK", &offset, &size)) return -1;
    if (offset == Py_None) return add(self, NULL, size, 0);
    unsigned long long at = PyLong_AsUnsignedLongLong(offset);
    if (PyErr_Occurred()) return -1;
    return add_run(self, at, size, offsets, sizes);
}

static PyObject *payload_landing(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"buffer", "targets", "offsets", "sizes", "trailer_bytes", NULL};
    PyObject *buffer, *targets;
    Py_buffer offsets = {0}, sizes = {0};
    Py_ssize_t trailer_bytes = 0;
    Payload *self = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOy*y*|n:landing", names, &buffer, &targets, &offsets, &sizes,
                                     &trailer_bytes))
        return NULL;
    PyObject *items = PySequence_Fast(targets, "targets are a sequence of pairs");
    if (!items) goto end;
    if (trailer_bytes < 0 || offsets.len % 8 || offsets.len != sizes.len) {
        PyErr_Format(bad_request, "%zd bytes of offsets and %zd of sizes are no columns of 64-bit integers, one a piece",
                     offsets.len, sizes.len);
        goto end;
    }
    size_t count = PySequence_Fast_GET_SIZE(items), pieces = sizes.len / 8;
    self = allocate(type, 1, count + pieces + 1, pieces);
    if (!self) goto end;
    self->incoming = 1;
    if (PyObject_GetBuffer(buffer, self->views, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) < 0) goto fail;
    self->view_count = 1;
    for (size_t i = 0; i < count; i++)
        if (add_target(self, PySequence_Fast_GET_ITEM(items, i), &offsets, &sizes) < 0) goto fail;
    if (self->sum_count != pieces) {
        PyErr_Format(bad_request, "targets hold %zu pieces, not %zu", self->sum_count, pieces);
        goto fail;
    }
    self->trailer = PyMem_New(uint8_t, trailer_bytes + 1);
    self->trailer_bytes = trailer_bytes;
    if (!self->trailer) {
        PyErr_NoMemory();
        goto fail;
    }
    if (add(self, self->trailer, trailer_bytes, 0) == 0) goto end;
fail:
    Py_CLEAR(self);
end:
    Py_XDECREF(items);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&sizes);
    return (PyObject *)self;
}

static PyMethodDef payload_methods[] = {
    {"landing", (PyCFunction)(void (*)(void))payload_landing, METH_VARARGS | METH_KEYWORDS | METH_CLASS, NULL},
    {"move", (PyCFunction)method_move, METH_VARARGS, NULL},
    {"window", (PyCFunction)method_window, METH_VARARGS, NULL},
    {"advance", (PyCFunction)method_advance, METH_VARARGS, NULL},
    {"fill", (PyCFunction)method_fill, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef payload_members[] = {
    {"left", T_PYSSIZET, offsetof(Payload, left), READONLY, NULL},
    {"incoming", T_BOOL, offsetof(Payload, incoming), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef payload_properties[] = {
    {"sums", (getter)get_sums, NULL, NULL, NULL},
    {"trailer", (getter)get_trailer, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject payload_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay._native.Payload",
    .tp_basicsize = sizeof(Payload),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = payload_new,
    .tp_dealloc = (destructor)payload_dealloc,
    .tp_methods = payload_methods,
    .tp_members = payload_members,
    .tp_getset = payload_properties,
};
