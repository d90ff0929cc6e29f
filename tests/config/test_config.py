"""`EngineConfig`: what YAML, mappings and overrides mean, and what is said of what is wrong in
them."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import ComponentRef
from dovetail.base.yaml_source import parse_yaml
from dovetail.config.engine import COMPONENT_KEYS, ComponentChoice, EngineConfig, Speculation
from dovetail.config.limits import Limits
from dovetail.config.parts import find_parts
from dovetail.errors import DISTRIBUTION, ConfigError
from dovetail.registry.registry import PREFERENCE, Registry
from tests.registry.fakes import Site, components
from tests.support import examples

DEFAULTS = {"scheduler": "fcfs", "kv_cache": "prefix", "sampler": "default", "executor": "local"}
DESIGN = """
model: demo
tokenizer: null
dtype: auto
load_format: auto
quantization: null
max_model_len: null
max_num_seqs: 256
max_num_batched_tokens: 8192
prefill_limit: 2.0
deterministic: on_request
gpu_memory_utilization: 0.9
cpu_memory_utilization: 0.25
kv_cache_memory: null
kv_host_memory: null
kv_cache_dtype: auto
kv_cache_scales: auto
state_dtype: float32
block_size: auto
generation_config: auto
overlap: true
cuda_graphs: true
seed: 0
pooling: {}
limits: {}
scheduler: dovetail:fcfs
kv_cache: {name: "dovetail:prefix"}
attention: auto
sampler: dovetail:default
logits_processors: []
grammar: auto
executor: dovetail:local
kv_tiers: []
observers: []
speculation: null
adapters: null
media: {images: true, cache_rows: 16384, step_rows: 4096, hosts: []}
plugins: {allow: null, deny: [], require: []}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes engine.yaml into the working directory, and gives its name."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str) -> str:
        (tmp_path / "engine.yaml").write_text(text)
        return "engine.yaml"

    return write_text


