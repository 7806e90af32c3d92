#include "lookups.h"

#include <poll.h>
#include <stddef.h>

#include "index.h"

#define MAX_KEY_BYTES 64 /* limits.MAX_KEY_BYTES; a test compares */
#define FEW 512

/* A client's view of an index, and keys to be looked up there. */
struct question {
    Py_buffer table, marks;
    PyObject *fast;
    struct sought *keys, few[FEW];
    Py_ssize_t count;
};

static void release(struct question *question) {
    if (question->keys != question->few) PyMem_Free(question->keys);
    Py_XDECREF(question->fast);
    PyBuffer_Release(&question->marks);
    PyBuffer_Release(&question->table);
}

/* The pool has let go of this connection, or died: what it left in memory says nothing any more. */
static int has_ended(int fd) {
    struct pollfd polled = {.fd = fd, .events = 0};
    return fd < 0 || poll(&polled, 1, 0) != 0;
}

/* 1: ask the index; 0: ask the pool, for one of several reasons, such as a key that it is to refuse; -1: an error is set.
 * Nothing is to be released unless it is 1. */
static int begin(struct question *question, PyObject *const *args) {
    memset(question, 0, offsetof(struct question, few));
    int fd = (int)PyLong_AsLong(args[2]);
    if (fd == -1 && PyErr_Occurred()) return -1;
    if (has_ended(fd)) return 0;
    int verdict = -1;
    if (PyObject_GetBuffer(args[0], &question->table, PyBUF_SIMPLE) < 0) goto ended;
    if (PyObject_GetBuffer(args[1], &question->marks, PyBUF_WRITABLE) < 0) goto ended;
    if (!(question->fast = PySequence_Fast(args[3], "keys are a sequence of bytes"))) goto ended;
    question->count = PySequence_Fast_GET_SIZE(question->fast);
    question->keys = question->count <= FEW ? question->few : PyMem_New(struct sought, question->count);
    if (!question->keys) {
        PyErr_NoMemory();
        goto ended;
    }
    for (Py_ssize_t i = 0; i < question->count; i++) {
        PyObject *key = PySequence_Fast_GET_ITEM(question->fast, i);
        size_t size = PyBytes_Check(key) ? (size_t)PyBytes_GET_SIZE(key) : 0;
        if (!size || size > MAX_KEY_BYTES) {
            verdict = 0;
            goto ended;
        }
        question->keys[i] = (struct sought){(const uint8_t *)PyBytes_AS_STRING(key), size};
    }
    return 1;
ended:
    release(question);
    return verdict;
}

static int check_arguments(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %zd", given, wanted);
    return -1;
}

static void tally(struct question *question, uint64_t matched, uint64_t missed) {
    struct index_tallies *tallies = question->marks.buf;
    __atomic_fetch_add(&tallies->lookups, 1, __ATOMIC_RELAXED);
    if (matched) __atomic_fetch_add(&tallies->matched, matched, __ATOMIC_RELAXED);
    if (missed) __atomic_fetch_add(&tallies->missed, missed, __ATOMIC_RELAXED);
}

static int64_t look(struct question *question, enum read_as as, int64_t *sealed, uint8_t *flags) {
    return index_read(question->table.buf, (size_t)question->table.len, question->marks.buf, (size_t)question->marks.len,
                      question->keys, question->count, as, sealed, flags);
}

static PyObject *index_count(PyObject *module, PyObject *const *args, Py_ssize_t args_count) {
    struct question question;
    int64_t sealed;
    (void)module;
    if (check_arguments(args_count, 5) < 0) return NULL;
    int whole = PyObject_IsTrue(args[4]);
    int begun = whole < 0 ? -1 : begin(&question, args);
    if (begun < 0) return NULL;
    if (!begun) Py_RETURN_NONE;
    int64_t present = look(&question, COUNT_NAMES, &sealed, NULL);
    int answered = present >= 0 && (!whole || present == question.count);
    if (answered) tally(&question, (uint64_t)present, (uint64_t)(question.count - present));
    release(&question);
    if (!answered) Py_RETURN_NONE;
    return Py_BuildValue("LL", (long long)present, (long long)sealed);
}

static PyObject *index_exists(PyObject *module, PyObject *const *args, Py_ssize_t args_count) {
    struct question question;
    int64_t sealed;
    PyObject *result = NULL;
    (void)module;
    if (check_arguments(args_count, 4) < 0) return NULL;
    int begun = begin(&question, args);
    if (begun < 0) return NULL;
    if (!begun) Py_RETURN_NONE;
    uint8_t *flags = PyMem_Malloc(question.count ? (size_t)question.count : 1);
    if (!flags) {
        PyErr_NoMemory();
    } else if (look(&question, TELL_EACH, &sealed, flags) < 0) {
        result = Py_NewRef(Py_None);
    } else if ((result = PyList_New(question.count))) {
        for (Py_ssize_t i = 0; i < question.count; i++) PyList_SET_ITEM(result, i, PyBool_FromLong(flags[i]));
        tally(&question, 0, 0);
    }
    PyMem_Free(flags);
    release(&question);
    return result;
}

#define FUNCTION(name) (PyCFunction)(void (*)(void)) name
PyMethodDef lookup_methods[] = {
    {"index_count", FUNCTION(index_count), METH_FASTCALL, NULL},
    {"index_exists", FUNCTION(index_exists), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
