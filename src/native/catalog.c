#include "catalog.h"

#include <math.h>
#include <string.h>

#include "books.h"

#define MAX_OBJECT_BYTES (1ull << 30) /* limits.MAX_OBJECT_BYTES; a test compares */
#define MAX_SCAN (1 << 16)
#define WINDOW 64 /* keys whose memory latencies overlap */

enum stored { STORED = 0, PRESENT = 1, BUSY = 2, FULL = 3, CONFLICT = 5 }; /* wire.bulk.Stored; a test compares */

static const char *const STATE_NAMES[STATES] = {"FREE", "WRITING", "SEALED", "GONE"};

/* An index and the memory it lies in. */
struct shown {
    struct index index;
    Py_buffer table, marks;
    struct shown *next;
};

typedef struct {
    PyObject_HEAD
    struct books books;
    struct shown *shown;
    PyObject *states, *info, *counts, *looked_up; /* kvrelay.pool.core's State, Info, Counts and LookedUp */
    int ready;
} Catalog;

/* --- arguments --- */

/* A row that is somebody's; -1 with an error set. */
static int64_t take_row(Catalog *self, PyObject *object) {
    int overflow;
    long long row = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (row == -1 && !overflow && PyErr_Occurred()) return -1;
    if (!overflow && row >= 0 && row < self->books.count && row_at(&self->books, (uint32_t)row)->state != FREE) return row;
    PyErr_Format(PyExc_ValueError, "row %R is free", object);
    return -1;
}

#define ROW(self, object)                                                                                              \
    int64_t number = take_row(self, object);                                                                           \
    if (number < 0) return NULL;                                                                                       \
    struct row *row = row_at(&(self)->books, (uint32_t)number)

static int check_count(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
    if (given >= least && given <= most) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, not %zd to %zd", given, least, most);
    return -1;
}

/* The rows of a column, each somebody's; NULL with an error set. The buffer is to be released. */
static const uint32_t *take_rows(Catalog *self, PyObject *object, Py_buffer *buffer, Py_ssize_t *count) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) < 0) return NULL;
    const uint32_t *rows = buffer->buf;
    *count = buffer->len / 4;
    if (buffer->len % 4 || (uintptr_t)rows % 4) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no aligned column of rows, 4 bytes each", buffer->len);
        goto refused;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        if (rows[i] < self->books.count && row_at(&self->books, rows[i])->state != FREE) continue;
        PyErr_Format(PyExc_ValueError, "row %lu is free", (unsigned long)rows[i]);
        goto refused;
    }
    return rows;
refused:
    PyBuffer_Release(buffer);
    return NULL;
}

static uint32_t take_tenant(Catalog *self, PyObject *object) {
    long long tenant = PyLong_AsLongLong(object);
    if (tenant == -1 && PyErr_Occurred()) return NO_ROW;
    uint32_t holding = books_holding(&self->books, tenant);
    if (holding == NO_ROW) PyErr_NoMemory();
    return holding;
}

static int take_key(PyObject *object, const uint8_t **key, size_t *size) {
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "a key is bytes, not %s", Py_TYPE(object)->tp_name);
        return -1;
    }
    *key = (const uint8_t *)PyBytes_AS_STRING(object);
    *size = (size_t)PyBytes_GET_SIZE(object);
    if (*size <= MAX_KEY) return 0;
    PyErr_Format(PyExc_ValueError, "a key of %zu bytes: %d are the most", *size, MAX_KEY);
    return -1;
}

static int check_size(uint64_t size) {
    if (size > 0 && size <= MAX_OBJECT_BYTES) return 0;
    PyErr_Format(PyExc_ValueError, "an object of %llu bytes: legal are 1 to %llu", (unsigned long long)size,
                 (unsigned long long)MAX_OBJECT_BYTES);
    return -1;
}

static int take_time(PyObject *object, double *time) {
    *time = PyFloat_AsDouble(object);
    if (*time == -1.0 && PyErr_Occurred()) return -1;
    if (!isnan(*time)) return 0;
    PyErr_SetString(PyExc_ValueError, "nan is no time");
    return -1;
}

/* The keys of a sequence, checked; NULL with an error set. `*fast` is to be released, the result freed. */
static struct wanted *take_keys(PyObject *object, PyObject **fast, Py_ssize_t *count) {
    *fast = PySequence_Fast(object, "keys are a sequence of bytes");
    if (!*fast) return NULL;
    *count = PySequence_Fast_GET_SIZE(*fast);
    struct wanted *wanted = PyMem_New(struct wanted, *count ? *count : 1);
    if (!wanted) PyErr_NoMemory();
    for (Py_ssize_t i = 0; wanted && i < *count; i++)
        if (take_key(PySequence_Fast_GET_ITEM(*fast, i), &wanted[i].key, &wanted[i].size) < 0) {
            PyMem_Free(wanted);
            wanted = NULL;
        }
    if (!wanted) Py_CLEAR(*fast);
    return wanted;
}

static PyObject *bytes_of(const void *data, size_t size) { return PyBytes_FromStringAndSize(data, (Py_ssize_t)size); }

