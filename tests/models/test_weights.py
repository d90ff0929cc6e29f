"""Weights are loaded from safetensors files, each once into its parameter; errors in the files are
reported."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from dovetail.errors import ModelLoadError
from dovetail.nn import staging
from dovetail.nn.parallel import SINGLE
from dovetail.nn.staging import Copies
from dovetail.nn.weights import dummy_weights, load_weights
from dovetail_executors.runtime.loading import ModelPlan, ReadingWeights, load_model
from tests.models.oracle import (
    CPU,
    MODELS,
    DenseAttention,
    FakeGroup,
    build,
    checkpoint_tensors,
    executor_config,
    reference,
    run,
    run_reference,
)
from tests.nn.test_staging import LateQueue
from tests.rounding import assert_rounded, roundings_of
from tests.support import examples

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
LAYER = "model.layers.1."
TOKENS = torch.tensor([1, 2, 3, 10])


def small(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**(SHAPE | fields))


def saved(
    directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **fields: Any
) -> Any:
    """A checkpoint as transformers writes it; returns its model."""
    model = reference(small(**fields)).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return model.float()


def loaded(directory: Path, **settings: Any) -> Any:
    config = executor_config(directory, **settings)
    return load_model(
        ModelPlan.of(config, MODELS, SINGLE, CPU), config, DenseAttention, SINGLE, CPU
    )


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("shard", ["5GB", "1KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_checkpoint_computes_what_it_did(
    tmp_path: Path, shard: str, dtype: torch.dtype, tied: bool
) -> None:
    theirs = saved(tmp_path, dtype=dtype, shard=shard, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "1KB")
    ours = loaded(tmp_path)
    plan = ModelPlan.of(executor_config(tmp_path), MODELS, SINGLE, CPU)
    assert (plan.dtype, plan.max_model_len, plan.vocab_size) == (torch.float32, 32, 11)
    assert_rounded(
        run(ours, TOKENS)[1],
        run_reference(theirs, TOKENS)[1],
        roundings_of(theirs.config, len(TOKENS)),
    )


def test_weights_take_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    module = loaded(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_progress_counts_every_tensor_once(tmp_path: Path) -> None:
    saved(tmp_path, shard="1KB")
    seen: list[tuple[str, int, int]] = []
    load_weights(build(small()), tmp_path, lambda *args: seen.append(args))
    total = len(list(build(small()).weights()))
    assert seen == [("loading weights", i + 1, total) for i in range(total)]


def test_a_rank_reads_only_its_part(tmp_path: Path) -> None:
    theirs = saved(tmp_path, num_key_value_heads=2).state_dict()
    ours = build(small(num_key_value_heads=2), parallel=FakeGroup(1, 2))
    load_weights(ours, tmp_path)
    for rule in ours.weights():
        part = rule.parameter.parts[rule.shard_id]
        expected = theirs[rule.source].narrow(part.dim, part.start, part.size)
        assert torch.equal(part.place(rule.parameter), expected), rule.source


def one_more(weights: torch.Tensor) -> torch.Tensor:
    return 1 + weights


def with_one_more(module: Any, *names: str) -> Any:
    """The model, whose rules for tensors with such names add one."""
    rules = [
        replace(rule, transform=one_more) if any(name in rule.source for name in names) else rule
        for rule in module.weights()
    ]
    module.weights = lambda: rules
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rule_can_transform_what_the_checkpoint_holds(
    tmp_path: Path, rank: int, dtype: torch.dtype
) -> None:
    """In float32 for any checkpoint dtype: 1 + w in bfloat16 would lose small values."""
    saved(tmp_path, dtype=dtype, num_key_value_heads=2)
    config, group = small(num_key_value_heads=2), FakeGroup(rank, 2)
    plain, transformed = (
        build(config, parallel=group),
        with_one_more(build(config, parallel=group), "norm", "q_proj", "down_proj"),
    )
    for module in (plain, transformed):
        load_weights(module, tmp_path)
    for theirs, ours in zip(plain.weights(), transformed.weights(), strict=True):
        before, after = (
            rule.parameter.parts[rule.shard_id].place(rule.parameter) for rule in (theirs, ours)
        )
        assert torch.equal(after, before if ours.transform is None else 1 + before), ours.source


def test_tied_tensors_are_compared_as_they_are_loaded(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    load_weights(
        with_one_more(build(small(tie_word_embeddings=True)), "embed_tokens", "lm_head"), tmp_path
    )
    with pytest.raises(
        ModelLoadError, match="differs from the tensor that the config says it is tied to"
    ):
        load_weights(with_one_more(build(small(tie_word_embeddings=True)), "lm_head"), tmp_path)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Load as to a GPU: through other threads, and a class of copies."""

    def use(piece_bytes: int = 100, least_bytes: int = 1, kind: type[Copies] = Copies) -> None:
        monkeypatch.setattr(staging, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(staging, "LEAST_BYTES", least_bytes)
        monkeypatch.setattr(Copies, "to", lambda *asked: kind(lambda: LateQueue([]), 3))

    return use


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shard", ["5GB", "1KB"])
def test_threads_load_what_one_thread_loads(
    tmp_path: Path, staged: Callable[..., None], shard: str, rank: int
) -> None:
    fields = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    saved(tmp_path, shard=shard, **fields)
    plain, ours = (build(small(**fields), parallel=FakeGroup(rank, 2)) for _ in range(2))
    load_weights(plain, tmp_path)
    staged()
    by: list[threading.Thread] = []
    load_weights(ours, tmp_path, lambda *_: by.append(threading.current_thread()))
    for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert {*by} == {threading.current_thread()}


def test_a_tied_tensor_is_compared_after_the_other_one_is_there(
    tmp_path: Path, staged: Callable[..., None]
) -> None:
    saved(tmp_path, tie_word_embeddings=True, vocab_size=100)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    waited_for = threading.Event()

    class Delayed(Copies):
        def wait(self) -> None:
            waited_for.set()
            super().wait()

        def _send(self, *args: Any) -> None:
            waited_for.wait(60)
            super()._send(*args)

    size = 100 * 8 * 4
    staged(size, size, Delayed)  # one piece; no other tensor is as large
    ours = build(small(tie_word_embeddings=True, vocab_size=100))
    load_weights(ours, tmp_path)
    assert torch.equal(
        next(iter(ours.parameters())),
        load_file(tmp_path / "model.safetensors")["lm_head.weight"],
    )


def test_the_first_wrong_tensor_is_named_whatever_threads_do(
    tmp_path: Path, staged: Callable[..., None]
) -> None:
    saved(tmp_path)
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({name: tensors[name].to(torch.int8) for name in names}),
    )
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        first = min(names, key=[*file.keys()].index)
    staged()
    for _ in range(5):
        with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor {first}: expected"):
            load_weights(build(small()), tmp_path)


