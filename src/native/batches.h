/* What Python hands over for a batch: buffers, packed columns of u64, checked before anything is touched. */
#ifndef KVRELAY_BATCHES_H
#define KVRELAY_BATCHES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "xxh3.h"

extern const struct xxh3_kernel *chosen_kernel;
extern PyObject *bad_request; /* kvrelay.errors.BadRequestError */

/* Below this many bytes the interpreter lock is kept: giving it up may cost more than the work. */
#define RELEASE_BYTES (128u << 10)

extern PyMethodDef batch_methods[];

#endif
