/* What the router does to every message that passes through it. */
#ifndef KVRELAY_HTTP_H
#define KVRELAY_HTTP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef http_methods[];

#endif
