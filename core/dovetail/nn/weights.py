"""Loads weights from safetensors files or a GGUF file directly into place. Files are memory-mapped,
each rank reads only its part, and nothing is loaded twice or omitted."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from dovetail.api.json_files import read_json_object
from dovetail.api.media_types import OTHER_PARTS
from dovetail.api.model import WeightRule
from dovetail.errors import DovetailError, ModelLoadError
from dovetail.gguf.unpacked import LINK, SUFFIX
from dovetail.nn.format.stored import CheckpointTensor, StoredWeight
from dovetail.nn.gguf_tensors import GgufTensors
from dovetail.nn.parameter import Weight
from dovetail.nn.staging import Copies

log = logging.getLogger("dovetail")

Progress = Callable[[str, int, int], None]  # (what, done, total)
Place = tuple[int, int | str | None]  # of a tensor in the model


class Header(NamedTuple):
    """Data type and shape of a tensor, from the header of its file."""

    dtype: str  # such as "BF16"
    shape: tuple[int, ...]


_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# prefix of all names except the head's, in a checkpoint of a causal language model
_PREFIX = "model."

# other parts than the text model, and layers for multi-token prediction in a list of their own
_LEFT_OUT = re.compile(rf"{OTHER_PARTS.pattern}|model\.mtp_layers\.")

TEXT_PARTS = {  # prefixes of the text model's names beside a vision model -> without one
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "",
}
# dtypes, as headers name them, of tensors that are converted to the model's dtype
PLAIN = (
    "F64",
    "F32",
    "F16",
    "BF16",
)

# suffixes of tensors in old checkpoints that are computed instead
COMPUTED = (
    ".rotary_emb.inv_freq",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)

# endings of tensors that belong to no layer's weights: `dovetail_executors.runtime.kv_scales` reads
# them
_OF_THE_CACHE = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


NONE_HELD: Mapping[int, tuple[Weight, StoredWeight]] = {}

DRAWN_EXPERTS = 8  # with `load_format: dummy`, of each mixture
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


@torch.no_grad()
def load_weights(
    model: Any,
    directory: str | Path,
    progress: Progress | None = None,
    *,
    partly: bool = False,
    elsewhere: Callable[[str], bool] = lambda _: False,
    ranks: int = 1,
) -> None:
    """Fill every parameter of `model` (a `CausalLM`) from the checkpoint in `directory`. `progress`
    counts tensors. `partly`: the model has rules for some of its parameters only, and the
    checkpoint may hold other tensors. `elsewhere`: True for names of tensors that aren't the
    model's. `ranks`: processes that load at the same time, on the same CPUs.

    Two rules may name the same part of a parameter (tied weights): the checkpoint may then hold
    either tensor, or both if they are equal. Raises `ModelLoadError` naming the file and the
    tensor: files missing or corrupt, tensors missing, unknown, or of a wrong shape or dtype.
    """
    plain = list(model.weights())
    if not partly:
        _check_rules(model, plain)
    held = _held(plain)
    rules: dict[str, list[WeightRule]] = {}
    for rule in for_each_tensor(plain, held):
        rules.setdefault(rule.source, []).append(rule)
    stored = {
        name: path for name, path in _tensor_files(Path(directory)).items() if not elsewhere(name)
    }
    skipped = tuple(
        rule.source[:-1] for rule in plain if rule.parameter is None and rule.source.endswith("*")
    )
    of_text = _text_names(stored)
    if len(of_text) < len(stored):
        others = len(stored) - len(of_text)
        log.info("%d tensors of other parts than the text model are skipped", others)
    names = {new: old for new, old in of_text.items() if not new.startswith(skipped)}
    if skipped and len(names) < len(stored):
        log.info("tensors named %s are skipped", " and ".join(f"{start}*" for start in skipped))
    files = {name: stored[old] for name, old in names.items()}
    if _is_bare(files, rules):
        rules = {name.removeprefix(_PREFIX): rule for name, rule in rules.items()}
    _check_names(
        rules,
        {name: path for name, path in files.items() if name in rules} if partly else files,
        Path(directory),
    )
    todo = [
        name for name in files if any(rule.parameter is not None for rule in rules.get(name, ()))
    ]
    _expect(rule for name in todo for rule in rules[name])
    _load_all(
        [_Source(files[name], names[name], tuple(rules[name])) for name in todo], progress, ranks
    )
    _dequantize(held)


class _Source(NamedTuple):
    """A tensor of a checkpoint, and the rules that load it."""

    path: Path
    name: str  # in the file
    rules: tuple[WeightRule, ...]


def _load_all(sources: Sequence[_Source], progress: Progress | None, ranks: int) -> None:
    """Load tensors, one file after the other. Only copies of plain weights run in other threads."""
    loaded: set[Place] = set()
    done = 0
    with Copies.to(_device_of(sources), ranks) as copies:
        for path in dict.fromkeys(source.path for source in sources):
            with _opened(path) as file:
                for _, name, rules in (source for source in sources if source.path == path):
                    with _naming(path, name):
                        tensor = file.get_slice(name)
                        for rule in rules:
                            _load_one(rule, tensor, loaded, copies)
                    done += 1
                    if progress is not None:
                        progress("loading weights", done, len(sources))


def _device_of(sources: Sequence[_Source]) -> torch.device:
    """Return the device of the plain weights."""
    weights = (rule.parameter for source in sources for rule in source.rules)
    return next((one.device for one in weights if type(one) is Weight), torch.device("cpu"))


def tensors_named(
    directory: str | Path, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, on the CPU, of those in the checkpoint whose names are `wanted`.
    Raises `ModelLoadError` as `load_weights` does."""
    files = _tensor_files(Path(directory))
    for path in dict.fromkeys(path for name, path in files.items() if wanted(name)):
        with _opened(path) as file:
            for name in (name for name in files if files[name] == path and wanted(name)):
                with _naming(path, name):
                    yield name, file.get_tensor(name)


