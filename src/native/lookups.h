/* Looking keys up in the index of a pool of this host. src/kvrelay/_native.pyi says what each function does. */
#ifndef KVRELAY_LOOKUPS_H
#define KVRELAY_LOOKUPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef lookup_methods[];

#endif
