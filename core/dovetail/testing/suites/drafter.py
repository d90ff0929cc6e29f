"""`DrafterSuite`: checks that a drafter conforms to the contract of `dovetail.api.drafter`.

Requests of several clients arrive, grow, pause, end and come again by a script, without an engine;
whatever the drafter proposes changes nothing of it, as in an engine. Needs no torch.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from numbers import Integral
from typing import Any, ClassVar

from dovetail.api.component import TARGET
from dovetail.api.draft_head import HeadArch
from dovetail.api.drafter import Drafter, DrafterContext, ModelDrafter
from dovetail.api.targets import import_target
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import PluginError, UnsupportedError, describe
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.binding import Binding
from dovetail.testing.checks import check, fail, require
from dovetail.testing.elsewhere import HASH_SEEDS, answer_elsewhere
from dovetail.testing.suite import Suite
from dovetail.testing.suites.holding import reachable, require_bounded
from dovetail.testing.suites.other_thread import in_thread
from dovetail.testing.suites.process_state import (
    process_state,
    require_untouched_by_first_use,
)

VOCAB_SIZE = 151_936  # as of Qwen3's models
EOS_ID = 151_645
# equal in their first or last 8 characters, or without case
CLIENTS = ("client 1 of many", "client 2 of many", "Client 1 of many", "client 1 of most", "", None)
OURS = CLIENTS[0]
ABORTED = 0.05  # of requests that may end, end before they are complete
ALIKE = "request-{}-of-user"  # names that are equal in their first and last 8 characters
MOST = (1, 2, 32)  # values of `DrafterContext.max_drafts`
STORIES = 12  # seeds of scripts
PAIRS = 6  # those of two clients
TOPICS = 6  # openings that all texts share
GONE = 200  # requests that end, in the check of what is kept
GONE_TOKENS = 500  # of each


@dataclass(frozen=True, slots=True)
class Begin:
    """A request arrives. `output`: what it will have generated, unless it ends before."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    client: str | None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """`propose`, for requests that have begun and not ended."""

    names: tuple[str, ...]
    most: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grow:
    """The next tokens of a request arrive."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """`on_finished`."""

    name: str


Act = Begin | Ask | Grow | End
Answer = tuple[Ask, Any]  # a question, and what `propose` returned

# What an engine may ask, and a script seldom does. LAST is the vocabulary's last id
LAST = -1
ODD: tuple[Act, ...] = (
    Begin("one", (5,), (), None),
    Ask(("one",), (8,)),
    Begin("never", (1, 2, 3), (), "ann"),
    End("never"),
    Begin("ends", (0, LAST) * 3, (0, LAST) * 40, "ann"),
    Ask(("one", "ends"), (1, 8)),
    Grow("ends", 1),
    Ask(("ends", "one"), (1, 1)),
    Ask(("ends",), (8,)),
    Grow("ends", 60),  # it wasn't asked for in the meantime
    Ask(("ends",), (8,)),
    End("one"),
    Begin("same", (7,) * 3000, (7,) * 1000, ""),
    Ask(("same", "ends"), (8, 3)),
    Grow("same", 1000),
    Ask(("same",), (8,)),
    End("ends"),
    *(
        Begin(f"sample {n}", (1, 2, 3, 1, 2), (3, n, 1, 2, 3), "bob", parent="of three")
        for n in range(3)
    ),
    Ask(("sample 2", "sample 0", "sample 1", "same"), (1, 2, 3, 4)),
    *(Grow(f"sample {n}", n) for n in range(3)),
    Ask(("sample 0", "sample 1", "sample 2"), (8, 8, 8)),
    *(End(name) for name in ("sample 1", "same", "sample 0", "sample 2")),
    Begin("same", (1, 2), (3,), None),
    Grow("same", 1),
    Ask(("same",), (8,)),
    End("same"),
)


def _bytes_as_ids(text: str) -> list[int]:
    return list(text.encode())


class DrafterSuite(Suite):
    """Scripts of requests whose texts have parts in common, with their own continuations.

    Drafters are made with `context`: 151,936 ids, of which texts use any, and a tokenizer that
    makes each byte of UTF-8 an id from 0 to 255. A drafter for one tokenizer may reject another;
    its own suite then sets `context` to one that it accepts, with at least 8 `max_drafts`.
    """

    kind = "drafter"
    settings = Suite.settings | {"context"}
    context: ClassVar[DrafterContext] = DrafterContext(
        max_drafts=8,
        vocab_size=VOCAB_SIZE,
        max_model_len=32_768,
        encode=_bytes_as_ids,
        eos_ids=(EOS_ID,),
    )

    def declares(self, capability: str) -> bool:
        """Two are observed instead: "model" is a `ModelDrafter`, and "head" one that names a
        head."""
        if capability == "model":
            return issubclass(self.component_class, ModelDrafter)
        if capability == "head":
            return self.declares("model") and bool(TARGET.fullmatch(str(self._make().head)))
        return super().declares(capability)

    @check("drafter.raises_nothing", since="1.0")
    def test_any_request_has_an_answer(self) -> None:
        """A method raised. Requests may have one token, thousands, or the same one always; grow by
        many tokens between two calls, or by none; be left out of calls; be samples of one prompt;
        end without having been asked for; and their ids come again. `max_drafts` may be 1 or 32."""
        self._play(ODD)
        took: list[float] = []

        def timed(method: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = method()
            took.append(time.perf_counter() - started)
            return result

        answers = [
            answer
            for seed in range(STORIES)
            for answer in self._play(self._story(seed), call=timed)
        ]
        for most in MOST:
            for seed in range(2):
                context = replace(self.context, max_drafts=most)
                acts = _story(context, self._vocab_size, seed)
                self._play(acts, self._make(context))
        self.note(
            f"its own time: {1e6 * sum(took) / sum(len(ask.names) for ask, _ in answers):.0f} µs "
            f"for each request of a call (not judged)"
        )

    @check("drafter.most", since="1.0")
    def test_no_more_drafts_than_asked_for(self) -> None:
        """`propose` returned more tokens for a request than `most` says, or not one sequence for
        each request, in order."""
        for ask, drafts in self._answers():
            require(
                isinstance(drafts, Sequence) and len(drafts) == len(ask.names),
                f"for {len(ask.names)} requests it returned {drafts!r:.200}, expected a sequence "
                f"for each",
            )
            for most, tokens in zip(ask.most, drafts, strict=True):
                require(
                    hasattr(tokens, "__len__"),
                    f"for a request it returned {tokens!r:.200}, expected a sequence of token ids",
                )
                require(
                    len(tokens) <= most,
                    f"it proposed {len(tokens)} tokens for a request, where {most} were asked for "
                    f"at most",
                )

    @check("drafter.ids", since="1.0")
    def test_drafts_are_token_ids(self) -> None:
        """A draft isn't a token id, an integer from 0 to `context.vocab_size` - 1. The engine drops
        all drafts of such a step."""
        for _, drafts in self._answers():
            for token in (token for tokens in drafts for token in tokens):
                right = (
                    isinstance(token, Integral)
                    and not isinstance(token, bool)
                    and 0 <= int(token) < self._vocab_size
                )
                require(
                    right,
                    f"it proposed {token!r:.200}, expected an id from 0 to {self._vocab_size - 1}",
                )

    @check("drafter.deterministic", since="1.0")
    def test_equal_calls_have_equal_answers(self) -> None:
        """Two drafters that were called in the same way proposed different tokens. Draw no random
        numbers without a fixed seed, read no clock, and don't depend on the order of sets, which is
        another in each process."""
        for seed in range(STORIES):
            self._require_equal(
                self._play(self._story(seed)),
                self._play(self._story(seed)),
                "another drafter, called in the same way,",
            )
        if self.context is not DrafterSuite.context:
            return  # a tokenizer of its own may not reach another process
        seeds = list(range(2))
        mine = self.drafts_of(seeds)
        for hash_seed in HASH_SEEDS:
            found = answer_elsewhere(
                self,
                f"{__name__}:drafts_of_stories",
                seeds,
                what="another process can't draft",
                hash_seed=hash_seed,
            )
            require(
                found == mine,
                f"in a process with PYTHONHASHSEED={hash_seed} it proposed other tokens",
            )

    @check("drafter.client", since="1.0")
    def test_nothing_is_learned_from_other_clients(self) -> None:
        """The drafter proposed tokens for one client's request that depend on the text of another
        client, or of another request without a client. Drafts show in the timing of answers, so a
        user could find out what others write. Key learned data by `request.client`, and by request
        if that is None."""
        for seed in range(STORIES):
            for client in (OURS, "", None):
                for name in self._names(self._story(seed), client):
                    owner = name if client is None else client
                    one = self._story(seed, ours=owner, others=1)
                    other = self._story(seed, ours=owner, others=2)
                    mine = (
                        frozenset([name]) if client is None else frozenset(self._names(one, client))
                    )
                    self._require_equal(
                        self._play(one),
                        self._play(other),
                        f"with other texts of others, for client {client!r},",
                        mine,
                    )
                    if client is not None:
                        break
        for other_client in CLIENTS[1:]:
            for seed in range(PAIRS):
                one, other = (
                    self._story(seed, ours=OURS, others=others, clients=(OURS, other_client))
                    for others in (1, 2)
                )
                self._require_equal(
                    self._play(one),
                    self._play(other),
                    f"with other texts of client {other_client!r}, for client {OURS!r},",
                    frozenset(self._names(one, OURS)),
                )

    @check("drafter.strangers", since="1.1")
    def test_nothing_is_learned_from_equal_beginnings(self) -> None:
        """A request was proposed tokens of another client's whose prompt begins with its own, of 80
        tokens, or of another sample of its request, which has no client. Equal beginnings and equal
        parents are no permission: key learned data by `request.client`, and by request if that is
        None."""
        for what, script in (("another client's prompt", _begins_alike), ("a sample", _samples)):
            one, other = (script(self._vocab_size, others) for others in (1, 2))
            self._require_equal(
                self._play(one),
                self._play(other),
                f"with other tokens of {what},",
                frozenset(["ours"]),
            )

    @check("drafter.ties", since="1.1")
    def test_ties_are_broken_in_the_same_way_everywhere(self) -> None:
        """The same tokens have several continuations in a text, and the drafter chose another one
        in another process. Break ties by position, not by hashes or the order of sets."""
        if self.context is not DrafterSuite.context:
            return  # a tokenizer of its own may not reach another process
        mine = self.drafts_of_ties()
        for hash_seed in HASH_SEEDS:
            found = answer_elsewhere(
                self,
                f"{__name__}:drafts_of_ties",
                what="another process can't draft",
                hash_seed=hash_seed,
            )
            require(
                found == mine,
                f"in a process with PYTHONHASHSEED={hash_seed} it proposed other tokens",
            )

    def drafts_of_ties(self) -> list[list[list[int]]]:
        """Return what a new drafter proposes for texts with ties."""
        return [
            [list(map(int, tokens)) for tokens in drafts]
            for _, drafts in self._play(_tied(self._vocab_size))
        ]

    @check("drafter.forgets_anywhere", since="1.1")
    def test_ends_are_told_by_another_thread(self) -> None:
        """`on_finished` came from another thread than `propose`, and the drafter keeps a request or
        its id, or proposes by the text of an earlier request with the same id. Keep nothing by
        thread."""
        subject = self._make()
        with ThreadPoolExecutor(1) as asks, ThreadPoolExecutor(1) as ends:

            def call(method: Callable[[], Any]) -> Any:
                is_question = isinstance(method, partial) and method.func == subject.propose
                thread = asks if is_question else ends
                return thread.submit(method).result()

            for seed in range(3):
                acts = self._story(seed, clients=(None,))
                self._require_equal(
                    self._play(acts),
                    self._play(acts, subject, call=call),
                    "after requests with the same ids, which ended in another thread,",
                )
            for path, value in reachable(subject):
                require(not isinstance(value, LiveRequest), f"{path} holds {value!r} after its end")

    @check("drafter.any_thread", since="1.0")
    def test_any_thread_may_call(self) -> None:
        """Called from another thread each time, it raised or proposed other tokens. Keep nothing by
        thread, and no lock from one call to the next."""
        for seed in range(2):
            self._require_equal(
                self._play(self._story(seed)),
                self._play(self._story(seed), call=in_thread),
                "the same, called from threads in turn,",
            )

    @check("drafter.forgets", since="1.0")
    def test_requests_that_ended_are_forgotten(self) -> None:
        """After `on_finished` the drafter keeps a request or its id, proposes by the text of an
        earlier request with the same id, or keeps what no other request may be given: the tokens of
        one without a client. Drop all of it; a server's memory would grow forever."""
        subject = self._make()
        names = {
            act.name
            for seed in range(STORIES)
            for act in self._story(seed)
            if isinstance(act, Begin)
        }
        for seed in range(STORIES):
            self._play(self._story(seed), subject)
        self._play(ODD, subject)
        alone = [self._story(seed, clients=(None,)) for seed in range(STORIES)]
        for acts in alone:  # all have the same ids
            self._require_equal(
                self._play(acts),
                self._play(acts, subject),
                "after requests with the same ids, which ended,",
            )
        numbers = count()

        def serve(requests: int) -> None:
            for number in islice(numbers, requests):
                self._serve_one_more(subject, number)

        require_bounded(
            subject, serve, GONE, GONE * GONE_TOKENS, f"requests of {GONE_TOKENS} tokens that ended"
        )
        names |= {ALIKE.format(number) for number in range(next(numbers))}
        for path, value in reachable(subject):
            require(not isinstance(value, LiveRequest), f"{path} holds {value!r} after its end")
            require(
                not (isinstance(value, str) and value in names),
                f"{path} holds the id {value!r} after its request's end",
            )

    def _serve_one_more(self, subject: Drafter, number: int) -> None:
        """Begin and end a request of its own tokens without a client, with or without having asked
        for it; every third is aborted."""
        chance = random.Random(number)
        text = tuple(chance.choices(range(self._vocab_size), k=GONE_TOKENS))
        half = GONE_TOKENS // 2
        name = ALIKE.format(number)
        asked = [Ask((name,), (min(4, self.context.max_drafts),))] * (number % 2)
        grown = [Grow(name, half // 5 if number % 3 == 0 else half)]
        begin = Begin(name, text[:half], text[half:], None)
        self._play((begin, *asked, *grown, *asked, End(name)), subject)

    @check("drafter.process_untouched", since="1.0")
    def test_process_untouched(self) -> None:
        """The drafter changed what belongs to the whole process: random numbers of `random` or
        numpy, print options, warnings, loggers, the environment, or another setting."""
        before = process_state(self.component_class)
        for seed in range(2):
            self._play(self._story(seed))
        for name, value in process_state(self.component_class).items():
            require(value == before[name], f"{name} isn't what it was before")

    @check("drafter.first_use", since="1.1")
    def test_first_use(self) -> None:
        """The first use of the drafter in a process changed a setting of the whole process, such as
        the interval of switches between threads; or each use registered a function at exit."""
        if self.context is DrafterSuite.context:  # another tokenizer may not reach a new process
            require_untouched_by_first_use(self, {})

    def use_once(self) -> None:
        self._play(self._story(0))

    @check("drafter.request_untouched", since="1.0")
    def test_requests_are_only_read(self) -> None:
        """The drafter modified a request, its tokens or its parameters. They are the engine's: keep
        state about requests in your own dict, by id."""
        for seed in range(STORIES):
            self._play(self._story(seed), watch=_Watch())

    @check("drafter.model", since="1.0", capability="model")
    def test_a_model_is_named(self) -> None:
        """A `ModelDrafter` has no `model`, the name or directory of one (None: its `head` is in the
        target's checkpoint); or `head` isn't "package.module:Class"; or it drafts itself: the
        executor does."""
        subject = self._make()
        name = subject.model
        head = subject.head
        require(
            (name is None and head is not None) or (isinstance(name, str) and name),
            f"model is {name!r}, expected the name or directory of one",
        )
        require(
            head is None or (isinstance(head, str) and TARGET.fullmatch(head)),
            f'head is {head!r}, expected "package.module:Class" or None',
        )
        for _, drafts in self._play(ODD, subject):
            require(
                not any(map(len, drafts)), f"propose returned {drafts!r:.200}, expected no drafts"
            )

    @check("drafter.head", since="1.0", capability="head")
    def test_a_head_is_a_class_that_builds_one(self) -> None:
        """`ModelDrafter.head` names no class, or one that isn't a `HeadArch`: the executor imports
        it, makes it with the drafter's options, and asks it for its layers."""
        target = self._make().head
        head = import_target(target, PluginError)
        require(
            isinstance(head, type) and issubclass(head, HeadArch),
            f"{target} is {head!r}, expected a subclass of HeadArch",
        )

    @property
    def _vocab_size(self) -> int:
        return self.context.vocab_size or VOCAB_SIZE

    def _make(self, context: DrafterContext | None = None) -> Any:
        try:
            return self.make(context or self.context)
        except UnsupportedError as error:
            fail(
                f"it rejects the context of the suite, {self.context}: {error}. If it is for one "
                f"tokenizer, set `context` of its suite to a `DrafterContext` that it accepts",
                error,
            )

    def _story(self, seed: int, **kwargs: Any) -> list[Act]:
        return _story(self.context, self._vocab_size, seed, **kwargs)

    def drafts_of(self, seeds: Sequence[int]) -> list[list[list[int]]]:
        """Return what a new drafter proposes in each script."""
        return [
            [list(map(int, tokens)) for tokens in drafts]
            for seed in seeds
            for _, drafts in self._play(self._story(seed))
        ]

    def _answers(self) -> Iterator[Answer]:
        yield from self._play(ODD)
        for seed in range(STORIES):
            yield from self._play(self._story(seed))

    @staticmethod
    def _names(acts: Sequence[Act], client: str | None) -> list[str]:
        return [act.name for act in acts if isinstance(act, Begin) and act.client == client]

    def _play(
        self,
        acts: Sequence[Act],
        drafter: Drafter | None = None,
        *,
        call: Callable[[Callable[[], Any]], Any] | None = None,
        watch: _Watch | None = None,
    ) -> list[Answer]:
        """Play a script, and return what `propose` returned. `call` calls a method of the
        drafter."""
        drafter = drafter or self._make()
        requests: dict[str, LiveRequest] = {}
        futures: dict[str, tuple[int, ...]] = {}
        answers: list[Answer] = []
        for act in acts:
            if isinstance(act, Begin):
                begin = _spelled(act, self._vocab_size)
                requests[act.name] = _request(begin)
                futures[act.name] = begin.output
            elif isinstance(act, Grow):
                known = requests[act.name].output
                known.extend(array("q", futures[act.name][len(known) : len(known) + act.tokens]))
            else:
                if watch is not None:
                    watch.before(requests.values())
                method: Callable[[], Any]
                if isinstance(act, Ask):
                    method = partial(
                        drafter.propose, [requests[name] for name in act.names], list(act.most)
                    )
                else:
                    method = partial(drafter.on_finished, requests[act.name])
                try:
                    result = method() if call is None else call(method)
                except Exception as error:
                    fail(
                        f"{'propose' if isinstance(act, Ask) else 'on_finished'} raised "
                        f"{describe(error)}",
                        error,
                    )
                if watch is not None:
                    watch.after(act)
                if isinstance(act, Ask):
                    answers.append((act, result))
                else:
                    del requests[act.name]
        return answers

    @staticmethod
    def _require_equal(
        one: list[Answer], other: list[Answer], what: str, mine: frozenset[str] | None = None
    ) -> None:
        """Require equal drafts, of requests named in `mine` if given."""
        for (ask, drafts), (_, others) in zip(one, other, strict=True):
            for name, tokens, there in zip(ask.names, drafts, others, strict=True):
                if mine is None or name in mine:
                    require(
                        list(tokens) == list(there),
                        f"it proposed {list(tokens)} for a request; {what} it proposed "
                        f"{list(there)}",
                    )


def _story(
    context: DrafterContext,
    vocab_size: int,
    seed: int,
    *,
    ours: str = "",
    others: int = 0,
    clients: Sequence[str | None] = CLIENTS,
) -> list[Act]:
    """Make a script. A text is a row of passages: one of a few openings, which all texts share, and
    a continuation of its own for each owner, a client or a request without one. `others` changes
    the continuations of all owners but `ours`, and nothing else."""
    chance = random.Random(seed)
    openings = [chance.choices(range(vocab_size), k=chance.randrange(2, 6)) for _ in range(TOPICS)]
    lengths = [chance.randrange(3, 9) for _ in range(TOPICS)]

    def text(owner: str, passages: int) -> tuple[int, ...]:
        tokens: list[int] = []
        for topic in chance.choices(range(TOPICS), k=passages):
            own = random.Random(f"{seed} {owner} {topic} {others if owner != ours else ''}")
            tokens += openings[topic] + own.choices(range(vocab_size), k=lengths[topic])
        return tuple(tokens[: max(1, len(tokens) - chance.randrange(4))])

    acts: list[Act] = []
    left: dict[str, int] = {}  # name -> output tokens to come
    for number in range(10):
        name = ALIKE.format(number)
        client = chance.choice(clients)
        owner = name if client is None else client
        begin = Begin(
            name, text(owner, chance.randrange(1, 6)), text(owner, chance.randrange(1, 4)), client
        )
        acts.append(begin)
        left[name] = len(begin.output)
        for _ in range(chance.randrange(4)):
            _step(chance, acts, left, context.max_drafts)
    while left:
        _step(chance, acts, left, context.max_drafts)
    return acts


def _begins_alike(vocab_size: int, others: int) -> list[Act]:
    """Make a script in which a prompt is the beginning of another client's."""
    chance = random.Random(1)
    begin = tuple(chance.choices(range(vocab_size), k=80))
    answer = tuple(chance.choices(range(vocab_size), k=8))
    theirs = begin + tuple(random.Random(others).choices(range(vocab_size), k=30))
    asked = Ask(("ours",), (8,))
    return [
        Begin("theirs", theirs, answer, CLIENTS[1]),
        Ask(("theirs",), (8,)),
        Begin("ours", begin, answer, OURS),
        asked,
        Grow("theirs", 8),
        End("theirs"),
        asked,
        Grow("ours", 8),
        asked,
        End("ours"),
    ]


def _samples(vocab_size: int, others: int) -> list[Act]:
    """Make a script of two samples of a prompt without a client, of which one ends first. They
    begin in the same way."""
    prompt = tuple(random.Random(1).choices(range(vocab_size), k=20))
    begin = tuple(random.Random(2).choices(range(vocab_size), k=20))
    theirs = begin + tuple(random.Random(others + 2).choices(range(vocab_size), k=20))
    asked = Ask(("ours",), (8,))
    return [
        Begin("theirs", prompt, theirs, None, parent="both"),
        Begin("ours", prompt, begin, None, parent="both"),
        Ask(("theirs", "ours"), (8, 8)),
        Grow("theirs", 40),
        Ask(("theirs",), (8,)),
        End("theirs"),
        asked,
        Grow("ours", 10),
        asked,
        Grow("ours", 10),
        asked,
        End("ours"),
    ]


def _tied(vocab_size: int) -> list[Act]:
    """Make a script of texts in which some tokens come again and again, each time with other
    tokens after them."""
    acts: list[Act] = []
    for number in range(8):
        chance = random.Random(number)
        context = chance.choices(range(vocab_size), k=12)
        text = [
            token for _ in range(6) for token in (*context, *chance.choices(range(vocab_size), k=5))
        ]
        name = ALIKE.format(number)
        acts += [Begin(name, (*text, *context), (), OURS), Ask((name,), (8,))]
    return acts


def _step(chance: random.Random, acts: list[Act], left: dict[str, int], most: int) -> None:
    """Ask for some requests; let some grow by a few tokens, and end those that are complete, or
    have waited long enough."""
    asked = tuple(chance.sample(sorted(left), k=chance.randrange(len(left) + 1)))
    if asked:
        acts.append(Ask(asked, tuple(chance.randrange(1, most + 1) for _ in asked)))
    for name in chance.sample(sorted(left), k=chance.randrange(len(left) + 1)):
        tokens = min(left[name], chance.choice((1, 1, 2, 5, most + 1)))
        acts.append(Grow(name, tokens))
        left[name] -= tokens
        if left[name] == 0 or chance.random() < ABORTED:
            acts.append(End(name))
            del left[name]


def _spelled(begin: Begin, vocab_size: int) -> Begin:
    """Return `begin` with the vocabulary's last id in place of LAST."""
    prompt, output = (
        tuple(vocab_size - 1 if token == LAST else token for token in tokens)
        for tokens in (begin.prompt, begin.output)
    )
    return replace(begin, prompt=prompt, output=output)


def _request(begin: Begin) -> LiveRequest:
    most = max(1, len(begin.output))
    return LiveRequest(
        begin.name,
        begin.prompt,
        SamplingParams(max_tokens=most),
        max_tokens=most,
        client=begin.client,
        parent=begin.parent,
    )


class _Watch:
    """Compares requests after a call with what they were before."""

    def before(self, requests: Iterable[LiveRequest]) -> None:
        self._known = {request: self._state(request) for request in requests}

    def after(self, act: Act) -> None:
        for request, before in self._known.items():
            for field, value in self._state(request).items():
                require(
                    value == before[field],
                    f"after {act}, {field} of a request is {value!r:.200}, and was "
                    f"{before[field]!r:.200}",
                )

    @staticmethod
    def _state(request: LiveRequest) -> dict[str, Any]:
        fields = (
            "id",
            "client",
            "parent",
            "params",
            "prompt_token_ids",
            "max_tokens",
            "priority",
            "num_computed",
            "in_flight",
            "__class__",
        )
        return {
            "output_token_ids": list(request.output_token_ids),
            **{name: getattr(request, name) for name in fields},
        }


def drafts_of_stories(suite: Binding, seeds: Sequence[int]) -> list[list[list[int]]]:
    """Return what a new drafter of the suite's proposes in each script."""
    named = {"component": suite.component, "options": suite.options}
    played = type("Elsewhere", (DrafterSuite,), named)()
    drafts: list[list[list[int]]] = played.drafts_of(seeds)
    return drafts


def drafts_of_ties(suite: Binding) -> list[list[list[int]]]:
    """Return what a new drafter of the suite's proposes for texts with ties."""
    named = {"component": suite.component, "options": suite.options}
    drafts: list[list[list[int]]] = type("Elsewhere", (DrafterSuite,), named)().drafts_of_ties()
    return drafts
