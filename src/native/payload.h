/* Bytes in many places, on their way through a socket. */
#ifndef KVRELAY_PAYLOAD_H
#define KVRELAY_PAYLOAD_H

#include "batches.h"

extern PyTypeObject payload_type;

#endif
