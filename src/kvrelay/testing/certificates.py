"""Certificates for tests: an authority that lives for a test, and what it signs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trustme

from kvrelay.transport.tls import TlsConfig

if TYPE_CHECKING:
    from pathlib import Path


class Pair(NamedTuple):
    """PEM files of a certificate chain and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates into ``directory``; ``ca``: its own certificate."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self._authority = trustme.CA()
        self.ca = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def server(self, *names: str) -> Pair:
        """A pool's certificate for host names and addresses."""
        return self._write("server", self._authority.issue_cert(*names))

    def client(self, common_name: str) -> Pair:
        """A client's certificate."""
        return self._write(common_name, self._authority.issue_cert(f"{common_name}.test", common_name=common_name))

    def trusting(self, client: Pair | None = None, *, server_name: str | None = None) -> TlsConfig:
        """What a client needs to trust this authority and, with ``client``, to show a certificate."""
        cert, key = (str(client.cert), str(client.key)) if client else (None, None)
        return TlsConfig(ca=str(self.ca), cert=cert, key=key, server_name=server_name)

    def _write(self, name: str, signed: trustme.LeafCert) -> Pair:
        pair = Pair(self._directory / f"{self._name}-{name}.pem", self._directory / f"{self._name}-{name}.key")
        for at, blob in enumerate(signed.cert_chain_pems):
            blob.write_to_path(str(pair.cert), append=at > 0)
        signed.private_key_pem.write_to_path(str(pair.key))
        return pair
