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


LOOKS = r"""
const found = [], words = (text) => JSON.stringify(text.trim().slice(0, 40));
const wide = document.documentElement.scrollWidth;
if (wide > innerWidth) found.push(`the page is ${wide} px wide`);
function within(rect, from) { // what scroll containers leave of a rectangle
  let { left, top, right, bottom } = rect;
  for (let one = from; one && one !== document.body; one = one.parentElement) {
    const how = getComputedStyle(one), box = one.getBoundingClientRect();
    if (how.overflowX === "visible" && how.overflowY === "visible") continue;
    [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
    [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
  }
  return { left, top, right, bottom };
}
function meet(some) { // texts of which one lies over the other
  some.sort((one, other) => one[1].top - other[1].top);
  some.forEach(([what, a, turned], i) => {
    for (const [other, b, too] of some.slice(i + 1)) {
      if (b.top >= a.bottom - 3) break;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      if (across > 2 && Math.min(a.bottom, b.bottom) - b.top > 3 && !(turned && too)) {
        found.push(`${words(what)} and ${words(other)} overlap`);
      }
    }
  });
}
for (const plot of document.querySelectorAll(".js-plotly-plot")) {
  const box = plot.getBoundingClientRect(), some = [];
  for (const text of plot.querySelectorAll("svg text")) {
    const at = text.getBoundingClientRect(), how = getComputedStyle(text);
    const hidden = how.visibility === "hidden" || Number(how.opacity) === 0 || how.display === "none";
    if (!at.width || hidden || text.closest(".hoverlayer")) continue;
    const beside = at.left < box.left - 1 || at.right > box.right + 1;
    const out = beside || at.bottom > box.bottom + 1 || at.top < box.top - 1;
    if (out) found.push(`${plot.parentElement.id || plot.id}: ${words(text.textContent)} is cut`);
    const angle = Number((/rotate\(([-\d.]+)/.exec(text.getAttribute("transform")) || [0, 0])[1]);
    some.push([text.textContent, at, angle % 90 !== 0]);
  }
  meet(some);
}
const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const visible = { contentVisibilityAuto: true, opacityProperty: true, visibilityProperty: true };
for (let node = walk.nextNode(); node; node = walk.nextNode()) {
  const parent = node.parentElement, range = document.createRange();
  const read = node.textContent.trim() && !parent.closest("svg, script, style, option, .skip");
  if (!read || !parent.checkVisibility(visible)) continue;
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    const at = within(rect, parent);
    if (at.right - at.left > 2 && at.bottom - at.top > 3) texts.push([node.textContent, at]);
    if (at.right > innerWidth + 1) found.push(`${words(node.textContent)} is off the screen`);
  }
}
meet(texts);
const pen = document.createElement("canvas").getContext("2d"), arrow = 16; // what Chromium's takes [px]
for (const one of document.querySelectorAll("body *")) {
  const how = getComputedStyle(one), box = one.getBoundingClientRect();
  if (!box.width || !box.height || one.closest("svg, .js-plotly-plot, .skip")) continue;
  const clips = ["hidden", "clip"].includes(how.overflowX) && one.textContent.trim();
  const longer = one.scrollWidth > one.clientWidth + 1;
  if (clips && longer) found.push(`${words(one.textContent)} is clipped`);
  if (one.matches("input") && longer) found.push(`${words(one.value)} is cut in its field`);
  if (one.matches("select")) {
    pen.font = how.font;
    const room = one.clientWidth - parseFloat(how.paddingLeft) - parseFloat(how.paddingRight) - arrow;
    const { text } = one.selectedOptions[0];
    if (pen.measureText(text).width > room) found.push(`${words(text)} is cut in its list`);
  }
}
return [...new Set(found)];
"""
"""Finds what is wider than its place, off the screen, or over something else."""


SCREENS = {390: 844, 1280: 800, 1920: 1080}
"""Heights of screens by their widths [px]."""


def sized(driver, width):
    """The page on one of the screens."""
    height = SCREENS[width]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def serious(driver):
    """What axe-core finds on the page that keeps people from using it: rule, impact and the first place of each.

    It does not look at points of figures, which are thousands.
    """
    import axe_core_python

    driver.execute_script((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run({ exclude: [['.points']] }).then((found) => done(found.violations.map("
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
