#!/bin/sh
# Sets up and passes the tests: style, types, then everything, benchmarks and the report in Chromium included.
set -eu
cd "$(dirname "$0")"

if ! command -v chromedriver >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
        echo "chromium could not be installed: the tests that open the report are skipped" >&2
fi

[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --editable '.[dev,others]' torch==2.13.0

# Two processes on two cores: none starts threads of its own. A clone compiles its engines once, beside the type checks.
export OMP_NUM_THREADS=1
.venv/bin/cpsim advise examples/llama3-8b-96gpu.yaml >/dev/null &
.venv/bin/ruff check .
.venv/bin/mypy
wait $!
.venv/bin/python -m pytest -n 2 --dist worksteal -m "" "$@"
