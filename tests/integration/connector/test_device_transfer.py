"""KV from one device to another through a real pool, while kernels run late."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")

from kvrelay.testing.deferred_device import DeferredCopies  # noqa: E402 - after the skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrelay.testing.pool import PoolThread

TOKENS = 200
P_BLOCKS = [7, 3, 4, 5, 20, 1, 0]
D_BLOCKS = [2, 13, 6, 21]


@pytest.mark.parametrize("late", [False, True])
def test_what_p_computes_late_arrives_whole_on_d(
    pool: PoolThread, make_rank: Callable[..., Any], make_chunks: Callable[..., Any], *, late: bool
) -> None:
    """``late``: saved in a step after the one that computed it, as what a request generated at its end is."""
    chunks = make_chunks(TOKENS)
    p_copies, d_copies = DeferredCopies(), DeferredCopies()
    p = make_rank(pool.unix, copies=p_copies)
    d = make_rank(pool.tcp, copies=d_copies, isa="amx", block_tokens=64, name="D")
    true = [np.random.default_rng(at).integers(0, 1 << 32, pages.shape, "u4") for at, pages in enumerate(p.pages)]

    order = p.save_order(chunks, P_BLOCKS)
    p.begin(saves=() if late else (order,))
    for layer, pages in enumerate(p.pages):
        p_copies.launch(partial(np.copyto, pages, true[layer]))
        p.side.layer_computed(layer)
    p.side.end_step()
    if late:
        p.step(saves=(order,))
    p.saved(1)
    assert p_copies.reached == len(p.pages)

    for pages in d.pages:  # whose blocks they were, in a step that still runs
        d_copies.launch(partial(pages.fill, 0xBAD))
    d.step(loads=(d.load_order(chunks, D_BLOCKS),))
    outcome = d.loaded().report.loads["r"]
    assert outcome.valid_end == TOKENS
    d_copies.finish()
    for mine, theirs in zip(d.tokens(D_BLOCKS, TOKENS), p.tokens(P_BLOCKS, TOKENS), strict=True):
        assert np.array_equal(mine, theirs)
