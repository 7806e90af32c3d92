"""What an object is called in a folder or a bucket that holds no index: the digest of its key, under its tenant's."""

from __future__ import annotations

import hashlib

from kvrelay.pool.tiers.core.tier import split_tier_key

SUFFIX = ".kv"


def tenant_prefix(tenant: str) -> str:
    """The directory, or the beginning of the name, of a tenant's objects."""
    return hashlib.blake2b(tenant.encode(), digest_size=12, person=b"kvrelay tenant").hexdigest()


def object_path(name: bytes) -> tuple[str, str, str]:
    """Tenant, fan-out (one of 4,096) and file name of a `tier_key`. The record's header tells the key itself."""
    tenant, _ = split_tier_key(name)
    digest = hashlib.blake2b(name, digest_size=32, person=b"kvrelay object").hexdigest()
    return tenant_prefix(tenant), digest[:3], digest[3:] + SUFFIX
