# SPDX-License-Identifier: Apache-2.0
"""A real server process, started and ended by a test."""

import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from own_process import ends_within
from prometheus_client.parser import text_string_to_metric_families

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def metrics(self) -> Counter[str]:
        """Every sample of /metrics: its name, and its position where it has one."""
        values: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                position = sample.labels.get("position")
                key = sample.name if position is None else f"{sample.name}[{position}]"
                values[key] += sample.value
        return values


@contextmanager
def serving(
    command: Sequence[str | Path], folder: Path, start_s: float = 300
) -> Iterator[Server]:
    """Run `command --port PORT` in a process group of its own until it is not needed.

    Args:
        command: starts a server with a /health page.
        folder: for the server's log.
        start_s: for the start.

    Raises:
        AssertionError: it does not start, or does not end cleanly and alone.

    """
    port = _free_port()
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_healthy(server, process, start_s)
        yield server
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        process.terminate()
        process.wait(timeout=60)
        assert ends_within(process.pid, seconds=20), "server processes were left"
    finally:
        if not ends_within(process.pid, seconds=0):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> None:
    """Nothing else ends a server whose test is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(
    server: Server, process: subprocess.Popen, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        is_over = process.poll() is not None or time.monotonic() > deadline
        assert not is_over, f"the server did not start:\n{server.log.read_text()}"