def errors_of(source: Any, **overrides: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(source, **overrides)
    return str(caught.value).splitlines()


def test_the_whole_file_spelled_out_is_the_default(write: Any) -> None:
    assert (
        EngineConfig.load(write(DESIGN))
        == EngineConfig()
        == EngineConfig.load(write(""))
        == EngineConfig.load({})
    )
    assert list(EngineConfig.model_fields) == list(yaml.safe_load(DESIGN))


def test_a_default_stays_the_built_in_whatever_is_installed(site: Site) -> None:
    """Third-party components have the names of the defaults, and of the built-ins that `auto`
    chooses from."""
    same = [
        *DEFAULTS.items(),
        *((kind, name) for kind, names in PREFERENCE.items() for name in names),
    ]
    site.install(
        "dovetail-same",
        modules={
            "same": components(
                *(f'kind="{kind}", name="{name}", target="a:B"' for kind, name in same)
            )
        },
    )
    parts = find_parts(EngineConfig.load("demo", **{"kv_cache.reuse": False}), Registry.discover())
    assert {part.distribution for part in parts if part.spec.kind != "model"} == {DISTRIBUTION}


def test_every_key_is_described() -> None:
    assert all(field.description for field in EngineConfig.model_fields.values())


def test_a_path_without_yaml_suffix_is_a_model() -> None:
    for model in ("Qwen/Qwen3-0.6B", "./here", "demo"):
        assert (
            EngineConfig.load(model)
            == EngineConfig.load(Path(model) if "/" not in model else model)
            == EngineConfig(model=model)
        )


def test_component_is_a_name_or_a_name_with_options(write: Any) -> None:
    config = EngineConfig.load(
        write("scheduler: {name: vtc, weight: 2}\nobservers: [log, {name: trace, path: x}]")
    )
    assert config.scheduler == ComponentChoice("vtc", {"weight": 2})
    assert config.observers == (ComponentChoice("log"), ComponentChoice("trace", {"path": "x"}))
    assert config.observers[1].where is not None
    assert config.observers[1].where.says("x") == "engine.yaml:2: observers.1: x"


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500 MB", 500_000_000), ("1024", 1024), (2048, 2048)]
)
def test_sizes_are_bytes(text: Any, size: int) -> None:
    assert EngineConfig.load({"kv_cache_memory": text}).kv_cache_memory == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "model: a\nmax_num_seq: 3",
            "engine.yaml:2: max_num_seq: unknown key, did you mean max_num_seqs?",
        ),
        ("\n\nzzz: 3", "engine.yaml:3: zzz: unknown key; valid are model, tokenizer, "),
        ("plugins:\n  alow: []", "engine.yaml:2: plugins.alow: unknown key, did you mean allow?"),
        (
            "plugins:\n  deny:\n  - a\n  - dovetail",
            "engine.yaml:4: plugins.deny.1: the built-ins (dovetail) can't be denied",
        ),
        ("max_num_seqs: many", "engine.yaml:1: max_num_seqs: expected a valid integer, got 'many'"),
        ("max_num_seqs: 0", "engine.yaml:1: max_num_seqs: expected greater than 0, got 0"),
        ("max_num_seqs: 1.5", "engine.yaml:1: max_num_seqs: expected a valid integer, got 1.5"),
        ("seed: true", "engine.yaml:1: seed: expected a valid integer, got True"),
        ("overlap: 1", "engine.yaml:1: overlap: expected a valid boolean, got 1"),
        ("prefill_limit: 1", "engine.yaml:1: prefill_limit: expected greater than 1, got 1"),
        (
            "prefill_limit: .inf",
            "engine.yaml:1: prefill_limit: expected a finite number, got inf",
        ),
        ("pace: 2.0", "engine.yaml:1: pace: unknown key: it is called `prefill_limit` now"),
        (
            "model: 3",
            "engine.yaml:1: model: expected a model's name, or a mapping with 'path' and "
            "'component', got 3",
        ),
        (
            "model: ''",
            "engine.yaml:1: model: expected String should have at least 1 character, got ''",
        ),
        (
            "model:\n  path: a\n  by: b",
            "engine.yaml:3: model.by: unknown key; valid are path, component",
        ),
        ("model: {component: a}", "engine.yaml:1: model.path: this key is required"),
        (
            "model:\n  path: a\n  component: 3",
            "engine.yaml:3: model.component: expected a component's name",
        ),
        (
            "dtype: int8",
            "engine.yaml:1: dtype: expected 'auto', 'float32', 'float16' or 'bfloat16', got 'int8'",
        ),
        (
            "block_size: 0",
            "engine.yaml:1: block_size: expected auto or an integer of 1 or more, up to "
            "2147483647, got 0",
        ),
        (
            "gpu_memory_utilization: 90",
            "engine.yaml:1: gpu_memory_utilization: expected less than or equal to 1, got 90",
        ),
        (
            "kv_cache_memory: 4 gallons",
            "engine.yaml:1: kv_cache_memory: expected a size like 4GiB, or a number of bytes, got "
            "'4 gallons'",
        ),
        ("kv_cache_memory: -1", "engine.yaml:1: kv_cache_memory: expected greater than 0, got -1"),
        (
            "scheduler: {aging_s: 1}",
            "engine.yaml:1: scheduler: expected a component's name, or a mapping with 'name'",
        ),
        ("scheduler:", "engine.yaml:1: scheduler: expected a component's name"),
        (
            "speculation: suffix",
            "engine.yaml:1: speculation: expected keys and values below it, got 'suffix'",
        ),
        (
            "speculation:\n  drafter: 3",
            "engine.yaml:2: speculation.drafter: expected a component's name",
        ),
        (
            "speculation:\n  max_drafts: 65",
            "engine.yaml:2: speculation.max_drafts: expected less than or equal to 64, got 65",
        ),
        (
            "speculation: {max_draft: 1}",
            "engine.yaml:1: speculation.max_draft: unknown key, did you mean max_drafts?",
        ),
        (
            "speculative_config: {}",
            "engine.yaml:1: speculative_config: unknown key: here it is `speculation: {drafter: "
            "suffix",
        ),
        ("observers: log", "engine.yaml:1: observers: expected a list of components, got 'log'"),
        ("observers:\n- log\n- 3", "engine.yaml:3: observers.1: expected a component's name"),
        ("model: a\nmodel: b", "engine.yaml:2: key 'model' is here twice, first at engine.yaml:1"),
        (
            "scheduler:\n  name: a\n  x: 1\n  x: 2",
            "engine.yaml:4: key 'x' is here twice, first at engine.yaml:3",
        ),
        ("a: [\nb: 1", "engine.yaml:2: not valid YAML: "),
        ("a: b: c", "engine.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "engine.yaml:2: not valid YAML: "),
        (
            "a: !!python/object:os.system {}",
            "engine.yaml:1: not valid YAML: could not determine a constructor",
        ),
        ("a: *nobody", "engine.yaml:1: not valid YAML: "),
        ("a: &x [*x]", "engine.yaml:1: not valid YAML: "),
        ("a: 1\n---\nb: 2", "engine.yaml:2: not valid YAML: "),
        ("no: 1", "engine.yaml:1: a key must be a string, got 'no'"),
        ("a: \x00", "engine.yaml:1: not valid YAML: "),
        ("a: 2024-13-45", "engine.yaml:1: not valid YAML: "),
        ("- model", "engine.yaml:1: expected keys and values"),
        ("just text", "engine.yaml:1: expected keys and values"),
    ],
)
def test_what_is_wrong_is_reported_with_file_and_line(write: Any, text: str, says: str) -> None:
    assert errors_of(write(text))[0].startswith(says)


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(write: Any) -> None:
    lines = errors_of(write("zzz: 1\nseed: x\ndtype: y\nmodel: 1"))
    assert [line.split(": ")[:2] for line in lines] == [
        [f"engine.yaml:{n}", key] for n, key in enumerate(("zzz", "seed", "dtype", "model"), 1)
    ]


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    assert errors_of(tmp_path / "none.yaml")[0].endswith("can't be read: No such file or directory")
    (tmp_path / "folder.yml").mkdir()
    assert "can't be read" in errors_of(tmp_path / "folder.yml")[0]
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    assert "can't be read" in errors_of(tmp_path / "bytes.yaml")[0]
    assert "a config is" in errors_of(3)[0]


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        ({"seed": 5}, "seed", 5),
        ({"max_model_len": None}, "max_model_len", None),
        ({"scheduler": "vtc"}, "scheduler", ComponentChoice("vtc")),
        ({"scheduler": {"name": "vtc", "a": 1}}, "scheduler", ComponentChoice("vtc", {"a": 1})),
        ({"scheduler.aging_s": 5}, "scheduler", ComponentChoice("slow", {"x": 1, "aging_s": 5})),
        ({"scheduler.name": "vtc"}, "scheduler", ComponentChoice("vtc", {"x": 1})),
        ({"scheduler.a.b": 5, "scheduler.a": {"b": 1}}, "scheduler", None),
        (
            {"kv_cache.reuse": False},
            "kv_cache",
            ComponentChoice("dovetail:prefix", {"reuse": False}),
        ),
        ({"observers.0.every_s": 1}, "observers", (ComponentChoice("log", {"every_s": 1}),)),
        ({"observers": []}, "observers", ()),
        ({"scheduler": "vtc", "scheduler.a": 1}, "scheduler", ComponentChoice("vtc", {"a": 1})),
        ({"speculation.drafter": "ngram"}, "speculation", Speculation(drafter="ngram")),
        (
            {"speculation.max_drafts": 3, "speculation.drafter.x": 1},
            "speculation",
            Speculation(drafter={"name": "dovetail:suffix", "x": 1}, max_drafts=3),
        ),
        (
            {"speculation": {"drafter": "a"}, "speculation.drafter.x": 1},
            "speculation",
            Speculation(drafter={"name": "a", "x": 1}),
        ),
    ],
)
def test_overrides(write: Any, overrides: dict[str, Any], key: str, expected: Any) -> None:
    source = write("max_model_len: 100\nscheduler: {name: slow, x: 1}\nobservers: [log]")
    if expected is None and key == "scheduler":
        assert errors_of(source, **overrides) == [
            "override: scheduler.a: there is nothing below this key"
        ]
        return
    before = EngineConfig.load(source)
    assert (
        getattr(EngineConfig.load(source, **overrides), key)
        == getattr(EngineConfig.load(before, **overrides), key)
        == expected
    )
    assert EngineConfig.load(source) == before


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"seeds": 1}, "override: seeds: unknown key, did you mean seed?"),
        ({"model.x": 1}, "override: model.x: unknown key; valid are path, component"),
        ({"observers.0.x": 1}, "override: observers.0: there is no such item; the list has 0"),
        ({"observers.x": 1}, "override: observers.x: there is no such item; the list has 0"),
        ({"nothing.x": 1}, "override: nothing: unknown key; valid are model, "),
        ({"limit.max_n": 1}, "override: limit: unknown key, did you mean limits?"),
        ({"adapters.rank": 1}, "override: adapters.rank: unknown key, did you mean max_rank?"),
        ({"max_model_len.x": 1}, "override: max_model_len: there is nothing below this key"),
        ({"": 1}, "override: unknown key"),
    ],
)
def test_wrong_overrides_are_reported(overrides: dict[str, Any], says: str) -> None:
    assert errors_of("demo", **overrides)[0].startswith(says)


