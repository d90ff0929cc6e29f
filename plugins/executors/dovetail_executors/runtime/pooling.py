"""How a checkpoint pools: by sentence-transformers' files beside it, as its architecture does, or
as `pooling` of `engine.yaml` says.

method      1_Pooling/config.json       | ModelArch.pooling            the last token's state, the first's (cls), or the mean of all
layers      2_Dense/config.json, …      | the head of a classifier     what is computed of it, in float32
normalize   2_Normalize in modules.json | yes                          embeddings to length 1
scores      LogitScore in modules.json  | `score_tokens`               of a generator: the logit of one token less that of another

Of a model of late interaction, `layers` are those of each token, and there is no vector of a whole
text. BGE-M3 (arXiv:2402.03216) has two more outputs beside its embedding, whose layers are files of
their own:

each token  colbert_linear.pt           vectors for MaxSim
            sparse_linear.pt            a lexical weight: how much the token says of its text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dovetail.api.executor import PoolingCapacity, PoolingMethod, PoolingTask
from dovetail.api.json_files import read_json_list, read_json_object
from dovetail.api.late_interaction_files import SIDES, LateInteraction, is_stanford
from dovetail.api.model import HeadLayer, ModelPooling
from dovetail.api.sentence_transformers_files import (
    DENSE,
    LOGIT_SCORE,
    MODULES,
    NORMALIZE,
    OWN_FILE,
    POOLING,
    has_marks,
    is_late,
    module_of,
    read_checked,
    read_own,
    read_transformer,
)
from dovetail.errors import ConfigError, ModelLoadError, UnsupportedError, shown
from dovetail.nn.weights import tensors_named
from dovetail_executors.runtime.pickled import pickled_tensors

MadeFor = Literal["generate", "embed", "classify", "tag"]  # tag: labels of each token

_METHODS = {  # names of sentence-transformers
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "weightedmean": "weighted",
}
_OLD_MODES = {  # keys of older files
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# of modules; Dense may occur several times
_ORDER = (
    "Transformer",
    "Pooling",
    "Dense",
    "Normalize",
    "LogitScore",
)
_LATE_ORDER = ("Transformer", "Dense", "Normalize")  # of a model of late interaction
# of one, too: it says which vectors count, wherever it is among the others
_MASK = "MultiVectorMask"
# of BGE-M3
_COLBERT = "colbert_linear"
_SPARSE = "sparse_linear"
_TORCH_ACTIVATIONS = {
    "GELU": "gelu",
    "Identity": "identity",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
_OUTPUTS = {  # of the transformer, by its task: what is read of its results
    "feature-extraction": "last_hidden_state",
    "sequence-classification": "logits",
    "text-generation": "logits",
}
_NO_LENGTH = 1e15  # transformers stores 1e30 for a tokenizer without a length


class StoredLayer(NamedTuple):
    """A layer, the folder of the file that has its tensors, or the file itself if that is pickled,
    and the size of its result."""

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
    size: int | None = None  # to which embeddings are cut after normalization
    is_late: bool = False  # it has a vector for each token, and none for a text

    @classmethod
    def of(cls, directory: Path) -> Stored:
        """Read the files; all is None without them. Raises `ModelLoadError` if they are wrong,
        `UnsupportedError` for what isn't served, by name."""
        own = directory / OWN_FILE
        config = read_own(directory)
        if config.get("model_type") == "SparseEncoder":
            raise UnsupportedError(
                f"{own}: model_type SparseEncoder isn't served: its vectors have a number for each "
                f"token of the vocabulary"
            )
        activation = (
            _activation(config["activation_fn"], own) if config.get("activation_fn") else None
        )
        size = config.get("truncate_dim")
        if size is not None and (type(size) is not int or size < 1):
            raise ModelLoadError(f"{own}: truncate_dim: expected a size, got {shown(size)}")
        path = directory / MODULES.file
        if is_stanford(directory) and not path.is_file():
            layer = StoredLayer(
                HeadLayer("linear"), directory, _rows_of(directory, "linear.weight")
            )
            return cls(layers=(layer,), is_late=True, max_length=_tokenizer_length(directory))
        if not path.is_file():
            if is_late(config):
                raise ModelLoadError(
                    f"{path} is missing, which names the layers of tokens' vectors"
                )
            raw = read_json_object(directory / "config.json", missing_ok=True)
            length = _tokenizer_length(directory) if has_marks(directory, raw) else None
            return cls(activation=activation, max_length=length, size=size)
        late = LateInteraction.read(directory)
        found = _modules(path, is_late=late is not None)
        for folder in found.get("Normalize", ()):
            _check_vectors(
                read_checked(folder / "config.json", NORMALIZE),
                folder / "config.json",
                is_late=late is not None,
            )
        if late is not None:
            return cls(
                layers=tuple(_dense(folder, is_late=True) for folder in found.get("Dense", ())),
                normalize="Normalize" in found or config.get("model_type") != "MultiVectorEncoder",
                max_length=_late_length(directory, late),
                size=size,
                is_late=True,
            )
        return cls(
            method=_pooling_method(found["Pooling"][0]) if "Pooling" in found else None,
            layers=tuple(_dense(folder, is_late=False) for folder in found.get("Dense", ())),
            normalize="Normalize" in found or "Pooling" not in found,
            score_tokens=_logit_tokens(found["LogitScore"][0]) if "LogitScore" in found else None,
            activation=activation,
            max_length=_max_length(directory),
            size=size,
        )


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """Decisions about pooling, made before any weights are read."""

    directory: Path
    capacity: PoolingCapacity
    normalize: bool  # embeddings
    layers: tuple[StoredLayer, ...] = ()  # from a pooled state to an embedding
    token_layers: tuple[StoredLayer, ...] = ()  # from a token's state to its vector
    head: tuple[StoredLayer, ...] = ()  # from it to the scores of labels
    # instead of a head: the score is the first one's logit, less the second's
    score_tokens: tuple[int, int | None] | None = None
    # of a classifier: of `dovetail_executors.runtime.pooler.ACTIVATIONS`
    activation: str = "identity"
    pair_activation: str = "identity"  # of the scores of pairs
    max_length: int | None = None  # see `Stored`

    @classmethod
    def of(
        cls,
        directory: str | Path,
        overrides: Mapping[str, Any],
        model: ModelPooling,
        config: Any,
        made_for: MadeFor,
        *,
        indivisible: bool,
    ) -> PoolingPlan:
        """Return the plan for the checkpoint in `directory`. `overrides`: `ExecutorConfig.pooling`;
        `config`: transformers' of the checkpoint.

        Raises `ModelLoadError`, `UnsupportedError` or `ConfigError` that names the file or the
        key."""
        directory = Path(directory)
        size = int(config.hidden_size)
        stored = Stored.of(directory)
        if unknown := sorted(overrides.keys() - {"method", "normalize", "score_tokens"}):
            raise ConfigError(f"pooling: the executor knows no {', '.join(unknown)}")
        method = overrides.get("method", stored.method or model.method)
        if method not in get_args(PoolingMethod):
            raise ConfigError(
                f"pooling.method: expected {', '.join(get_args(PoolingMethod))}, got "
                f"{shown(method)}"
            )
        tokens, labels = _score_tokens(
            directory, overrides.get("score_tokens"), stored.score_tokens
        )
        tasks = list[PoolingTask]()
        activation = "sigmoid"
        layers = stored.layers
        token_layers = tuple[StoredLayer, ...]()
        head = tuple[StoredLayer, ...]()
        pair_activation = "sigmoid"
        if made_for in ("classify", "tag"):
            if tokens is not None:
                raise ConfigError(
                    "pooling.score_tokens: this checkpoint has a classifier of its own"
                )
            labels = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
            tasks = ["classify", "token_classify"] if made_for == "classify" else ["token_classify"]
            layers = ()
            own_activation = stored.activation or _stored_activation(config, directory)
            activation = own_activation or _usual_activation(config, directory)
            pair_activation = own_activation or "sigmoid"
            head = tuple(
                StoredLayer(layer, directory, len(labels) if layer is model.head[-1] else size)
                for layer in model.head
            )
        elif stored.is_late:
            tasks = ["token_embed"]
        else:
            tasks = ["embed", "token_embed"]
            if indivisible:
                token_layers = _pickled_layer(directory, _COLBERT, size)
                head = _pickled_layer(directory, _SPARSE, size)
            if head:
                tasks = ["embed", "token_classify", "token_embed"]
                labels = ("lexical weight",)
                activation = "relu"
        if tokens is not None:
            if made_for != "generate" or not model.generates:
                raise ConfigError(
                    "pooling.score_tokens: scores of two tokens are a generator's, and this "
                    "checkpoint has no head for tokens"
                )
            _check_plain_logits(config)
            tasks = ["classify", *tasks]
            activation = pair_activation = stored.activation or "sigmoid"
        size = layers[-1].size if layers else size
        size = min(size, stored.size or size)
        sizes = [int(one) for one in getattr(config, "matryoshka_dimensions", None) or ()]
        capacity = PoolingCapacity(
            tasks=tuple(tasks),
            method=method,
            size=size,
            labels=labels,
            generates=model.generates and made_for == "generate",
            indivisible=indivisible,
            dimensions=tuple(one for one in sizes if one <= size) or None,
            padding=_padding(config)
            if made_for == "classify" and method == "last" and not indivisible
            else None,
            token_size=token_layers[-1].size if token_layers else None,
            is_lexical=bool(head) and "embed" in tasks,
        )
        normalize = bool(overrides.get("normalize", stored.normalize))
        return cls(
            directory,
            capacity,
            normalize,
            layers,
            token_layers,
            head,
            tokens,
            activation,
            pair_activation,
            stored.max_length,
        )

    def __str__(self) -> str:
        can = self.capacity
        if can.tasks == ("token_embed",):
            return f"vectors of {can.size} numbers, of each token"
        if can.labels and not can.is_lexical:
            return f"scores of {len(can.labels)} labels, by {can.method}"
        return f"embeddings of {can.size} numbers, by {can.method}"

    def owns(self, tensor: str) -> bool:
        """Return True for a tensor of the checkpoint that isn't the model's: of the head, or of a
        generator's head that isn't used."""
        modules = {name for layer, *_ in self.head for name in (layer.name, layer.norm)}
        if self.capacity.tasks == ("token_embed",):
            modules.add("linear")  # of ColBERT's own program; others may have it, too
        return tensor.rpartition(".")[0] in modules or (
            not self.capacity.generates and tensor.startswith("lm_head.")
        )


