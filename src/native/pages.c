/* Everything is checked before a byte is touched: orders against the tensor when a layer is made, blocks and sizes in
 * every call. */
#include "pages.h"

#include <string.h>

#include "planes.h"

/* From this many bytes of a call on, stores go past the caches: they would push out more than is read back. */
#define STREAM_BYTES (256u << 10)
/* Of an object. */
#define MAX_SEGMENTS (1 << 20)

typedef struct {
    PyObject_HEAD
    struct pages pages;
    struct plane *planes;
    size_t *tables; /* all of the orders', one allocation */
    Py_buffer memory;
} Pages;

/* --- making one --- */

/* `table` as sizes, into `to`; the largest of them, or -1 with an error set. */
static Py_ssize_t take_table(PyObject *table, const char *name, Py_ssize_t count, size_t *to) {
    Py_buffer view;
    if (PyObject_GetBuffer(table, &view, PyBUF_SIMPLE) < 0) return -1;
    Py_ssize_t most = -1;
    if (view.len != 8 * count) {
        PyErr_Format(bad_request, "%s: %zd bytes are not the places of %zd", name, view.len, count);
    } else {
        most = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t value;
            memcpy(&value, (const char *)view.buf + 8 * i, 8);
            if (value > PY_SSIZE_T_MAX / 8) {
                PyErr_Format(bad_request, "%s: %llu is no place in a block", name, (unsigned long long)value);
                most = -1;
                break;
            }
            to[i] = value;
            if ((Py_ssize_t)value > most) most = value;
        }
    }
    PyBuffer_Release(&view);
    return most;
}

static void classify(struct order *order, size_t tokens, size_t dims) {
    order->rows = order->columns = 1;
    order->stride = dims > 1 ? order->dim_at[1] - order->dim_at[0] : 1;
    for (size_t d = 1; d < dims; d++) {
        if (order->dim_at[d] != order->dim_at[0] + d) order->rows = 0;
        if (order->dim_at[d] != order->dim_at[0] + d * order->stride) order->columns = 0;
    }
    for (size_t t = 1; t < tokens; t++)
        if (order->token_at[t] != order->token_at[0] + t) order->columns = 0;
}

/* An order from (tokens, dims), two packed tables; `room`: items it may reach. */
static int take_order(Pages *self, PyObject *tables, size_t dims, size_t room, size_t **free, struct order *order) {
    Py_ssize_t tokens = self->pages.block_tokens, last_token, last_dim;
    if (!PyTuple_Check(tables) || PyTuple_GET_SIZE(tables) != 2) {
        PyErr_SetString(bad_request, "an order is a pair: places of tokens, places of dims");
        return -1;
    }
    size_t *token_at = *free, *dim_at = *free + tokens;
    last_token = take_table(PyTuple_GET_ITEM(tables, 0), "tokens", tokens, token_at);
    last_dim = last_token < 0 ? -1 : take_table(PyTuple_GET_ITEM(tables, 1), "dims", dims, dim_at);
    if (last_dim < 0) return -1;
    if ((size_t)last_token + last_dim >= room) {
        PyErr_Format(bad_request, "an order reaches item %zd of a (block, head), which has %zu", last_token + last_dim, room);
        return -1;
    }
    *free += tokens + dims;
    order->token_at = token_at;
    order->dim_at = dim_at;
    classify(order, tokens, dims);
    return 0;
}

static Py_ssize_t table_dims(PyObject *tables) {
    if (!PyTuple_Check(tables) || PyTuple_GET_SIZE(tables) != 2) {
        PyErr_SetString(bad_request, "an order is a pair: places of tokens, places of dims");
        return -1;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(tables, 1), &view, PyBUF_SIMPLE) < 0) return -1;
    Py_ssize_t dims = view.len / 8;
    PyBuffer_Release(&view);
    if (!dims) PyErr_SetString(bad_request, "a plane has no dims");
    return dims ? dims : -1;
}

static int alike(const struct pages *pages) {
    for (size_t p = 0; p < pages->plane_count; p++) {
        const struct plane *plane = pages->planes + p;
        if (memcmp(plane->paged.token_at, plane->packed.token_at, pages->block_tokens * sizeof(size_t)) ||
            memcmp(plane->paged.dim_at, plane->packed.dim_at, plane->dims * sizeof(size_t)))
            return 0;
    }
    return 1;
}