def test_random_weights_are_what_the_layers_compute_with() -> None:
    plain, transformed = build(small()), with_one_more(build(small()), "norm", "proj")
    for module in (plain, transformed):
        dummy_weights(module, seed=0)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), transformed.parameters(), strict=True)
    )


def test_tensors_that_are_computed_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(2)}),
    )
    loaded(tmp_path)


class TestTiedHead:
    def test_may_be_there_too_if_it_is_equal(self, tmp_path: Path) -> None:
        saved(tmp_path, tie_word_embeddings=True)
        rewrite(
            tmp_path,
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
            ),
        )
        loaded(tmp_path)

    def test_may_be_there_instead_of_the_embedding(self, tmp_path: Path) -> None:
        theirs = saved(tmp_path, tie_word_embeddings=True)
        rewrite(
            tmp_path,
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
            ),
        )
        assert_rounded(
            run(loaded(tmp_path), TOKENS)[1],
            run_reference(theirs, TOKENS)[1],
            roundings_of(theirs.config, len(TOKENS)),
        )

    def test_that_differs_is_refused(self, tmp_path: Path) -> None:
        saved(tmp_path, tie_word_embeddings=True)
        rewrite(
            tmp_path,
            lambda tensors: tensors.update(
                {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
            ),
        )
        with pytest.raises(ModelLoadError, match="set tie_word_embeddings to false"):
            loaded(tmp_path)

    def test_needs_one_of_the_two(self, tmp_path: Path) -> None:
        saved(tmp_path, tie_word_embeddings=True)
        rewrite(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
        with pytest.raises(ModelLoadError, match=r"lacks 1 tensor \(model.embed_tokens.weight\)"):
            loaded(tmp_path)


class TestDummyWeights:
    @staticmethod
    def parameters(seed: int, **fields: Any) -> dict[str, torch.Tensor]:
        model = build(small(attention_bias=True), **fields)
        dummy_weights(model, seed)
        return dict(model.named_parameters())

    def test_are_never_zero_and_norms_are_one(self) -> None:
        for name, parameter in self.parameters(0).items():
            assert (parameter != 0).all(), name
            assert torch.equal(parameter, torch.ones_like(parameter)) == ("norm" in name), name

    def test_are_normal_with_a_small_deviation(self) -> None:
        weights = torch.cat(
            [p.flatten() for name, p in self.parameters(0).items() if "norm" not in name]
        )
        assert abs(weights.mean().item()) < 0.002
        assert abs(weights.std().item() - 0.02) < 0.002

    def test_follow_from_the_seed(self) -> None:
        one, same, other = (self.parameters(seed) for seed in (3, 3, 4))
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert all(torch.equal(one[name], other[name]) == ("norm" in name) for name in one)

    def test_differ_from_layer_to_layer(self) -> None:
        weights = self.parameters(0)
        first, second = (weights[f"blocks.{i}.mlp.down_proj.weight"] for i in (0, 1))
        assert not torch.equal(first, second)

    def test_need_no_files(self, tmp_path: Path) -> None:
        small(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
        module = loaded(tmp_path, load_format="dummy", seed=5)
        again = build(small())
        dummy_weights(again, 5)
        assert torch.equal(module.head.weight, again.head.weight)


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def edit_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


SINGLE_FILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (
        lambda d: rewrite(d, lambda t: t.pop(f"{LAYER}mlp.up_proj.weight")),
        r"lacks 1 tensor \(model.layers.1.mlp.up_proj.weight\)",
    ),
    "part of a fused one": (
        lambda d: rewrite(d, lambda t: t.pop(f"{LAYER}self_attn.k_proj.weight")),
        r"lacks 1 tensor \(model.layers.1.self_attn.k_proj.weight\)",
    ),
    "many missing": (
        lambda d: rewrite(d, lambda t: [t.pop(name) for name in list(t) if "layers" in name]),
        r"lacks 18 tensors \(model.layers.0.input_layernorm.weight, .* and 13 more\)",
    ),
    "unknown tensor": (
        lambda d: rewrite(d, lambda t: t.update({f"{LAYER}self_attn.q_scale": torch.ones(1)})),
        r"holds 1 tensor \(model.layers.1.self_attn.q_scale\), which the model doesn't know",
    ),
    "a layer too many": (
        lambda d: rewrite(
            d, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(12, 8)})
        ),
        "model.layers.2.mlp.up_proj.weight",
    ),
    "wrong shape": (
        lambda d: rewrite(d, lambda t: t.update({f"{LAYER}mlp.up_proj.weight": torch.ones(12, 7)})),
        r"tensor model.layers.1.mlp.up_proj.weight: expected shape \[12, 8\], found \[12, 7\]",
    ),
    "quantized values": (
        lambda d: rewrite(
            d,
            lambda t: t.update({f"{LAYER}mlp.up_proj.weight": torch.ones(12, 8, dtype=torch.int8)}),
        ),
        "tensor model.layers.1.mlp.up_proj.weight: expected float16.* found int8",
    ),
    "truncated": (
        lambda d: cut(d / "model.safetensors", -9),
        "model.safetensors: not a whole safetensors file",
    ),
    "header only": (
        lambda d: cut(d / "model.safetensors", 20),
        "model.safetensors: not a whole safetensors file",
    ),
    "empty file": (
        lambda d: cut(d / "model.safetensors", 0),
        "model.safetensors: not a whole safetensors file",
    ),
    "junk": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs…" * 9),
        "not a whole safetensors file",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "neither model.safetensors nor .*; found no weights at all",
    ),
    "only .bin": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        r"found pytorch_model.bin; convert them to safetensors: "
        r"AutoModelForCausalLM.from_pretrained\(DIRECTORY\).save_pretrained",
    ),
    "only GGUF": (
        lambda d: (d / "model.safetensors").rename(d / "q4.gguf"),
        r"found q4.gguf; name the GGUF file as the model",
    ),
    "a bare model without one tensor": (
        lambda d: rewrite(
            d,
            lambda t: (
                [t.update({name[6:]: t.pop(name)}) for name in list(t) if name[:6] == "model."]
                and t.pop("norm.weight")
            ),
        ),
        r"the checkpoint lacks 1 tensor \(model.norm.weight\)$",
    ),
    "names with the prefix and without": (
        lambda d: rewrite(d, lambda t: t.update({"norm.weight": t.pop("model.norm.weight")})),
        r"lacks 1 tensor \(model.norm.weight\) and holds 1 tensor \(norm.weight\)",
    ),
}

