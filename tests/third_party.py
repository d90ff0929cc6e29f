"""Runs an engine of a config, and sees to it that all of Dovetail comes from a folder:
`third_party.py engine.yaml KIND NAME FOLDER [MODEL]`.

MODEL is a directory with a config.json and no weights, for components of the kind model.
`third_party.sh` calls this in a venv of its own; it imports nothing of this repository.
"""

import sys
from pathlib import Path

from dovetail import LLMEngine, SamplingParams
from dovetail.config.engine import COMPONENT_KEYS, EngineConfig
from dovetail.registry.registry import Registry

config_file, kind, name, folder, *model = sys.argv[1:]
config = EngineConfig.load(config_file)
if kind != "model":  # which is chosen by its config.json
    key = next(key for key, of in COMPONENT_KEYS.items() if of == kind)
    assert [choice.name for choice in config.choices(key)] == [name], config
component = Registry.discover(config.plugins).resolve(kind, name)
assert component.distribution == f"dovetail-{name}", component

prompts = {"one": [5, 6, 7, 8] * 10, "other": [5, 6, 7, 8] * 9 + [1]}
finished = {}
with LLMEngine.from_config(
    config_file, **({"model": model[0], "load_format": "dummy"} if model else {})
) as engine:
    for id, tokens in prompts.items():
        engine.add_request(
            id,
            {"prompt_token_ids": tokens},
            SamplingParams(
                max_tokens=5, temperature=1.0, seed=1, ignore_eos=True, detokenize=False
            ),
        )
    while engine.has_unfinished_requests():
        finished |= {
            output.request_id: len(output.outputs[0].token_ids)
            for output in engine.step()
            if output.finished
        }
assert finished == dict.fromkeys(prompts, 5), finished

ours = {
    name: module.__file__
    for name, module in sys.modules.items()
    if name.split(".")[0].startswith("dovetail") and module.__file__
}
strangers = {name: file for name, file in ours.items() if not Path(file).is_relative_to(folder)}
assert len(ours) > 20
assert not strangers, strangers
print(f"{component}: {finished}")
