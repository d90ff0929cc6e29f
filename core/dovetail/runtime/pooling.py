"""How a checkpoint pools: by sentence-transformers' files beside it, as its architecture does, or as `pooling` of `engine.yaml` says.

method      1_Pooling/config.json       | ModelArch.pooling            the last token's state, the first's (cls), or the mean of all
layers      2_Dense/config.json, …      | the head of a classifier     what is computed of it, in float32
normalize   2_Normalize in modules.json | yes                          embeddings to length 1
scores      LogitScore in modules.json  | `score_tokens`               of a generator: the logit of one token less that of another
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dovetail.api.executor import PoolingCapacity, PoolingMethod, PoolingTask
from dovetail.api.model import HeadLayer, ModelPooling
from dovetail.checks import shown
from dovetail.errors import ConfigError, ModelLoadError, UnsupportedError
from dovetail.json_files import read_json_list, read_json_object

MODULES = "modules.json"
MadeFor = Literal["generate", "embed", "classify"]

_METHODS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # names of sentence-transformers
_OLD_MODES = {  # keys of older files
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")  # of modules; the third may occur several times
_TORCH_ACTIVATIONS = {
    "GELU": "gelu",
    "Identity": "identity",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
_SINGLE = ("SparseEncoder", "MultiVectorEncoder")  # kinds of sentence-transformers models that aren't served


class StoredLayer(NamedTuple):
    """A layer, the folder of the file that has its tensors, and the size of its result."""

    layer: HeadLayer
    folder: Path
    size: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What sentence-transformers' files beside a checkpoint say."""

    method: PoolingMethod | None = None
    layers: tuple[StoredLayer, ...] = ()
    normalize: bool = True
    score_tokens: tuple[int, int | None] | None = None
    activation: str | None = None  # of scores
    max_length: int | None = None  # tokens of the longest text

    @classmethod
    def of(cls, directory: Path) -> Stored:
        """Read the files; all is None without them. Raises `ModelLoadError` if they are wrong, `UnsupportedError` for what isn't served, by name."""
        own = directory / "config_sentence_transformers.json"
        config = read_json_object(own) if own.is_file() else {}
        if config.get("model_type") in _SINGLE:
            raise UnsupportedError(f"{own}: model_type {config['model_type']} isn't served, only embeddings of a fixed size and scores")
        activation = _activation(config["activation_fn"], own) if config.get("activation_fn") else None
        path = directory / MODULES
        if not path.is_file():
            return cls(activation=activation)
        found: dict[str, list[Path]] = {}
        for module in read_json_list(path):
            kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
            if not isinstance(kind, str) or not isinstance(folder, str) or ".." in Path(folder).parts or Path(folder).is_absolute():
                raise ModelLoadError(f"{path}: expected modules, each with its 'type' and 'path', got {shown(module)}")
            package, _, name = kind.rpartition(".")
            if package.partition(".")[0] != "sentence_transformers" or name not in (*_ORDER, "Dropout"):
                raise UnsupportedError(f"{path}: module {kind} isn't served; served are {', '.join(_ORDER)}")
            if name != "Dropout":  # there is none but in training
                found.setdefault(name, []).append(directory / folder)
        order = [_ORDER.index(name) for name, folders in found.items() for _ in folders]
        if order != sorted(order) or any(len(folders) > 1 for name, folders in found.items() if name != "Dense") or "Transformer" not in found:
            raise UnsupportedError(f"{path}: served are modules in the order {', '.join(_ORDER)}, of Dense any number, found {', '.join(found)}")
        if found["Transformer"] != [directory]:
            raise UnsupportedError(f"{path}: the transformer is served from the folder of {MODULES} itself, not from {found['Transformer'][0].name}")
        return cls(
            method=_pooling_method(found["Pooling"][0]) if "Pooling" in found else None,
            layers=tuple(map(_dense, found.get("Dense", ()))),
            normalize="Normalize" in found or "Pooling" not in found,
            score_tokens=_logit_tokens(found["LogitScore"][0]) if "LogitScore" in found else None,
            activation=activation,
            max_length=_max_length(directory),
        )


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Decisions about pooling, made before any weights are read."""

    directory: Path
    capacity: PoolingCapacity
    normalize: bool  # embeddings
    layers: tuple[StoredLayer, ...] = ()  # from a pooled state to an embedding
    head: tuple[StoredLayer, ...] = ()  # from it to the scores of labels
    score_tokens: tuple[int, int | None] | None = None  # instead of a head: the score is the first one's logit, less the second's
    activation: str = "identity"  # of scores: of `dovetail.runtime.pooler.ACTIVATIONS`
    max_length: int | None = None  # see `Stored`

    @classmethod
    def of(
        cls, directory: str | Path, overrides: Mapping[str, Any], model: ModelPooling, config: Any, made_for: MadeFor, *, indivisible: bool
    ) -> PoolingPlan:
        """Return the plan for the checkpoint in `directory`. `overrides`: `ExecutorConfig.pooling`; `config`: transformers' of the checkpoint.

        Raises `ModelLoadError`, `UnsupportedError` or `ConfigError` that names the file or the key."""
        directory, size = Path(directory), int(config.hidden_size)
        stored = Stored.of(directory)
        if unknown := sorted(overrides.keys() - {"method", "normalize", "score_tokens"}):
            raise ConfigError(f"pooling: the executor knows no {', '.join(unknown)}")
        method = overrides.get("method", stored.method or model.method)
        if method not in get_args(PoolingMethod):
            raise ConfigError(f"pooling.method: expected {', '.join(get_args(PoolingMethod))}, got {shown(method)}")
        tokens, labels = _score_tokens(directory, overrides.get("score_tokens"), stored.score_tokens)
        tasks, activation, layers, head = list[PoolingTask](), "sigmoid", stored.layers, tuple[StoredLayer, ...]()
        if made_for == "classify":
            if tokens is not None:
                raise ConfigError("pooling.score_tokens: this checkpoint has a classifier of its own")
            labels = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
            tasks, activation, layers = ["classify", "token_classify"], stored.activation or _of_scores(config, directory), ()
            head = tuple(StoredLayer(layer, directory, len(labels) if layer is model.head[-1] else size) for layer in model.head)
        else:
            tasks = ["embed", "token_embed"]
        if tokens is not None:
            if made_for != "generate" or not model.generates:
                raise ConfigError("pooling.score_tokens: scores of two tokens are a generator's, and this checkpoint has no head for tokens")
            _check_plain_logits(config)
            tasks = ["classify", *tasks]
        sizes = getattr(config, "matryoshka_dimensions", None)
        capacity = PoolingCapacity(
            tasks=tuple(tasks),
            method=method,
            size=layers[-1].size if layers else size,
            labels=labels,
            generates=model.generates and made_for == "generate",
            indivisible=indivisible,
            dimensions=tuple(map(int, sizes)) if sizes else None,
        )
        normalize = bool(overrides.get("normalize", stored.normalize))
        return cls(directory, capacity, normalize, layers, head, tokens, activation, stored.max_length)

    def __str__(self) -> str:
        what = f"embeddings of {self.capacity.size} numbers" if not self.capacity.labels else f"scores of {len(self.capacity.labels)} labels"
        return f"{what}, by {self.capacity.method}"

    def owns(self, tensor: str) -> bool:
        """Return True for a tensor of the checkpoint that isn't the model's: of the head, or of a generator's head that isn't used."""
        modules = {name for layer, *_ in self.head for name in (layer.name, layer.norm)}
        return tensor.rpartition(".")[0] in modules or (not self.capacity.generates and tensor.startswith("lm_head."))


def is_embedding_model(directory: str | Path) -> bool:
    """Return True if files of sentence-transformers say that the checkpoint makes embeddings."""
    return (Path(directory) / MODULES).is_file() and Stored.of(Path(directory)).method is not None


def _pooling_method(folder: Path) -> PoolingMethod:
    path = folder / "config.json"
    config = read_json_object(path)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _METHODS:
        raise UnsupportedError(f"{path}: pooling by {shown(modes)} isn't served, only one of {', '.join(_METHODS)}")
    if config.get("include_prompt", True) is not True:
        raise UnsupportedError(f"{path}: include_prompt = {shown(config['include_prompt'])} isn't served: prompts are pooled, too")
    _only(path, config, {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *_OLD_MODES})
    return _METHODS[modes[0]]  # type: ignore[return-value]


def _dense(folder: Path) -> StoredLayer:
    path = folder / "config.json"
    config = read_json_object(path)
    size = config.get("out_features")
    if type(size) is not int or size < 1:
        raise ModelLoadError(f"{path}: out_features: expected a size, got {shown(size)}")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise UnsupportedError(f"{path}: {key} = {shown(config[key])} isn't served, only layers of whole embeddings")
    if config.get("use_residual"):
        raise UnsupportedError(f"{path}: use_residual isn't served")
    _only(path, config, {"in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name", "use_residual"})
    return StoredLayer(HeadLayer("linear", _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), path)), folder, size)


def _logit_tokens(folder: Path) -> tuple[int, int | None]:
    path = folder / "config.json"
    config = read_json_object(path)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if type(yes) is not int or (no is not None and type(no) is not int):
        raise ModelLoadError(f"{path}: expected the ids true_token_id and perhaps false_token_id, got {shown(config)}")
    _only(path, config, {"true_token_id", "false_token_id", "module_input_name"})
    return yes, no


def _max_length(directory: Path) -> int | None:
    """Return how many tokens of a text are used. Raises `UnsupportedError` for a key that changes the numbers and isn't implemented."""
    path = directory / "sentence_bert_config.json"
    config = read_json_object(path) if path.is_file() else {}
    if config.get("do_lower_case"):
        raise UnsupportedError(f"{path}: do_lower_case isn't served: only the tokenizer's own rules are")
    if config.get("transformer_task", "feature-extraction") not in ("feature-extraction", "sequence-classification", "text-generation"):
        raise UnsupportedError(f"{path}: transformer_task = {shown(config['transformer_task'])} isn't served")
    for key in ("query_length", "document_length", "query_expansion", "processing_kwargs"):
        if config.get(key):
            raise UnsupportedError(f"{path}: {key} isn't served")
    if "message" in (config.get("modality_config") or ()) and config.get("transformer_task") != "text-generation":
        raise UnsupportedError(f"{path}: modality_config has 'message': texts in a chat template aren't served; without that, they are as they stand")
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(f"{path}: max_seq_length: expected a number of tokens, got {shown(length)}")
    return length


