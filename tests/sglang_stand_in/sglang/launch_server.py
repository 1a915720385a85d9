"""Speaks as much of SGLang's command line and HTTP as launching needs. STAND_IN says how it behaves."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        free = self.path == "/health" or self.headers["Authorization"] == f"Bearer {arguments.api_key}"
        self.send_response(200 if free else 401)
        self.end_headers()


class Server(socketserver.TCPServer):
    """Not an HTTPServer, which looks up the name of its host when it is made."""

    allow_reuse_address = True


def report() -> None:
    """Who runs, with a child that would outlive its parent."""
    child = subprocess.Popen(["sleep", "600"])
    seen = {"argv": sys.argv[1:], "environ": dict(os.environ), "pids": [os.getpid(), os.getppid(), child.pid]}
    seen["command_lines"] = [Path(f"/proc/{pid}/cmdline").read_text() for pid in seen["pids"]]
    seen["path"], seen["stdin"] = sys.path, sys.stdin.read()
    part = Path(os.environ["STAND_IN_REPORT"] + ".part")
    part.write_text(json.dumps(seen))
    part.replace(os.environ["STAND_IN_REPORT"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--api-key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    behaviour = os.environ.get("STAND_IN", "serve")
    print(f"launched with {arguments.api_key}")
    if behaviour == "die":
        print(*(f"line {number}" for number in range(30)), sep="\n")
        sys.exit(3)
    report()
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "dist":
        sys.exit(
            "torch.distributed.DistNetworkError: port: 29500, code: -98, name: EADDRINUSE, message: address in use"
        )
    address = (arguments.host, arguments.port)
    try:
        Server(address, Handler).serve_forever()
    except OSError:  # the real one then waits for its warm-up, which waits for the server
        print(f"ERROR: [Errno 98] error while attempting to bind on address {address}: address already in use")
        time.sleep(600)
