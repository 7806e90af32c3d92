/* kvrelay._native: what has to be fast. src/kvrelay/_native.pyi says what each function does. */
#include "batches.h"
#include "catalog.h"
#include "http.h"
#include "lookups.h"
#include "mapping.h"
#include "pages.h"
#include "payload.h"

#include <string.h>

const struct xxh3_kernel *chosen_kernel;
PyObject *bad_request;

static PyObject *use_kernel(PyObject *module, PyObject *name) {
    const char *wanted = PyUnicode_AsUTF8(name);
    (void)module;
    if (!wanted) return NULL;
    for (const struct xxh3_kernel *kernel = xxh3_kernels; kernel->name; kernel++)
        if (!strcmp(kernel->name, wanted)) {
            chosen_kernel = kernel;
            Py_RETURN_NONE;
        }
    PyErr_Format(bad_request, "%R is no kernel of this processor; KERNELS names them", name);
    return NULL;
}

static PyMethodDef own_methods[] = {
    {"use_kernel", use_kernel, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvrelay._native", .m_size = -1, .m_methods = own_methods};

static int fill(PyObject *module) {
    PyObject *errors = PyImport_ImportModule("kvrelay.errors");
    if (!errors) return -1;
    bad_request = PyObject_GetAttrString(errors, "BadRequestError");
    Py_DECREF(errors);
    if (!bad_request) return -1;
    if (!chosen_kernel) {
        xxh3_find_kernels();
        chosen_kernel = xxh3_kernels;
    }
    Py_ssize_t count = 0;
    while (xxh3_kernels[count].name) count++;
    PyObject *names = PyTuple_New(count);
    if (!names) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyUnicode_FromString(xxh3_kernels[i].name);
        if (!name) {
            Py_DECREF(names);
            return -1;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    int added = PyModule_AddObjectRef(module, "KERNELS", names);
    Py_DECREF(names);
    if (added < 0 || PyModule_AddFunctions(module, batch_methods) < 0) return -1;
    PyObject *interface = PyLong_FromUnsignedLong(KVRELAY_INTERFACE);
    added = PyModule_AddObjectRef(module, "INTERFACE", interface);
    Py_XDECREF(interface);
    if (added < 0) return -1;
    if (PyModule_AddFunctions(module, http_methods) < 0) return -1;
    if (PyModule_AddFunctions(module, lookup_methods) < 0) return -1;
    if (PyModule_AddType(module, &CatalogType) < 0) return -1;
    if (PyModule_AddType(module, &mapping_type) < 0) return -1;
    if (PyModule_AddType(module, &pages_type) < 0) return -1;
    return PyModule_AddType(module, &payload_type);
}

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && fill(module) < 0) Py_CLEAR(module);
    return module;
}