/* --- one object --- */

static PyObject *find(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    const uint8_t *key;
    size_t size;
    if (check_count(count, 2, 2) < 0) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW || take_key(args[1], &key, &size) < 0) return NULL;
    uint32_t row = books_find_one(&self->books, holding, names_tag(&self->books.names, holding, key, size), key, size);
    if (row == NO_ROW) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(row);
}

static PyObject *add(Catalog *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tenant", "key", "size", "layers", "segments", NULL};
    PyObject *tenant, *name;
    long long size, layers = 1, segments = 1;
    const uint8_t *key;
    size_t key_size;
    uint32_t row;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL|LL:add", names, &tenant, &name, &size, &layers, &segments))
        return NULL;
    uint32_t holding = take_tenant(self, tenant);
    if (holding == NO_ROW || take_key(name, &key, &key_size) < 0) return NULL;
    uint32_t tag = names_tag(&self->books.names, holding, key, key_size);
    if (books_find_one(&self->books, holding, tag, key, key_size) != NO_ROW)
        return PyErr_Format(PyExc_ValueError, "key %R has a row already", name);
    if (size < 0 || check_size((uint64_t)size) < 0) return size < 0 ? PyErr_Format(PyExc_ValueError, "an object of %lld bytes", size) : NULL;
    if (layers < 1 || segments < 1 || layers > UINT32_MAX || segments > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%lld layers of %lld segments: legal are 1 to 2**32 - 1", layers, segments);
    if (books_begin(&self->books, holding, tag, key, key_size, (uint32_t)size, (uint32_t)layers, (uint32_t)segments, &row) != BEGUN)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(row);
}

static PyObject *seal(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    Py_buffer sums;
    double expires;
    if (check_count(count, 3, 3) < 0) return NULL;
    ROW(self, args[0]);
    if (take_time(args[2], &expires) < 0 || PyObject_GetBuffer(args[1], &sums, PyBUF_SIMPLE) < 0) return NULL;
    int done = 0;
    if (row->state != WRITING || (uint64_t)sums.len / 8 != (uint64_t)row->layers * row->segments || sums.len % 8)
        PyErr_Format(PyExc_ValueError, "row %lld is %s, %zd bytes of checksums given", (long long)number,
                     STATE_NAMES[row->state], sums.len);
    else if (books_seal(&self->books, (uint32_t)number, sums.buf, expires) < 0) PyErr_NoMemory();
    else done = 1;
    PyBuffer_Release(&sums);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static PyObject *forget(Catalog *self, PyObject *object) {
    ROW(self, object);
    books_forget(&self->books, (uint32_t)number);
    return PyBool_FromLong(row->state == FREE);
}

static PyObject *pin(Catalog *self, PyObject *object) {
    ROW(self, object);
    if (row->pins == UINT32_MAX) return PyErr_Format(PyExc_ValueError, "row %R has all the pins there can be", object);
    books_pin(&self->books, (uint32_t)number);
    Py_RETURN_NONE;
}

static PyObject *unpin(Catalog *self, PyObject *object) {
    ROW(self, object);
    if (!row->pins) return PyErr_Format(PyExc_ValueError, "row %R is not pinned", object);
    books_unpin(&self->books, (uint32_t)number);
    return PyBool_FromLong(row->state == FREE);
}

static PyObject *hold(Catalog *self, PyObject *object) {
    ROW(self, object);
    row->flags |= HELD;
    Py_RETURN_NONE;
}

static PyObject *unhold(Catalog *self, PyObject *object) {
    ROW(self, object);
    books_unhold(&self->books, (uint32_t)number);
    return PyBool_FromLong(row->state == FREE);
}

static PyObject *touch(Catalog *self, PyObject *object) {
    ROW(self, object);
    row->flags |= VISITED;
    Py_RETURN_NONE;
}

static PyObject *keep(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    if (check_count(count, 2, 2) < 0) return NULL;
    int on = PyObject_IsTrue(args[1]);
    if (on < 0) return NULL;
    ROW(self, args[0]);
    if (row->state != SEALED)
        return PyErr_Format(PyExc_ValueError, "row %R is %s, not sealed", args[0], STATE_NAMES[row->state]);
    if (books_keep(&self->books, (uint32_t)number, on) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *set_expiry(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    double expires;
    if (check_count(count, 2, 2) < 0 || take_time(args[1], &expires) < 0) return NULL;
    ROW(self, args[0]);
    (void)row;
    if (books_expire_at(&self->books, (uint32_t)number, expires) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *mark_clean(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    if (check_count(count, 2, 2) < 0) return NULL;
    int on = PyObject_IsTrue(args[1]);
    if (on < 0) return NULL;
    ROW(self, args[0]);
    (void)row;
    books_mark_clean(&self->books, (uint32_t)number, on);
    Py_RETURN_NONE;
}

static PyObject *handle(Catalog *self, PyObject *object) {
    ROW(self, object);
    return PyLong_FromUnsignedLongLong(handle_of(row, (uint32_t)number));
}

static PyObject *row_of(Catalog *self, PyObject *object) {
    int overflow;
    long long handle = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (handle == -1 && !overflow && PyErr_Occurred()) return NULL;
    uint32_t number = (uint32_t)handle;
    if (overflow || number >= self->books.count) Py_RETURN_NONE;
    const struct row *row = row_at(&self->books, number);
    if (row->state == FREE || handle_of(row, number) != (uint64_t)handle) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(number);
}

static PyObject *state_object(Catalog *self, int state) { return Py_NewRef(PyTuple_GET_ITEM(self->states, state)); }

static PyObject *state(Catalog *self, PyObject *object) {
    int overflow;
    long long row = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (row == -1 && !overflow && PyErr_Occurred()) return NULL;
    if (overflow || row < 0 || row >= self->books.count) return state_object(self, FREE);
    return state_object(self, row_at(&self->books, (uint32_t)row)->state);
}

static PyObject *key(Catalog *self, PyObject *object) {
    ROW(self, object);
    return bytes_of(key_of(row), row->key_size);
}

static uint64_t offset_of(Catalog *self, const struct row *row) {
    return block_offset(block_at(&self->books.blocks, row->block));
}

static PyObject *geometry(Catalog *self, PyObject *object) {
    ROW(self, object);
    return Py_BuildValue("KIII", (unsigned long long)offset_of(self, row), row->size, row->layers, row->segments);
}

static PyObject *sums(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    if (check_count(count, 3, 3) < 0) return NULL;
    Py_ssize_t first = PyNumber_AsSsize_t(args[1], NULL), end = PyNumber_AsSsize_t(args[2], NULL);
    if (PyErr_Occurred()) return NULL;
    ROW(self, args[0]);
    const struct cold_row *cold = cold_at(&self->books, (uint32_t)number);
    Py_ssize_t there = row->flags & HAS_SUMS ? (Py_ssize_t)row->layers * row->segments : 0;
    if (first < 0) first = 0;
    if (end > there) end = there;
    if (first >= end) return bytes_of(NULL, 0);
    return bytes_of((is_whole(row) ? &cold->sum : cold->sums) + first, 8 * (size_t)(end - first));
}

static PyObject *info(Catalog *self, PyObject *object) {
    ROW(self, object);
    PyObject *key_object = bytes_of(key_of(row), row->key_size);
    if (!key_object) return NULL;
    PyObject *made = PyObject_CallFunction(
        self->info, "LNNKIIIIOOOd", (long long)self->books.holdings[row->holding].tenant, key_object,
        state_object(self, row->state), (unsigned long long)offset_of(self, row), row->size, row->layers, row->segments,
        row->pins, row->flags & HELD ? Py_True : Py_False, row->flags & KEPT ? Py_True : Py_False,
        row->flags & CLEAN ? Py_True : Py_False, cold_at(&self->books, (uint32_t)number)->expires);
    return made;
}

/* --- many objects --- */

static PyObject *lookup(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    PyObject *fast, *states = NULL, *rows = NULL, *result = NULL;
    Py_ssize_t count;
    if (check_count(args_count, 2, 2) < 0) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW) return NULL;
    struct wanted *wanted = take_keys(args[1], &fast, &count);
    if (!wanted) return NULL;
    states = bytes_of(NULL, (size_t)count);
    rows = bytes_of(NULL, 4 * (size_t)count);
    if (states && rows) {
        for (Py_ssize_t at = 0; at < count; at += WINDOW)
            books_find(&self->books, holding, wanted + at, (size_t)(count - at < WINDOW ? count - at : WINDOW));
        for (Py_ssize_t i = 0; i < count; i++) {
            uint32_t row = wanted[i].row == NO_ROW ? 0 : wanted[i].row;
            PyBytes_AS_STRING(states)[i] = wanted[i].row == NO_ROW ? FREE : (char)row_at(&self->books, row)->state;
            memcpy(PyBytes_AS_STRING(rows) + 4 * i, &row, 4);
        }
        result = PyTuple_Pack(2, states, rows);
    }
    Py_XDECREF(states);
    Py_XDECREF(rows);
    PyMem_Free(wanted);
    Py_DECREF(fast);
    return result;
}

/* Mark the longest prefix of keys that is there, of at least `least` and at most `segments` segments, as asked for.
 * How many it is; `*sealed`: the sealed ones of these from the first on. Their rows are in `wanted`. */
static Py_ssize_t mark_prefix(Catalog *self, uint32_t holding, struct wanted *wanted, Py_ssize_t count, int least,
                              uint64_t segments, Py_ssize_t *sealed) {
    Py_ssize_t unsealed = -1, i = 0;
    for (; i < count; i++) {
        if (i % WINDOW == 0)
            books_find(&self->books, holding, wanted + i, (size_t)(count - i < WINDOW ? count - i : WINDOW));
        if (wanted[i].row == NO_ROW) break;
        struct row *row = row_at(&self->books, wanted[i].row);
        if (row->state < least || (uint64_t)row->layers * row->segments > segments) break;
        row->flags |= VISITED;
        if (unsealed < 0 && row->state != SEALED) unsealed = i;
    }
    *sealed = unsealed < 0 ? i : unsealed;
    return i;
}

static PyObject *prefix(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    PyObject *fast, *rows = NULL;
    Py_ssize_t count, sealed;
    if (check_count(args_count, 4, 4) < 0) return NULL;
    long least = PyLong_AsLong(args[2]);
    unsigned long long segments = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW) return NULL;
    struct wanted *wanted = take_keys(args[1], &fast, &count);
    if (!wanted) return NULL;
    count = mark_prefix(self, holding, wanted, count, (int)least, segments, &sealed);
    rows = bytes_of(NULL, 4 * (size_t)count);
    for (Py_ssize_t i = 0; rows && i < count; i++) memcpy(PyBytes_AS_STRING(rows) + 4 * i, &wanted[i].row, 4);
    PyMem_Free(wanted);
    Py_DECREF(fast);
    return rows;
}

static PyObject *count_prefix(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    PyObject *fast;
    Py_ssize_t count, sealed;
    if (check_count(args_count, 2, 2) < 0) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW) return NULL;
    struct wanted *wanted = take_keys(args[1], &fast, &count);
    if (!wanted) return NULL;
    count = mark_prefix(self, holding, wanted, count, WRITING, UINT64_MAX, &sealed);
    PyMem_Free(wanted);
    Py_DECREF(fast);
    return Py_BuildValue("nn", count, sealed);
}

/* Begin what can be begun; -1: no memory. The columns are written. */
static int reserve_all(Catalog *self, uint32_t holding, struct wanted *wanted, const uint64_t *sizes, Py_ssize_t count,
                       uint8_t *states, uint32_t *rows, uint64_t *offsets) {
    struct books *books = &self->books;
    Py_ssize_t done = 0, found = 0;
    uint32_t *pinned = PyMem_New(uint32_t, count ? count : 1);
    if (!pinned) return -1;
    for (Py_ssize_t at = 0; at < count; at += WINDOW) /* warms the caches: what is found may change on the way */
        books_find(books, holding, wanted + at, (size_t)(count - at < WINDOW ? count - at : WINDOW));
    for (; done < count; done++) {
        const struct wanted *w = wanted + done;
        uint32_t number = books_find_one(books, holding, w->tag, w->key, w->size);
        rows[done] = 0;
        offsets[done] = 0;
        if (number == NO_ROW) {
            states[done] = FULL;
            if (books_begin(books, holding, w->tag, w->key, w->size, (uint32_t)sizes[done], 1, 1, &number) != BEGUN) continue;
            row_at(books, number)->flags |= HELD;
            states[done] = STORED;
            rows[done] = number;
            offsets[done] = offset_of(self, row_at(books, number));
            continue;
        }
        struct row *row = row_at(books, number);
        rows[done] = number;
        int same = row->size == sizes[done];
        states[done] = !same ? CONFLICT : row->state == SEALED ? PRESENT : BUSY;
        if (row->state != SEALED) continue;
        if (same) row->flags |= VISITED;
        books_pin(books, number); /* until the end of this */
        pinned[found++] = number;
    }
    while (found) books_unpin(books, pinned[--found]);
    PyMem_Free(pinned);
    return 0;
}

static PyObject *reserve(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    PyObject *fast = NULL, *states = NULL, *rows = NULL, *offsets = NULL, *result = NULL;
    Py_buffer column;
    Py_ssize_t count;
    uint64_t *sizes = NULL;
    struct wanted *wanted = NULL;
    if (check_count(args_count, 3, 3) < 0) return NULL;
    if (PyObject_GetBuffer(args[2], &column, PyBUF_SIMPLE) < 0) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW || !(wanted = take_keys(args[1], &fast, &count))) goto end;
    if (column.len != 8 * count) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of sizes for %zd keys: 8 each", column.len, count);
        goto end;
    }
    sizes = PyMem_New(uint64_t, count ? count : 1);
    if (!sizes) {
        PyErr_NoMemory();
        goto end;
    }
    memcpy(sizes, column.buf, (size_t)column.len);
    for (Py_ssize_t i = 0; i < count; i++)
        if (check_size(sizes[i]) < 0) goto end;
    states = bytes_of(NULL, (size_t)count);
    rows = bytes_of(NULL, 4 * (size_t)count);
    offsets = bytes_of(NULL, 8 * (size_t)count);
    if (!states || !rows || !offsets) goto end;
    if (reserve_all(self, holding, wanted, sizes, count, (uint8_t *)PyBytes_AS_STRING(states),
                    (uint32_t *)(void *)PyBytes_AS_STRING(rows), (uint64_t *)(void *)PyBytes_AS_STRING(offsets)) < 0)
        PyErr_NoMemory();
    else result = PyTuple_Pack(3, states, rows, offsets);
end:
    Py_XDECREF(states);
    Py_XDECREF(rows);
    Py_XDECREF(offsets);
    PyMem_Free(sizes);
    PyMem_Free(wanted);
    Py_XDECREF(fast);
    PyBuffer_Release(&column);
    return result;
}

static PyObject *publish(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    Py_buffer column, sum_column;
    Py_ssize_t count, sealed = 0;
    double expires;
    PyObject *result = NULL;
    if (check_count(args_count, 3, 3) < 0 || take_time(args[2], &expires) < 0) return NULL;
    const uint32_t *rows = take_rows(self, args[0], &column, &count);
    if (!rows) return NULL;
    if (PyObject_GetBuffer(args[1], &sum_column, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&column);
        return NULL;
    }
    int whole = sum_column.len == 8 * count;
    for (Py_ssize_t i = 0; whole && i < count; i++) whole = is_whole(row_at(&self->books, rows[i]));
    if (!whole) {
        PyErr_Format(PyExc_ValueError, "%zd checksums for %zd objects of one segment", sum_column.len / 8, count);
        goto end;
    }
    for (Py_ssize_t i = count; i-- > 0;) { /* of a chain of keys the tail goes before the head */
        if (row_at(&self->books, rows[i])->state != WRITING) {
            books_unhold(&self->books, rows[i]);
            continue;
        }
        if (books_seal(&self->books, rows[i], (const uint8_t *)sum_column.buf + 8 * i, expires) < 0) {
            PyErr_NoMemory();
            goto end;
        }
        sealed++;
    }
    result = PyLong_FromSsize_t(sealed);
end:
    PyBuffer_Release(&sum_column);
    PyBuffer_Release(&column);
    return result;
}

static PyObject *forget_rows(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count, named = 0;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        int state = row_at(&self->books, rows[i])->state;
        named += state == WRITING || state == SEALED;
        books_forget(&self->books, rows[i]);
    }
    PyBuffer_Release(&column);
    return PyLong_FromSsize_t(named);
}

