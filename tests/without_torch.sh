#!/usr/bin/env bash
# Schedulers, the KV manager, the lab and the command line run in a venv without torch, and so does a scheduler of a third party.
# $WHEELS: where wheels are or will be, by default a folder of its own. $DOVETAIL_TEST_PASSED_TO: a file for the names of tests that needn't run again.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
wheels=${WHEELS:-$dir/wheels}
export PIP_DISABLE_PIP_VERSION_CHECK=1
plain=$dir/venv/bin
"$python" -m venv --without-pip "$dir/venv"
pip=("$python" -m pip --python "$plain/python")  # the only thing that is used of $VENV, which may still be being installed
"${pip[@]}" install --quiet -c constraints.txt setuptools
tests/wheels.sh "$wheels" "${pip[@]}"
"${pip[@]}" install --quiet -c constraints.txt "$(echo "$wheels"/dovetail_llm-*.whl)[testing,lab]" pytest-xdist
! "$plain/python" -c 'import torch' 2>/dev/null || { echo "this venv was meant to have no torch"; exit 1; }
"$plain/dovetail" plugins list
export DOVETAIL_TEST_BUDGET=off  # packages are installed at the same time
"$plain/python" -m pytest -n 2 -p no:cacheprovider tests/engine tests/schedulers tests/kv_cache tests/lab
# These run with torch too: here each test with one of its parameters, and few examples.
DOVETAIL_TEST_PASSED_TO="" DOVETAIL_TEST_PROFILE=brief "$plain/python" -m pytest -n 2 -p no:cacheprovider tests/testing tests/registry tests/config
if message=$("$plain/dovetail" generate demo hello 2>&1); then echo "generated without torch?"; exit 1; fi
echo "$message" | grep -q 'pip install "dovetail-llm\[torch\]"' || { echo "the missing extra was not named: $message"; exit 1; }

"${pip[@]}" install --quiet --no-deps "$wheels"/dovetail_lcfs-*.whl
tests/third_party.sh use "$dir/venv" scheduler lcfs
mkdir "$dir/new"
cd "$dir/new"
"$plain/dovetail" plugins new observer mine
test -s dovetail-mine/.github/workflows/ci.yml
