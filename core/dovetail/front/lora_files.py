"""Reads LoRA adapters in PEFT's format and checks them against the model: `read_adapter`. Files are
untrusted: whatever is wrong with one becomes a `RequestError`. Needs no torch, and runs in a
process of its own: see `adapter_worker`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import SchemaError, SchemaValidator, core_schema

from dovetail.api.executor import AdapterCapacity
from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.api.json_files import MAX_DEPTH
from dovetail.api.media_types import OTHER_PARTS
from dovetail.base.bounded_json import JsonBounds, WrongJsonError, read_json
from dovetail.base.checks import as_number, plain_integer
from dovetail.errors import RequestError, shown

T = TypeVar("T")

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MERGE = "merge the adapter into its base model with PEFT's merge_and_unload, and serve that"
# bytes
_MAX_CONFIG = 1 << 20
_MAX_HEADER = 16 << 20
_SLACK = 1 << 20
# characters of a module's name; patterns that aren't plain names
_MAX_NAME = 512
_MAX_PATTERNS = 100
_CONFIG_BOUNDS = JsonBounds(parts=100_000, depth=MAX_DEPTH)
# of a header: for each tensor, and for its metadata
_TENSOR_PARTS = 7
_OTHER_PARTS = 1_000
_MAX_DIMENSION = 1 << 40
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
}  # of tensors, as numpy reads them
_OFF: tuple[Any, ...] = (False, [], {})
_TRAINING = NoEffect("of training")
_FROM_TENSORS = NoEffect("the tensors say which modules are adapted")
KEYS = FileKeys(
    CONFIG,
    {
        "peft_type": Used("LORA; others are refused"),
        "r": Used("the rank"),
        "lora_alpha": Used("the scale, times the rank"),
        "rank_pattern": Used("ranks of single modules"),
        "alpha_pattern": Used("scales of single modules"),
        "use_rslora": Used("divides by the root of the rank"),
        "target_modules": Used("the adapted modules, which must be those of the tensors"),
        "layers_to_transform": Used("the adapted layers, which must be those of the tensors"),
        "init_lora_weights": Used("refused if the base model's weights were changed, too"),
        "base_model_name_or_path": NoEffect("the request names the model"),
        "revision": NoEffect("the request names the model"),
        "exclude_modules": _FROM_TENSORS,
        "layers_pattern": _FROM_TENSORS,
        "fan_in_fan_out": NoEffect("how the base model stores its weights"),
        "qalora_group_size": NoEffect("only with `use_qalora`"),
        "ensure_weight_tying": NoEffect("only with `modules_to_save`"),
        "megatron_core": NoEffect("only with `megatron_config`"),
        "runtime_config": NoEffect("where PEFT computes"),
        "peft_version": NoEffect("the version that wrote the file"),
        **dict.fromkeys(
            ("auto_mapping", "inference_mode", "task_type"), NoEffect("which class PEFT makes")
        ),
        **dict.fromkeys(("corda_config", "eva_config", "loftq_config"), _TRAINING),
        **dict.fromkeys(("lora_dropout", "lora_ga_config", "velora_config"), _TRAINING),
        "bias": Refused("it changes biases of the model", ("none",)),
        "use_dora": Refused("DoRA also scales the weights", _OFF),
        "modules_to_save": Refused("it replaces whole modules of the model", _OFF),
        "trainable_token_indices": Refused("it changes embeddings of tokens", _OFF),
        "target_parameters": Refused("it changes parameters that are no linear layers", _OFF),
        "alora_invocation_tokens": Refused(
            "an activated LoRA changes only what follows certain tokens", _OFF
        ),
        "lora_bias": Refused("it has biases", _OFF),
        "layer_replication": Refused("it repeats layers of the model", _OFF),
        "use_qalora": Refused("QA-LoRA pools its inputs", _OFF),
        "megatron_config": Refused("Megatron's layers are others", _OFF),
        "arrow_config": Refused("Arrow chooses among adapters by itself", _OFF),
        "kasa_config": Refused("KaSA changes the base model's weights", _OFF),
        "monteclora_config": Refused("MonteCLoRA draws its weights", _OFF),
        "use_bdlora": Refused("BD-LoRA's matrices are block-diagonal", _OFF),
    },
)
# values of `init_lora_weights` that leave the base model as it was
_KEEPS_WEIGHTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "mica",
    "orthogonal",
)
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_LAYER = re.compile(r".*\.(\d+)\.")
_TAIL = re.compile(r"\blayers?\.\d.*")
_PLAIN = re.compile(r"[\w.-]+")  # a pattern that is a name


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter, and what tells whether they have changed since."""

    config: Path
    weights: Path
    seen: tuple[tuple[int, ...], ...]  # device, inode, size, and times of change, of each

    @classmethod
    def find(cls, path: str, within: Path | None = None) -> AdapterFiles:
        """Find the files in the directory `path`, which must be in the folder `within`, if there is
        one, whatever links say. Raises `RequestError`."""
        directory = Path(path)
        path = path[:200]
        try:
            outside = within is not None and not directory.resolve().is_relative_to(
                within.resolve()
            )
            is_there = directory.is_dir()
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # it is too long, has a null byte, or is a link to itself
            raise RequestError(
                f"{path} can't be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        if outside:
            raise RequestError(f"{path} isn't below the folder of adapters")
        if not is_there:
            raise RequestError(
                f"{path} is no directory here: give one that has {CONFIG}; `hf download` fetches "
                f"an adapter from the hub to one"
            )
        for name in (CONFIG, WEIGHTS):
            if not (directory / name).exists():
                others = sorted(file.name for file in directory.glob("adapter_model*.bin"))
                hint = (
                    f", only {others[0]}: save the adapter as safetensors, since unpickling runs "
                    f"code"
                    if others and name == WEIGHTS
                    else ""
                )
                raise RequestError(f"{path} has no {name}{hint}")
        config, weights = ((directory / name).resolve() for name in (CONFIG, WEIGHTS))
        stats = [file.stat() for file in (config, weights)]
        for file, one in zip((config, weights), stats, strict=True):
            if within is not None and not file.is_relative_to(within.resolve()):
                raise RequestError(f"{path}: {file.name} isn't below the folder of adapters")
            if not stat.S_ISREG(one.st_mode):
                raise RequestError(f"{path}: {file.name} is no regular file")
        return cls(
            config,
            weights,
            tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats),
        )


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """A checked adapter: the file that executors read, and a digest of what it was made from."""

    digest: str
    header: bytes
    tensors: list[NDArray[Any]]

    def write(self, path: Path) -> None:
        with path.open("xb") as file:
            file.write(len(self.header).to_bytes(8, "little") + self.header)
            for tensor in self.tensors:
                file.write(tensor.tobytes())