static PyObject *pin_rows(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    int possible = 1;
    for (Py_ssize_t i = 0; possible && i < count; i++)
        possible = row_at(&self->books, rows[i])->pins <= UINT32_MAX - (uint32_t)count;
    for (Py_ssize_t i = 0; possible && i < count; i++) books_pin(&self->books, rows[i]);
    PyBuffer_Release(&column);
    if (!possible) return PyErr_Format(PyExc_ValueError, "a row has all the pins there can be");
    Py_RETURN_NONE;
}

/* Do something to each row that may free it; the rows that were freed, each once. */
static PyObject *freed_by(Catalog *self, const uint32_t *rows, Py_ssize_t count, void (*work)(struct books *, uint32_t)) {
    PyObject *freed = bytes_of(NULL, 4 * (size_t)count);
    Py_ssize_t found = 0;
    if (!freed) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (row_at(&self->books, rows[i])->state == FREE) continue; /* it came before */
        work(&self->books, rows[i]);
        if (row_at(&self->books, rows[i])->state == FREE)
            memcpy(PyBytes_AS_STRING(freed) + 4 * found++, &rows[i], 4);
    }
    if (found < count) _PyBytes_Resize(&freed, 4 * found);
    return freed;
}

static PyObject *unpin_rows(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count, possible = 0;
    PyObject *freed = NULL;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    while (possible < count && row_at(&self->books, rows[possible])->pins) row_at(&self->books, rows[possible++])->pins--;
    for (Py_ssize_t i = 0; i < possible; i++) row_at(&self->books, rows[i])->pins++;
    if (possible < count)
        PyErr_Format(PyExc_ValueError, "row %lu is not pinned as often as that", (unsigned long)rows[possible]);
    else freed = freed_by(self, rows, count, books_unpin);
    PyBuffer_Release(&column);
    return freed;
}