def _modules(path: Path, *, is_late: bool) -> dict[str, list[Path]]:
    """Return the folders of the modules that `modules.json` lists, by their kind, in its order.
    Raises `ModelLoadError` if it is wrong, `UnsupportedError` for modules that aren't served."""
    directory = path.parent
    served = _LATE_ORDER if is_late else _ORDER
    packages = ("sentence_transformers", "pylate") if is_late else ("sentence_transformers",)
    without_effect = ("Dropout", _MASK) if is_late else ("Dropout",)  # on the numbers
    found: dict[str, list[Path]] = {}
    for module in read_json_list(path):
        kind, folder = module_of(module, path)
        package, _, name = kind.rpartition(".")
        is_known = name in served or name in without_effect
        if package.partition(".")[0] not in packages or not is_known:
            raise UnsupportedError(
                f"{path}: module {kind} isn't served; served are {', '.join(served)}"
            )
        if name not in without_effect:
            found.setdefault(name, []).append(directory / folder)
    order = [served.index(name) for name, folders in found.items() for _ in folders]
    repeated = [name for name, folders in found.items() if len(folders) > 1 and name != "Dense"]
    if order != sorted(order) or repeated or "Transformer" not in found:
        raise UnsupportedError(
            f"{path}: served are modules in the order {', '.join(served)}, of Dense any number, "
            f"found {', '.join(found)}"
        )
    if found["Transformer"] != [directory]:
        raise UnsupportedError(
            f"{path}: the transformer is served from the folder of {MODULES.file} itself, not from "
            f"{found['Transformer'][0].name}"
        )
    return found


