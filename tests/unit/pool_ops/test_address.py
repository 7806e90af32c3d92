"""Addresses of pools, TLS among them, survive being written and read."""

from __future__ import annotations

import pytest

from kvrelay.errors import ConfigError
from kvrelay.transport.address import Address, parse_address
from kvrelay.transport.tls import TlsConfig


@pytest.mark.parametrize(
    "address",
    [
        Address(path="/run/pool.sock"),
        Address(host="::1", port=7420),
        Address(host="pool.example", port=7420, tls=TlsConfig()),
        Address(host="::1", port=1, tls=TlsConfig(ca="/a b/c&d=?.pem", cert="c.pem", key="k.pem", server_name="pool")),
    ],
)
def test_an_address_is_what_its_text_says(address: Address) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["tls:host", "tls:host:1?cacert=x", "tls:", "udp:host:1"])
def test_other_texts_are_refused_with_the_legal_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|ca, cert, key, server_name"):
        parse_address(text)
