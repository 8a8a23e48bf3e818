"""Chromium under Selenium, for tests of pages: what a person would do, and how long the page takes."""

from __future__ import annotations

import shutil
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

WATCH = """
const say = () => { window.said = performance.now(); window.drawn = null; window.last = null;
  window.before = Number(document.documentElement.dataset.asked); };
const page = document.querySelector("#page");
const look = () => {
  if (Number(page.dataset.answered) <= window.before) return;
  window.last = performance.now();
  if (window.drawn === null) window.drawn = window.last; };
if (window.before === undefined) {
  for (const kind of ["mousedown", "keydown"]) { window.addEventListener(kind, say, true); }
  window.addEventListener("change", (event) => { if (event.target.tagName === "SELECT") say(); }, true);
  document.querySelector("#plot .js-plotly-plot").on("plotly_afterplot", look);
}
say();
"""
"""Notes when something was last said, when the page first drew an answer to it, and when it last drew one."""
WHOLE = """
const done = arguments[0], progress = document.querySelector("#progress");
const look = () => {
  const whole = window.drawn !== null && progress.value >= progress.max && performance.now() - window.last > 300;
  if (whole) done([window.said, window.drawn, window.last]); else setTimeout(look, 20); };
look();
"""
"""Answers, once the answer is whole and nothing is drawn any more, with the moments that it noted [ms]; asked once,
since a driver that asks again and again takes processor time from the page."""


def serious(driver):
    """What axe-core finds on the page that keeps people from using it: rule, impact and the first place of each."""
    import axe_core_python

    driver.execute_script((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((found) => done(found.violations.map("
        "(one) => [one.id, one.impact, one.nodes[0].html, one.nodes[0].failureSummary])));"
    )
    return [one for one in found if one[1] in ("serious", "critical")]


def chromium(downloads=None, width=1280, height=1000):
    """A headless browser whose files land in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = CHROMIUM
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    flags += f"--disable-component-update --disable-sync --no-first-run --window-size={width},{height}"
    for flag in flags.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if downloads:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    return webdriver.Chrome(options=options, service=Service(DRIVER))