static PyObject *unhold_rows(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    PyObject *freed = freed_by(self, rows, count, books_unhold);
    PyBuffer_Release(&column);
    return freed;
}

static PyObject *describe(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    PyObject *columns[3] = {NULL, NULL, NULL}, *result = NULL;
    for (int i = 0; i < 3; i++)
        if (!(columns[i] = bytes_of(NULL, 8 * (size_t)count))) goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + 16 < count) __builtin_prefetch(block_at(&self->books.blocks, row_at(&self->books, rows[i + 16])->block));
        const struct row *row = row_at(&self->books, rows[i]);
        if (!is_whole(row)) {
            PyErr_SetString(PyExc_ValueError, "an object of several segments has no checksum of its whole");
            goto end;
        }
        uint64_t values[3] = {offset_of(self, row), row->size,
                              row->flags & HAS_SUMS ? cold_at(&self->books, rows[i])->sum : 0};
        for (int which = 0; which < 3; which++) memcpy(PyBytes_AS_STRING(columns[which]) + 8 * i, &values[which], 8);
    }
    result = PyTuple_Pack(3, columns[0], columns[1], columns[2]);
end:
    for (int i = 0; i < 3; i++) Py_XDECREF(columns[i]);
    PyBuffer_Release(&column);
    return result;
}

