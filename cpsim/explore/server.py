"""Serves the page to this machine, and to others only where asked to, with a token."""

from __future__ import annotations

import gc
import io
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from cpsim.errors import CpsimError, MachineError, shown
from cpsim.explore.answers import Answers, load_costs
from cpsim.explore.app import make_app
from cpsim.explore.door import LOOPBACK, MOST_BYTES, TOKEN, door_of, keep
from cpsim.prediction.runs import runs_in
from cpsim.runtime.interrupts import ignore_sigint

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario

CONNECTIONS: Final = 128
"""Connections at once; where there are more, those go that have kept silent for longest."""
PATIENCE_S: Final = 10.0
"""How long a connection may take to say what it wants, or to take what it gets [s]."""
PIECE_BYTES: Final = 1 << 16
"""How much is read at a time of what nobody wants, e.g. of a body that is too long."""


class _Pieces:
    """What comes through a connection, at most a piece at a time, however much somebody wants to read."""

    def __init__(self, file: Any) -> None:
        self._file, self.readline, self.close = file, file.readline, file.close

    def read(self, most: int) -> bytes:
        return bytes(self._file.read1(min(most, PIECE_BYTES)))


class Handler(WSGIRequestHandler):
    """Reads a request whole before it is answered, and says nothing of single ones."""

    server: Server
    timeout = PATIENCE_S
    server_version = "cpsim"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Pieces(self.rfile)

    def run_wsgi(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers:
            self.send_error(411)
        elif not (length.isascii() and length.isdigit() and len(self.headers.get_all("Content-Length", [])) < 2):
            self.send_error(400)
        else:
            self._body = self._read(int(length[:12])) if int(length[:12]) <= MOST_BYTES else b""
            self.server.heard(self.connection)
            super().run_wsgi()
        self.close_connection = True

    def make_environ(self) -> dict[str, Any]:
        """Raises ConnectionError, which ends the connection, for an address that is none."""
        try:
            environ = super().make_environ()
        except ValueError:
            self.send_error(400)
            raise ConnectionError from None
        return environ | {"wsgi.input": io.BytesIO(self._body)}

    def _read(self, length: int) -> bytes:
        body, until = b"", time.monotonic() + PATIENCE_S
        while len(body) < length and time.monotonic() < until:
            piece = self.rfile.read(length - len(body))
            if not piece:
                break
            body += piece
        if len(body) < length:
            self.send_error(408)
            raise ConnectionError
        return body

    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


class Server(ThreadedWSGIServer):
    """A thread for each connection, of which there are not too many."""

    request_queue_size = 512
    address: str
    """Where it listens."""
    link: str
    """What to open."""

    def __init__(self, listening: socket.socket, app: Any) -> None:
        """
        Args:
            listening: a socket, which is the server's from now on.
            app: what answers (WSGI).
        """
        self._silent: OrderedDict[socket.socket, float] = OrderedDict()
        self._open = 0
        self._lock = Lock()
        host = listening.getsockname()[0]
        super().__init__(host, listening.getsockname()[1], app, Handler, fd=listening.fileno())
        listening.close()
        self.server_port = self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a thread; where there are too many, who has not yet said what it wants loses its connection."""
        with self._lock:
            full, oldest = self._open >= CONNECTIONS, next(iter(self._silent), None)
            if full and oldest is not None:
                self._silent.pop(oldest)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open += 1
            self._silent[request] = time.monotonic()
        super().process_request(request, client_address)

    def heard(self, connection: Any) -> None:
        """A connection has said what it wants."""
        with self._lock:
            self._silent.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """A connection ends."""
        with self._lock:
            self._silent.pop(request, None)
            self._open -= 1
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever sent what cannot be read has lost the connection."""


@contextmanager
def serving(start: Scenario, runs: Path | None, host: str, port: int) -> Iterator[Server]:
    """A server of the page that listens already; ``serve_forever`` answers.

    Args:
        start: the case that the page begins with.
        runs: folder of run files, or none.
        host: address to listen on; requests must name it, or another name of this machine, as their host. Where others
            can reach it, requests need the token of the link, too.
        port: 0 takes a free one; the server knows which (``server_port``), and the link to open.

    Raises:
        CpsimError: this machine has no such address, or a run file is broken.
        MachineError: the port cannot be had.
    """
    measured = runs_in(runs)
    with _listening(host, port) as listening:
        address, taken = listening.getsockname()[:2]
        token = "" if _is_loopback(address) else secrets.token_urlsafe(32)
        with ignore_sigint():
            answers = Answers()
        try:
            app = make_app(start, measured, answers)
            keep(app, door_of(host, address, taken, token))
            Thread(target=_warm_up, daemon=True).start()
            server = Server(listening, app.server)
            server.link = _link(host, address, taken, token)
            yield server
        finally:
            answers.close()


def _warm_up() -> None:
    """What answers need is loaded while the page opens, and left out of collections of garbage: one that looks at all
    of it holds an answer up by 0.1 s.
    """
    load_costs()
    gc.freeze()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        CpsimError: this machine has no such address.
        MachineError: it has, but the port cannot be had.
    """
    if not host.strip():
        raise CpsimError("explore: --host: expected an address to listen on, got nothing; leave it out for 127.0.0.1")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=Server.request_queue_size)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        why = f"explore: cannot listen on {shown(host)} port {port}: {reason}"
    if _is_address(host):
        raise MachineError(f"{why}; try --port 0")
    raise CpsimError(f"{why}; try --host 127.0.0.1")


def _is_address(host: str) -> bool:
    """Whether this machine can be listened to there."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError):
        return False
    return True


def _is_loopback(address: str) -> bool:
    known = ip_address(address.partition("%")[0])
    return (getattr(known, "ipv4_mapped", None) or known).is_loopback


def _link(host: str, address: str, port: int, token: str) -> str:
    """What to open in a browser: an address under which others reach this machine where it listens on all of its."""
    name = _own_address(address) if ip_address(address.partition("%")[0]).is_unspecified else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?{TOKEN}={token}" if token else "")


def _own_address(every: str) -> str:
    """The address from which this machine would speak to others; loopback where it has no network."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in every else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((elsewhere, 9))  # sends nothing
        except OSError:
            return LOOPBACK[2] if ":" in every else LOOPBACK[0]
        return str(asked.getsockname()[0])