def is_embedding_model(directory: str | Path) -> bool:
    """Return True if files of sentence-transformers say that the checkpoint makes embeddings."""
    if not (Path(directory) / MODULES.file).is_file():
        return False
    stored = Stored.of(Path(directory))
    return stored.is_late or stored.method is not None


def _pooling_method(folder: Path) -> PoolingMethod:
    path = folder / "config.json"
    config = read_checked(path, POOLING)
    if unknown := sorted(
        key for key in config if key.startswith("pooling_mode_") and key not in _OLD_MODES
    ):
        raise UnsupportedError(
            f"{path}: {', '.join(unknown)}: not implemented, and may change the numbers"
        )
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _METHODS:
        raise UnsupportedError(
            f"{path}: pooling by {shown(modes)} isn't served, only one of {', '.join(_METHODS)}"
        )
    return _METHODS[modes[0]]  # type: ignore[return-value]


def _rows_of(directory: Path, name: str) -> int:
    """Return the rows of a matrix of a checkpoint. Raises `ModelLoadError` if it has none."""
    for _, tensor in tensors_named(directory, name.__eq__):
        if tensor.ndim == 2:
            return len(tensor)
    raise ModelLoadError(f"{directory}: the checkpoint has no matrix {name}")


def _check_vectors(config: Mapping[str, Any], path: Path, *, is_late: bool) -> None:
    """Raise `UnsupportedError` if a module computes other vectors than those that are served."""
    own = "token_embeddings" if is_late else "sentence_embedding"
    for key in ("module_input_name", "module_output_name"):
        # sentence-transformers itself leaves such names out in older files
        if (name := config.get(key)) not in (None, own):
            raise UnsupportedError(
                f"{path}: {key} = {shown(name)} isn't served in this model, only {own!r}"
            )


