"""The door of the page: who may ask, what a request may be, and what browsers are told of the page."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hmac import compare_digest
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from dash.exceptions import DashException, PreventUpdate
from flask import Response, abort, redirect, request
from werkzeug.exceptions import HTTPException

from cpsim.errors import described
from cpsim.runtime.streams import say

if TYPE_CHECKING:
    from dash import Dash

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
AT_ONCE: Final = 4
"""Requests of one page that are answered at a time: what it changed, what it asks more of, and files."""
MOST_BYTES: Final = 1 << 18
"""Longest body of a request; that of a page with thousands of documents has a tenth."""
TOKEN: Final = "token"
"""In the link that is printed where the page can be reached from elsewhere."""
HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Nothing from elsewhere, and no script but those that are served; Plotly writes styles into the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Who may ask."""

    names: set[str]
    """Names of this machine that requests may give as their host, besides the address that they reached."""
    port: int
    token: str = ""
    """What a browser must have been given; empty where only this machine can ask."""

    @property
    def cookie(self) -> str:
        """Name of the cookie that remembers the token; servers of one machine share cookies."""
        return f"cpsim-{self.port}"

    def refusal(self) -> Any:
        """What a request that may not come in is answered; None for others."""
        asked = _host(f"//{request.environ.get('HTTP_HOST', '')}")
        reached = request.environ["werkzeug.socket"].getsockname()[0].partition("%")[0].removeprefix("::ffff:")
        if asked not in self.names and asked != reached:  # a page of another site, under a name of its own
            return f"cpsim explore answers requests to {min(self.names - {*LOOPBACK}, default='localhost')} only", 403
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.environ.get("HTTP_HOST"):
            return "cpsim explore answers its own page only", 403
        return self._without_token() if self.token else None

    def _without_token(self) -> Any:
        if TOKEN in request.args:
            if not _equal(request.args[TOKEN], self.token):
                return "cpsim explore: the token is wrong; open the link that was printed at its start", 403
            rest = urlencode([(k, v) for k, v in request.args.items(multi=True) if k != TOKEN])
            answer = redirect("/" + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict")
            return answer
        if _equal(request.cookies.get(self.cookie, ""), self.token):
            return None
        return "cpsim explore: open the link with the token that was printed at its start", 403


def door_of(host: str, address: str, port: int, token: str) -> Door:
    """The door of a server that listens.

    Args:
        host: what the user asked to listen on.
        address: where it listens.
        port: where it listens.
        token: what requests from elsewhere need; empty where there are none.
    """
    names = {*LOOPBACK, host.lower(), address}
    if token:
        name = socket.gethostname().lower()
        names |= {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}
        Thread(target=lambda: names.add(socket.getfqdn().lower()), daemon=True).start()  # may ask a slow network
    return Door(names=names, port=port, token=token)


def keep(app: Dash, door: Door) -> None:
    """Lets in who may ask, answers what makes no sense with one line, and tells browsers what the page may do."""
    policy = POLICY.format(scripts=" ".join(f"{one}" for one in app.csp_hashes()))
    app.server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    app.server.before_request(door.refusal)
    app.server.register_error_handler(Exception, _answer_to)

    def tell(response: Response) -> Response:
        response.headers.update({**HEADERS, "Content-Security-Policy": policy})
        return response

    app.server.after_request(tell)


def check(makes_sense: bool) -> None:
    """Refuses a request that our page does not send."""
    if not makes_sense:
        abort(400)


class Turns:
    """How many requests of each page are being answered."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def of(self, state: Any) -> Iterator[None]:
        """Within, one request of a page is answered; what goes wrong there is our mistake and said in one line."""
        check(isinstance(state, dict))
        page = page_of(state)
        with self._lock:
            if self._counts[page] >= AT_ONCE:
                abort(429)
            self._counts[page] += 1
        try:
            yield
        except (HTTPException, PreventUpdate):
            raise
        except Exception as error:
            _say(error)
            abort(500)
        finally:
            with self._lock:
                self._counts[page] -= 1
                self._counts += Counter()  # forgets those that are at zero


def page_of(state: Mapping[str, Any]) -> str:
    """Who asks: a page, as it names itself."""
    return str(state.get("page"))[:64]


def _answer_to(error: Exception) -> Any:
    """The answer to a request that could not be answered."""
    if isinstance(error, HTTPException):
        if error.code is None or error.code < 400:
            return error
        return f"{error.code} {error.name}", error.code
    if isinstance(error, PreventUpdate):
        return "", 204
    if request.method == "POST" or isinstance(error, UnicodeError):  # Dash could not make sense of what it was sent
        return "400 Bad Request: cpsim explore does not understand this", 400
    if isinstance(error, DashException | OSError | ValueError):  # of a name in the address
        return "404 Not Found", 404
    _say(error)
    return "500 Internal Server Error", 500


def _say(error: Exception) -> None:
    say(f"cpsim: explore: {described(error)}; please report this")


def _host(address: str) -> str | None:
    try:
        return (urlsplit(address).hostname or "").rstrip(".")
    except ValueError:
        abort(400)


def _equal(given: str, right: str) -> bool:
    """Compared in a time that does not tell how much is right."""
    return compare_digest(given.encode(errors="replace"), right.encode())
