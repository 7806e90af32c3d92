/* A file mapped where huge pages of it can be: its offsets and its addresses agree in their lowest 21 bits. */
#ifndef KVRELAY_MAPPING_H
#define KVRELAY_MAPPING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyTypeObject mapping_type;

#endif
