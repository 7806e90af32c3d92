/* kvrelay._native.Catalog: kvrelay.pool.core.catalog's interface over `struct books`. */
#ifndef KVRELAY_CATALOG_H
#define KVRELAY_CATALOG_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyTypeObject CatalogType;

#endif
