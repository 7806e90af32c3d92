"""Flags of ``kvrelay router serve`` about who may come in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.router.entrance.settings import ENGINE_KEY_VARIABLE, FORWARD, EntranceSettings
from kvrelay.transport.tls import TlsConfig

if TYPE_CHECKING:
    import argparse

_DEFAULTS = EntranceSettings()


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add them."""
    serve.add_argument(
        "--max-concurrent", type=int, default=_DEFAULTS.max_concurrent, metavar="N",
        help="requests served at once, 0 for as many as come (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--max-per-decode", type=int, default=_DEFAULTS.max_per_decode, metavar="N",
        help="requests served at once for each decode engine, 0 for as many as come (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--max-queued", type=int, default=_DEFAULTS.max_queued, metavar="N",
        help="requests that wait while as many as may are served; over it: 503 (%(default)s)",
    )  # fmt: skip
    serve.add_argument(
        "--max-queue-wait", type=float, default=_DEFAULTS.max_queue_wait_s, metavar="S",
        help="how long each waits at most; then: 503 (%(default)g)",
    )  # fmt: skip
    serve.add_argument(
        "--keys-file", metavar="FILE", help="API keys, TOML or JSON (see kvrelay router key): others are refused"
    )
    serve.add_argument(
        "--engine-api-key-file", metavar="FILE", help=f"the engines' own API key (or {ENGINE_KEY_VARIABLE})"
    )
    serve.add_argument(
        "--forward-authorization", default=_DEFAULTS.forward_authorization, metavar="WAY",
        help=f"whether engines get the client's key: {', '.join(FORWARD)}; auto: without --keys-file (%(default)s)",
    )  # fmt: skip
    serve.add_argument("--tls-cert", metavar="FILE", help="PEM file of the certificate chain: clients speak TLS")
    serve.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key (in --tls-cert if not given)")
    serve.add_argument(
        "--tls-client-ca", metavar="FILE", help="PEM file of authorities: clients must show a certificate of theirs"
    )
    serve.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="pages of this origin may use the router from browsers, * for all; repeat for more",
    )  # fmt: skip
    serve.add_argument(
        "--engine-tls-ca", metavar="FILE",
        help="PEM file of authorities that engines' certificates come from, where their URLs are https (the system's)",
    )  # fmt: skip
    serve.add_argument("--engine-tls-cert", metavar="FILE", help="PEM file of the certificate chain shown to engines")
    serve.add_argument(
        "--engine-tls-key", metavar="FILE", help="PEM file of its private key (in --engine-tls-cert if not given)"
    )
    serve.add_argument(
        "--engine-tls-name", metavar="NAME", help="the name in the engines' certificates (the host of each one's URL)"
    )


def engine_tls_of(args: argparse.Namespace) -> TlsConfig:
    """What was given of TLS towards engines."""
    return TlsConfig(
        ca=args.engine_tls_ca, cert=args.engine_tls_cert, key=args.engine_tls_key, server_name=args.engine_tls_name
    )


def settings_of(args: argparse.Namespace) -> EntranceSettings:
    """What was given."""
    return EntranceSettings(
        max_concurrent=args.max_concurrent,
        max_per_decode=args.max_per_decode,
        max_queued=args.max_queued,
        max_queue_wait_s=args.max_queue_wait,
        keys_file=args.keys_file,
        engine_api_key_file=args.engine_api_key_file,
        forward_authorization=args.forward_authorization,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
        cors_origins=args.cors_origin,
    )
