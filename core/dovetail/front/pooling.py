"""Requests that pool: what a model can do of what `PoolingParams` ask for, prompts of texts and of
pairs of texts, and scores of pairs.

`PoolingFacts` are the properties of an engine that this needs; `PoolingIntake` works with them, in
an `LLMEngine` or in a front end of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import PoolingCapacity, PoolingTask, RowPooling
from dovetail.api.json_files import read_json_object
from dovetail.api.late_interaction_files import SIDES, LateInteraction, Side
from dovetail.api.sentence_transformers_files import (
    LATE_SIMILARITIES,
    OWN_FILE,
    SIMILARITIES,
    has_marks,
    read_own,
)
from dovetail.errors import (
    ConfigError,
    ModelLoadError,
    RequestError,
    UnsupportedError,
    shown,
)
from dovetail.front.late_interaction import LateTexts, maxsim, mean_maxsim
from dovetail.front.outputs import PooledReading
from dovetail.front.prompts import Prompt, PromptSource, content_of, cuts
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request.pooling import PoolingOutput, PoolingParams
from dovetail.request.sampling_params import OutputKind, SamplingParams

# names of stored prompts for the two sides of a search
QUERY = ("query",)
DOCUMENT = ("document", "passage", "corpus")
YES_OR_NO = (  # Qwen3-Reranker's, with its default instruction
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    "query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_NEEDS_LAST = SamplingParams(max_tokens=1, seed=0, detokenize=False, output_kind=OutputKind.FINAL)
_NEEDS_ALL = SamplingParams(
    max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False, output_kind=OutputKind.FINAL
)
PYTHON_CALLS: Mapping[str, str] = {
    "embed": "embed() makes embeddings",
    "token_embed": 'encode(…, pooling_task="token_embed") makes one for each token',
    "classify": "classify() returns the probabilities of its labels",
    "token_classify": 'encode(…, pooling_task="token_classify") returns them for each token',
    "score": "score(query, documents) compares texts",
    "embed_sparse": "embed_sparse() returns lexical weights",
}
# Names of tokens that have no lexical weight.
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """How an engine pools. Plain values, to be sent to another process."""

    capacity: PoolingCapacity
    max_tokens: int  # of a prompt
    limit: str  # the setting that says so
    # stored in the checkpoint, by name: they are put before texts
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of one for texts that name none
    template: str | None = None  # of a pair; None: the tokenizer's form of a pair
    similarity: str = "cosine"  # of two texts: a key of `SIMILARITY`
    # tokens to which texts are cut unless requests say otherwise; None: they aren't cut
    cut_at: int | None = None
    # what callers call for each task, for errors
    call_of: Mapping[str, str] = field(default_factory=lambda: dict(PYTHON_CALLS))
    late: LateInteraction | None = None  # None: it isn't made for late interaction

    @classmethod
    def of(
        cls,
        capacity: PoolingCapacity,
        model_dir: Path,
        template: str | None,
        max_model_len: int,
        max_step_tokens: int,
        similarity: str | None = None,
    ) -> PoolingFacts:
        """Return the facts of an engine, with the prompts that a checkpoint of
        sentence-transformers stores. `similarity`: instead of the checkpoint's.

        Raises `ModelLoadError` for a file with invalid values, `UnsupportedError` for what isn't
        served, and `ConfigError` for a similarity that the model can't be compared by."""
        path = model_dir / OWN_FILE
        stored = read_own(model_dir)
        prompts = stored.get("prompts") or {}
        default = stored.get("default_prompt_name")
        if not isinstance(prompts, Mapping) or not all(
            isinstance(text, str) for text in prompts.values()
        ):
            raise ModelLoadError(f"{path}: prompts must map names to texts, got {shown(prompts)}")
        if default is not None and default not in prompts:
            raise ModelLoadError(
                f"{path}: default_prompt_name {shown(default)} names none of its prompts"
            )
        config = read_json_object(model_dir / "config.json", missing_ok=True)
        if template is None and capacity.generates and config.get("model_type") == "qwen3":
            template = YES_OR_NO
        fits_step = not capacity.indivisible or max_model_len <= max_step_tokens
        most, limit = (
            (max_model_len, "max_model_len")
            if fits_step
            else (max_step_tokens, "max_num_batched_tokens")
        )
        late = LateInteraction.read(model_dir)
        usual = SIMILARITIES if late is None else LATE_SIMILARITIES
        stored_similarity = stored.get("similarity_fn_name") or usual[0]
        similarity = _checked_similarity(similarity or stored_similarity, capacity)
        # as sentence-transformers does
        is_cut = late is not None or has_marks(model_dir, config)
        cut_at = max_model_len if is_cut else None
        prompts = dict(prompts)
        if late is not None:
            _check_expansion(late, capacity, most, model_dir)
            default = default or "document"
            for side in SIDES:
                prompts[side] = prompts.get(side, "").removeprefix(late.prefixes[side])
        return cls(
            *(capacity, most, limit, prompts, default, template, similarity, cut_at), late=late
        )

    @property
    def calls(self) -> str:
        """Return the calls that this model serves, for the error about one that it doesn't."""
        tasks: Sequence[str] = self.capacity.tasks
        if self.capacity.is_lexical:
            tasks = [task for task in tasks if task != "token_classify"] + ["embed_sparse"]
        return "; ".join(self.call_of[task] for task in tasks)

    @property
    def scores_pairs(self) -> bool:
        """True if it scores a query and a document together; False if embeddings are compared.
        Raises `RequestError` if it can't score."""
        if "classify" in self.capacity.tasks and len(self.capacity.labels) == 1:
            return True
        if any(task.endswith("embed") for task in self.capacity.tasks):
            return False
        raise RequestError(
            f"score: this model has {len(self.capacity.labels)} labels, and a score needs a model "
            f"of one, or embeddings; {self.calls}"
        )

    def row_pooling(self, params: PoolingParams) -> RowPooling:
        """Return what a request with these parameters pools. Raises `RequestError`."""
        can = self.capacity
        task: PoolingTask = can.tasks[0]
        if params.task == "score":
            if "classify" not in can.tasks or len(can.labels) != 1:
                raise RequestError(
                    f"task: this model scores no prompt of its own; {self.call_of['score']}; "
                    f"{self.calls}"
                )
            task = "classify"
        elif params.task == "embed_sparse":
            if not can.is_lexical:
                raise RequestError(f"this model can't do embed_sparse; {self.calls}")
            task = "token_classify"
        elif params.task is not None:
            task = params.task
        if task not in can.tasks:
            raise RequestError(f"this model can't do {task}; {self.calls}")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        is_active = params.use_activation is not False
        return RowPooling(task, params.dimensions, is_active, of_pair=params.task == "score")

    def pooled_part(self, prompt: NDArray[np.int32], pooling: RowPooling) -> NDArray[np.int32]:
        """Return a prompt without the padding at its end that the task skips; at least a token."""
        if pooling.task != "classify" or self.capacity.padding is None:
            return prompt
        others = np.flatnonzero(prompt != self.capacity.padding)
        return prompt[: int(others[-1]) + 1 if len(others) else 1]

    def _check_dimensions(self, wanted: int, task: PoolingTask) -> None:
        can = self.capacity
        if not task.endswith("embed"):
            raise RequestError(f"dimensions: only embeddings can be cut, and the task is {task}")
        if can.dimensions is not None and wanted not in can.dimensions:
            raise RequestError(
                f"dimensions must be one of {', '.join(map(str, can.dimensions))} for this model, "
                f"got {wanted}"
            )
        if wanted > can.size_of(task):
            raise RequestError(
                f"dimensions must be at most {can.size_of(task)}, the size of this model's embeddings, got "
                f"{wanted}"
            )

    def core_params(self, pooling: RowPooling) -> SamplingParams:
        """Return the parameters of such a request for the core. Those that need all states ask for
        log-probabilities of the prompt, so that no KV-cache manager gives them cached tokens."""
        return _NEEDS_ALL if self.capacity.needs_all_states(pooling.task) else _NEEDS_LAST


