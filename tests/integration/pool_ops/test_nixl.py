"""`kvrelay pool serve --nixl`: offered to tenants that are trusted with the arena, and to nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrelay.client.blocking import PoolClient
from kvrelay.errors import BadRequestError, ConfigError
from kvrelay.transport import nixl
from kvrelay.wire.messages import NixlMap, NixlMapped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.pool_ops.conftest import Command, Serve

needs_nixl = pytest.mark.skipif(not nixl.available(), reason=f"NIXL is not installed: {nixl.INSTALL}")


@needs_nixl
def test_objects_travel_over_nixl_where_it_is_offered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pool = serve("--nixl")
    with PoolClient.connect(pool.tcp, name="test", transport="nixl") as client:
        assert client.transport == "nixl"
        client.put(b"k", bytes(range(256)) * 1_000)
        assert client.get(b"k") == bytes(range(256)) * 1_000
    with PoolClient.connect(pool.tcp, name="other", transport="tcp") as other:
        assert other.get(b"k") == bytes(range(256)) * 1_000


@needs_nixl
def test_a_tenant_without_shared_memory_is_not_offered_it(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    (tmp_path / "token").write_text("t")
    file = tmp_path / "pool.toml"
    file.write_text('nixl = true\n[[tenants]]\nname = "a"\ntoken_file = "token"\n')
    pool = serve("--config", str(file))
    with pytest.raises(ConfigError, match="does not offer it"):
        PoolClient.connect(pool.tcp, name="test", token="t", transport="nixl")
    with pool.connect(pool.tcp, token="t") as client:
        with pytest.raises(BadRequestError, match="by tenants trusted with its memory only"):
            client.start(NixlMap(0), NixlMapped).result(5.0)
        client.put(b"k", b"v")


def test_a_pool_without_it_says_how_to_start_one_with_it(serve: Serve) -> None:
    pool = serve()
    with pytest.raises(ConfigError, match="start it with --nixl"):
        PoolClient.connect(pool.tcp, name="test", transport="nixl")
    with pool.connect(pool.tcp) as client, pytest.raises(BadRequestError, match="start it with --nixl"):
        client.start(NixlMap(0), NixlMapped).result(5.0)


@pytest.mark.skipif(nixl.available(), reason="NIXL is installed")
def test_where_it_is_not_installed_the_pool_says_how_to_install_it(kvrelay: Command) -> None:
    done = kvrelay("pool", "serve", "--size", "1MiB", "--listen", "127.0.0.1:0", "--nixl")
    assert done.returncode == 2
    assert nixl.INSTALL in done.stderr