def read_rows(directory: str | Path, names: Sequence[str], rows: Sequence[int]) -> torch.Tensor:
    """Return rows [n, size], on the CPU, of the first of the matrices `names` that the checkpoint
    has. Raises `ModelLoadError` as `load_weights`."""
    files = _tensor_files(Path(directory))
    name = next((name for name in names if name in files), None)
    if name is None:
        raise ModelLoadError(f"{directory}: the checkpoint has none of {', '.join(names)}")
    with _opened(files[name]) as file, _naming(files[name], name):
        matrix = file.get_slice(name)
        found = torch.cat([matrix[row : row + 1] for row in rows])
        if not found.is_floating_point() or found.element_size() < 2:
            raise ModelLoadError(
                f"expected plain numbers, found {str(found.dtype).removeprefix('torch.')}"
            )
        return found


def tensor_names(directory: str | Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors. Raises `ModelLoadError` as `load_weights`
    does."""
    return frozenset(_tensor_files(Path(directory)))


def other_parts(directory: str | Path) -> dict[str, Header]:
    """Return names of a checkpoint's tensors that aren't the language model's -> what headers say
    of them. Raises `ModelLoadError` as `load_weights` does."""
    files = _tensor_files(Path(directory))
    text = {*_text_names(files).values()}
    found: dict[str, Header] = {}
    for path in dict.fromkeys(files.values()):
        with _opened(path) as file:
            for name in (name for name in files if files[name] == path and name not in text):
                part = file.get_slice(name)
                found[name] = Header(part.get_dtype(), tuple(part.get_shape()))
    return found


def stored_bytes(directory: str | Path, dtype: torch.dtype | None = None) -> int:
    """Return the size of a checkpoint's tensors, without those of a vision model, by the headers of
    its files. `dtype`: what plain numbers are loaded in; None: as stored. Raises `ModelLoadError`
    as `load_weights` does."""
    files = _tensor_files(Path(directory))
    wanted = {*_text_names(files).values()}
    total = 0
    for path in dict.fromkeys(files.values()):
        with _opened(path) as file:
            for name in (name for name in files if files[name] == path and name in wanted):
                part = file.get_slice(name)
                stored = part.get_dtype()
                bits = (
                    8 * dtype.itemsize
                    if dtype is not None and stored in PLAIN
                    else _bits_of(stored)
                )
                total += math.prod(part.get_shape()) * bits // 8
    return total


def _bits_of(dtype: str) -> int:
    """Return the bits of a number of a dtype as headers name it, such as F8_E4M3 or I32."""
    found = re.match(r"[A-Z]+(\d+)", dtype)
    return int(found[1]) if found else 8


def _held(rules: Iterable[WeightRule]) -> dict[int, tuple[Weight, StoredWeight]]:
    """Return memory for the plain weights that the checkpoint stores in a format, by their ids."""
    return {
        id(rule.parameter): (
            rule.parameter,
            rule.parameter.stored_as.allocate(rule.parameter, rule.parameter.device),
        )
        for rule in rules
        if isinstance(rule.parameter, Weight) and rule.parameter.stored_as is not None
    }


def _dequantize(held: Mapping[int, tuple[Weight, StoredWeight]]) -> None:
    """Fill plain weights from the memory that `_held` returned, now that it is loaded."""
    for weight, stored in held.values():
        weight.data.copy_(stored.format.dequantized(stored))


def for_each_tensor(
    rules: Iterable[WeightRule], held: Mapping[int, tuple[Weight, StoredWeight]] = NONE_HELD
) -> Iterator[WeightRule]:
    """Return the rules, with one per stored tensor for weights in another format, instead of one
    for the plain weight. `held`: memory for plain weights that are stored in a format, by their
    ids."""
    for rule in rules:
        _, weight = held.get(id(rule.parameter), (None, rule.parameter))
        tensors = dict(weight.tensors(rule.shard_id)) if isinstance(weight, StoredWeight) else {}
        if not tensors:
            yield rule
        for word, tensor in tensors.items():
            before, _, last = rule.source.rpartition(".")
            name = f"{before}.{word}" if last == "weight" else f"{rule.source}_{word}"
            yield WeightRule(
                name,
                tensor,
                rule.shard_id,
                optional=rule.optional or tensor.optional,
                transform=rule.transform,
            )


def _expect(rules: Iterable[WeightRule]) -> None:
    """Tell stored weights which of their tensors the checkpoint has."""
    for rule in rules:
        if isinstance(rule.parameter, CheckpointTensor):
            rule.parameter.expected.add(rule.shard_id)


def _is_bare(files: Mapping[str, Path], rules: Mapping[str, list[WeightRule]]) -> bool:
    """Return True if the checkpoint was saved from the bare model (`LlamaModel`), whose names lack
    the prefix. transformers reads such checkpoints, too."""
    return not any(name.startswith(_PREFIX) for name in files) and any(
        _PREFIX + name in rules for name in files
    )


def _text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that tensors of the text model have by themselves -> those in the
    checkpoint, which may hold a vision model, too."""
    names = list(names)
    renamed = {text_name(name): name for name in names if text_name(name) != name}
    if renamed:
        renamed |= {name: name for name in names if name.startswith("lm_head.")}
    else:
        renamed = {name: name for name in names if not _LEFT_OUT.match(name)}
    return renamed


def text_name(name: str) -> str:
    """Return the name that a tensor of the text model has without a vision model."""
    for old, new in TEXT_PARTS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def place_of(rule: WeightRule) -> Place:
    """Return where a rule's tensor goes: the parameter, and where the part begins. Of parts for
    different layouts of a checkpoint it is the same."""
    owner = (
        rule.parameter.weight if isinstance(rule.parameter, CheckpointTensor) else rule.parameter
    )
    part = getattr(owner, "parts", {}).get(rule.shard_id)
    return id(rule.parameter), rule.shard_id if part is None else part.at


def _load_one(rule: WeightRule, source: Any, loaded: set[Place], copies: Copies) -> None:
    place = place_of(rule)
    if place not in loaded:
        if type(rule.parameter) is Weight and rule.transform is None:
            rule.parameter.load(source, rule.shard_id, copy=copies.copy)
        else:  # a transform may use its result's memory again
            rule.parameter.load(source, rule.shard_id, rule.transform)
        loaded.add(place)
        return
    if isinstance(rule.parameter, CheckpointTensor | StoredWeight):
        raise ModelLoadError("this quantized weight is loaded already, under another name")
    copies.wait()
    part = rule.parameter.parts[rule.shard_id]
    there = part.place(rule.parameter.data)
    if not torch.equal(part.read(source, rule.transform).to(there), there):
        raise ModelLoadError(
            "differs from the tensor that the config says it is tied to; set tie_word_embeddings "
            "to false in config.json"
        )


def dummy_weights(model: Any, seed: int) -> None:
    """Random weights instead of a checkpoint's: normal with standard deviation 0.02, and 1 for
    norms. The same seed gives the same model on a kind of device, over however many ranks. Of a
    mixture's experts the first `DRAWN_EXPERTS` are drawn, and the others repeat these, since
    drawing hundreds of small experts in each layer would take most of a start."""
    filled: set[Place] = set()
    drawn = "", torch.empty(0)
    first_experts: dict[tuple[str, int], Any] = {}
    for rule in model.weights():
        weight = rule.parameter
        place = place_of(rule)
        if weight is None or place in filled:
            continue
        filled.add(place)
        part = weight.parts[rule.shard_id]
        if (expert := _expert_of(rule)) is not None:
            first = first_experts.setdefault((expert.layer, expert.number % DRAWN_EXPERTS), weight)
            if first is not weight:
                _repeat(first, weight)
                filled |= {place_of(replace(rule, shard_id=shard)) for shard in weight.parts}
                continue
        if weight.scale:
            weight.load(torch.ones(part.source_shape, device=weight.device), rule.shard_id)
            continue
        name = rule.source if part.expert is None else f"{rule.source} {part.expert[0]}"
        if name != drawn[0]:  # several parts of one tensor follow each other
            drawn = name, random_numbers(part.source_shape, name, seed, weight.device)
        weight.load(part.whole(drawn[1]), rule.shard_id)


class _Expert(NamedTuple):
    """One of a mixture's experts."""

    layer: str  # of the experts: the tensor's name without an index
    number: int


def _expert_of(rule: WeightRule) -> _Expert | None:
    """Return the expert whose weight a rule fills; None for other weights."""
    part = rule.parameter.parts[rule.shard_id]
    if part.expert is not None:
        return _Expert(rule.source, part.expert[0])
    if (found := _EXPERT.search(rule.source)) is None:
        return None
    start, end = found.span(1)
    return _Expert(f"{rule.source[:start]}*{rule.source[end:]}", int(found[1]))


def _repeat(source: Any, weight: Any) -> None:
    """Copy the values of a weight that is filled to one of the same shape and format."""
    weight.data.copy_(source.data)
    for name, value in vars(weight).items():
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(source, name))


