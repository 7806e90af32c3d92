/* Headers are lists of pairs of bytes, names in lower case. kvrelay.router.http.messages has the same in Python. */
#include "http.h"

#include <string.h>

/* One pair's name and value, borrowed; -1 with an error set where it is none. */
static int pair(PyObject *header, PyObject **name, PyObject **value) {
    if (PyTuple_CheckExact(header) && PyTuple_GET_SIZE(header) == 2) {
        *name = PyTuple_GET_ITEM(header, 0);
        *value = PyTuple_GET_ITEM(header, 1);
        if (PyBytes_CheckExact(*name) && PyBytes_CheckExact(*value)) return 0;
    }
    PyErr_SetString(PyExc_TypeError, "headers are a list of pairs of bytes");
    return -1;
}

static int check(PyObject *headers) {
    if (PyList_CheckExact(headers)) return 0;
    PyErr_SetString(PyExc_TypeError, "headers are a list of pairs of bytes");
    return -1;
}

static PyObject *find(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "find(headers, name)");
        return NULL;
    }
    if (check(args[0]) < 0) return NULL;
    const char *wanted = PyBytes_AS_STRING(args[1]);
    Py_ssize_t size = PyBytes_GET_SIZE(args[1]);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *name, *value;
        if (pair(PyList_GET_ITEM(args[0], i), &name, &value) < 0) return NULL;
        if (PyBytes_GET_SIZE(name) == size && !memcmp(PyBytes_AS_STRING(name), wanted, (size_t)size)) return Py_NewRef(value);
    }
    Py_RETURN_NONE;
}

/* Those whose names are in neither of two collections. */
static PyObject *without(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "without(headers, some, others)");
        return NULL;
    }
    if (check(args[0]) < 0) return NULL;
    PyObject *kept = PyList_New(0);
    if (!kept) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *name, *value, *header = PyList_GET_ITEM(args[0], i);
        if (pair(header, &name, &value) < 0) goto failed;
        int drop = PySequence_Contains(args[1], name);
        if (!drop) drop = PySequence_Contains(args[2], name);
        if (drop < 0 || (!drop && PyList_Append(kept, header) < 0)) goto failed;
    }
    return kept;
failed:
    Py_DECREF(kept);
    return NULL;
}

static char *put(char *at, const char *data, Py_ssize_t size) {
    memcpy(at, data, (size_t)size);
    return at + size;
}

/* "name: value" and a line end for each. */
static PyObject *render(PyObject *module, PyObject *headers) {
    (void)module;
    if (check(headers) < 0) return NULL;
    PyObject *name, *value;
    Py_ssize_t size = 0, count = PyList_GET_SIZE(headers);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (pair(PyList_GET_ITEM(headers, i), &name, &value) < 0) return NULL;
        size += PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value) + 4;
    }
    PyObject *text = PyBytes_FromStringAndSize(NULL, size);
    if (!text) return NULL;
    char *at = PyBytes_AS_STRING(text);
    for (Py_ssize_t i = 0; i < count; i++) {
        pair(PyList_GET_ITEM(headers, i), &name, &value);
        at = put(at, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name));
        at = put(at, ": ", 2);
        at = put(at, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
        at = put(at, "\r\n", 2);
    }
    return text;
}

/* How often a blank line ends an event: b"\n\n", not overlapping, as bytes.count() counts. That one looks at every byte;
   memchr() jumps from line to line, and a line of an event is some hundreds of bytes long. */
static PyObject *count_event_ends(PyObject *module, PyObject *data) {
    char *at;
    Py_ssize_t size, count = 0;
    (void)module;
    if (PyBytes_AsStringAndSize(data, &at, &size) < 0) return NULL;
    const char *end = at + size;
    while (end - at >= 2 && (at = memchr(at, '\n', (size_t)(end - at - 1)))) {
        if (at[1] == '\n') {
            count++;
            at += 2;
        } else {
            at++;
        }
    }
    return PyLong_FromSsize_t(count);
}

PyMethodDef http_methods[] = {
    {"find_header", (PyCFunction)(void (*)(void))find, METH_FASTCALL, NULL},
    {"headers_without", (PyCFunction)(void (*)(void))without, METH_FASTCALL, NULL},
    {"render_headers", render, METH_O, NULL},
    {"count_event_ends", count_event_ends, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