def _pickled_layer(directory: Path, name: str, size: int) -> tuple[StoredLayer, ...]:
    """Return the layer from states of `size` numbers that a file of this name has; none if there is
    none. Raises `ModelLoadError` if it is wrong."""
    path = directory / f"{name}.pt"
    if not path.is_file():
        return ()
    weight = pickled_tensors(path, size).get(f"{name}.weight")
    if weight is None or weight.ndim != 2 or not 1 <= len(weight) <= size:
        found = "none" if weight is None else str(list(weight.shape))
        raise ModelLoadError(
            f"{path}: expected a weight of at most {size} rows and {size} columns, found {found}"
        )
    return (StoredLayer(HeadLayer(name), path, len(weight)),)


def _dense(folder: Path, *, is_late: bool) -> StoredLayer:
    path = folder / "config.json"
    config = read_checked(path, DENSE)
    _check_vectors(config, path, is_late=is_late)
    size = config.get("out_features")
    if type(size) is not int or size < 1:
        raise ModelLoadError(f"{path}: out_features: expected a size, got {shown(size)}")
    return StoredLayer(
        HeadLayer(
            "linear",
            _activation(
                config.get("activation_function", "torch.nn.modules.activation.Tanh"), path
            ),
        ),
        folder,
        size,
    )


def _logit_tokens(folder: Path) -> tuple[int, int | None]:
    path = folder / "config.json"
    config = read_checked(path, LOGIT_SCORE)
    yes = config.get("true_token_id")
    no = config.get("false_token_id")
    if type(yes) is not int or (no is not None and type(no) is not int):
        raise ModelLoadError(
            f"{path}: expected the ids true_token_id and perhaps false_token_id, got "
            f"{shown(config)}"
        )
    return yes, no


def _late_length(directory: Path, late: LateInteraction) -> int | None:
    """Return how many tokens of a text are used in a model of late interaction. Raises as
    `_max_length`."""
    usual = _max_length(directory, is_late=True)
    lengths = late.lengths.values()
    if len(lengths) == len(SIDES):
        return max(lengths)  # `max_seq_length` is that of the last text before the model was saved
    return None if usual is None else max(usual, *lengths)


def _max_length(directory: Path, *, is_late: bool = False) -> int | None:
    """Return how many tokens of a text are used. Raises `UnsupportedError` for what changes the
    numbers and isn't implemented."""
    path, config = read_transformer(directory)
    for key in ("query_length", "document_length", "query_expansion"):
        if config.get(key) is not None and not is_late:
            raise UnsupportedError(
                f"{path}: {key} is served in models of late interaction only, such as "
                f"MultiVectorEncoder"
            )
    task = config.get("transformer_task", "feature-extraction")
    if task not in _OUTPUTS:
        raise UnsupportedError(f"{path}: transformer_task = {shown(task)} isn't served")
    _check_modalities(config.get("modality_config") or {}, task, path)
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ModelLoadError(
            f"{path}: max_seq_length: expected a number of tokens, got {shown(length)}"
        )
    return _tokenizer_length(directory) if length is None else length


