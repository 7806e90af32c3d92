#include "batches.h"

#include <string.h>

#include "moves.h"

static inline uint64_t u64_at(const void *column, Py_ssize_t i) {
    uint64_t value;
    memcpy(&value, (const char *)column + 8 * i, 8);
    return value;
}

/* --- arguments --- */

/* One u64 a piece: a packed buffer, one number for all, or nothing. */
struct column {
    Py_buffer packed;
    uint64_t same;
    Py_ssize_t count; /* -1: as many as wanted */
    int given;
};

static int take_column(struct column *column, PyObject *object, const char *name, int may_be_same) {
    column->count = -1;
    if (object == Py_None) return 0;
    if (may_be_same && PyLong_Check(object)) {
        column->same = PyLong_AsUnsignedLongLong(object);
        if (column->same == (uint64_t)-1 && PyErr_Occurred()) {
            PyErr_Format(bad_request, "%s: %R is not a number of bytes from 0 to 2**64 - 1", name, object);
            return -1;
        }
        column->given = 1;
        return 0;
    }
    if (PyObject_GetBuffer(object, &column->packed, PyBUF_SIMPLE) < 0) return -1;
    column->given = 1;
    column->count = column->packed.len / 8;
    if (column->packed.len % 8) {
        PyErr_Format(bad_request, "%s: %zd bytes are no packed 64-bit integers, whose bytes are a multiple of 8", name,
                     column->packed.len);
        return -1;
    }
    return 0;
}

static inline uint64_t in_column(const struct column *column, Py_ssize_t i) {
    return column->packed.obj ? u64_at(column->packed.buf, i) : column->same;
}

/* Where pieces are: at offsets of one buffer, or in a buffer each. */
struct side {
    const char *name;
    Py_buffer whole;
    struct column offsets;
    PyObject *sequence;
    Py_buffer *each;
    Py_ssize_t held;
};

static int take_side(struct side *side, PyObject *object, PyObject *offsets, const char *name, int writable) {
    int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    side->name = name;
    if (offsets != Py_None) {
        if (PyObject_GetBuffer(object, &side->whole, flags) < 0) return -1;
        return take_column(&side->offsets, offsets, name, 0);
    }
    side->sequence = PySequence_Fast(object, "without offsets, pieces are a sequence of buffers");
    if (!side->sequence) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(side->sequence);
    side->each = PyMem_New(Py_buffer, count ? count : 1);
    if (!side->each) {
        PyErr_NoMemory();
        return -1;
    }
    for (; side->held < count; side->held++)
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(side->sequence, side->held), &side->each[side->held], flags) < 0)
            return -1;
    return 0;
}

static Py_ssize_t side_count(const struct side *side) { return side->sequence ? side->held : side->offsets.count; }

static void release_side(struct side *side) {
    while (side->held) PyBuffer_Release(&side->each[--side->held]);
    PyMem_Free(side->each);
    Py_XDECREF(side->sequence);
    PyBuffer_Release(&side->offsets.packed);
    PyBuffer_Release(&side->whole);
}

/* The address of piece `i`, checked; NULL with an error set. */
static uint8_t *piece(const struct side *side, Py_ssize_t i, uint64_t size) {
    if (side->sequence) {
        if ((uint64_t)side->each[i].len == size) return side->each[i].buf;
        PyErr_Format(bad_request, "%s %zd has %zd bytes, not the %llu of the object", side->name, i, side->each[i].len,
                     (unsigned long long)size);
        return NULL;
    }
    uint64_t offset = u64_at(side->offsets.packed.buf, i), length = (uint64_t)side->whole.len;
    if (size <= length && offset <= length - size) return (uint8_t *)side->whole.buf + offset;
    PyErr_Format(bad_request, "%s %zd: %llu bytes at offset %llu are not within a buffer of %zd bytes", side->name, i,
                 (unsigned long long)size, (unsigned long long)offset, side->whole.len);
    return NULL;
}

struct arguments {
    struct side to, from;
    struct column sizes, expected;
    struct move *moves;
    struct batch batch;
};