/* The tensor: [block][head][whatever the orders say]. Returns the items a (block, head) reaches, 0 with an error set. */
static size_t take_memory(Pages *self, PyObject *memory) {
    Py_buffer *view = &self->memory;
    struct pages *pages = &self->pages;
    if (PyObject_GetBuffer(memory, view, PyBUF_STRIDED | PyBUF_WRITABLE) < 0) return 0;
    if (view->ndim < 3 || (view->itemsize != 1 && view->itemsize != 2 && view->itemsize != 4)) {
        PyErr_Format(bad_request, "pages are [block][head][...] of 1, 2 or 4 bytes an item, not %d axes of %zd bytes",
                     view->ndim, view->itemsize);
        return 0;
    }
    size_t reach = 0;
    for (int axis = 0; axis < view->ndim; axis++) {
        Py_ssize_t stride = view->strides[axis], size = view->shape[axis];
        if (stride < 0 || stride % view->itemsize || size < 1 || (uintptr_t)view->buf % view->itemsize) {
            PyErr_Format(bad_request, "pages: axis %d has size %zd and stride %zd for items of %zd bytes", axis, size,
                         stride, view->itemsize);
            return 0;
        }
        if (axis > 1) reach += (size - 1) * stride / view->itemsize;
    }
    pages->base = view->buf;
    pages->item = view->itemsize;
    pages->blocks = view->shape[0];
    pages->heads = view->shape[1];
    pages->block_stride = view->strides[0];
    pages->head_stride = view->strides[1];
    return reach + 1;
}

static int fill(Pages *self, PyObject *memory, Py_ssize_t block_tokens, PyObject *orders, PyObject *packed) {
    struct pages *pages = &self->pages;
    size_t room = take_memory(self, memory), items = 0, total = 0;
    if (!room) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(orders);
    if (block_tokens < 1 || block_tokens > 1 << 20 || count < 1 || count > 64 ||
        (packed && PySequence_Fast_GET_SIZE(packed) != count)) {
        PyErr_Format(bad_request, "pages of %zd tokens a block, %zd planes", block_tokens, count);
        return -1;
    }
    self->planes = PyMem_Calloc(count, sizeof *self->planes);
    if (!self->planes) goto memory;
    for (Py_ssize_t p = 0; p < count; p++) {
        Py_ssize_t dims = table_dims(PySequence_Fast_GET_ITEM(orders, p));
        if (dims < 0) return -1;
        self->planes[p].dims = dims;
        items += dims;
        total += 2 * (block_tokens + dims);
    }
    size_t *free = self->tables = PyMem_Calloc(total, sizeof *free);
    if (!free) goto memory;
    pages->block_tokens = block_tokens;
    pages->token_bytes = items * pages->item;
    pages->planes = self->planes;
    pages->plane_count = count;
    pages->native = packed != NULL;
    for (Py_ssize_t p = 0; p < count; p++) {
        struct plane *plane = self->planes + p;
        if (take_order(self, PySequence_Fast_GET_ITEM(orders, p), plane->dims, room, &free, &plane->paged) < 0) return -1;
        if (packed && take_order(self, PySequence_Fast_GET_ITEM(packed, p), plane->dims, items * block_tokens, &free,
                                 &plane->packed) < 0)
            return -1;
    }
    pages->alike = packed && alike(pages);
    if (pages->alike && items * block_tokens > room) pages->alike = 0;
    return 0;
memory:
    PyErr_NoMemory();
    return -1;
}

static void pages_dealloc(Pages *self) {
    PyMem_Free(self->planes);
    PyMem_Free(self->tables);
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *pages_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "block_tokens", "orders", "packed", NULL};
    PyObject *memory, *orders, *packed = Py_None, *order_list = NULL, *packed_list = NULL;
    Py_ssize_t block_tokens;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnO|O:Pages", names, &memory, &block_tokens, &orders, &packed))
        return NULL;
    Pages *self = (Pages *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    order_list = PySequence_Fast(orders, "orders are a sequence");
    packed_list = order_list && packed != Py_None ? PySequence_Fast(packed, "packed orders are a sequence") : NULL;
    if (!order_list || (packed != Py_None && !packed_list) ||
        fill(self, memory, block_tokens, order_list, packed_list) < 0)
        Py_CLEAR(self);
    Py_XDECREF(order_list);
    Py_XDECREF(packed_list);
    return (PyObject *)self;
}