def most_bytes(capacity: AdapterCapacity) -> int:
    """Return the largest size of the file of weights, in float64."""
    return 8 * capacity.max_rank * sum(map(sum, capacity.modules.values())) + _MAX_HEADER + _SLACK


def read_adapter(files: AdapterFiles, capacity: AdapterCapacity) -> AdapterContent:
    """Read and check an adapter for a model of that capacity. Raises `RequestError` naming the file
    and what is wrong."""
    config_bytes = _read(files.config, _MAX_CONFIG, "that is no config of an adapter")
    config = _Config.read(config_bytes, capacity.max_rank)
    weights = _read(
        files.weights,
        most_bytes(capacity),
        f"no adapter of rank {capacity.max_rank} for this model is as large",
    )
    tensors = _tensors(weights, 2 * len(capacity.modules))
    modules = _paired(tensors, capacity)
    config.check_modules(modules)
    header: dict[str, dict[str, Any]] = {}
    written: list[NDArray[Any]] = []
    offset = 0
    for peft_name, (module, (a_dtype, a), b) in modules.items():
        rank, scale = config.rank_and_scale(peft_name)
        size_in, size_out = capacity.modules[module]
        if a.shape != (rank, size_in) or b.shape != (size_out, rank):
            raise RequestError(
                f"{WEIGHTS}: {peft_name}: lora_A {list(a.shape)} and lora_B {list(b.shape)} don't "
                f"fit this model and the adapter's rank: expected "
                f"{[rank, size_in]} and {[size_out, rank]}"
            )
        with np.errstate(over="ignore"):
            scaled = b * np.float32(scale)
        if not (np.isfinite(_as_float32(a_dtype, a)).all() and np.isfinite(scaled).all()):
            raise RequestError(
                f"{WEIGHTS}: {peft_name} has numbers that are infinite or no numbers (NaN)"
            )
        for side, dtype, array in (("A", a_dtype, a), ("B", "F32", scaled)):
            if dtype == "F64":
                dtype = "F32"
                array = array.astype(np.float32)
            header[f"{module}.lora_{side}"] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [offset, offset + array.nbytes],
            }
            written.append(array)
            offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    digest = hashlib.sha256(config_bytes + b"\0" + hashlib.sha256(weights).digest()).hexdigest()
    return AdapterContent(digest, text + b" " * (-len(text) % 8), written)


