from __future__ import annotations

import signal

from kvrelay.launch.core.failures import describe_status
from kvrelay.launch.core.logs import causes, last_words

VLLM_LOG = """\
(EngineCore pid=9) INFO 11-30 00:42:13 [core.py:133] Initializing
(EngineCore pid=9) ERROR 11-30 00:42:13 [core.py:1510] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-30 00:42:13 [core.py:1510]     raise ValueError(
(EngineCore pid=9) ERROR 11-30 00:42:13 [core.py:1510] ValueError: To serve at least one request 0.02 GiB is needed
Process EngineCore:
Traceback (most recent call last):
ValueError: To serve at least one request 0.02 GiB is needed
(EngineCore pid=9) INFO 11-30 00:42:15 [multiproc_executor.py:486] all workers exited gracefully
kvrelay.errors.ConfigError: MLA is not supported
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 514 functions!
 - leaked function "create_loc"
 - ... skipped remainder
/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked
  warnings.warn('resource_tracker: There appear to be %d '
""".splitlines()


def test_the_root_causes_are_found_once_each_wherever_they_are() -> None:
    assert causes(VLLM_LOG, 2) == [
        "ValueError: To serve at least one request 0.02 GiB is needed",
        "kvrelay.errors.ConfigError: MLA is not supported",
    ]
    assert causes(["all is well"], 2) == []


def test_last_words_leave_out_probes_that_were_answered_well() -> None:
    log = [
        '(APIServer pid=7) INFO:     127.0.0.1:4466 - "POST /v1/completions HTTP/1.1" 200 OK',
        '(APIServer pid=7) INFO:     127.0.0.1:4466 - "GET /health HTTP/1.1" 503 Service Unavailable',
        '(APIServer pid=7) INFO:     127.0.0.1:4466 - "GET /health HTTP/1.1" 200 OK',
        'INFO:     127.0.0.1:4468 - "GET /metrics HTTP/1.1" 200 OK',
    ]
    assert last_words(log, 20) == log[:2]


def test_last_words_leave_out_the_noise_of_a_dying_interpreter() -> None:
    assert last_words(VLLM_LOG, 1) == [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    ]


def test_a_status_is_told_by_number_or_by_signal_name() -> None:
    assert describe_status(3) == "status 3"
    assert describe_status(-signal.SIGKILL) == "signal 9 (SIGKILL)"
    assert describe_status(-250) == "signal 250"