def test_override_of_a_line_in_a_file_is_blamed_on_the_override(write: Any) -> None:
    assert errors_of(write("seed: 1"), seed="x") == [
        "override: seed: expected a valid integer, got 'x'"
    ]


def test_every_setting_of_an_executor_is_that_of_the_config(tmp_path: Path) -> None:
    head = ComponentRef("drafter", "x:head", "x:Head")
    values: dict[str, Any] = {
        "dtype": "float16",
        "load_format": "dummy",
        "max_model_len": 77,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "gpu_memory_utilization": 0.5,
        "cpu_memory_utilization": 0.1,
        "kv_cache_memory": 1 << 20,
        "block_size": 32,
        "cuda_graphs": False,
        "overlap": False,
        "seed": 5,
        "kv_cache_scales": "calibrate",
        "quantization": "int8",
        "state_dtype": "bfloat16",
    }
    parts = {
        "speculation": {"max_drafts": 3},
        "adapters": {"slots": 2, "max_rank": 8},
        "pooling": {"method": "mean"},
        "media": {"cache_rows": 77, "step_rows": 7},
        "kv_cache_dtype": "fp8",
        "kv_host_memory": "1MiB",
    }
    made = EngineConfig.load({**values, **parts}).executor_config(tmp_path, tmp_path / "d", head)
    expected = values | {
        "model": str(tmp_path),
        "kv_cache_dtype": "float8_e4m3fn",
        "max_drafts": 3,
        "draft_model": str(tmp_path / "d"),
        "draft_head": head,
        "pooling": {"method": "mean"},
        "max_adapters": 2,
        "max_adapter_rank": 8,
        "media_cache_rows": 77,
        "media_step_rows": 7,
        "kv_transfers": True,
    }
    found = {field.name: getattr(made, field.name) for field in fields(made)}
    assert found == expected | {"features": ()}
    plain = EngineConfig().executor_config(tmp_path)
    assert [name for name, value in expected.items() if getattr(plain, name) == value] == ["model"]