def _check_modalities(modalities: Any, task: str, path: Path) -> None:
    """Raise `UnsupportedError` if texts aren't computed as usual."""
    where = f"{path}: modality_config"
    if not isinstance(modalities, Mapping):
        raise ModelLoadError(f"{where}: expected keys and values, got {shown(modalities)}")
    if "message" in modalities and task != "text-generation":
        raise UnsupportedError(
            f"{where} has 'message': texts in a chat template aren't served; without that, they "
            f"are as they stand"
        )
    usual = {"method": "forward", "method_output_name": _OUTPUTS[task]}
    if (text := modalities.get("text", usual)) != usual:
        raise UnsupportedError(f"{where}: text = {shown(text)} isn't served, only {usual}")


def _tokenizer_length(directory: Path) -> int | None:
    """Return the length that `tokenizer_config.json` stores, by which sentence-transformers
    cuts."""
    path = directory / "tokenizer_config.json"
    length = read_json_object(path, missing_ok=True).get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int | float):
        return None
    if not length <= _NO_LENGTH:  # also of NaN
        return None
    if length < 1 or length != int(length):
        raise ModelLoadError(
            f"{path}: model_max_length: expected a number of tokens, got {shown(length)}"
        )
    return int(length)


def _activation(name: Any, path: Path) -> str:
    """Return the name here of torch's activation class."""
    package, _, last = str(name).rpartition(".")
    if package.partition(".")[0] != "torch" or last not in _TORCH_ACTIVATIONS:
        raise UnsupportedError(
            f"{path}: the activation {shown(name)} isn't served; served are torch's "
            f"{', '.join(_TORCH_ACTIVATIONS)}"
        )
    return _TORCH_ACTIVATIONS[last]


def _padding(config: Any) -> int | None:
    """Return the id that transformers' classifiers of a last token skip at the end of a text."""
    return config.pad_token_id if type(config.pad_token_id) is int else None


def _stored_activation(config: Any, directory: Path) -> str | None:
    """Return the activation of scores that sentence-transformers has stored in `config.json`."""
    own = getattr(config, "sentence_transformers", None)
    name = (
        own.get("activation_fn")
        if isinstance(own, dict)
        else getattr(config, "sbert_ce_default_activation_function", None)
    )
    return None if name is None else _activation(name, directory / "config.json")


def _usual_activation(config: Any, directory: Path) -> str:
    """Return the activation of a classifier that stores none: transformers' by the type of its
    problem; of one label, sentence-transformers' if that has saved the checkpoint."""
    if len(config.id2label) == 1 and (
        config.problem_type != "regression" or has_marks(directory, vars(config))
    ):
        return "sigmoid"
    by_problem = {
        "regression": "identity",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    return by_problem.get(config.problem_type, "softmax")


def _score_tokens(
    directory: Path, asked: Any, stored: tuple[int, int | None] | None
) -> tuple[tuple[int, int | None] | None, tuple[str, ...]]:
    """Return the ids of the tokens whose logits make a score, and its label. `asked`: texts or ids
    of two tokens."""
    if asked is None:
        return stored, () if stored is None else (str(stored[0]),)
    if not isinstance(asked, list | tuple) or len(asked) != 2:
        raise ConfigError(
            f"pooling.score_tokens: expected two tokens, for yes and no, got {shown(asked)}"
        )
    yes, no = (token if type(token) is int else _token_id(directory, token) for token in asked)
    return (yes, no), (str(asked[0]),)


def _token_id(directory: Path, text: Any) -> int:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"pooling.score_tokens: {path} doesn't exist, so tokens must be given by their ids, "
            f"not as {shown(text)}"
        )
    ids = Tokenizer.from_file(str(path)).encode(str(text), add_special_tokens=False).ids
    if len(ids) != 1:
        raise ConfigError(f"pooling.score_tokens: {shown(text)} is {len(ids)} tokens, expected one")
    return int(ids[0])


def _check_plain_logits(config: Any) -> None:
    """Raise `UnsupportedError` if logits aren't the products of states and rows of the head."""
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if (value := getattr(config, name, None)) not in (None, 1, 1.0):
            raise UnsupportedError(
                f"scores of two tokens aren't served with {name} = {shown(value)}"
            )