static int append_run(PyObject *list, uint64_t start, uint64_t end) {
    if (end <= start) return 0;
    PyObject *run = Py_BuildValue("KK", (unsigned long long)start, (unsigned long long)(end - start));
    int failed = !run || PyList_Append(list, run) < 0;
    Py_XDECREF(run);
    return failed ? -1 : 0;
}

static PyObject *runs(Catalog *self, PyObject *object) {
    Py_buffer column;
    Py_ssize_t count;
    uint64_t start = 0, end = 0;
    const uint32_t *rows = take_rows(self, object, &column, &count);
    if (!rows) return NULL;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        const struct row *row = row_at(&self->books, rows[i]);
        uint64_t offset = offset_of(self, row);
        if (offset == end && end > start) {
            end += row->size;
            continue;
        }
        if (append_run(list, start, end) < 0) Py_CLEAR(list);
        start = offset;
        end = offset + row->size;
    }
    if (list && append_run(list, start, end) < 0) Py_CLEAR(list);
    PyBuffer_Release(&column);
    return list;
}

/* --- losing objects --- */

static PyObject *trim(Catalog *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"size_bytes", "tenant", "clean", NULL};
    long long bytes;
    PyObject *tenant = Py_None;
    int clean = 0;
    uint64_t objects, freed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L|O$p:trim", names, &bytes, &tenant, &clean)) return NULL;
    uint32_t holding = NO_ROW;
    if (tenant != Py_None && (holding = take_tenant(self, tenant)) == NO_ROW) return NULL;
    books_trim(&self->books, bytes < 0 ? 0 : (uint64_t)bytes, holding, clean, &objects, &freed);
    return Py_BuildValue("KK", (unsigned long long)objects, (unsigned long long)freed);
}

