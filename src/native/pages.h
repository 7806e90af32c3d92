/* One layer of an engine's paged KV, as Python hands it over. */
#ifndef KVRELAY_PAGES_H
#define KVRELAY_PAGES_H

#include "batches.h"

extern PyTypeObject pages_type;

#endif