def test_mapping_given_is_not_changed() -> None:
    given = {"scheduler": {"name": "vtc"}, "observers": ["log"]}
    EngineConfig.load(given, **{"scheduler.a": 1, "observers.0.b": 2})
    assert given == {"scheduler": {"name": "vtc"}, "observers": ["log"]}


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig().seed = 1


def test_executor_config_has_its_share(tmp_path: Path) -> None:
    config = EngineConfig(
        kv_cache_memory=1 << 20, block_size=32, max_model_len=10, overlap=False
    ).executor_config(tmp_path)
    assert (config.model, config.kv_cache_memory, config.block_size, config.max_model_len) == (
        str(tmp_path),
        1 << 20,
        32,
        10,
    )
    assert not config.overlap
    assert EngineConfig().executor_config(tmp_path).block_size is None
    assert EngineConfig().executor_config(tmp_path).max_drafts == 0
    assert (
        EngineConfig(speculation=Speculation(max_drafts=3)).executor_config(tmp_path).max_drafts
        == 3
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.5e3", 1500.0),
        ("a", "a"),
        ("", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("e5", "e5"),
    ],
)
def test_values_of_the_command_line_are_yaml(text: str, value: Any) -> None:
    assert parse_yaml(text, "--set").value == value


def _texts(**sizes: int) -> st.SearchStrategy[str]:
    """But for those like 1e5, which PyYAML takes for text and we, as YAML 1.2, for numbers."""
    return st.text(**sizes).filter(
        lambda text: not re.fullmatch(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+", text)
    )


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_texts(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@examples(quick=60, full=3000)
@given(st.dictionaries(_texts(min_size=1, max_size=6), PLAIN, max_size=4))
def test_yaml_reads_as_pyyaml_does_and_knows_every_line(value: dict[str, Any]) -> None:
    text = yaml.safe_dump(value)
    parsed = parse_yaml(text, "f")
    assert parsed.value == value
    assert all((key,) in parsed.origins for key in value)


@examples(quick=100, full=5000)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *EngineConfig.model_fields,
                "scheduler.x",
                "plugins.deny",
                "observers.0",
                "speculation.drafter",
            ]
        ),
        PLAIN,
        max_size=3,
    )
)
def test_any_value_is_taken_or_refused_with_a_config_error(values: dict[str, Any]) -> None:
    try:
        config = EngineConfig.load("demo", **values)
    except ConfigError as error:
        assert str(error).startswith("override: ")  # noqa: PT017
    else:
        assert EngineConfig.load(config.model_dump()) == config