def random_numbers(
    shape: Sequence[int], name: str, seed: int, device: torch.device
) -> torch.Tensor:
    """Return float32 numbers for the tensor `name` of a model with random weights."""
    # torch takes 32 bits on a CPU
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(tuple(shape), generator=generator, device=device) * 0.02


def _check_rules(model: torch.nn.Module, rules: Iterable[WeightRule]) -> None:
    """Check that every part of every parameter has a rule; otherwise the architecture is at fault,
    not the checkpoint."""
    ruled = {(id(rule.parameter), rule.shard_id) for rule in rules}
    for name, parameter in model.named_parameters():
        for shard_id in getattr(parameter, "parts", {None: None}):
            if (id(parameter), shard_id) not in ruled:
                part = f" (part {shard_id!r})" if shard_id is not None else ""
                raise ModelLoadError(
                    f"{type(model).__name__}.weights() has no rule for parameter {name}{part}"
                )


def _missing(rules: Mapping[str, list[WeightRule]], found: set[Place]) -> list[str]:
    """Return the names of missing tensors; where several would do, such as that of an expert or of
    all, the one for the fewest places."""
    by_place: dict[Place, str] = {}
    for name in sorted(rules, key=lambda name: len(rules[name])):
        for rule in rules[name]:
            if not rule.optional and place_of(rule) not in found:
                by_place.setdefault(place_of(rule), rules[name][0].source)
    named = set(by_place.values())
    return [some[0].source for some in rules.values() if some[0].source in named]


