"""Pages of the explorer without a browser: what their scripts send, and how long the answer takes."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from contextlib import contextmanager

from scripts import ROOT

from cpsim.case.load import scenario_from
from cpsim.explore import controls

SMALL = {"gpus": 8, "cluster": "dgx-h200", "tokens_per_gpu": 4096, "mask": "causal", "heads": 32, "kv_heads": 8}
ABSURD = SMALL | {"gpus": 4096, "tokens_per_gpu": 8192, "mask": "causal_document"}


@contextmanager
def explorer(*options, warm=True):
    """A running explorer: its link, and the process, whose stderr is a pipe."""
    command = [sys.executable, "-m", "cpsim", "explore", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("Explore at http://"), line
            link = line.split()[2]
            if warm:
                Visitor(link, "first").settle(600)
            yield link, process
        finally:
            process.terminate()


class Visitor:
    """One page."""

    def __init__(self, link, page, **case):
        self.host = link.split("/")[2]
        self.page, self.serial = page, 0
        self.case = SMALL | case
        self.headers = {"Content-Type": "application/json"}

    def state(self, **changes):
        said = controls.state_of(scenario_from(self.case))
        self.serial += 1
        return said | {"view": "ranking", "theme": "light", "page": self.page, "serial": self.serial} | changes

    def request(self, method, path, body=None, headers=None, timeout=60):
        """Status, body and headers."""
        connection = http.client.HTTPConnection(self.host, timeout=timeout)
        try:
            connection.request(method, path, body, self.headers | (headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def body(self, state, more=False, answered=None):
        """What the page's script sends when a control has changed, or to ask for more of the same answer."""
        shows = next(c for c in self.dependencies() if {"id": "more", "property": "data"} in c["inputs"])
        names = [one.rsplit(".", 1) for one in shows["output"].strip(".").split("...")]
        return {
            "output": shows["output"],
            "outputs": [{"id": name, "property": of} for name, of in names],
            "inputs": [
                {"id": "state", "property": "data", "value": state},
                {"id": "more", "property": "data", "value": answered and answered["at"]},
            ],
            "changedPropIds": ["more.data" if more else "state.data"],
            "state": [{"id": "answered", "property": "data", "value": answered}],
        }

    def dependencies(self):
        if not hasattr(self, "_dependencies"):
            self._dependencies = json.loads(self.request("GET", "/_dash-dependencies")[1])
        return self._dependencies

    def ask(self, state, **how):
        """The answer by places of the page, and the seconds that it took."""
        body = json.dumps(self.body(state, **how))
        begun = time.perf_counter()
        status, said, _ = self.request("POST", "/_dash-update-component", body)
        seconds = time.perf_counter() - begun
        assert status == 200, (status, said[:200])
        return json.loads(said)["response"], seconds

    def first(self, seconds=60, **changes):
        """Seconds until a first strategy is recommended, which asking for more may take."""
        state, begun = self.state(**changes), time.perf_counter()
        said, _ = self.ask(state)
        while not said.get("lead", {}).get("children", "").startswith("Run "):
            assert time.perf_counter() < begun + seconds, said
            said, _ = self.ask(state, more=True, answered=said["answered"]["data"])
        return time.perf_counter() - begun

    def settle(self, seconds=60, **changes):
        """Asks until the answer is whole, as the page does; the last that said something, and the first's time [s]."""
        state, end = self.state(**changes), time.monotonic() + seconds
        said, first = self.ask(state)
        last = said
        while (done := said["answered"]["data"])["pieces"][0] < done["pieces"][1]:
            assert time.monotonic() < end, "no answer"
            said, _ = self.ask(state, more=True, answered=done)
            last = said if "lead" in said else last
        return last, first
