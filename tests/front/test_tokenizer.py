"""Loading a tokenizer from a model directory, and what is said when there is none."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

import dovetail_models
from dovetail.errors import ModelLoadError, RequestError
from dovetail.front.tokenizer import TOKENIZER_CONFIG, Tokenizer, TransformersTokenizer
from tests.budget import least_cpu_s
from tests.support import examples

DEMO = Path(dovetail_models.__file__).parent / "demo"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def test_text_comes_back(demo: Tokenizer) -> None:
    text = "O Romeo, Romeo! wherefore art thou — Ünïcode 👍?\n"
    assert demo.decode(demo.encode(text)) == text


@pytest.mark.slow("tokenizes in many threads")
@given(st.lists(st.text(max_size=40), max_size=5), st.booleans())
def test_many_texts_at_once_become_the_tokens_of_each(
    texts: list[str], special_tokens: bool
) -> None:
    """As the file says that the tokenizer is made of; with a token before and after, so that it
    shows whether they are there."""
    library = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    ours = TransformersTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=library))
    assert ours.encode_all(texts, special_tokens) == [
        library.encode(text, add_special_tokens=special_tokens).ids for text in texts
    ]
    assert ours.encode_all(texts, special_tokens) == [
        ours.encode(text, special_tokens) for text in texts
    ]


@examples(quick=20, full=200)
@given(st.lists(st.text(max_size=10), max_size=3))
def test_a_tokenizer_written_in_python_does_too(texts: list[str]) -> None:
    bytes_and_end = [[3 + byte for byte in text.encode()] + [1] for text in texts]
    assert TransformersTokenizer(transformers.ByT5Tokenizer()).encode_all(texts) == bytes_and_end


def test_a_panic_of_the_library_is_the_reason_like_any_other_error(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    with pytest.raises(ModelLoadError, match=r"no tokenizer that can be loaded \(PanicException: "):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_no_text(demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"half a surrogate pair, '\\ud800', at character 1"):
        demo.encode_all(["fine", "a\ud800"])


def test_it_knows_its_size_and_its_end(demo: Tokenizer) -> None:
    assert demo.vocab_size == 1024
    assert demo.own.eos_token_id == 0
    assert demo.decode([0, 50], skip_special_tokens=True) == demo.decode([50])


def test_it_knows_the_models_chat_templates_and_what_they_call_special_tokens(
    demo: Tokenizer,
) -> None:
    assert list(demo.chat_templates) == ["default"]
    assert demo.special_tokens == {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    several = TransformersTokenizer(transformers.ByT5Tokenizer())
    assert several.chat_templates == {}
    several = TransformersTokenizer(
        transformers.ByT5Tokenizer(chat_template={"default": "a", "tool_use": "b"})
    )
    assert several.chat_templates == {"default": "a", "tool_use": "b"}


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_a_name_is_never_looked_up_on_the_network() -> None:
    with pytest.raises(ModelLoadError, match="local directory"):
        Tokenizer.load("some-org/some-model")


@pytest.mark.slow("starts processes that import everything")
def test_loading_the_demo_does_not_import_torch() -> None:
    code = (
        f"import sys; from dovetail.front.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(DEMO)!r}).encode('x'); print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def of_pairs(side: str = "right") -> tuple[tokenizers.Tokenizer, TransformersTokenizer]:
    """The demo model's tokenizer with special tokens around the texts of a pair, of the library and
    ours."""
    library = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A",
        pair="<|endoftext|> $A <|endoftext|> $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", 0)],
    )
    names = ["input_ids", "token_type_ids"]
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, truncation_side=side, model_input_names=names
    )
    return tokenizers.Tokenizer.from_str(library.to_str()), TransformersTokenizer(own)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_is_cut_as_the_tokenizers_library_cuts_it(side: str) -> None:
    library, ours = of_pairs(side)
    texts = [
        "",
        "a",
        "a<|endoftext|>b",
        "wherefore art thou",
        "Deny thy father and refuse thy name",
    ]
    pairs = list(itertools.product(texts, texts))
    for most in range(4, 30):
        library.enable_truncation(most, strategy="longest_first", direction=side)
        cut = ours.encode_pairs(pairs, most)
        for pair, one in zip(pairs, cut, strict=True):
            theirs = library.encode(*pair)
            assert one.token_ids == theirs.ids
            assert one.second == theirs.type_ids.index(1)
    with pytest.raises(
        RequestError, match="must be more than 3, the special tokens of a pair, got 3"
    ):
        ours.encode_pairs([("a", "b")], 3)
    assert ours.encode_pairs([], 3) == []


def test_cutting_a_long_pair_takes_time_by_its_length() -> None:
    """The library keeps all combinations of what it cuts off both texts."""
    _, ours = of_pairs()
    long = "to be or not " * 10_000
    [one] = ours.encode_pairs([(long, long)], 64)
    assert len(one.token_ids) == 64
    assert least_cpu_s(lambda: ours.encode_pairs([(long, long)], 64), 1.0) <= 1.0


def with_settings(directory: Path, **settings: object) -> Path:
    """Copy the demo model's tokenizer, with other settings."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


