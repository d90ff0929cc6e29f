"""Drafters with one thing wrong."""

from __future__ import annotations

import random
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from dovetail.api.drafter import Drafter, DrafterContext, ModelDrafter
from dovetail.errors import PluginError
from dovetail.request import Request
from tests.conformance.mutants import mutant

RUN = 2  # tokens that are looked up


class Lookup(Drafter):
    """Right in itself: continues as a request's own text did after its last two tokens, or an
    earlier answer to its client."""

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.answers: dict[Any, list[int]] = defaultdict(list)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self.draft(request)[:limit] for request, limit in zip(requests, most, strict=True)]

    def draft(self, request: Request) -> list[int]:
        own = self.text(request)
        for text in (own, self.learned(request)):
            for place in range(len(text) - 1, RUN - 1, -1):
                if text[place - RUN : place] == own[-RUN:]:
                    return text[place : place + self.context.max_drafts]
        return []

    def text(self, request: Request) -> list[int]:
        return [*request.prompt_token_ids, *request.output_token_ids]

    def learned(self, request: Request) -> list[int]:
        return [] if request.client is None else self.answers.get(request.client, [])

    def on_finished(self, request: Request) -> None:
        if request.client is not None:
            self.answers[request.client] += request.output_token_ids


@mutant(caught_by="drafter.raises_nothing")
class ExpectsAnOutput(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        assert all(request.output_token_ids[-1] >= 0 for request in requests)
        return super().propose(requests, most)


@mutant(caught_by="drafter.raises_nothing")
class KnowsOnlyWhomItWasAskedFor(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.asked: set[str] = set()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        self.asked |= {request.id for request in requests}
        return super().propose(requests, most)

    def on_finished(self, request: Request) -> None:
        self.asked.remove(request.id)
        super().on_finished(request)


@mutant(caught_by="drafter.most")
class AlwaysProposesAsManyAsItCan(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [self.draft(request) for request in requests]


@mutant(caught_by="drafter.most")
class LeavesOutRequestsWithoutDrafts(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [draft for draft in super().propose(requests, most) if draft]


@mutant(caught_by="drafter.ids")
class PadsWithAnIdBeyondAll(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        pad = self.context.vocab_size
        return [
            (draft + [pad] * limit)[:limit]
            for draft, limit in zip(super().propose(requests, most), most, strict=True)
        ]


@mutant(caught_by="drafter.ids")
class AsksForTheExecutorsModel(Lookup):
    """-1 is the executor's business."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[-1] * limit for limit in most]


@mutant(caught_by="drafter.ids")
class ProposesFractions(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[token / 1 for token in draft] for draft in super().propose(requests, most)]  # type: ignore[misc]


@mutant(caught_by="drafter.deterministic")
class Guesses(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [
            [random.SystemRandom().randrange(self.context.vocab_size)] * limit for limit in most
        ]


@mutant(caught_by="drafter.client")
class LearnsFromAll(Lookup):
    def learned(self, request: Request) -> list[int]:
        return [token for answer in self.answers.values() for token in answer]


@mutant(caught_by="drafter.client")
class TakesNoClientForOne(Lookup):
    def learned(self, request: Request) -> list[int]:
        return self.answers.get(request.client, [])

    def on_finished(self, request: Request) -> None:
        self.answers[request.client] += request.output_token_ids


@mutant(caught_by="drafter.client")
class TakesTheEmptyNameForNone(Lookup):
    def learned(self, request: Request) -> list[int]:
        return self.answers.get(request.client or "", [])


@mutant(caught_by="drafter.client")
class CopiesFromItsNeighbour(Lookup):
    """A request without a draft gets the draft of the request before it in the call."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        drafts = super().propose(requests, most)
        return [(draft or drafts[index - 1])[: most[index]] for index, draft in enumerate(drafts)]


@mutant(caught_by="drafter.any_thread")
class RemembersByThread(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.local = threading.local()

    def learned(self, request: Request) -> list[int]:
        return getattr(self.local, f"of {request.client}", [])

    def on_finished(self, request: Request) -> None:
        if request.client is not None:
            setattr(
                self.local,
                f"of {request.client}",
                [*self.learned(request), *request.output_token_ids],
            )


@mutant(caught_by="drafter.forgets")
class KeepsRequests(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.seen: list[Request] = []

    def on_finished(self, request: Request) -> None:
        self.seen.append(request)
        super().on_finished(request)


@mutant(caught_by="drafter.forgets")
class KeepsTextsById(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.texts: dict[str, list[int]] = {}

    def text(self, request: Request) -> list[int]:
        own = self.texts.setdefault(request.id, list(request.prompt_token_ids))
        own += request.output_token_ids[len(own) - request.prompt_tokens :]
        return own


@mutant(caught_by="drafter.forgets")
class KeepsAnswersThatItMayNotUse(Lookup):
    def on_finished(self, request: Request) -> None:
        self.answers[request.client] += request.output_token_ids


@mutant(caught_by="drafter.request_untouched")
class AppendsItsDrafts(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        drafts = super().propose(requests, most)
        for request, draft in zip(requests, drafts, strict=True):
            request.output.extend(draft[:1])  # type: ignore[attr-defined]
        return drafts


@mutant(caught_by="drafter.request_untouched")
class MarksWhatHasEnded(Lookup):
    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        request.client = "(ended)"


@mutant(caught_by="drafter.client")
class TellsClientsApartBy8Characters(Lookup):
    def learned(self, request: Request) -> list[int]:
        return [] if request.client is None else self.answers.get(request.client[:8], [])

    def on_finished(self, request: Request) -> None:
        if request.client is not None:
            self.answers[request.client[:8]] += request.output_token_ids


@mutant(caught_by="drafter.client")
class TellsClientsApartButForCase(Lookup):
    def learned(self, request: Request) -> list[int]:
        return [] if request.client is None else self.answers.get(request.client.lower(), [])

    def on_finished(self, request: Request) -> None:
        if request.client is not None:
            self.answers[request.client.lower()] += request.output_token_ids


@mutant(caught_by="drafter.client")
class TellsRequestsApartByTheEndOfIds(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.texts: dict[str, list[int]] = {}

    def text(self, request: Request) -> list[int]:
        own = [*request.prompt_token_ids, *request.output_token_ids]
        before = self.texts.get(request.id[-8:], [])
        self.texts[request.id[-8:]] = own
        return before + own

    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        self.texts.pop(request.id[-8:], None)


@mutant(caught_by="drafter.forgets")
class KeepsAbortedRequests(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.asked: dict[str, int] = {}

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        self.asked |= {request.id: request.num_tokens for request in requests}
        return super().propose(requests, most)

    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        if request.output_left == 0:
            self.asked.pop(request.id, None)


@mutant(caught_by="drafter.deterministic")
class ProposesTheFirstOfASet(Lookup):
    """In the order of strings' hashes, which differ between processes."""

    def draft(self, request: Request) -> list[int]:
        words = {str(token) for token in self.text(request)}
        return [int(next(iter(words)))]


@mutant(caught_by="drafter.raises_nothing")
class HasRoomForEightDrafts(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        assert max(most, default=0) <= 8
        return super().propose(requests, most)


@mutant(caught_by="drafter.process_untouched")
class SeedsRandomNumbersOfAll(Lookup):
    def draft(self, request: Request) -> list[int]:
        random.seed(request.num_tokens)
        return [random.randrange(self.context.vocab_size or 1)]


@mutant(caught_by="drafter.first_use")
class SwitchesThreadsMoreOften(Lookup):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        sys.setswitchinterval(0.0005)
        return super().propose(requests, most)


@mutant(caught_by="drafter.strangers", soon=True)
class ContinuesPromptsOfAll(Lookup):
    """Continues a prompt as a longer one that begins with it."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        prompts = self.__dict__.setdefault("prompts", [])
        prompts += [request.prompt_token_ids for request in requests]
        return super().propose(requests, most)

    def draft(self, request: Request) -> list[int]:
        own = tuple(self.text(request))
        for prompt in self.__dict__["prompts"]:
            if len(own) >= 48 and len(prompt) > len(own) and tuple(prompt[: len(own)]) == own:
                return list(prompt[len(own) :])
        return super().draft(request)


@mutant(caught_by="drafter.strangers")
class LearnsFromSamples(Lookup):
    def learned(self, request: Request) -> list[int]:
        return self.answers.get(request.client or request.parent, [])

    def on_finished(self, request: Request) -> None:
        self.answers[request.client or request.parent] += request.output_token_ids


@mutant(caught_by="drafter.ties")
class BreaksTiesByHashes(Lookup):
    def draft(self, request: Request) -> list[int]:
        own = self.text(request)
        ways = [place for place in range(RUN, len(own)) if own[place - RUN : place] == own[-RUN:]]
        if not ways:
            return []
        return own[random.Random(hash(request.id)).choice(ways) :]


@mutant(caught_by="drafter.forgets_anywhere")
class KeepsRequestsByThread(Lookup):
    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.local = threading.local()

    def draft(self, request: Request) -> list[int]:
        self.local.__dict__.setdefault("requests", {})[request.id] = request
        return super().draft(request)

    def on_finished(self, request: Request) -> None:
        self.local.__dict__.setdefault("requests", {}).pop(request.id, None)


class Named(ModelDrafter):
    @property
    def model(self) -> str:
        return "demo"


@mutant(caught_by="drafter.model")
class NamesNoModel(Named):
    @property
    def model(self) -> str:
        return ""


@mutant(caught_by="drafter.model")
class NamesNothing(Named):
    @property
    def model(self) -> None:  # type: ignore[override]
        return None


@mutant(caught_by="drafter.model")
class NamesAHeadThatIsNoClass(Named):
    head = "a_module"


@mutant(caught_by="drafter.head", error=PluginError)
class NamesAHeadThatIsNotThere(Named):
    head = "tests.conformance.mutants.drafter:Head"


@mutant(caught_by="drafter.head")
class NamesItselfAsItsHead(Named):
    head = "tests.conformance.mutants.drafter:Named"


@mutant(caught_by="drafter.model")
class DraftsItself(Named):
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[0]] * len(requests)