static PyObject *victims(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    uint32_t only = NO_ROW;
    if (check_count(args_count, 1, 2) < 0) return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[0], NULL);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    if (args_count == 2 && args[1] != Py_None && (only = take_tenant(self, args[1])) == NO_ROW) return NULL;
    if (limit < 0) limit = 0;
    if ((uint64_t)limit > self->books.count) limit = self->books.count;
    PyObject *rows = bytes_of(NULL, 4 * (size_t)limit);
    if (!rows) return NULL;
    Py_ssize_t found = books_victims(&self->books, (uint32_t)limit, only, (uint32_t *)(void *)PyBytes_AS_STRING(rows));
    if (found < limit) _PyBytes_Resize(&rows, 4 * found);
    return rows;
}

static PyObject *expire(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    double now;
    if (check_count(count, 2, 2) < 0 || take_time(args[0], &now) < 0) return NULL;
    Py_ssize_t limit = PyNumber_AsSsize_t(args[1], NULL), objects = 0;
    uint64_t bytes = 0;
    if (limit == -1 && PyErr_Occurred()) return NULL;
    for (uint32_t row; objects < limit && (row = books_expired(&self->books, now)) != NO_ROW; objects++) {
        bytes += rounded(row_at(&self->books, row)->size);
        books_forget(&self->books, row);
    }
    return Py_BuildValue("nK", objects, (unsigned long long)bytes);
}

static PyObject *next_expiry(Catalog *self, PyObject *unused) {
    (void)unused;
    if (!self->books.due_count) Py_RETURN_NONE;
    return PyFloat_FromDouble(cold_at(&self->books, self->books.timetable[0])->expires);
}

/* --- what clients of this host see --- */

static void hide(struct shown *shown) {
    index_end(&shown->index);
    PyBuffer_Release(&shown->table);
    PyBuffer_Release(&shown->marks);
    PyMem_Free(shown);
}

static PyObject *show(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    if (check_count(count, 3, 3) < 0) return NULL;
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW) return NULL;
    if (self->books.holdings[holding].index) return PyErr_Format(PyExc_ValueError, "tenant %R is shown already", args[0]);
    struct shown *shown = PyMem_Calloc(1, sizeof *shown);
    if (!shown) return PyErr_NoMemory();
    if (PyObject_GetBuffer(args[1], &shown->table, PyBUF_WRITABLE) < 0) goto refused;
    if (PyObject_GetBuffer(args[2], &shown->marks, PyBUF_WRITABLE) < 0) goto refused;
    if ((uintptr_t)shown->table.buf % 4096 || (uintptr_t)shown->marks.buf % 4096 ||
        index_begin(&shown->index, shown->table.buf, (size_t)shown->table.len, shown->marks.buf, (size_t)shown->marks.len) < 0) {
        PyErr_Format(PyExc_ValueError, "no index fits into %zd and %zd bytes of whole pages", shown->table.len, shown->marks.len);
        goto refused;
    }
    shown->next = self->shown;
    self->shown = shown;
    books_show(&self->books, holding, &shown->index);
    Py_RETURN_TRUE;
refused:
    PyBuffer_Release(&shown->table);
    PyBuffer_Release(&shown->marks);
    PyMem_Free(shown);
    return NULL;
}

