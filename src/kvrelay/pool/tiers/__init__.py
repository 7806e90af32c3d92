"""Storage below the arena: local disk, shared folder, object store."""