@dataclass(frozen=True, slots=True)
class _Config:
    """The ranks, scales and target modules that `adapter_config.json` of PEFT sets."""

    rank: int
    alpha: float
    ranks: _Patterns[int]
    alphas: _Patterns[float]
    rs: bool  # rank-stabilized: the scale is alpha / sqrt(rank)
    targets: tuple[str, ...]  # ends of modules' names; empty: a pattern chose them
    layers: frozenset[int]  # empty: all

    @classmethod
    def read(cls, content: bytes, max_rank: int) -> _Config:
        try:
            config = read_json(content, _CONFIG_BOUNDS)
        except WrongJsonError as error:
            raise RequestError(f"{CONFIG}: {error}") from None
        if not isinstance(config, dict):
            raise RequestError(f"{CONFIG} must be an object")
        _refuse(config)
        rank = _rank("r", config.get("r"))
        alpha = _alpha("lora_alpha", config.get("lora_alpha"))
        ranks = _Patterns.read(config, "rank_pattern", _rank)
        alphas = _Patterns.read(config, "alpha_pattern", _alpha)
        if (most := max(rank, *ranks.values, 0)) > max_rank:
            raise RequestError(
                f"{CONFIG}: it has rank {most}, and this engine takes {max_rank} at most: raise "
                f"adapters.max_rank (max_lora_rank)"
            )
        if type(config.get("use_rslora", False)) is not bool:
            raise RequestError(
                f"{CONFIG}: use_rslora must be true or false, got {shown(config['use_rslora'])}"
            )
        targets = config.get("target_modules")
        layers = config.get("layers_to_transform")
        if not isinstance(targets, str) and not _is_list_of(targets, str):
            raise RequestError(
                f"{CONFIG}: target_modules must be a list of names or a pattern, got "
                f"{shown(targets)}"
            )
        if layers is not None and type(layers) is not int and not _is_list_of(layers, int):
            raise RequestError(
                f"{CONFIG}: layers_to_transform must be a layer's number or a list of them, got "
                f"{shown(layers)}"
            )
        chosen = frozenset(
            layers if isinstance(layers, list) else () if layers is None else (layers,)
        )
        return cls(
            rank,
            alpha,
            ranks,
            alphas,
            bool(config.get("use_rslora")),
            tuple(targets) if isinstance(targets, list) else (),
            chosen,
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's adapter, and the factor of its product."""
        rank = self.ranks.value_of(module, self.rank)
        alpha = self.alphas.value_of(module, self.alpha)
        return rank, 0.0 if rank == 0 else alpha / (math.sqrt(rank) if self.rs else rank)

    def check_modules(self, names: Iterable[str]) -> None:
        """Raise `RequestError` unless there are weights for just the modules that the config
        names."""
        wanted = set(self.targets)
        found = set[str]()
        layers = set[int]()
        for name in names:
            ends = wanted.intersection(_ends_of(name))
            if wanted and not ends:
                raise RequestError(f"{WEIGHTS}: {name} isn't among the target_modules of {CONFIG}")
            found |= ends
            if (number := _LAYER.match(name)) is not None:
                layers.add(int(number[1]))
        for target in self.targets:
            if target not in found:
                raise RequestError(
                    f"{WEIGHTS} has no weights for {shown(target)}, which {CONFIG} names in "
                    f"target_modules: is it whole?"
                )
        if self.layers and self.layers != layers:
            raise RequestError(
                f"{WEIGHTS} has weights for the layers {sorted(layers)}, and {CONFIG} names "
                f"{sorted(self.layers)} in layers_to_transform"
            )


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise `RequestError` for what can't be honoured."""
    if config.get("peft_type") != "LORA":
        raise RequestError(
            f"{CONFIG}: peft_type is {shown(config.get('peft_type'))}: only LORA is served; {MERGE}"
        )
    if reasons := KEYS.reasons_against(config):
        raise RequestError(f"{CONFIG}: {'; '.join(reasons)}; {MERGE}")
    if (init := config.get("init_lora_weights")) is not None and init not in _KEEPS_WEIGHTS:
        raise RequestError(
            f"{CONFIG}: init_lora_weights={shown(init)}: it has changed the weights of the base "
            f"model; save it as a plain adapter, with PEFT's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )


def _paired(
    tensors: Mapping[str, tuple[str, NDArray[Any]]], capacity: AdapterCapacity
) -> dict[str, tuple[str, tuple[str, NDArray[Any]], NDArray[np.float32]]]:
    """Return PEFT's name of each module -> the model's name, A with its dtype, and B."""
    if not tensors:
        raise RequestError(f"{WEIGHTS} has no tensors")
    sides: dict[str, dict[str, tuple[str, NDArray[Any]]]] = {}
    for name, tensor in tensors.items():
        if len(name) > _MAX_NAME:
            raise RequestError(f"{WEIGHTS}: {shown(name)} has more than {_MAX_NAME} characters")
        if (match := _KEY.fullmatch(name)) is None:
            kind = (
                "an adapter of embeddings"
                if "lora_embedding" in name
                else "a magnitude of DoRA"
                if "lora_magnitude" in name
                else "no A or B"
            )
            raise RequestError(
                f"{WEIGHTS}: {shown(name)} is {kind} of a linear layer, which isn't served; {MERGE}"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    tails = {_tail(module): module for module in capacity.modules}
    paired = {}
    for name, sides_of in sides.items():
        module = _module_of(name, tails, capacity)
        if len(sides_of) < 2:
            raise RequestError(
                f"{WEIGHTS}: {shown(name)} lacks its {'lora_B' if 'A' in sides_of else 'lora_A'}"
            )
        if len(sides_of["A"][1].shape) != 2 or len(sides_of["B"][1].shape) != 2:
            raise RequestError(f"{WEIGHTS}: {shown(name)}: A and B must be matrices")
        paired[name] = module, sides_of["A"], _as_float32(*sides_of["B"])
    if len({module for module, *_ in paired.values()}) < len(paired):
        raise RequestError(f"{WEIGHTS} has several adapters of one layer")
    return paired


def _module_of(name: str, tails: Mapping[str, str], capacity: AdapterCapacity) -> str:
    """Return the model's name of PEFT's module. `tails`: the ends of the model's names."""
    if OTHER_PARTS.match(name):  # its layers may have the names of the language model's
        raise RequestError(
            f"{WEIGHTS}: {shown(name)} is a layer of the image encoder: only the language model's "
            "layers may be changed"
        )
    module = name if name in capacity.modules else tails.get(_tail(name))
    if module is None:
        raise RequestError(
            f"{WEIGHTS}: {shown(name)} is no layer of this model that adapters may change, "
            f"like {next(iter(capacity.modules), 'none')}"
        )
    return module


class _Entry(NamedTuple):
    """A tensor as the header of a safetensors file describes it. Offsets count from the end of the
    header."""

    name: str
    dtype: Any
    shape: Any
    begin: Any
    end: Any

    def check(self, size: int) -> None:
        """Raise `RequestError` if its shape isn't a matrix's, or its bytes aren't within `size`."""
        has_offsets = _is_list_of([self.begin, self.end], int)
        if not has_offsets or not isinstance(self.shape, list):
            raise RequestError(f"{WEIGHTS}: its header isn't that of a safetensors file")
        if not 0 <= self.begin <= self.end <= size:
            raise RequestError(f"{WEIGHTS}: its header isn't that of a safetensors file")
        is_small = len(self.shape) <= 2 and _is_list_of(self.shape, int)
        if not is_small or not all(0 <= one < _MAX_DIMENSION for one in self.shape):
            raise RequestError(f"{WEIGHTS}: {shown(self.name)}: A and B must be matrices")
        if self.dtype not in _DTYPES:
            raise RequestError(
                f"{WEIGHTS}: {shown(self.name)} is of type {shown(self.dtype)}: "
                f"an adapter has {', '.join(_DTYPES)}"
            )

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape)) * np.dtype(_DTYPES[self.dtype]).itemsize


def _header(content: bytes, most: int) -> tuple[list[_Entry], int]:
    """Return the entries of a safetensors file's header, and where the data begin."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(_MAX_HEADER, len(content) - 8):
        raise RequestError(f"{WEIGHTS} isn't a whole safetensors file")
    bounds = JsonBounds(_TENSOR_PARTS * most + _OTHER_PARTS, 3)
    try:
        header = read_json(content[8 : 8 + size], bounds)
    except WrongJsonError as error:
        raise RequestError(
            f"{WEIGHTS}: its header isn't that of an adapter for this model: {error}"
        ) from None
    try:
        entries = [
            _Entry(name, entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError(f"{WEIGHTS}: its header isn't that of a safetensors file") from None
    return entries, 8 + size


def _tensors(content: bytes, most: int) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return the dtypes and tensors of a safetensors file of at most `most` by name.

    Those of BF16 are unsigned integers.
    """
    entries, start = _header(content, most)
    for entry in entries:
        entry.check(len(content))
    tensors = {}
    size = len(content) - start
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        is_next = entry.begin == end and entry.end == end + entry.num_bytes
        if not is_next or entry.end > size:
            raise RequestError(
                f"{WEIGHTS} isn't a whole safetensors file: {shown(entry.name)} would be "
                f"at bytes {entry.begin} to {entry.end}"
            )
        count = math.prod(entry.shape)
        values = np.frombuffer(content, _DTYPES[entry.dtype], count, start + entry.begin)
        tensors[entry.name] = (entry.dtype, values.reshape(entry.shape))
        end = entry.end
    if end != size:
        raise RequestError(
            f"{WEIGHTS} isn't a whole safetensors file: {size - end} bytes belong to no tensor"
        )
    return tensors


def _as_float32(dtype: str, tensor: NDArray[Any]) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return tensor.astype(np.float32)


def _read(path: Path, most: int, too_large: str) -> bytes:
    try:
        with path.open("rb") as file:
            # which allocates as much
            content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    except OSError as error:
        raise RequestError(f"{path.name} can't be read: {error.strerror or error}") from None
    if len(content) > most:
        raise RequestError(f"{path.name} has more than {most} bytes: {too_large}")
    return content


@dataclass(frozen=True, slots=True)
class _Patterns(Generic[T]):
    """A mapping of PEFT from patterns of modules' names. A name has the value of the first pattern
    that it ends with."""

    values: list[T]
    names: Mapping[str, int]  # patterns that are plain names -> index of the value
    others: list[tuple[int, SchemaValidator]]  # ascending

    @classmethod
    def read(
        cls, config: Mapping[str, Any], name: str, value_of: Callable[[str, Any], T]
    ) -> _Patterns[T]:
        """Raises `RequestError` for what is no pattern, or one that can't be matched in linear
        time."""
        patterns = config.get(name) or {}
        if not isinstance(patterns, Mapping):
            raise RequestError(f"{CONFIG}: {name} must map modules' names, got {shown(patterns)}")
        names: dict[str, int] = {}
        others: list[tuple[int, SchemaValidator]] = []
        for index, pattern in enumerate(patterns):
            if _PLAIN.fullmatch(pattern):
                names[pattern] = index
            elif len(others) == _MAX_PATTERNS:
                raise RequestError(
                    f"{CONFIG}: {name} has more than {_MAX_PATTERNS} patterns: name the modules"
                )
            else:
                others.append((index, _matcher(pattern, name)))
        return cls([value_of(name, value) for value in patterns.values()], names, others)

    def value_of(self, module: str, otherwise: T) -> T:
        first = min(
            (self.names[end] for end in _ends_of(module) if end in self.names),
            default=len(self.values),
        )
        for index, matcher in self.others:
            if index > first:
                break
            if matcher.isinstance_python(module):
                first = index
                break
        return otherwise if first == len(self.values) else self.values[first]


def _matcher(pattern: str, name: str) -> SchemaValidator:
    """Return a validator of the names that end with a pattern, as PEFT matches it, but in linear
    time: by Rust's regular expressions."""
    if len(pattern) > _MAX_NAME:
        raise RequestError(
            f"{CONFIG}: {name}: {shown(pattern)} has more than {_MAX_NAME} characters: name the "
            f"modules"
        )
    try:
        for whole in (pattern, rf"^(?:.*\.)?(?:{pattern})$"):
            matcher = SchemaValidator(
                core_schema.str_schema(pattern=whole, regex_engine="rust-regex")
            )
    except SchemaError as error:
        reason = " ".join(str(error).split())[-200:]
        raise RequestError(
            f"{CONFIG}: {name}: {shown(pattern)} is no pattern that can be matched in linear time: "
            f"{reason}"
        ) from None
    return matcher


def _rank(name: str, value: Any) -> int:
    if (rank := plain_integer(value)) is None or rank < 0:
        raise RequestError(
            f"{CONFIG}: {name} must be a rank, an integer of 0 or more, got {shown(value)}"
        )
    return rank


def _alpha(name: str, value: Any) -> float:
    if (alpha := as_number(value)) is None:
        raise RequestError(f"{CONFIG}: {name} must be a finite number, got {shown(value)}")
    return alpha


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _ends_of(name: str) -> Iterator[str]:
    """Yield a module's name without none, one, two, … of its first parts."""
    yield name
    place = name.find(".")
    while place >= 0:
        yield name[place + 1 :]
        place = name.find(".", place + 1)


def _tail(module: str) -> str:
    """Return a module's name from its layer on, or its last part if it is in no layer. The prefix
    depends on the class that PEFT has wrapped."""
    found = _TAIL.search(module)
    return module.rpartition(".")[2] if found is None else found[0]