def _only(path: Path, config: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(config.keys() - known):
        raise UnsupportedError(f"{path}: {', '.join(unknown)}: not implemented, and may change the numbers")


def _activation(name: Any, path: Path) -> str:
    """Return the name here of torch's activation class."""
    package, _, last = str(name).rpartition(".")
    if package.partition(".")[0] != "torch" or last not in _TORCH_ACTIVATIONS:
        raise UnsupportedError(f"{path}: the activation {shown(name)} isn't served; served are torch's {', '.join(_TORCH_ACTIVATIONS)}")
    return _TORCH_ACTIVATIONS[last]


def _of_scores(config: Any, directory: Path) -> str:
    """Return the activation of a classifier's scores."""
    own = getattr(config, "sentence_transformers", None)
    name = own.get("activation_fn") if isinstance(own, dict) else getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        return _activation(name, directory / "config.json")
    by_problem = {"regression": "identity", "multi_label_classification": "sigmoid", "single_label_classification": "softmax"}
    one = len(config.id2label) == 1
    return "sigmoid" if one and config.problem_type != "regression" else by_problem.get(config.problem_type, "softmax")


def _score_tokens(directory: Path, asked: Any, stored: tuple[int, int | None] | None) -> tuple[tuple[int, int | None] | None, tuple[str, ...]]:
    """Return the ids of the tokens whose logits make a score, and its label. `asked`: texts or ids of two tokens."""
    if asked is None:
        return stored, () if stored is None else (str(stored[0]),)
    if not isinstance(asked, list | tuple) or len(asked) != 2:
        raise ConfigError(f"pooling.score_tokens: expected two tokens, for yes and no, got {shown(asked)}")
    yes, no = (token if type(token) is int else _token_id(directory, token) for token in asked)
    return (yes, no), (str(asked[0]),)


def _token_id(directory: Path, text: Any) -> int:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"pooling.score_tokens: {path} doesn't exist, so tokens must be given by their ids, not as {shown(text)}")
    ids = Tokenizer.from_file(str(path)).encode(str(text), add_special_tokens=False).ids
    if len(ids) != 1:
        raise ConfigError(f"pooling.score_tokens: {shown(text)} is {len(ids)} tokens, expected one")
    return int(ids[0])


def _check_plain_logits(config: Any) -> None:
    """Raise `UnsupportedError` if logits aren't the products of states and rows of the head."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            raise UnsupportedError(f"scores of two tokens aren't served with {name} = {shown(value)}")