def _check_names(
    rules: Mapping[str, list[WeightRule]], files: Mapping[str, Path], directory: Path
) -> None:
    """Check that the checkpoint has everything the model needs, and nothing that it doesn't
    know."""
    found = {place_of(rule) for name in files for rule in rules.get(name, ())}
    missing = _missing(rules, found)
    extra = [
        name for name in files if name not in rules and not name.endswith(COMPUTED + _OF_THE_CACHE)
    ]
    check_differences(directory, missing, extra)


def check_differences(directory: str | Path, missing: list[str], extra: list[str]) -> None:
    """Raise `ModelLoadError` that names tensors which a checkpoint lacks, and those that its model
    doesn't know, unless there are none."""
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)}")
    if extra:
        problems.append(f"holds {_some(extra)}, which the model doesn't know")
    if problems:
        raise ModelLoadError(f"{directory}: the checkpoint {' and '.join(problems)}")


def _some(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({some_of(names)})"


def some_of(names: Iterable[str], limit: int = 5) -> str:
    """Return the first names in order, and the number of others."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Return tensor name -> file, from the files themselves, in the order of files."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory}: no such directory")
    if (directory / _WEIGHTS).is_file():
        return dict.fromkeys(_names_in(directory / _WEIGHTS), directory / _WEIGHTS)
    if (directory / _INDEX).is_file():
        return _sharded_files(directory)
    if (directory / LINK).is_file():
        return dict.fromkeys(_names_in(directory / LINK), directory / LINK)
    others = sorted(
        p.name
        for p in directory.iterdir()
        if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    )
    found = f"found {', '.join(others[:5])}" if others else "found no weights at all"
    hint = ""
    if others and all(name.endswith(SUFFIX) for name in others):
        hint = "; name the GGUF file as the model"
    elif others and not any(name.endswith(".safetensors") for name in others):
        hint = (
            "; convert them to safetensors: "
            "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(ANOTHER), of "
            "transformers"
        )
    raise ModelLoadError(f"{directory}: neither {_WEIGHTS} nor {_INDEX}; {found}{hint}")


def _sharded_files(directory: Path) -> dict[str, Path]:
    path = directory / _INDEX
    names = read_json_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ModelLoadError(
            f"{path}: expected 'weight_map', a map from tensor names to file names"
        )
    files: dict[str, Path] = {}
    for shard in sorted(set(names.values())):
        if shard != Path(shard).name:
            raise ModelLoadError(f"{path}: {shard!r} is not the name of a file beside it")
        held = set(_names_in(directory / shard))
        for name in (name for name, file in names.items() if file == shard):
            if name not in held:
                raise ModelLoadError(
                    f"{directory / shard}: lacks the tensor {name}, which {_INDEX} says it holds"
                )
            files[name] = directory / shard
    return files


def _names_in(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        opened = GgufTensors(path) if path.suffix == SUFFIX else safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error
    with opened as file:
        yield file


@contextmanager
def _naming(path: Path, tensor: str) -> Iterator[None]:
    """Context that adds the file and the tensor to errors."""
    try:
        yield
    except DovetailError as error:
        raise ModelLoadError(f"{path}: tensor {tensor}: {error}") from error
    except SafetensorError as error:
        raise ModelLoadError(f"{path}: tensor {tensor}: {error}") from error