SHARDED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (
        lambda d: shards(d)[1].unlink(),
        r"model-00002-of-\d+.safetensors: no such file",
    ),
    "truncated shard": (
        lambda d: cut(shards(d)[1], -9),
        r"model-00002-of-\d+.safetensors: not a whole safetensors file",
    ),
    "index not JSON": (
        lambda d: cut(d / "model.safetensors.index.json", 30),
        "index.json: not valid JSON",
    ),
    "index of brackets": (
        lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000),
        "index.json: more than 50 lists and objects",
    ),
    "index without a map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "index.json: expected 'weight_map'",
    ),
    "index promises too much": (
        lambda d: edit_index(d, lambda names: names.update(more=next(iter(names.values())))),
        "lacks the tensor more, which model.safetensors.index.json says it holds",
    ),
    "index leads elsewhere": (
        lambda d: edit_index(d, lambda names: names.update(more="../other.safetensors")),
        r"'../other.safetensors' is not the name of a file beside it",
    ),
}


@pytest.mark.parametrize("case", SINGLE_FILE)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    spoil, said = SINGLE_FILE[case]
    saved(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelLoadError, match=said) as caught:
        loaded(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("case", SHARDED)
def test_a_wrong_shard_or_index_is_named_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    spoil, said = SHARDED[case]
    saved(tmp_path, shard="1KB")
    spoil(tmp_path)
    with pytest.raises(ModelLoadError, match=said) as caught:
        loaded(tmp_path)
    assert str(tmp_path) in str(caught.value)


@given(data=st.data())
@examples(quick=60, full=1000)
def test_any_cut_of_a_file_is_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    tensors = checkpoint_tensors(reference(small()))
    save_file(tensors, directory / "model.safetensors")
    size = (directory / "model.safetensors").stat().st_size
    cut(directory / "model.safetensors", data.draw(st.integers(0, size - 1)))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_weights(build(small()), directory)


def test_an_architecture_that_forgets_a_parameter_is_reported(tmp_path: Path) -> None:
    saved(tmp_path)
    model = build(small())
    rules = [rule for rule in model.weights() if rule.source != f"{LAYER}self_attn.v_proj.weight"]
    model.weights = lambda: rules
    with pytest.raises(
        ModelLoadError, match=r"no rule for parameter .*qkv_proj.weight \(part 'v'\)"
    ):
        load_weights(model, tmp_path)


def read_in_a_thread(directory: Path, meanwhile: Callable[[ReadingWeights], object]) -> Any:
    """Load a model whose weights a thread reads, call `meanwhile`, and return the model."""
    config = executor_config(directory)
    plan = ModelPlan.of(config, MODELS, SINGLE, CPU)
    with ReadingWeights() as reading:
        module = load_model(plan, config, DenseAttention, SINGLE, CPU, reading=reading)
        meanwhile(reading)
    return module


def test_weights_that_a_thread_reads_are_the_same_and_there_at_the_end(tmp_path: Path) -> None:
    saved(tmp_path)
    module = read_in_a_thread(tmp_path, lambda reading: None)
    assert not module.training
    for name, parameter in loaded(tmp_path).named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_thread_can_not_read_is_raised_where_it_is_waited_for(
    tmp_path: Path, waits: bool
) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(LAYER + "mlp.up_proj.weight"))
    reached: list[bool] = []

    def meanwhile(reading: ReadingWeights) -> None:
        reached.append(True)
        if waits:
            reading.wait()
            pytest.fail("it has read what isn't there")

    with pytest.raises(ModelLoadError, match=r"mlp\.up_proj"):
        read_in_a_thread(tmp_path, meanwhile)
    assert reached


def test_an_error_beside_the_reading_is_the_one_that_is_raised(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ZeroDivisionError):
        read_in_a_thread(tmp_path, lambda reading: 1 / 0)
