#!/usr/bin/env bash
# `wheels.sh FOLDER PIP`: builds the wheels of Dovetail and of examples/plugins there, unless it has done so before. PIP is a command, whose Python has
# setuptools.
set -euo pipefail
cd "$(dirname "$0")/.."
test ! -e "$1/.built" || exit 0
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
# Building leaves things behind; and others may be compiling modules, whose files come and go.
tar --exclude __pycache__ -c pyproject.toml README.md LICENSE core plugins apps -C examples/plugins $(ls examples/plugins) | tar -x -C "$source"
"${@:2}" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$1" "$source" "$source"/dovetail-*
touch "$1/.built"