static void release(struct arguments *arguments) {
    release_side(&arguments->to);
    release_side(&arguments->from);
    PyBuffer_Release(&arguments->sizes.packed);
    PyBuffer_Release(&arguments->expected.packed);
    PyMem_Free(arguments->moves);
}

static int agree(Py_ssize_t *count, Py_ssize_t other, const char *name) {
    if (other < 0 || other == *count) return 0;
    if (*count < 0) {
        *count = other;
        return 0;
    }
    PyErr_Format(bad_request, "%s: %zd entries for %zd objects", name, other, *count);
    return -1;
}

static int overlap(const struct move *move) {
    uintptr_t to = (uintptr_t)move->to, from = (uintptr_t)move->from;
    return to < from + move->size && from < to + move->size;
}

/* Turn what was taken into moves. */
static int prepare(struct arguments *arguments, int copies, int threads) {
    struct batch *batch = &arguments->batch;
    const struct side *from = &arguments->from, *to = &arguments->to;
    Py_ssize_t count = -1;
    if (agree(&count, side_count(from), "sources") < 0 || (copies && agree(&count, side_count(to), "targets") < 0) ||
        agree(&count, arguments->sizes.count, "sizes") < 0 || agree(&count, arguments->expected.count, "sums") < 0)
        return -1;
    if (!arguments->sizes.given && !from->sequence && !(copies && to->sequence)) {
        PyErr_SetString(bad_request, "sizes: None is for sources or targets that are buffers of their own");
        return -1;
    }
    if (threads < 1 || threads > MAX_THREADS) {
        PyErr_Format(bad_request, "threads: %d is not from 1 to %d", threads, MAX_THREADS);
        return -1;
    }
    struct move *moves = arguments->moves = PyMem_New(struct move, count ? count : 1);
    if (!moves) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t size = arguments->sizes.given ? in_column(&arguments->sizes, i)
                        : from->sequence       ? (uint64_t)from->each[i].len
                                               : (uint64_t)to->each[i].len;
        moves[i] = (struct move){NULL, piece(from, i, size), size};
        if (!moves[i].from && PyErr_Occurred()) return -1;
        if (copies) {
            moves[i].to = piece(to, i, size);
            if (!moves[i].to && PyErr_Occurred()) return -1;
            if (overlap(&moves[i])) {
                PyErr_Format(bad_request, "object %zd: its %llu bytes of source and target overlap", i,
                             (unsigned long long)size);
                return -1;
            }
        }
        batch->bytes += size;
    }
    batch->kernel = chosen_kernel;
    batch->moves = moves;
    batch->count = count;
    batch->threads = threads;
    batch->expected = arguments->expected.packed.buf;
    return 0;
}

static size_t run(const struct batch *batch) {
    size_t matched;
    if (batch->bytes < RELEASE_BYTES) return run_batch(batch);
    Py_BEGIN_ALLOW_THREADS;
    matched = run_batch(batch);
    Py_END_ALLOW_THREADS;
    return matched;
}

/* Run, and make the result: sums as bytes, the first that differs, or None. */
static PyObject *result_of(struct arguments *arguments, int wants_sums) {
    struct batch *batch = &arguments->batch;
    PyObject *sums = NULL;
    if (wants_sums) {
        sums = PyBytes_FromStringAndSize(NULL, 8 * batch->count);
        if (!sums) return NULL;
        batch->sums = (uint8_t *)PyBytes_AS_STRING(sums);
    }
    size_t matched = run(batch);
    if (sums) return sums;
    if (matched < batch->count) return PyLong_FromSize_t(matched);
    Py_RETURN_NONE;
}

/* --- functions --- */

static PyObject *copying(PyObject *args, PyObject *kwargs, enum work work, int verifies, char *format, char **names) {
    PyObject *to, *to_offsets, *from, *from_offsets, *sizes, *expected = Py_None;
    int threads = 1;
    struct arguments arguments = {0};
    PyObject *result = NULL;
    if (verifies ? !PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &to, &to_offsets, &from, &from_offsets,
                                                &sizes, &expected, &threads)
                 : !PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &to, &to_offsets, &from, &from_offsets,
                                                &sizes, &threads))
        return NULL;
    arguments.batch.work = work;
    if (take_side(&arguments.to, to, to_offsets, "target", 1) == 0 &&
        take_side(&arguments.from, from, from_offsets, "source", 0) == 0 &&
        take_column(&arguments.sizes, sizes, "sizes", 1) == 0 &&
        take_column(&arguments.expected, expected, "sums", 0) == 0 && prepare(&arguments, 1, threads) == 0)
        result = result_of(&arguments, work == WORK_COPY_SUM && !verifies);
    release(&arguments);
    return result;
}