static PyObject *looked_up(Catalog *self, PyObject *unused) {
    unsigned long long bytes = 0, lookups = 0, matched = 0, missed = 0;
    (void)unused;
    for (const struct shown *shown = self->shown; shown; shown = shown->next) {
        const struct index_tallies *tallies = index_tallies(&shown->index);
        bytes += index_bytes(&shown->index);
        lookups += __atomic_load_n(&tallies->lookups, __ATOMIC_RELAXED);
        matched += __atomic_load_n(&tallies->matched, __ATOMIC_RELAXED);
        missed += __atomic_load_n(&tallies->missed, __ATOMIC_RELAXED);
    }
    return PyObject_CallFunction(self->looked_up, "KKKK", bytes, lookups, matched, missed);
}

/* --- tenants, and looking around --- */

static PyObject *set_quota(Catalog *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t most[2] = {UINT64_MAX, UINT64_MAX};
    if (check_count(count, 2, 3) < 0) return NULL;
    for (Py_ssize_t i = 1; i < count; i++) {
        if (args[i] == Py_None) continue;
        most[i - 1] = PyLong_AsUnsignedLongLong(args[i]);
        if (most[i - 1] == UINT64_MAX && PyErr_Occurred()) return NULL;
    }
    uint32_t holding = take_tenant(self, args[0]);
    if (holding == NO_ROW) return NULL;
    self->books.holdings[holding].quota = most[0];
    self->books.holdings[holding].max_objects = most[1];
    Py_RETURN_NONE;
}

static PyObject *usage(Catalog *self, PyObject *tenant) {
    uint32_t index = take_tenant(self, tenant);
    if (index == NO_ROW) return NULL;
    const struct holding *holding = self->books.holdings + index;
    return Py_BuildValue("KK", (unsigned long long)holding->named, (unsigned long long)holding->bytes);
}

static PyObject *page(Catalog *self, PyObject *const *args, Py_ssize_t args_count) {
    if (check_count(args_count, 4, 4) < 0) return NULL;
    long long tenant = args[0] == Py_None ? 0 : PyLong_AsLongLong(args[0]);
    unsigned long long cursor = PyLong_AsUnsignedLongLong(args[1]);
    Py_ssize_t limit = PyNumber_AsSsize_t(args[2], NULL), found = 0;
    const uint8_t *prefix_bytes;
    size_t prefix_size;
    if (PyErr_Occurred() || take_key(args[3], &prefix_bytes, &prefix_size) < 0) return NULL;
    uint64_t end = cursor + MAX_SCAN < self->books.count ? cursor + MAX_SCAN : self->books.count;
    if (limit < 0) limit = 0;
    if (limit > MAX_SCAN) limit = MAX_SCAN;
    PyObject *rows = bytes_of(NULL, 4 * (size_t)limit);
    if (!rows) return NULL;
    for (; cursor < end && found < limit; cursor++) {
        uint32_t number = (uint32_t)cursor;
        const struct row *row = row_at(&self->books, number);
        if ((row->state == WRITING || row->state == SEALED) &&
            (args[0] == Py_None || self->books.holdings[row->holding].tenant == tenant) && row->key_size >= prefix_size &&
            !memcmp(key_of(row), prefix_bytes, prefix_size))
            memcpy(PyBytes_AS_STRING(rows) + 4 * found++, &number, 4);
    }
    if (found < limit && _PyBytes_Resize(&rows, 4 * found) < 0) return NULL;
    return Py_BuildValue("NK", rows, cursor >= self->books.count ? 0ull : cursor);
}

static PyObject *counts(Catalog *self, PyObject *unused) {
    const struct books *books = &self->books;
    uint64_t evictable = 0;
    (void)unused;
    for (uint32_t i = 0; i < books->holding_count; i++) evictable += books->holdings[i].evictable_bytes;
    return PyObject_CallFunction(
        self->counts, "KKKKKKKKKKKK", (unsigned long long)books->number[SEALED], (unsigned long long)books->number[WRITING],
        (unsigned long long)books->number[GONE], (unsigned long long)books->pinned, (unsigned long long)books->kept,
        (unsigned long long)books->blocks.free_bytes, (unsigned long long)blocks_largest(&books->blocks),
        (unsigned long long)evictable, (unsigned long long)books->gone_bytes,
        (unsigned long long)books->evicted_for_room, (unsigned long long)books->evicted_for_quota,
        (unsigned long long)books->evicted_unclean);
}

static PyObject *check_integrity(Catalog *self, PyObject *unused) {
    const char *wrong = books_check(&self->books);
    (void)unused;
    if (wrong) return PyErr_Format(PyExc_AssertionError, "%s", wrong);
    Py_RETURN_NONE;
}

static PyObject *arena_bytes(Catalog *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->books.blocks.size);
}

static PyObject *free_bytes(Catalog *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->books.blocks.free_bytes);
}

/* --- the type --- */

