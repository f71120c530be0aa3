"""Runs the process of the server: opens the socket, runs uvicorn, and lets running requests end before it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from trt_kvcache.errors import OptionError
from trt_kvcache.files import read_file
from trt_kvcache.serve.service import Service

_SLOW = 5
"""Seconds in which clients can still read complete answers, after running requests have ended."""

_IDLE = 75
"""Seconds to keep a connection without requests: longer than clients keep it (OpenAI's client: 5 seconds), so that no
client sends a request over a connection that is being closed."""


def read_keys(file: Path) -> list[str]:
    """Read API keys from a file, one per line, without empty lines and lines that begin with #.

    Raises `OptionError` if the file cannot be read, other users can read it, or it has no key.
    """
    try:
        text = read_file(file, 1 << 20).decode()
        others = os.name == "posix" and stat.S_IMODE(file.stat().st_mode) & 0o077
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{file} is not UTF-8 text; give a file with a key in each line") from None
    if others:
        raise OptionError(f"{file} holds keys, and others may read it; run: chmod 600 {file}")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise OptionError(f"{file} holds no key; write one in each line")
    return keys


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address, so that clients can connect and wait while the model is opened.

    Raises `OptionError` if the address is in use, or does not belong to this machine.
    """
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        if os.name == "posix":  # on Windows this option would take the port from another process
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # on Linux, two processes can bind one port until one of them listens
    except OSError as error:
        if sock is not None:
            sock.close()
        raise OptionError(f"{host} port {port} cannot be used: {error.strerror}; give another port") from None
    return sock


class _Server(uvicorn.Server):
    """The uvicorn server. After the first signal it refuses new requests, and gives running requests time to end."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._drain, self._until, self._say_started = service, drain, 0.0, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        usual = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second signal ends the wait.
        self._until = time.monotonic() + (0 if self._service.draining else self._drain)
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and (not self._service.active or time.monotonic() >= self._until):
            await asyncio.to_thread(self._service.core.close)  # ends sequences that still run
            return True
        return await super().on_tick(counter)


def serve(service: Service, sock: socket.socket, drain: float, started: Callable[[], None]) -> None:
    """Serve requests until SIGTERM or Ctrl-C, and then until running requests have ended; close the core.

    Running requests get at most `drain` seconds to end. `started` is called once the server answers requests and
    handles signals.
    """
    config = uvicorn.Config(
        service.app, http="h11", ws="none", loop="asyncio", lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=_SLOW, timeout_keep_alive=_IDLE,
    )  # fmt: skip
    # The command line's watch would end a long step after a signal; here a step may run to its end.
    watch = signal.set_wakeup_fd(-1)
    try:
        _Server(config, service, drain, started).run([sock])
    finally:
        signal.set_wakeup_fd(watch, warn_on_full_buffer=False)
        service.core.close()