def _checked_similarity(name: str, capacity: PoolingCapacity) -> str:
    """Return a similarity. Raises `ConfigError` if the model hasn't what it compares."""
    task: PoolingTask = "token_embed" if name in LATE_SIMILARITIES else "embed"
    can_embed = any(one.endswith("embed") for one in capacity.tasks)
    if can_embed and task not in capacity.tasks:
        raise ConfigError(
            f"pooling.similarity: {name} compares results of {task}; this model serves "
            f"{', '.join(capacity.tasks)}"
        )
    return name


def _check_expansion(
    late: LateInteraction, capacity: PoolingCapacity, most: int, model_dir: Path
) -> None:
    """Raise `UnsupportedError` for mask tokens that don't fit a prompt of at most `most` tokens, or
    that other tokens don't attend to, if the executor can't compute these."""
    if late.expansion is None:
        return
    if late.expansion.length > most:
        raise UnsupportedError(
            f"{model_dir}: its queries are filled to {late.expansion.length} tokens, and a prompt "
            f"has at most {most} (max_model_len, max_num_batched_tokens)"
        )
    if not late.expansion.is_attended and not capacity.hidden_tails:
        raise UnsupportedError(
            f"{model_dir}: its queries are filled with mask tokens that other tokens don't attend "
            f"to, which the model or its attention backend can't compute "
            f"(PoolingCapacity.hidden_tails); served are those with attend_to_expansion_tokens, or "
            f"without query expansion"
        )