static int take_vocabulary(Catalog *self) {
    PyObject *module = PyImport_ImportModule("kvrelay.pool.core.catalog");
    if (!module) return -1;
    PyObject *state_type = PyObject_GetAttrString(module, "State");
    self->info = PyObject_GetAttrString(module, "Info");
    self->counts = PyObject_GetAttrString(module, "Counts");
    self->looked_up = PyObject_GetAttrString(module, "LookedUp");
    self->states = PyTuple_New(STATES);
    Py_DECREF(module);
    int failed = !state_type || !self->info || !self->counts || !self->looked_up || !self->states;
    for (int i = 0; !failed && i < STATES; i++) {
        PyObject *member = PyObject_GetAttrString(state_type, STATE_NAMES[i]);
        failed = !member;
        if (member) PyTuple_SET_ITEM(self->states, i, member);
    }
    Py_XDECREF(state_type);
    return failed ? -1 : 0;
}

static PyObject *catalog_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"arena_bytes", NULL};
    long long bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L:Catalog", names, &bytes)) return NULL;
    if (bytes < 0 || bytes > 1ll << 52)
        return PyErr_Format(PyExc_ValueError, "an arena of %lld bytes: legal are 0 to 2**52", bytes);
    Catalog *self = (Catalog *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    int initialised = books_init(&self->books, (uint64_t)bytes);
    self->ready = 1;
    if (initialised < 0) PyErr_NoMemory();
    if (initialised < 0 || take_vocabulary(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void catalog_dealloc(Catalog *self) {
    if (self->ready) books_clear(&self->books);
    for (struct shown *next; self->shown; self->shown = next) {
        next = self->shown->next;
        hide(self->shown);
    }
    Py_XDECREF(self->states);
    Py_XDECREF(self->info);
    Py_XDECREF(self->counts);
    Py_XDECREF(self->looked_up);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define FUNCTION(name) (PyCFunction)(void (*)(void)) name
static PyMethodDef methods[] = {
    {"find", FUNCTION(find), METH_FASTCALL, NULL},
    {"add", FUNCTION(add), METH_VARARGS | METH_KEYWORDS, NULL},
    {"seal", FUNCTION(seal), METH_FASTCALL, NULL},
    {"forget", FUNCTION(forget), METH_O, NULL},
    {"pin", FUNCTION(pin), METH_O, NULL},
    {"unpin", FUNCTION(unpin), METH_O, NULL},
    {"hold", FUNCTION(hold), METH_O, NULL},
    {"unhold", FUNCTION(unhold), METH_O, NULL},
    {"touch", FUNCTION(touch), METH_O, NULL},
    {"keep", FUNCTION(keep), METH_FASTCALL, NULL},
    {"set_expiry", FUNCTION(set_expiry), METH_FASTCALL, NULL},
    {"mark_clean", FUNCTION(mark_clean), METH_FASTCALL, NULL},
    {"handle", FUNCTION(handle), METH_O, NULL},
    {"row_of", FUNCTION(row_of), METH_O, NULL},
    {"state", FUNCTION(state), METH_O, NULL},
    {"key", FUNCTION(key), METH_O, NULL},
    {"geometry", FUNCTION(geometry), METH_O, NULL},
    {"sums", FUNCTION(sums), METH_FASTCALL, NULL},
    {"info", FUNCTION(info), METH_O, NULL},
    {"lookup", FUNCTION(lookup), METH_FASTCALL, NULL},
    {"prefix", FUNCTION(prefix), METH_FASTCALL, NULL},
    {"count_prefix", FUNCTION(count_prefix), METH_FASTCALL, NULL},
    {"reserve", FUNCTION(reserve), METH_FASTCALL, NULL},
    {"publish", FUNCTION(publish), METH_FASTCALL, NULL},
    {"forget_rows", FUNCTION(forget_rows), METH_O, NULL},
    {"pin_rows", FUNCTION(pin_rows), METH_O, NULL},
    {"unpin_rows", FUNCTION(unpin_rows), METH_O, NULL},
    {"unhold_rows", FUNCTION(unhold_rows), METH_O, NULL},
    {"describe", FUNCTION(describe), METH_O, NULL},
    {"runs", FUNCTION(runs), METH_O, NULL},
    {"trim", FUNCTION(trim), METH_VARARGS | METH_KEYWORDS, NULL},
    {"victims", FUNCTION(victims), METH_FASTCALL, NULL},
    {"expire", FUNCTION(expire), METH_FASTCALL, NULL},
    {"next_expiry", FUNCTION(next_expiry), METH_NOARGS, NULL},
    {"set_quota", FUNCTION(set_quota), METH_FASTCALL, NULL},
    {"usage", FUNCTION(usage), METH_O, NULL},
    {"page", FUNCTION(page), METH_FASTCALL, NULL},
    {"show", FUNCTION(show), METH_FASTCALL, NULL},
    {"looked_up", FUNCTION(looked_up), METH_NOARGS, NULL},
    {"counts", FUNCTION(counts), METH_NOARGS, NULL},
    {"check_integrity", FUNCTION(check_integrity), METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"arena_bytes", (getter)arena_bytes, NULL, NULL, NULL},
    {"free_bytes", (getter)free_bytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject CatalogType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay._native.Catalog",
    .tp_basicsize = sizeof(Catalog),
    .tp_dealloc = (destructor)catalog_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
    .tp_getset = properties,
    .tp_new = catalog_new,
};