SETTINGS: list[dict[str, object]] = [
    {"add_bos_token": True, "bos_token": "<|endoftext|>"},
    {"add_eos_token": True, "eos_token": "<|endoftext|>"},
    {"add_prefix_space": True},
    {"do_lower_case": True},
    {"split_special_tokens": True},
    {"extra_special_tokens": ["Romeo"]},
    {"legacy": False},
    {
        "padding_side": "left",
        "model_max_length": 3,
        "pad_to_multiple_of": 8,
        "truncation_strategy": "longest_first",
        "max_length": 2,
    },
    {"clean_up_tokenization_spaces": True, "spaces_between_special_tokens": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_tokenizer_config_do_what_transformers_makes_of_them(
    settings: dict[str, object], tmp_path: Path
) -> None:
    text = "Romeo , wherefore<|endoftext|> art thou Romeo ?"
    directory = with_settings(tmp_path, **settings)
    assert all(TOKENIZER_CONFIG.rule(key) is not None for key in settings)
    assert (
        Tokenizer.load(directory).encode(text)
        == transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    )


def test_each_setting_that_transformers_reads_is_in_the_table() -> None:
    base = transformers.PreTrainedTokenizerBase
    names = {
        *base.SPECIAL_TOKENS_ATTRIBUTES,
        "model_max_length",
        "padding_side",
        "truncation_side",
        "model_input_names",
        "split_special_tokens",
    }
    names |= {
        "clean_up_tokenization_spaces",
        "chat_template",
        "response_schema",
        "processor_class",
        "name_or_path",
        "added_tokens_decoder",
    }
    assert not [name for name in names if TOKENIZER_CONFIG.rule(name) is None]


def test_the_chat_template_of_a_processor_is_used_if_the_tokenizer_has_none(tmp_path: Path) -> None:
    directory = with_settings(tmp_path, chat_template=None)
    assert Tokenizer.load(directory).chat_templates == {}
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert Tokenizer.load(directory).chat_templates == {"default": "{{ messages }}"}
    with_settings(tmp_path, chat_template="{{ own }}")
    assert Tokenizer.load(directory).chat_templates == {"default": "{{ own }}"}
    (directory / "chat_template.json").write_text("[]")
    assert Tokenizer.load(directory).chat_templates == {"default": "{{ own }}"}
    with_settings(tmp_path, chat_template=None)
    with pytest.raises(ModelLoadError, match=r"chat_template.json: expected an object"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("lower", "files"), [(True, ["modules.json"]), (False, ["modules.json"]), (True, [])], ids=str
)
def test_texts_are_put_in_lower_case_as_sentence_transformers_does(
    lower: bool, files: list[str], tmp_path: Path
) -> None:
    directory = with_settings(tmp_path)
    (directory / "sentence_roberta_config.json").write_text(json.dumps({"do_lower_case": lower}))
    for name in files:
        (directory / name).write_text("[]")
    text = "ROMEO loves Juliet"
    expected = text.lower() if lower and files else text
    assert Tokenizer.load(directory).encode(text) == Tokenizer.load(DEMO).encode(expected)
