"""A process for the launcher to run: serves, dies, hangs, or is stubborn, as its arguments say.

fake_process.py serve PORT [--children FILE] [--ignore-term] [--shared] | die STATUS | hang | print-and-die LINES
"""

# ruff: noqa: T201 - a program that talks by printing

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEPER = "import time; time.sleep(600)"
DAEMON = f"""
import os
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
os.dup2(2, 1)
{SLEEPER}
"""


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def start_children(file: Path) -> None:
    """Start a child that ignores SIGTERM and a daemon that has left the session; write the ids of both."""
    stubborn = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPER}"]
    )
    daemon = subprocess.run([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True, check=True)
    file.write_text(f"{stubborn.pid} {daemon.stdout}")


def main(mode: str, *args: str) -> None:
    if mode == "die":
        print("about to die", flush=True)
        print("Traceback (most recent call last):\nValueError: the fake is out of luck", flush=True)
        sys.exit(int(args[0]))
    if "--ignore-term" in args:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "--children" in args:
        start_children(Path(args[args.index("--children") + 1]))
    if mode == "hang":
        print("still thinking", flush=True)
        time.sleep(600)
    http.server.HTTPServer.allow_reuse_port = "--shared" in args
    http.server.HTTPServer(("127.0.0.1", int(args[0])), Answer).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