def _cosine(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    cosine = float(first @ second) / max(norms, 1e-12)
    return min(1.0, max(-1.0, cosine))  # rounding may exceed them


Similarity = Callable[[NDArray[Any], NDArray[Any]], float]
SIMILARITY: Mapping[str, Similarity] = {
    "cosine": _cosine,
    "dot": lambda first, second: float(first @ second),
    "euclidean": lambda first, second: -float(np.linalg.norm(first - second)),
    "manhattan": lambda first, second: -float(np.abs(first - second).sum()),
    # of matrices [tokens, size]
    "maxsim": maxsim,
    "meanmaxsim": mean_maxsim,
}


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The prompts whose results give the scores of pairs of texts."""

    prompts: PromptSource
    params: PoolingParams
    # of each pair's two prompts, which are compared; None: each prompt is a pair
    places: list[tuple[int, int]] | None
    similarity: str = "cosine"  # of these

    @property
    def compares_tokens(self) -> bool:
        """True if results are matrices, of a vector for each token."""
        return self.params.task == "token_embed"

    def of_pair(self, pair: int) -> tuple[int, ...]:
        """Return the places of a pair's prompts."""
        return (pair,) if self.places is None else self.places[pair]

    def score(self, results: Sequence[NDArray[np.float32]]) -> float:
        """Return the score of a pair, given what was pooled of its prompts."""
        if self.places is None:
            return float(results[0][0])
        dtype = np.float32 if self.compares_tokens else np.float64
        first, second = (np.asarray(result, dtype) for result in results)
        return SIMILARITY[self.similarity](first, second)


@dataclass(frozen=True, slots=True)
class KeptReading:
    """Reads the results of those tokens that count."""

    token_ids: NDArray[np.int32]  # of the prompt
    kept: NDArray[np.bool_]

    def __call__(self, data: NDArray[np.float32]) -> PoolingOutput:
        return PoolingOutput(data[self.kept], self.token_ids[self.kept])


@dataclass(frozen=True, slots=True)
class LexicalReading:
    """Reads weights of tokens [tokens, 1] as those of their ids: the largest of each."""

    token_ids: NDArray[np.int32]  # of the prompt
    unweighted: NDArray[np.int32]  # ids that have none

    def __call__(self, data: NDArray[np.float32]) -> PoolingOutput:
        ids, places = np.unique(self.token_ids, return_inverse=True)
        weights = np.zeros(len(ids), np.float32)
        np.maximum.at(weights, places, data[:, 0])
        kept = (weights > 0) & ~np.isin(ids, self.unweighted)
        return PoolingOutput(weights[kept], ids[kept])


class PoolingIntake:
    """Makes prompts for requests that pool. Thread safe."""

    def __init__(
        self,
        facts: PoolingFacts,
        encoded: Callable[[Sequence[Prompt]], list[Prompt]],
        tokenizer: Callable[[], Tokenizer],
        check_chars: Callable[[int, bool], None],
    ) -> None:
        """`encoded` tokenizes prompts that are texts. `check_chars` raises `RequestError` for a
        text of too many characters; its second argument says whether the text is truncated."""
        self.facts = facts
        self._encoded = encoded
        self._tokenizer = tokenizer
        self._check_chars = check_chars
        self._late = None if facts.late is None else LateTexts(facts.late, tokenizer)

    def source(
        self, prompts: Sequence[Prompt], params: Sequence[PoolingParams], name: str | None = None
    ) -> PromptSource:
        """Return the source of the same prompts, tokenized, with stored prompts before texts that
        are to be embedded, or that name one. Raises `RequestError`."""
        heads = [
            self._head(content_of(prompt), one, name)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        texts = [content_of(prompt) for prompt in prompts]
        chars = [
            len(head) + len(text) if isinstance(text, str) else 0
            for head, text in zip(heads, texts, strict=True)
        ]

        side = _side(name or self.facts.default_prompt)

        def make(part: slice) -> list[Prompt]:
            pairs = zip(heads[part], prompts[part], strict=True)
            whole = [head + content_of(prompt) if head else prompt for head, prompt in pairs]
            if self._late is None:
                return self._encoded(whole)
            return self._late_prompts(self._late, whole, params[part], [side] * len(whole))

        return self._checked(PromptSource(chars, make), params)

    def _late_prompts(
        self,
        late: LateTexts,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        sides: Sequence[Side],
    ) -> list[Prompt]:
        """Return prompts of a model of late interaction, those that are texts tokenized."""
        made = list(prompts)
        places = [place for place, one in enumerate(prompts) if isinstance(content_of(one), str)]
        texts = [late.text_before(sides[place]) + content_of(prompts[place]) for place in places]
        for place, tokenized in zip(places, self._texts(texts), strict=True):
            side = sides[place]
            most = late.length(side, self._most(params[place]))
            ids = tokenized.token_ids
            ids = ids if most is None else self._cut_to(ids, most)
            made[place] = late.prompt(tokenized.text, ids, side)
        return made

    def _head(self, content: Any, params: PoolingParams, name: str | None) -> str:
        """Return what is put before a prompt."""
        if not isinstance(content, str):
            if name is not None:
                raise RequestError(
                    "prompt_name: a stored prompt is put before texts; these are token ids"
                )
            return ""
        if name is not None or self.facts.row_pooling(params).task.endswith("embed"):
            return self._stored(name)
        return ""

    def cut(
        self, token_ids: Sequence[Any], params: PoolingParams, *, is_text: bool = True
    ) -> Sequence[Any]:
        """Truncate a prompt as its parameters say, otherwise a text as the checkpoint does: at the
        side that the tokenizer names, keeping the special tokens around it. Raises
        `RequestError`."""
        most = self._most(params) if is_text or cuts(params) else None
        return token_ids if most is None else self._cut_to(token_ids, most)

    def _cut_to(self, token_ids: Sequence[Any], most: int) -> Sequence[Any]:
        if len(token_ids) <= most:
            return token_ids
        head, tail = self._tokenizer().around
        begun = len(head) if list(token_ids[: len(head)]) == head else 0
        ended = len(tail) if tail and list(token_ids[-len(tail) :]) == tail else 0
        if most <= begun + ended:
            raise RequestError(
                f"truncate_prompt_tokens must be more than {begun + ended}, the special tokens "
                f"around a text, got {most}"
            )
        if self._tokenizer().truncates_left:
            return [*token_ids[:begun], *token_ids[len(token_ids) - (most - begun) :]]
        return [*token_ids[: most - ended], *token_ids[len(token_ids) - ended :]]

    def numbers(self, prompts: Sequence[Prompt], params: PoolingParams) -> int:
        """Return how many numbers are pooled of tokenized prompts. Raises `RequestError`."""
        pooling = self.facts.row_pooling(params)
        size = pooling.dimensions or self.facts.capacity.size_of(pooling.task)
        if params.task == "embed_sparse":
            size = 4  # as long as an id and a weight with their names
        if not pooling.task.startswith("token_"):
            return size * len(prompts)
        most = self._most(params) or self.facts.max_tokens
        return size * sum(min(most, len(_ids_of(prompt))) for prompt in prompts)

    def reading(
        self, params: PoolingParams, token_ids: NDArray[np.int32], side: Side | None
    ) -> PooledReading:
        """Return how the result of a prompt is read. `side`: of a text of a model of late
        interaction; None: other prompts, whose results are those of all tokens."""
        can = self.facts.capacity
        if params.task == "embed_sparse":
            return LexicalReading(token_ids, self._unweighted)
        task = self.facts.row_pooling(params).task
        kept = None
        if self._late is not None and side is not None:
            kept = self._late.kept(token_ids, side)
        elif can.token_size is not None and task == "token_embed":
            kept = self._inner(token_ids, after=False)
        elif can.is_lexical and task == "token_classify":
            kept = self._inner(token_ids, after=True)
        return PoolingOutput if kept is None or kept.all() else KeptReading(token_ids, kept)

    def _inner(self, token_ids: NDArray[np.int32], *, after: bool) -> NDArray[np.bool_]:
        """Return which tokens of a prompt aren't the special ones before a text, or after it if
        these count, too."""
        head, tail = self._tokenizer().around
        kept = np.ones(len(token_ids), np.bool_)
        if token_ids[: len(head)].tolist() == head:
            kept[: len(head)] = False
        if after and tail and token_ids[-len(tail) :].tolist() == tail:
            kept[-len(tail) :] = False
        return kept

    @cached_property
    def _unweighted(self) -> NDArray[np.int32]:
        """Tokens without a lexical weight."""
        tokenizer = self._tokenizer()
        names = (tokenizer.special_tokens.get(name) for name in _UNWEIGHTED)
        found = [tokenizer.token_id(name) for name in names if name is not None]
        return np.array([token_id for token_id in found if token_id is not None], np.int32)

    def prompted(self, text: str, name: str | None) -> str:
        """Put the stored prompt of this name before a text; None: the default one, if there is one.
        Raises `RequestError`."""
        return self._stored(name) + text

    def _stored(self, name: str | None) -> str:
        stored = self.facts.prompts
        if name is not None and name not in stored:
            raise RequestError(
                f"prompt_name: the model stores no prompt named {shown(name)}; it has "
                f"{', '.join(map(repr, stored)) or 'none'}"
            )
        chosen = self.facts.default_prompt if name is None else name
        return "" if chosen is None else stored[chosen]

    def plan_scores(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, template: str | None = None
    ) -> ScorePlan:
        """Plan the scores of queries and documents, whose texts aren't joined yet. A bi-encoder
        embeds each different text once, with its stored prompts for queries and documents. Raises
        `RequestError`."""
        if not self.facts.scores_pairs:
            if template is not None:
                raise RequestError(
                    "template: this model compares embeddings of the two texts, and has no prompt "
                    "of both"
                )
            return self._plan_compared(pairs, params)
        params = replace(params, task="score")
        template = self.facts.template if template is None else checked_template(template)
        if template is None and self.facts.capacity.generates:
            raise RequestError(
                "template: this generator scores a prompt with both texts, and only that of "
                "Qwen3-Reranker is known: give one with {query} and, "
                "after it, {document}, here or as pooling.template in the config"
            )
        most = self._most(params)
        around = 0 if template is None else len(template) - len("{query}{document}")
        chars = [around + len(query) + len(document) for query, document in pairs]

        def make(part: slice) -> list[Prompt]:
            if template is None:
                return [*self._tokenizer().encode_pairs(pairs[part], most)]
            return [*self._filled(template, pairs[part], most)]

        return ScorePlan(
            self._checked(PromptSource(chars, make), [params] * len(chars)), params, None
        )

    def _texts(self, texts: Sequence[str]) -> list[TokenizedText]:
        # as all of them are
        return [prompt for prompt in self._encoded(texts) if isinstance(prompt, TokenizedText)]

    def _most(self, params: PoolingParams) -> int | None:
        """Return the number of tokens to which a prompt is cut; None: it isn't."""
        asked = params.truncate_prompt_tokens
        if asked is None:
            return self.facts.cut_at
        return self.facts.max_tokens if asked == -1 else asked

    def _plan_compared(self, pairs: Sequence[tuple[str, str]], params: PoolingParams) -> ScorePlan:
        if params.task not in (None, "embed", "score", "token_embed"):
            raise RequestError(f"task: scores of this model compare embeddings, got {params.task}")
        similarity = self.facts.similarity
        if params.task == "token_embed" and similarity not in LATE_SIMILARITIES:
            similarity = LATE_SIMILARITIES[0]
        task: PoolingTask = "token_embed" if similarity in LATE_SIMILARITIES else "embed"
        if params.task not in (None, "score", task):
            raise RequestError(f"task: scores of this model are {similarity}, of {task}")
        params = replace(params, task=task)
        places: dict[tuple[int, str], int] = {}
        found = [
            tuple(places.setdefault((side, text), len(places)) for side, text in enumerate(pair))
            for pair in pairs
        ]
        names = [
            next((name for name in names if name in self.facts.prompts), None)
            for names in (QUERY, DOCUMENT)
        ]
        heads = ["" if name is None else self._stored(name) for name in names]
        texts = list(places)
        chars = [len(heads[side]) + len(text) for side, text in texts]

        def make(part: slice) -> list[Prompt]:
            whole = [heads[side] + text for side, text in texts[part]]
            if self._late is None:
                return self._encoded(whole)
            sides = [SIDES[side] for side, _ in texts[part]]
            return self._late_prompts(self._late, whole, [params] * len(whole), sides)

        of_pairs = [(first, second) for first, second in found]
        prompts = self._checked(PromptSource(chars, make), [params] * len(chars))
        return ScorePlan(prompts, params, of_pairs, similarity)

    def _checked(self, prompts: PromptSource, params: Sequence[PoolingParams]) -> PromptSource:
        """Return the prompts. Raises `RequestError` for one whose text is too long."""
        for chars, one in zip(prompts.chars, params, strict=True):
            self._check_chars(chars, cuts(one))
        return prompts

    def _filled(
        self, template: str, pairs: Sequence[tuple[str, str]], most: int | None
    ) -> list[TokenizedText]:
        """Return the prompts of a template; documents are cut to make them fit."""
        before, _, rest = template.partition("{query}")
        between, _, after = rest.partition("{document}")
        texts = [f"{before}{query}{between}{document}{after}" for query, document in pairs]
        prompts = self._texts(texts)
        if most is None or all(len(prompt.token_ids) <= most for prompt in prompts):
            return prompts
        tail = self._tokenizer().encode(after, special_tokens=False) + self._tokenizer().around[1]
        heads: dict[str, int] = {}  # tokens before the document, by query
        for place, prompt in enumerate(prompts):
            if len(prompt.token_ids) > most:
                query = pairs[place][0]
                if query not in heads:
                    heads[query] = len(self._tokenizer().encode(f"{before}{query}{between}"))
                if heads[query] + len(tail) >= most:
                    raise RequestError(
                        f"truncate_prompt_tokens: {most} tokens leave no room for the document, as "
                        f"the rest of the prompt takes them"
                    )
                prompts[place] = TokenizedText(
                    prompt.text, [*prompt.token_ids[: most - len(tail)], *tail]
                )
        return prompts


def _side(name: str | None) -> Side:
    """Return which of the two texts one with the stored prompt of this name is, in a model of late
    interaction."""
    return "query" if name == "query" else "document"


def _ids_of(prompt: Prompt) -> Sequence[Any]:
    ids: Sequence[Any] = (
        prompt.token_ids if isinstance(prompt, TokenizedText) else content_of(prompt)
    )
    return ids


def checked_template(template: Any) -> str:
    """Return a template of pairs. Raises `RequestError` unless it has a place for the query, and
    after it one for the document."""
    if (
        not isinstance(template, str)
        or template.count("{query}") != 1
        or template.partition("{query}")[2].count("{document}") != 1
    ):
        raise RequestError(
            f"template must have {{query}} and, after it, {{document}}, each once, got "
            f"{shown(template)}"
        )
    return template


def paired(
    data_1: Any, data_2: Any, names: tuple[str, str] = ("data_1", "data_2")
) -> list[tuple[str, str]]:
    """Return pairs of texts: one with each of several, or each of several with that at its place.
    Raises `RequestError` with these names."""
    sides = [[data] if isinstance(data, str) else data for data in (data_1, data_2)]
    for name, side in zip(names, sides, strict=True):
        if (
            not isinstance(side, Sequence)
            or not side
            or not all(isinstance(text, str) for text in side)
        ):
            raise RequestError(
                f"{name} must be a text, or a list of one text or more, got {shown(side)}"
            )
    queries, documents = sides
    if len(queries) == 1:
        queries = [*queries] * len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"{names[0]} must be one text, or as many as {names[1]}: got {len(queries)} and "
            f"{len(documents)}"
        )
    return list(zip(queries, documents, strict=True))
