#!/usr/bin/env bash
# The packages in examples/plugins are a third party: built as wheels, installed beside Dovetail's own wheel, and used where no file of this
# repository can be seen. The scheduler is in a venv without torch; the others find torch and what else they need in $VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${VENV:-.venv}/bin/python")
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 DOVETAIL_PLUGINS="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
unset PYTHONPATH

mkdir "$dir/src" "$dir/empty"
# Building leaves things behind; and others may be compiling modules, whose files come and go.
tar --exclude __pycache__ -c pyproject.toml README.md LICENSE core plugins apps -C examples/plugins $(ls examples/plugins) | tar -x -C "$dir/src"
cp constraints.txt tests/third_party.py "$dir"
cd "$dir/empty"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$dir/wheels" "$dir/src" "$dir"/src/dovetail-*

without_torch() {
  "$python" -m venv --without-pip "$dir/plain"
  "$python" -m pip --python "$dir/plain/bin/python" install --quiet -c "$dir/constraints.txt" "$(echo "$dir"/wheels/dovetail_llm-*.whl)[testing]" "$dir"/wheels/dovetail_lcfs-*.whl
  ! "$dir/plain/bin/python" -c 'import torch' 2>/dev/null || { echo "this venv was meant to have no torch"; return 1; }
  use plain scheduler lcfs
  "$dir/plain/bin/dovetail" plugins new observer mine && test -s dovetail-mine/.github/workflows/ci.yml
}

with_torch() {
  "$python" -m venv --without-pip "$dir/torch"
  mkdir "$dir/layer"  # all of $VENV but Dovetail
  for entry in "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/*; do
    case $(basename "$entry") in dovetail* | __editable__* | *.pth) ;; *) ln -s "$entry" "$dir/layer" ;; esac
  done
  echo "$dir/layer" > "$("$dir/torch/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/layer.pth"
  "$python" -m pip --python "$dir/torch/bin/python" install --quiet --no-deps "$dir"/wheels/dovetail_llm-*.whl "$dir"/wheels/dovetail_{radix,gumbel,olmo2}-*.whl
  mkdir "$dir/tiny"
  cat > "$dir/tiny/config.json" <<< '{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": null, "pad_token_id": null}'
  use torch kv_cache radix  # a line each: before a && bash would go on after an error
  use torch sampler gumbel
  use torch model olmo2 "$dir/tiny"
}

use() {  # venv, kind, name, and for a model a directory with a config.json that it serves
  local bin=$dir/$1/bin
  "$bin/dovetail" plugins list | grep -E "^$2 +$3 +dovetail-$3/$3 "
  "$bin/dovetail" plugins doctor "dovetail-$3"
  "$bin/python" -P "$dir/third_party.py" "$dir/src/dovetail-$3/engine.yaml" "$2" "$3" "$dir" "${@:4}"
  "$bin/python" -m pytest -q -p no:cacheprovider --rootdir "$dir/empty" "$dir/src/dovetail-$3/tests/test_$3.py"
  case $3 in lcfs | gumbel) "$bin/dovetail" plugins test "$2" "$3" ;; esac  # the same suite once more, by the command: two show that it finds it
}

without_torch > "$dir/plain.log" 2>&1 &
plain=$!
with_torch
wait "$plain" || { cat "$dir/plain.log"; echo "without torch: failed"; exit 1; }
cat "$dir/plain.log"
