#!/usr/bin/env bash
# The packages in examples/plugins are a third party: built as wheels, installed beside Dovetail's own wheel, and used where no file of this
# repository can be seen. They find torch and what else they need in $VENV. $WHEELS: where wheels are or will be, by default a folder of its own.
# The scheduler is tried by without_torch.sh, with `third_party.sh use VENV KIND NAME`.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 DOVETAIL_PLUGINS="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
unset PYTHONPATH

use() {  # venv, kind, name, and for a model a directory with a config.json that it serves
  local bin=$1/bin plugin=$dir/dovetail-$3
  mkdir "$plugin"
  cp -r tests/third_party.py "examples/plugins/dovetail-$3/"{engine.yaml,tests} "$plugin"
  pushd "$plugin" > /dev/null
  "$bin/dovetail" plugins list | grep -E "^$2 +$3 +dovetail-$3/$3 "
  "$bin/dovetail" plugins doctor "dovetail-$3"
  "$bin/python" -P third_party.py engine.yaml "$2" "$3" "$1" "${@:4}"
  "$bin/python" -P -m pytest -q -p no:cacheprovider --rootdir . "tests/test_$3.py"
  case $3 in lcfs | gumbel | xgrammar) "$bin/dovetail" plugins test "$2" "$3" ;; esac  # three show that the command finds the suite
  popd > /dev/null
}

if [ "${1-}" = use ]; then
  use "${@:2}"
  exit
fi

python=$(realpath --no-symlinks "${VENV:-.venv}/bin/python")
wheels=${WHEELS:-$dir/wheels}
tests/wheels.sh "$wheels" "$python" -m pip
"$python" -m venv --without-pip "$dir/venv"
mkdir "$dir/layer"  # all of $VENV but Dovetail
for entry in "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/*; do
  case $(basename "$entry") in dovetail* | __editable__* | *.pth) ;; *) ln -s "$entry" "$dir/layer" ;; esac
done
echo "$dir/layer" > "$("$dir/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/layer.pth"
"$python" -m pip --python "$dir/venv/bin/python" install --quiet --no-deps "$wheels"/dovetail_llm-*.whl "$wheels"/dovetail_{radix,gdsf,gumbel,olmo2,redis,samplers_extra,xgrammar}-*.whl
mkdir "$dir/tiny"
cat > "$dir/tiny/config.json" <<< '{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 64, "hidden_size": 32,
  "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": null, "pad_token_id": null}'
use "$dir/venv" kv_cache radix  # a line each: before a && bash would go on after an error
use "$dir/venv" kv_cache gdsf
use "$dir/venv" sampler gumbel
use "$dir/venv" grammar xgrammar
use "$dir/venv" kv_tier redis
use "$dir/venv" model olmo2 "$dir/tiny"
cp -r examples/plugins/dovetail-samplers-extra/tests "$dir/several"  # components of one distribution
cd "$dir/several"
"$dir/venv/bin/dovetail" plugins doctor dovetail-samplers-extra
"$dir/venv/bin/python" -P -m pytest -q -p no:cacheprovider --rootdir . .