/* --- one call --- */

struct call {
    Py_buffer blocks, spans, sums, offsets;
    PyObject *sequence; /* of buffers; NULL: all objects lie in one, at offsets */
    Py_buffer *views;
    Py_ssize_t held;
    uint8_t **segments; /* where each object's first segment of this layer is */
    size_t count, bytes;
    size_t first, each; /* where it is among the object's segments, if not at the offset; how many these are */
    size_t more;        /* layers whose segments follow this one's in each buffer */
};

static void release(struct call *call) {
    while (call->held) PyBuffer_Release(&call->views[--call->held]);
    PyMem_Free(call->views);
    PyMem_Free(call->segments);
    Py_XDECREF(call->sequence);
    PyBuffer_Release(&call->blocks);
    PyBuffer_Release(&call->spans);
    PyBuffer_Release(&call->sums);
    PyBuffer_Release(&call->offsets);
}

/* Find this layer's part of object `i`, of so many tokens. */
static int locate(const struct pages *pages, struct call *call, size_t i, size_t tokens) {
    const Py_buffer *view = call->views + (call->sequence ? i : 0);
    size_t size = segment_bytes(pages, tokens), room = view->len, all = (1 + call->more) * pages->heads;
    uint64_t offset = 0;
    int fits = room == all * size;
    if (!call->sequence) {
        memcpy(&offset, (const char *)call->offsets.buf + 8 * i, 8);
        fits = offset <= room && (!size || (room - offset) / size >= call->first + pages->heads);
    }
    if (!fits) {
        PyErr_Format(bad_request, "segments %zu: %zd bytes from %llu on are not the %zu of %zu tokens of %zu heads", i,
                     view->len, (unsigned long long)offset, all * size, tokens, all);
        return -1;
    }
    call->bytes += all * size;
    call->segments[i] = (uint8_t *)view->buf + offset + call->first * size;
    if ((uintptr_t)call->segments[i] % pages->item) {
        PyErr_Format(bad_request, "segments %zu: %p is no place for items of %zu bytes", i, call->segments[i], pages->item);
        return -1;
    }
    return 0;
}

static int take_spans(const struct pages *pages, struct call *call, int saves) {
    const uint64_t *blocks = call->blocks.buf;
    size_t block_count = call->blocks.len / 8, slots = block_count * pages->block_tokens;
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i] >= pages->blocks) {
            PyErr_Format(bad_request, "block %llu is not among the %zu of this layer", (unsigned long long)blocks[i],
                         pages->blocks);
            return -1;
        }
    const struct span *spans = call->spans.buf;
    for (size_t i = 0; i < call->count; i++) {
        const struct span *span = spans + i;
        if (span->tokens > 1 << 24 || span->skip > span->tokens || span->count > span->tokens - span->skip ||
            span->first > slots || span->count > slots - span->first ||
            (saves && (span->skip || span->count != span->tokens)) ||
            (pages->native && span->count && (span->first + pages->block_tokens - span->skip % pages->block_tokens) %
                                                 pages->block_tokens)) {
            PyErr_Format(bad_request, "span %zu: tokens %zu to %zu of %zu at slot %zu of %zu slots", i, span->skip,
                         span->skip + span->count, span->tokens, span->first, slots);
            return -1;
        }
        if (locate(pages, call, i, span->tokens) < 0) return -1;
    }
    return 0;
}

