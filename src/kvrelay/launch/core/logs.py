"""What a dead process's log has to say: its last lines without noise, and the errors that came before them.

vLLM ends with "See root cause above": the cause is then far up, behind other processes' tracebacks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISE = re.compile(
    r"^(nanobind: | - leaked |\s*- \.\.\. skipped|See https://nanobind|.*resource_tracker: |\s*warnings\.warn\(|\s*$"
    r'|.*"GET /(?:health|metrics) HTTP/[\d.]+" 200\b)'
)
"""What Python and nanobind print when an interpreter ends in a hurry, and probes that were answered well."""
CAUSE = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+)$")
"""The last line of a traceback, plain or in vLLM's log format."""
UNTELLING = re.compile(r"See root cause above|^SystemExit")


def last_words(lines: Sequence[str], count: int) -> list[str]:
    """The last ``count`` lines that say something."""
    return [line for line in lines if not NOISE.match(line)][-count:]


def causes(lines: Sequence[str], count: int) -> list[str]:
    """The last ``count`` different errors in the log, in order of their first appearance."""
    found = dict.fromkeys(match[1] for line in lines if (match := CAUSE.match(line)) and not UNTELLING.search(match[1]))
    return list(found)[-count:]
