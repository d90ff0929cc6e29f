#!/usr/bin/env bash
# Schedulers, the KV manager, the lab and the command line run in a venv without torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" -m venv --without-pip "$dir/venv"
pip() { "$python" -m pip --python "$dir/venv/bin/python" "$@"; }  # the only thing that is used of $VENV, which may still be being installed
pip install --quiet -c constraints.txt setuptools
mkdir "$dir/src"  # building leaves things behind; and others may be compiling modules, whose files come and go
tar --exclude __pycache__ -c pyproject.toml README.md LICENSE core plugins apps | tar -x -C "$dir/src"
pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$dir/wheels" "$dir/src"
pip install --quiet -c constraints.txt "$(echo "$dir"/wheels/dovetail_llm-*.whl)[testing,lab]" pytest-xdist
! "$dir/venv/bin/python" -c 'import torch' 2>/dev/null || { echo "this venv was meant to have no torch"; exit 1; }
"$dir/venv/bin/dovetail" plugins list
(cd "$dir" && venv/bin/dovetail plugins test scheduler fcfs)
# All of these run with torch too: here each test runs with one of its parameters and few examples, and a few of the calibrations, which take minutes.
export DOVETAIL_TEST_PROFILE=brief
"$dir/venv/bin/python" -m pytest -n 2 -p no:cacheprovider \
  tests/engine tests/testing tests/schedulers tests/kv_cache tests/registry tests/config tests/lab \
  --ignore tests/lab/test_calibrate.py
"$dir/venv/bin/python" -m pytest -n 2 -p no:cacheprovider tests/lab/test_calibrate.py -k "known_step_times or too_slow or bad_input"
if message=$("$dir/venv/bin/dovetail" generate demo hello 2>&1); then echo "generated without torch?"; exit 1; fi
echo "$message" | grep -q 'pip install "dovetail-llm\[torch\]"' || { echo "the missing extra was not named: $message"; exit 1; }