/* Buffers: one an object, or, with `offsets`, one for all. */
static int take_buffers(struct call *call, PyObject *buffers, PyObject *offsets, int flags) {
    Py_ssize_t count = 1;
    if (offsets) {
        if (PyObject_GetBuffer(offsets, &call->offsets, PyBUF_SIMPLE) < 0) return -1;
        call->count = call->offsets.len / 8;
    } else {
        call->sequence = PySequence_Fast(buffers, "segments are a sequence of buffers");
        if (!call->sequence) return -1;
        call->count = count = PySequence_Fast_GET_SIZE(call->sequence);
    }
    call->views = PyMem_New(Py_buffer, count + 1);
    call->segments = PyMem_New(uint8_t *, call->count + 1);
    if (!call->views || !call->segments) {
        PyErr_NoMemory();
        return -1;
    }
    for (; call->held < count; call->held++) {
        PyObject *buffer = offsets ? buffers : PySequence_Fast_GET_ITEM(call->sequence, call->held);
        if (PyObject_GetBuffer(buffer, &call->views[call->held], flags) < 0) return -1;
    }
    return 0;
}

static int take(const struct pages *pages, struct call *call, PyObject *blocks, PyObject *spans, PyObject *buffers,
                PyObject *offsets, int saves) {
    if (PyObject_GetBuffer(blocks, &call->blocks, PyBUF_SIMPLE) < 0) return -1;
    if (PyObject_GetBuffer(spans, &call->spans, PyBUF_SIMPLE) < 0) return -1;
    if (take_buffers(call, buffers, offsets, saves ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return -1;
    if (call->blocks.len % 8 || call->offsets.len % 8 || call->spans.len % sizeof(struct span) ||
        call->spans.len / sizeof(struct span) != call->count || (uintptr_t)call->blocks.buf % 8 ||
        (uintptr_t)call->spans.buf % 8) {
        PyErr_Format(bad_request, "%zd bytes of blocks, %zd bytes of spans for %zu objects", call->blocks.len,
                     call->spans.len, call->count);
        return -1;
    }
    return take_spans(pages, call, saves);
}

static int alike_layers(const struct pages *one, const struct pages *other) {
    return one->blocks == other->blocks && one->heads == other->heads && one->block_tokens == other->block_tokens &&
           one->token_bytes == other->token_bytes && one->item == other->item && one->native == other->native;
}

/* This layer and `others`, a list: their tensors, to be freed; NULL with an error set. */
static const struct pages **take_layers(const Pages *self, PyObject *others) {
    Py_ssize_t count = PyList_GET_SIZE(others);
    const struct pages **layers = PyMem_New(const struct pages *, count + 1);
    if (!layers) {
        PyErr_NoMemory();
        return NULL;
    }
    layers[0] = &self->pages;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *other = PyList_GET_ITEM(others, i);
        if (!PyObject_TypeCheck(other, &pages_type) || !alike_layers(&self->pages, &((Pages *)other)->pages)) {
            PyErr_Format(bad_request, "other layer %zd is not one of the same blocks, heads, tokens and items", i);
            PyMem_Free(layers);
            return NULL;
        }
        layers[i + 1] = &((Pages *)other)->pages;
    }
    return layers;
}

static PyObject *pages_save(Pages *self, PyObject *args) {
    PyObject *blocks, *spans, *targets, *others = NULL, *result = NULL;
    const struct pages *pages = &self->pages, **layers;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "OOO|O!:save", &blocks, &spans, &targets, &PyList_Type, &others)) return NULL;
    others = others ? PyList_GetSlice(others, 0, PY_SSIZE_T_MAX) : PyList_New(0);
    if (!others) return NULL;
    call.more = PyList_GET_SIZE(others);
    layers = take_layers(self, others);
    if (!layers || take(pages, &call, blocks, spans, targets, NULL, 1) < 0) goto end;
    result = PyBytes_FromStringAndSize(NULL, 8 * call.count * (1 + call.more) * pages->heads);
    if (!result) goto end;
    char *sums = PyBytes_AS_STRING(result);
    const struct xxh3_kernel *kernel = chosen_kernel;
    enum xxh3_store store = call.bytes >= STREAM_BYTES ? XXH3_STREAMED : XXH3_CACHED;
    PyThreadState *state = call.bytes < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    for (size_t i = 0; i < call.count; i++) {
        const struct span *span = (const struct span *)call.spans.buf + i;
        size_t size = segment_bytes(pages, span->tokens);
        uint8_t *segment = call.segments[i];
        for (size_t layer = 0; layer <= call.more; layer++)
            for (size_t head = 0; head < pages->heads; head++, sums += 8, segment += size) {
                uint64_t sum = save_segment(kernel, layers[layer], head, call.blocks.buf, span, segment, store);
                memcpy(sums, &sum, 8);
            }
    }
    xxh3_copy_fence();
    if (state) PyEval_RestoreThread(state);
