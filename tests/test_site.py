"""The documentation: it builds without a warning, loads nothing from elsewhere, and speaks of what there is."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from scripts import ROOT
from typer.main import get_command

import cpsim
from cpsim.cli.app import app

pytest.importorskip("mkdocs")


def commands(group, before=""):
    """Everything that can be typed, by its name; of a group its commands."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{before}{name} ")
        else:
            yield before + name, one


COMMANDS = dict(commands(get_command(app)))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """Collects what a page loads: scripts, styles, pictures, fonts."""

    def __init__(self):
        super().__init__()
        self.found, self.text = [], []

    def handle_starttag(self, tag, attrs):
        fields = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(fields.get("src") or "")
        if tag == "link" and fields.get("rel") in ("stylesheet", "preconnect", "preload", "icon"):
            self.found.append(fields["href"])

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    page = Loaded()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 12
    for path in pages:
        loaded = read(path).found
        assert len(loaded) > 3 or path.name == "runs.html", path
        assert not [name for name in loaded if name.startswith(("http:", "https:", "//"))], path
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_reference_has_every_command_and_every_public_name(site):
    page = "".join(read(site / "commands" / "index.html").text)
    assert len(COMMANDS) > 14
    assert all(f"cpsim {name}" in page for name in COMMANDS)
    names = (site / "api" / "index.html").read_text(encoding="utf-8")
    asked = set(cpsim.__all__) - {"STRATEGIES"}
    assert not [name for name in asked if not re.search(rf'id="cpsim\.[\w.]*\b{name}"', names)]


def test_the_models_page_has_formulas_and_sources(site):
    text = "".join(read(site / "models" / "index.html").text)
    assert "seconds = call + max(waves * (step_s * steps + tile_s), traffic / bandwidth)" in text
    assert text.count("Reference:") >= 4
    named = set(re.findall(r"^::: cpsim\.([\w.]+)", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.M))
    models = {
        ".".join(path.relative_to(ROOT / "cpsim").with_suffix("").parts) for path in (ROOT / "cpsim").rglob("*.py")
    }
    assert len(named) >= 8
    assert named <= models


def test_commands_in_the_documentation_exist():
    """Every `cpsim ...` line of a page names a command, and options that it has."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    lines = [
        line.split("#")[0].split("&&")[0]
        for page in pages
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
        for line in block.splitlines()
        if line.startswith("cpsim ")
    ]
    assert len(lines) > 12
    for line in lines:
        names = [name for name in COMMANDS if f"{line} ".startswith(f"cpsim {name} ")]
        assert len(names) == 1, line
        known = {"--help"}.union(*((*one.opts, *one.secondary_opts) for one in COMMANDS[names[0]].params))
        assert all(word in known for word in line.split() if word.startswith("--")), line


def test_every_page_is_in_the_navigation_and_every_picture_is_shown():
    docs = ROOT / "docs"
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = set(re.findall(r": (\S+\.(?:md|html))$", nav, re.M))
    pages = {path.name for path in docs.glob("*.md")} | {"runs.html", "commands.md"}
    assert listed == pages
    texts = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *docs.glob("*.md")])
    pictures = [path for kind in ("svg", "png") for path in docs.rglob(f"*.{kind}")]
    assert len(pictures) > 10
    assert not [path.name for path in pictures if path.relative_to(docs).as_posix() not in texts]