def test_component_keys_are_those_of_the_config() -> None:
    sections = {"": EngineConfig, "speculation.": Speculation}
    fields = {
        f"{prefix}{key}": field
        for prefix, model in sections.items()
        for key, field in model.model_fields.items()
    }
    assert [
        key for key, field in fields.items() if "ComponentChoice" in str(field.annotation)
    ] == list(COMPONENT_KEYS)


def test_a_limit_can_be_set_by_a_dotted_key() -> None:
    assert EngineConfig.load("demo", **{"limits.max_n": 4}).limits.max_n == 4
    assert EngineConfig.load(
        {"limits": {"max_n": 4}}, **{"limits.max_stop_strings": 0}
    ).limits == Limits(max_n=4, max_stop_strings=0)


@pytest.mark.parametrize("key", ["limits", "plugins"])
@pytest.mark.parametrize("value", ["", " 3", " [a]"])
def test_a_section_without_keys_is_reported_in_words_of_yaml(
    write: Any, key: str, value: str
) -> None:
    [error] = errors_of(write(f"{key}:{value}  # a: 1"))
    assert "expected keys and values below it, got " in error
    assert "dictionary" not in error


@pytest.mark.parametrize(
    ("limit", "most", "too_much"),
    [
        ("max_template_s", 86_400, (86_401, 1e300, math.inf)),
        ("max_template_bytes", 2**63 - 1, (2**63, 10**30)),
    ],
)
def test_a_limit_that_the_system_could_not_hold_to_is_refused(
    limit: str, most: float, too_much: tuple[float, ...]
) -> None:
    assert getattr(EngineConfig.load("demo", **{f"limits.{limit}": most}).limits, limit) == most
    for value in too_much:
        assert errors_of("demo", **{f"limits.{limit}": value})[0].startswith(
            f"override: limits.{limit}: expected less than "
        )
