"""Serves the page to this machine, and to nobody else unless asked to."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from flask import request
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cpsim.errors import CpsimError
from cpsim.explore.answers import Answers, load_costs
from cpsim.explore.app import make_app
from cpsim.prediction.runs import runs_in
from cpsim.runtime.interrupts import ignore_sigint

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class Quiet(WSGIRequestHandler):
    """Says nothing of single requests."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        del code, size


@contextmanager
def serving(start: Scenario, runs: Path | None, host: str, port: int) -> Iterator[BaseWSGIServer]:
    """A server of the page that listens already; ``serve_forever`` answers.

    Args:
        start: the case that the page begins with.
        runs: folder of run files, or none.
        host: address to listen on; requests must name it, or loopback, as their host.
        port: 0 takes a free one; the server knows which (``server_port``).

    Raises:
        CpsimError: the address cannot be had, or a run file is broken.
    """
    measured = runs_in(runs)
    with TemporaryDirectory(prefix="cpsim-explore-") as folder:
        with ignore_sigint():
            answers = Answers()
        try:
            app = make_app(start, measured, answers, Path(folder)).server
            Thread(target=_warm_up, daemon=True).start()
            app.before_request(lambda: _refused(host))
            yield _listening(host, port, app)
        finally:
            answers.close()


def _warm_up() -> None:
    """What answers need is loaded while the page opens, and left out of collections of garbage: one that looks at all
    of it holds an answer up by 0.1 s.
    """
    load_costs()
    gc.freeze()


def _listening(host: str, port: int, app: Any) -> BaseWSGIServer:
    try:
        return make_server(host, port, app, threaded=True, request_handler=Quiet)
    except (OSError, SystemExit) as error:
        raise CpsimError(f"explore: cannot listen on {host} port {port}: {error}; try --port 0") from None


def _refused(host: str) -> tuple[str, int] | None:
    """A page of another site may reach this machine under a name of its own; such requests are not answered."""
    named = urlsplit(f"//{request.environ.get('HTTP_HOST', '')}").hostname
    if named in (*LOOPBACK, host):
        return None
    return f"cpsim explore answers requests to {host} or localhost only", 403
