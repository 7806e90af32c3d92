"""Moving bytes: sockets with scatter/gather, shared memory."""
