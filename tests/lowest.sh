#!/bin/sh
# Whether cpsim works with the oldest versions that pyproject.toml allows of what it needs: installs them into a folder
# of its own, and passes tests that use each.
#   tests/lowest.sh [arguments of pytest]
set -eu
cd "$(dirname "$0")/.."
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
python3 -m venv "$own"
"$own/bin/pip" install --quiet --disable-pip-version-check uv
install() { "$own/bin/uv" pip install --quiet --python "$own/bin/python" "$@"; }
install --resolution lowest-direct --requirements pyproject.toml --extra sweep --extra dask --extra explore
install 'pytest>=8' 'hypothesis>=6.100' 'setuptools>=70.1'
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- -q tests/test_cli.py tests/test_sweeps.py tests/test_terminal.py tests/test_report.py tests/test_trace.py \
    tests/test_calibrate.py tests/test_explore.py tests/test_compiled.py
"$own/bin/python" -m pytest -o filterwarnings=default -o addopts= -p no:cacheprovider -m "not slow and not benchmark" "$@"
