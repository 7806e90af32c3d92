#define _GNU_SOURCE
#include "mapping.h"

#include <stdint.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct {
    PyObject_HEAD
    uint8_t *start;
    size_t bytes;
    int writable;
} Mapping;

/* MAP_FAILED: errno says why. */
static uint8_t *map_aligned(int fd, size_t bytes, int protection) {
    uint8_t *start = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return start;
    size_t before = -(uintptr_t)start % HUGE_PAGE;
    uint8_t *mapped = mmap(start + before, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        munmap(start, bytes + HUGE_PAGE);
        return mapped;
    }
    if (before) munmap(start, before);
    if (HUGE_PAGE - before) munmap(mapped + bytes, HUGE_PAGE - before);
    return mapped;
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"descriptor", "size_bytes", "writable", NULL};
    int fd, writable;
    long long bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iLp:Mapping", names, &fd, &bytes, &writable)) return NULL;
    if (bytes < 4096 || bytes % 4096) return PyErr_Format(PyExc_ValueError, "%lld bytes are no whole pages", bytes);
    Mapping *self = (Mapping *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->start = map_aligned(fd, (size_t)bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
    if (self->start == MAP_FAILED) {
        self->start = NULL;
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->bytes = (size_t)bytes;
    self->writable = writable;
    return (PyObject *)self;
}

static void mapping_dealloc(Mapping *self) {
    if (self->start) munmap(self->start, self->bytes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int mapping_buffer(Mapping *self, Py_buffer *view, int flags) {
    return PyBuffer_FillInfo(view, (PyObject *)self, self->start, (Py_ssize_t)self->bytes, !self->writable, flags);
}

static PyBufferProcs buffer_procs = {.bf_getbuffer = (getbufferproc)mapping_buffer};

PyTypeObject mapping_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay._native.Mapping",
    .tp_basicsize = sizeof(Mapping),
    .tp_dealloc = (destructor)mapping_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_as_buffer = &buffer_procs,
    .tp_new = mapping_new,
};
