"""What a command's end is to whoever started it: an exit status, and errors said in one line each."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from kvrelay.errors import ConfigError, KvRelayError

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger("kvrelay")


def exit_status(run: Callable[[], int]) -> int:
    """Of ``run``: its own, or 1 failed while running, 2 unusable input, 130 interrupted."""
    try:
        status = run()
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            print(f"kvrelay: error: {problem}", file=sys.stderr)
        return 2
    except KvRelayError as error:
        print(f"kvrelay: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        log.critical("an error that kvrelay should have foreseen", exc_info=True)
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        told = "this is a fault of kvrelay: report it with the traceback above"
        print(f"kvrelay: error: {said}; {told}", file=sys.stderr)
        return 1
    return status