end:
    release(&call);
    PyMem_Free(layers);
    Py_DECREF(others);
    return result;
}

/* Load what `call` holds; its buffers are released. `expected`: checksums of all segments of all objects. */
static PyObject *load(const struct pages *pages, struct call *call, PyObject *expected) {
    Py_ssize_t bad = -1;
    int failed = 1;
    if (PyObject_GetBuffer(expected, &call->sums, PyBUF_SIMPLE) < 0) goto end;
    if ((size_t)call->sums.len != 8 * call->count * call->each) {
        PyErr_Format(bad_request, "%zd bytes of checksums for %zu segments", call->sums.len, call->count * call->each);
        goto end;
    }
    const struct xxh3_kernel *kernel = chosen_kernel;
    enum xxh3_store store = call->bytes >= STREAM_BYTES ? XXH3_STREAMED : XXH3_CACHED;
    PyThreadState *state = call->bytes < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    call->segments[call->count] = NULL;
    for (size_t i = 0; i < call->count && bad < 0; i++) {
        const struct span *span = (const struct span *)call->spans.buf + i;
        const char *sums = (const char *)call->sums.buf + 8 * (i * call->each + call->first);
        size_t size = segment_bytes(pages, span->tokens);
        for (size_t head = 0; head < pages->heads && bad < 0; head++, sums += 8) {
            const uint8_t *segment = call->segments[i] + head * size;
            const uint8_t *following = head + 1 < pages->heads ? segment + size : call->segments[i + 1];
            uint64_t sum = load_segment(kernel, pages, head, call->blocks.buf, span, segment, following, store);
            if (memcmp(sums, &sum, 8)) bad = i;
        }
    }
    xxh3_copy_fence();
    if (state) PyEval_RestoreThread(state);
    failed = 0;
end:
    release(call);
    if (failed) return NULL;
    if (bad >= 0) return PyLong_FromSsize_t(bad);
    Py_RETURN_NONE;
}

static PyObject *pages_load(Pages *self, PyObject *args) {
    PyObject *blocks, *spans, *sources, *sums;
    struct call call = {.each = self->pages.heads};
    if (!PyArg_ParseTuple(args, "OOOO:load", &blocks, &spans, &sources, &sums)) return NULL;
    if (take(&self->pages, &call, blocks, spans, sources, NULL, 0) == 0) return load(&self->pages, &call, sums);
    release(&call);
    return NULL;
}

static PyObject *pages_load_at(Pages *self, PyObject *args) {
    PyObject *blocks, *spans, *source, *offsets, *sums;
    Py_ssize_t first, each;
    if (!PyArg_ParseTuple(args, "OO(OOOn)n:load_at", &blocks, &spans, &source, &offsets, &sums, &each, &first)) return NULL;
    size_t heads = self->pages.heads;
    if (first < 0 || each < 0 || each > MAX_SEGMENTS || (size_t)each < heads || (size_t)first > each - heads) {
        PyErr_Format(bad_request, "segments %zd to %zd of %zd", first, first + (Py_ssize_t)heads, each);
        return NULL;
    }
    struct call call = {.first = first, .each = each};
    if (take(&self->pages, &call, blocks, spans, source, offsets, 0) == 0) return load(&self->pages, &call, sums);
    release(&call);
    return NULL;
}

static PyMethodDef pages_methods[] = {
    {"save", (PyCFunction)pages_save, METH_VARARGS, NULL},
    {"load", (PyCFunction)pages_load, METH_VARARGS, NULL},
    {"load_at", (PyCFunction)pages_load_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject pages_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kvrelay._native.Pages",
    .tp_basicsize = sizeof(Pages),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pages_new,
    .tp_dealloc = (destructor)pages_dealloc,
    .tp_methods = pages_methods,
};
