"""Odd YAML: each mistake is an error of ours, short and with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.base.where import LISTED
from dovetail.base.yaml_source import MAX_CHARACTERS, parse_yaml
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError
from tests.support import examples
from tests.work import at_most


def error_of(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(path)
    return str(caught.value).replace(str(path), "engine.yaml")


def test_a_large_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, "# " + "x" * MAX_CHARACTERS)
    assert error.startswith("engine.yaml: more than 1048576 characters")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: !!bool maybe", "engine.yaml:1: not valid YAML: 'maybe' can't be read as bool"),
        ('seed: !!int ""', "engine.yaml:1: not valid YAML: '' can't be read as int"),
        ("\nseed: !!int _", "engine.yaml:2: not valid YAML: '_' can't be read as int"),
        ("seed: !!float ''", "engine.yaml:1: not valid YAML: '' can't be read as float"),
        ("seed: !!timestamp x", "engine.yaml:1: not valid YAML: 'x' can't be read as timestamp"),
        ("kv_cache_memory: 1e400GB", "engine.yaml:1: kv_cache_memory: expected a size like 4GiB"),
        ('seed: "\\UFFFFFFFF"', "engine.yaml:1: not valid YAML: "),
        (
            "model: a\nseed: \x00",
            "engine.yaml:2: not valid YAML: the character '\\x00' is not allowed",
        ),
        ("x" * 5000 + ": 1", "engine.yaml:1: not valid YAML: "),
        ("? " + "x" * 5000 + "\n: 1", "engine.yaml:1: xxx"),
        ("seed: " + "x" * 5000, "engine.yaml:1: seed: expected a valid integer, got 'xxx"),
        (
            "model: [" + "a, " * 300 + "]",
            "engine.yaml:1: model: expected a model's name, or a mapping with 'path' and "
            "'component', got ['a', ",
        ),
        (
            "max_num_seqs: 2147483648",
            "engine.yaml:1: max_num_seqs: expected less than or equal to 2147483647",
        ),
        (
            "seed: 18446744073709551616",
            "engine.yaml:1: seed: expected less than 18446744073709551616",
        ),
        (
            "kv_cache_memory: 16EiB",
            "engine.yaml:1: kv_cache_memory: expected less than 9223372036854775808",
        ),
    ],
)
def test_odd_values_are_reported_in_a_line_with_their_place(
    tmp_path: Path, text: str, says: str
) -> None:
    error = error_of(tmp_path, text)
    assert error.startswith(says)
    assert len(error) < 800


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            "".join(f"key_number_{i}: 1\n" for i in range(30)),
            "engine.yaml:1: key_number_0: unknown key",
        ),
        (
            "plugins:\n  deny:\n" + "  - not a name\n" * 30,
            "engine.yaml:3: plugins.deny.0: expected the name of a distribution",
        ),
        ("observers:\n" + "- 3\n" * 30, "engine.yaml:2: observers.0: expected a component's name"),
    ],
)
def test_of_many_problems_ten_are_reported_and_the_rest_counted(
    tmp_path: Path, text: str, first: str
) -> None:
    *lines, last = error_of(tmp_path, text).splitlines()
    assert len(lines) == LISTED
    assert lines[0].startswith(first)
    assert last == "… and 20 more"


def test_work_for_unknown_keys_grows_with_their_number() -> None:
    with at_most(30 * 10_000), pytest.raises(ConfigError, match="… and 9990 more"):
        EngineConfig.load({f"key_number_{i}": 1 for i in range(10_000)})


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_bytes("\ufeffseed: 3".encode())
    assert EngineConfig.load(tmp_path / "engine.yaml").seed == 3


def test_aliases_within_reason_are_fine() -> None:
    value, _ = parse_yaml(
        "scheduler: &x {name: vtc, weights: {a: 1}}\nkv_cache: *x\nsampler: {<<: *x, name: "
        "default}",
        "f",
    )
    assert value["kv_cache"] == value["scheduler"] == value["sampler"] | {"name": "vtc"}


TAGS = [
    "",
    "!!int ",
    "!!bool ",
    "!!float ",
    "!!timestamp ",
    "!!null ",
    "!!binary ",
    "!!set ",
    "!!omap ",
    "!!pairs ",
    "!!seq ",
    "!!map ",
    "!x ",
    "&a ",
]
SCALARS = [
    "*a",
    "~",
    "1",
    "1:59",
    "0x",
    "0b2",
    "1e5",
    "1e400",
    "2024-13-45",
    "=",
    "<<",
    "auto",
    "demo",
    "'x",
    '"\\ud800"',
    '"\\x"',
    "'",
    "%",
    "@",
    "",
]
KEYS = [*EngineConfig.model_fields, "name", "<<", "~", "allow"]
PIECES = st.tuples(st.sampled_from(TAGS), st.sampled_from(SCALARS) | st.text(max_size=3)).map(
    "".join
)
YAML = st.recursive(
    PIECES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=3).map(
            lambda pairs: f"{{{', '.join(': '.join(pair) for pair in pairs)}}}"
        )
    ),
    max_leaves=8,
)
LINES = st.lists(st.tuples(st.sampled_from(KEYS), YAML).map(": ".join) | PIECES, max_size=4).map(
    "\n".join
)


@examples(quick=200, full=20_000)
@given(st.text(max_size=30) | YAML | LINES)
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    try:
        EngineConfig.load(parse_yaml(text, "f").value or {})
    except ConfigError as error:
        assert len(str(error)) < 5000  # noqa: PT017
