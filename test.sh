#!/bin/sh
# Sets up and passes the tests: style, types and behaviour, the report in Chromium included.
#   ./test.sh [--all] [arguments of pytest]     --all: what is slow, and benchmarks, too
set -eu
cd "$(dirname "$0")"
unset PYTHONDONTWRITEBYTECODE # images of containers set it, and every process would compile PyTorch's Python again
marks="not slow and not benchmark"
if [ "${1-}" = --all ]; then
    marks=
    shift
fi

# Two cores: the browser comes and the engines are compiled, once for all processes, while packages are unpacked.
browser=
if ! command -v chromedriver >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 &
    browser=$!
fi

[ -x .venv/bin/python ] || python3 -m venv .venv
install() { .venv/bin/pip install --quiet --disable-pip-version-check --no-compile --editable "$@"; }
install .
export OMP_NUM_THREADS=1 # two processes on two cores: none starts threads of its own
.venv/bin/python -m cpsim advise examples/llama3-8b-96gpu.yaml >/dev/null &
compiled=$!
install '.[dev,others]' torch==2.13.0
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/python -m pytest --collect-only --quiet >/dev/null 2>&1 & # leaves compiled Python to the processes below
collected=$!
.venv/bin/mypy
wait $compiled
wait $collected || : # which says what is wrong, too
[ -z "$browser" ] || wait $browser ||
    echo "chromium could not be installed: the tests that open the report are skipped" >&2
.venv/bin/python -m pytest -n 2 --dist worksteal -m "$marks" "$@"