static char *copy_names[] = {"target", "target_offsets", "source", "source_offsets", "sizes", "threads", NULL};
static char *copy_verify_names[] = {"target", "target_offsets", "source", "source_offsets", "sizes", "sums", "threads",
                                    NULL};

static PyObject *copy_plain(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    return copying(args, kwargs, WORK_COPY, 0, "OOOOO|i:copy", copy_names);
}

static PyObject *copy_sums(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    return copying(args, kwargs, WORK_COPY_SUM, 0, "OOOOO|i:copy_sums", copy_names);
}

static PyObject *copy_verify(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    return copying(args, kwargs, WORK_COPY_SUM, 1, "OOOOOO|i:copy_verify", copy_verify_names);
}

static PyObject *summing(PyObject *from, PyObject *offsets, PyObject *sizes, PyObject *expected, int threads) {
    struct arguments arguments = {0};
    PyObject *result = NULL;
    arguments.batch.work = WORK_SUM;
    if (take_side(&arguments.from, from, offsets, "source", 0) == 0 &&
        take_column(&arguments.sizes, sizes, "sizes", 1) == 0 &&
        take_column(&arguments.expected, expected, "sums", 0) == 0 && prepare(&arguments, 0, threads) == 0)
        result = result_of(&arguments, expected == Py_None);
    release(&arguments);
    return result;
}

static PyObject *sums(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"source", "source_offsets", "sizes", "threads", NULL};
    PyObject *from, *offsets, *sizes;
    int threads = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|i:sums", names, &from, &offsets, &sizes, &threads)) return NULL;
    return summing(from, offsets, sizes, Py_None, threads);
}

static PyObject *verify(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"source", "source_offsets", "sizes", "sums", "threads", NULL};
    PyObject *from, *offsets, *sizes, *expected;
    int threads = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|i:verify", names, &from, &offsets, &sizes, &expected, &threads))
        return NULL;
    return summing(from, offsets, sizes, expected, threads);
}

static PyObject *checksum(PyObject *module, PyObject *data) {
    Py_buffer view;
    uint64_t sum;
    (void)module;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    if (view.len < RELEASE_BYTES) {
        sum = xxh3(chosen_kernel, view.buf, view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        sum = xxh3(chosen_kernel, view.buf, view.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(sum);
}

/* Sums of equal segments as a list of integers. */
static PyObject *segment_sums(PyObject *module, PyObject *args) {
    Py_buffer view;
    Py_ssize_t size;
    PyObject *list = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n:segment_sums", &view, &size)) return NULL;
    if (size <= 0 || view.len % size) {
        PyErr_Format(bad_request, "%zd bytes are no whole segments of %zd bytes", view.len, size);
        goto end;
    }
    Py_ssize_t count = view.len / size;
    uint64_t *found = PyMem_New(uint64_t, count ? count : 1);
    if (!found) {
        PyErr_NoMemory();
        goto end;
    }
    PyThreadState *state = view.len < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++) found[i] = xxh3(chosen_kernel, (const uint8_t *)view.buf + i * size, size);
    if (state) PyEval_RestoreThread(state);
    list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(found[i]);
        if (!value) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, value);
    }
    PyMem_Free(found);
end:
    PyBuffer_Release(&view);
    return list;
}

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS
PyMethodDef batch_methods[] = {
    {"copy", WITH_KEYWORDS(copy_plain), NULL},
    {"copy_sums", WITH_KEYWORDS(copy_sums), NULL},
    {"copy_verify", WITH_KEYWORDS(copy_verify), NULL},
    {"sums", WITH_KEYWORDS(sums), NULL},
    {"verify", WITH_KEYWORDS(verify), NULL},
    {"checksum", checksum, METH_O, NULL},
    {"segment_sums", segment_sums, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
