#!/usr/bin/env bash
# `wheels.sh FOLDER PIP`: builds the wheels of Dovetail and of examples/plugins there, unless it has done so before. PIP is a command, whose Python has
# setuptools. $EXAMPLES: those of examples/plugins to build, instead of all.
set -euo pipefail
cd "$(dirname "$0")/.."
test ! -e "$1/.built" || exit 0
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
# Building leaves things behind; and others may be compiling modules, whose files come and go.
tar --exclude __pycache__ -c pyproject.toml README.md LICENSE core plugins apps | tar -x -C "$source"
wanted=("$source")
for example in ${EXAMPLES-$(ls examples/plugins)}; do
    tar --exclude __pycache__ -C examples/plugins -c "$example" | tar -x -C "$source"
    wanted+=("$source/$example")
done
"${@:2}" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1" "${wanted[@]}"
touch "$1/.built"
