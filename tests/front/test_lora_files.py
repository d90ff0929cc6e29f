"""Reading adapters in PEFT's format: what is served is written down as the executor reads it, all
else is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from dovetail.api.executor import AdapterCapacity
from dovetail.api.file_keys import Refused, Used
from dovetail.errors import RequestError
from dovetail.front.lora_files import CONFIG, KEYS, WEIGHTS, AdapterFiles, read_adapter
from dovetail.testing.fake_executor import ADAPTED
from tests.adapters import config_of, weights_of, write_adapter
from tests.support import examples

Q, DOWN = ADAPTED
TWO_LAYERS = {
    f"model.layers.{layer}.self_attn.{name}": (8, 8)
    for layer in range(2)
    for name in ("q_proj", "v_proj")
}


def read(
    folder: Path, capacity: AdapterCapacity | None = None, within: Path | None = None
) -> dict[str, Any]:
    """Return the normalized tensors of an adapter, by name."""
    content = read_adapter(
        AdapterFiles.find(str(folder), within), capacity or AdapterCapacity(2, 16, ADAPTED)
    )
    target = folder.parent / f"{content.digest}-{len(list(folder.parent.iterdir()))}.safetensors"
    content.write(target)
    return load_file(target)


def refusal(
    folder: Path, capacity: AdapterCapacity | None = None, within: Path | None = None
) -> str:
    with pytest.raises(RequestError) as refused:
        read(folder, capacity, within)
    return str(refused.value)


def test_weights_are_written_with_their_scale(tmp_path: Path) -> None:
    weights = weights_of()
    found = read(write_adapter(tmp_path / "a", config_of(lora_alpha=6, r=4), weights))
    assert set(found) == {f"{module}.lora_{side}" for module in ADAPTED for side in "AB"}
    for module in ADAPTED:
        np.testing.assert_array_equal(
            found[f"{module}.lora_A"], weights[f"base_model.model.{module}.lora_A.weight"]
        )
        np.testing.assert_array_equal(
            found[f"{module}.lora_B"],
            weights[f"base_model.model.{module}.lora_B.weight"] * np.float32(1.5),
        )


@pytest.mark.parametrize(
    ("changes", "rank", "scale"),
    [
        ({"r": 4, "lora_alpha": 16}, 4, 4.0),
        ({"r": 4, "lora_alpha": 16, "use_rslora": True}, 4, 8.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 4}}, 4, 4.0),
        (
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {"layers.0.self_attn.q_proj": 4},
                "alpha_pattern": {"q_proj": 2.0},
            },
            4,
            0.5,
        ),
        (
            {
                "r": 8,
                "lora_alpha": 16,
                "rank_pattern": {r"model\.layers\.\d+\.self_attn\.(q|v)_proj": 4},
            },
            4,
            4.0,
        ),
        (
            {
                "r": 4,
                "lora_alpha": 16,
                "rank_pattern": {"proj": 8},
                "alpha_pattern": {"elf_attn.q_proj": 1},
            },
            4,
            4.0,
        ),  # parts of names don't match
        ({"r": 2, "lora_alpha": 3, "use_rslora": True}, 2, 3 / math.sqrt(2)),
        ({"r": 4, "lora_alpha": 0}, 4, 0.0),
        ({"r": 0, "lora_alpha": 16}, 0, 0.0),
    ],
    ids=str,
)
def test_rank_and_scale_are_those_of_peft(
    changes: dict[str, Any], rank: int, scale: float, tmp_path: Path
) -> None:
    modules = {Q: ADAPTED[Q]}
    weights = weights_of(modules, rank)
    found = read(
        write_adapter(tmp_path / "a", config_of(**changes, target_modules=["q_proj"]), weights)
    )
    np.testing.assert_array_equal(
        found[f"{Q}.lora_B"], weights[f"base_model.model.{Q}.lora_B.weight"] * np.float32(scale)
    )


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "base_model.model.language_model."])
@pytest.mark.parametrize("cut", ["", "model."])
def test_modules_are_found_whatever_class_peft_had_wrapped(
    prefix: str, cut: str, tmp_path: Path
) -> None:
    weights = {
        name.replace("model.layers", f"{'' if cut else 'model.'}layers"): tensor
        for name, tensor in weights_of(prefix=prefix).items()
    }
    assert set(read(write_adapter(tmp_path / "a", None, weights))) == {
        f"{module}.lora_{side}" for module in ADAPTED for side in "AB"
    }


def test_a_module_in_no_layer_is_found_by_its_last_part(tmp_path: Path) -> None:
    sizes = {"model.inputs_projection": (8, 4)}
    weights = weights_of({"model.language_model.inputs_projection": (8, 4)})
    config = config_of(target_modules=["inputs_projection"])
    found = read(write_adapter(tmp_path / "a", config, weights), AdapterCapacity(2, 16, sizes))
    assert set(found) == {f"model.inputs_projection.lora_{side}" for side in "AB"}


@pytest.mark.parametrize(
    "targets",
    ["all-linear", r".*\.(q_proj|down_proj)", ["q_proj", "mlp.down_proj"], [Q, DOWN]],
    ids=str,
)
def test_target_modules_may_be_a_list_or_a_pattern(targets: Any, tmp_path: Path) -> None:
    assert read(write_adapter(tmp_path / "a", config_of(target_modules=targets)))


@pytest.mark.parametrize("layers", [1, [1]])
def test_some_layers_only(layers: Any, tmp_path: Path) -> None:
    capacity = AdapterCapacity(2, 16, TWO_LAYERS)
    config = config_of(target_modules=["q_proj"], layers_to_transform=layers)
    only = {name: size for name, size in TWO_LAYERS.items() if ".1." in name and "q_proj" in name}
    assert set(read(write_adapter(tmp_path / "a", config, weights_of(only)), capacity)) == {
        f"{module}.lora_{side}" for module in only for side in "AB"
    }
    wrong = {name: size for name, size in TWO_LAYERS.items() if ".0." in name and "q_proj" in name}
    assert "layers_to_transform" in refusal(
        write_adapter(tmp_path / "b", config, weights_of(wrong)), capacity
    )


def test_16_bit_numbers_stay_or_become_exact_ones(tmp_path: Path) -> None:
    torch, torch_files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    half = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in weights_of().items()}
    folder = write_adapter(tmp_path / "a", config_of(lora_alpha=5))
    torch_files.save_file(half, folder / WEIGHTS)
    content = read_adapter(AdapterFiles.find(str(folder)), AdapterCapacity(2, 16, ADAPTED))
    content.write(tmp_path / "n.safetensors")
    with safe_open(tmp_path / "n.safetensors", "pt") as file:
        assert file.get_tensor(f"{Q}.lora_A").dtype == torch.bfloat16
        assert torch.equal(
            file.get_tensor(f"{Q}.lora_A"), half[f"base_model.model.{Q}.lora_A.weight"]
        )
        assert torch.equal(
            file.get_tensor(f"{Q}.lora_B"),
            half[f"base_model.model.{Q}.lora_B.weight"].float() * 1.25,
        )


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return read_adapter(AdapterFiles.find(str(folder)), AdapterCapacity(2, 16, ADAPTED)).digest

    same = [digest(write_adapter(tmp_path / name)) for name in "ab"]
    others = [
        digest(write_adapter(tmp_path / "c", seed=1)),
        digest(write_adapter(tmp_path / "d", config_of(lora_alpha=9))),
    ]
    assert len({*same}) == 1
    assert len({*same, *others}) == 3


WRITTEN = (  # by LoraConfig of PEFT 0.21.2
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision "
    "inference_mode r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out "
    "bias use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern "
    "rank_pattern alpha_pattern megatron_config megatron_core trainable_token_indices "
    "loftq_config eva_config corda_config lora_ga_config use_dora velora_config "
    "alora_invocation_tokens use_qalora qalora_group_size monteclora_config layer_replication "
    "runtime_config lora_bias target_parameters use_bdlora arrow_config kasa_config "
    "ensure_weight_tying "
)


def test_each_key_that_peft_writes_is_in_the_table() -> None:
    assert not [key for key in WRITTEN.split() if KEYS.rule(key) is None]


def test_the_installed_version_of_peft_writes_no_other_key() -> None:
    peft = pytest.importorskip("peft")
    assert not [
        field.name for field in dataclasses.fields(peft.LoraConfig) if KEYS.rule(field.name) is None
    ]


@pytest.mark.parametrize(
    "key", [key for key, rule in KEYS.keys.items() if not isinstance(rule, Used)]
)
def test_a_key_is_refused_by_name_or_changes_nothing(key: str, tmp_path: Path) -> None:
    plain, rule = told(write_adapter(tmp_path / "plain")), KEYS.keys[key]
    for index, value in enumerate(
        (None, *rule.unless, 7) if isinstance(rule, Refused) else (None, "text", [1], 7, {"a": 1})
    ):
        folder = write_adapter(tmp_path / str(index), config_of(**{key: value}))
        if isinstance(rule, Refused) and value == 7:
            assert f"{key} = 7 is not implemented" in refusal(folder)
        else:
            assert told(folder) == plain


def told(folder: Path) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in read(folder).items()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "use_dora = True is not implemented (only False, [], {}): DoRA"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': it has changed the weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA': only LORA"),
        ({"peft_type": None}, "peft_type"),
        ({"use_newest_trick": True}, "'use_newest_trick' = True is unknown"),
        ({"r": 17}, "rank 17, and this engine takes 16 at most: raise adapters.max_rank"),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64"),
        ({"r": "4"}, "r must be a rank"),
        ({"r": -1}, "r must be a rank"),
        ({"r": True}, "r must be a rank"),
        ({"lora_alpha": None}, "lora_alpha must be a finite number"),
        ({"lora_alpha": 10**400}, "a number of more than 100 digits"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must map"),
        ({"rank_pattern": {"(": 4}}, "is no pattern"),
        ({"rank_pattern": {"(?=q)q_proj": 4}}, "no pattern that can be matched in linear time: "),
        ({"alpha_pattern": {r"(.)\1": 4}}, "no pattern that can be matched in linear time: "),
        (
            {"alpha_pattern": {"a{1000}{1000}": 4}},
            "no pattern that can be matched in linear time: ",
        ),
        ({"alpha_pattern": {"a" * 513 + "+": 4}}, "has more than 512 characters: name the modules"),
        (
            {"alpha_pattern": {f"{number}+": 4 for number in range(101)}},
            "has more than 100 patterns: name the modules",
        ),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"target_modules": None}, "target_modules must be"),
        ({"target_modules": ["q_proj", 7]}, "target_modules must be"),
        ({"target_modules": ["q_proj"]}, "isn't among the target_modules"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "no weights for 'v_proj'"),
        ({"layers_to_transform": "all"}, "layers_to_transform must be"),
        ({"layers_to_transform": [0, 1]}, "names [0, 1] in layers_to_transform"),
        ({"r": 8}, "don't fit this model and the adapter's rank"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in refusal(write_adapter(tmp_path / "a", config_of(**changes)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w | {"base_model.model.model.embed_tokens.lora_embedding_A": w.popitem()[1]},
            "adapter of embeddings",
        ),
        (
            lambda w: w | {f"base_model.model.{Q}.lora_magnitude_vector": np.ones(8, np.float32)},
            "magnitude of DoRA",
        ),
        (lambda w: w | {f"base_model.model.{Q}.bias": np.ones(8, np.float32)}, "no A or B"),
        (
            lambda w: {name: one for name, one in w.items() if "q_proj.lora_B" not in name},
            "lacks its lora_B",
        ),
        (
            lambda w: {name.replace("layers.0", "layers.7"): one for name, one in w.items()},
            "is no layer of this model that adapters may change",
        ),
        (
            lambda w: {
                name.replace("model.layers", "vision_tower.encoder.layers"): one
                for name, one in w.items()
            },
            "a layer of the image encoder",
        ),
        (lambda w: {name: one[:, :-1] for name, one in w.items()}, "don't fit this model"),
        (lambda w: {name: one[0] for name, one in w.items()}, "must be matrices"),
        (
            lambda w: {name: np.full_like(one, np.nan) for name, one in w.items()},
            "no numbers (NaN)",
        ),
        (lambda w: {name: np.full_like(one, np.inf) for name, one in w.items()}, "infinite"),
        (
            lambda w: {name: np.full_like(one, 3e38) for name, one in w.items()},
            "infinite",
        ),  # with its scale
        (lambda w: {name: one.astype(np.int32) for name, one in w.items()}, "of type 'I32'"),
        (lambda w: {}, "has no tensors"),
        (
            lambda w: w | {name.replace("model.layers", "layers"): one for name, one in w.items()},
            "several adapters of one layer",
        ),
    ],
)
def test_foreign_weights_are_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], says: str, tmp_path: Path
) -> None:
    assert says in refusal(write_adapter(tmp_path / "a", None, change(weights_of())))


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "is no directory here" in refusal(tmp_path / "none")
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "only adapter_model.bin: save the adapter as safetensors" in refusal(folder)
    (folder / CONFIG).unlink()
    assert f"has no {CONFIG}" in refusal(folder)


def test_files_outside_of_the_folder_of_adapters_are_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "adapters", write_adapter(tmp_path / "secret")
    assert read(write_adapter(inside / "good"), within=inside)
    (inside / "link").symlink_to(outside)
    sly = write_adapter(inside / "sly")
    (sly / WEIGHTS).unlink()
    (sly / WEIGHTS).symlink_to(outside / WEIGHTS)
    for path in (
        outside,
        inside / "link",
        sly,
        inside / ".." / "secret",
        tmp_path,
        tmp_path / "none",
    ):  # nor is told what else there is
        assert "isn't below the folder of adapters" in refusal(path, within=inside)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_path_that_no_directory_can_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    for name in ("x" * 5_000, "a\0b", "itself"):
        for within in (None, tmp_path):
            says = refusal(tmp_path / name, within=within)
            assert "can't be read" in says or "is no directory here" in says
            assert len(says) < 500


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)  # reading it would wait forever
    assert "no regular file" in refusal(folder)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    with (folder / WEIGHTS).open("ab") as file:
        file.truncate(1 << 40)  # sparse
    assert "for this model is as large" in refusal(folder)


@pytest.mark.parametrize(
    "config",
    [b"", b"{", b"[]", b'{"r": ', b"\xff\xfe", b"[" * 10_000, b'{"peft_type": "LORA"}', b"null"],
)
def test_a_damaged_config_is_refused(config: bytes, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / CONFIG).write_bytes(config)
    assert CONFIG in refusal(folder)


@given(st.data())
@examples(quick=60, full=3_000)
def test_damaged_weights_are_refused_or_are_another_adapter(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut, changed or lengthened at any place: nothing but a `RequestError` comes of it."""
    folder = write_adapter(tmp_path_factory.mktemp("damaged"))
    whole = (folder / WEIGHTS).read_bytes()
    header = struct.unpack("<Q", whole[:8])[0] + 8
    at = data.draw(st.integers(0, header) | st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(max_size=12))
    kind = data.draw(st.sampled_from(["cut", "insert", "replace"]))
    after = {"cut": b"", "insert": whole[at:], "replace": whole[at + len(junk) :]}[kind]
    (folder / WEIGHTS).write_bytes(whole[:at] + junk + after)
    try:
        content = read_adapter(AdapterFiles.find(str(folder)), AdapterCapacity(2, 16, ADAPTED))
    except RequestError:
        return
    assert sum(tensor.nbytes for tensor in content.tensors) == len(whole) - header


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from(sorted(config_of())),
)
@examples(quick=100, full=5_000)
def test_any_value_of_an_option_is_served_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, name: str
) -> None:
    folder = write_adapter(tmp_path_factory.getbasetemp() / "any", config_of(**{name: value}))
    with suppress(RequestError):
        read_adapter(AdapterFiles.find(str(folder)), AdapterCapacity(2, 16, ADAPTED))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    )
)
@examples(quick=100, full=5_000)
def test_any_header_is_served_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Any
) -> None:
    folder = write_adapter(tmp_path_factory.getbasetemp() / "header")
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    assert WEIGHTS in refusal(folder)
