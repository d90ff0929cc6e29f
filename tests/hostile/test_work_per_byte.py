"""Work per byte: whatever reads untrusted input takes bounded processor time and memory for each
byte of it.

`INPUTS` is the table: a new reader is a row, with its hostile inputs
(`generators`). `docs/security.md` states the bounds. Sizes are small here: a quadratic reader is
far beyond its bound, a linear one takes milliseconds. Slow tests send the largest bodies, and watch
the event loop.

Seconds are those of the reference machine of `tests/budget.py`, and the best of three tries counts:
one may include a garbage collection of all that tests have imported.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple, get_type_hints

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from dovetail.api.executor import AdapterCapacity, ComponentRef
from dovetail.api.grammar import GrammarContext, GrammarSpec, SpecKind
from dovetail.api.json_files import read_json_object
from dovetail.cli.prompts import parse_json
from dovetail.config.limits import Limits
from dovetail.errors import DovetailError
from dovetail.front.chat_rendering import ChatTemplate, TemplateRenderer
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.grammar_trials import GrammarTrials
from dovetail.front.grammars import GrammarCompiler
from dovetail.front.intake import Intake
from dovetail.front.intake_facts import IntakeFacts
from dovetail.front.lora_files import CONFIG, WEIGHTS, AdapterFiles, read_adapter
from dovetail.front.pooling import PoolingFacts
from dovetail.front.tokenizer import Tokenizer
from dovetail.request.pooling import PoolingParams
from dovetail.request.structured import Structured
from dovetail.testing.fake_executor import ADAPTED
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions
from dovetail_server.app import create_app
from dovetail_server.batches.lines import request_at, scan
from dovetail_server.protocol.openapi import OPERATIONS
from dovetail_server.protocol.reasoning import EFFORT, reads
from dovetail_server.protocol.response_items import chat_messages, read_items
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.settings import ServerSettings
from tests.adapters import config_of, write_adapter
from tests.budget import least_cpu_s, least_s
from tests.front.pooled import SCORER
from tests.hostile.generators import (
    ADAPTER_CONFIGS,
    FORMS,
    GRAMMARS,
    HEADERS,
    JSON,
    LINES,
    PATTERNS,
    SCHEMAS,
    TEMPLATES,
    TEXTS,
    TOKENIZERS,
    Generator,
    safetensors,
)
from tests.server.answers import parser_named
from tests.server.fake_engine import FakeEngine
from tests.server.pictures import APIS, asked, image, seeing
from tests.server.serving import demo_tokenizer
from tests.support import FULL

CPU_S_PER_BYTE, CPU_S = 2e-6, 0.1
OWN_PROCESS_CPU_S = {
    "an adapter's patterns": 1.0
}  # instead of CPU_S, for what a process of its own reads, which is ended after 3 s
MEMORY_PER_BYTE, MEMORY_BYTES = 100, 4 << 20
LOOP_HELD_S = 0.5
# bytes of an input; of one whose memory is traced, which is slow
SIZE, MEMORY_SIZE = (
    1 << 15,
    1 << 12,
)
LARGEST = ServerSettings().max_body_bytes
PATIENCE_S = 60
BYTES = GrammarContext([*(bytes([byte]) for byte in range(256)), None], frozenset([256]), 257)

HOLE, TEXT_HOLE = "@", "#"  # where the input goes in a body: as JSON, or within a string
CHAT = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
CALL = (
    '{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": '
    '"f", "arguments": "#"}}]}'
)
PLACES: Mapping[str, tuple[str, ...]] = {  # of an endpoint's body, besides its fields
    "/v1/completions": (
        '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": @}}',
        '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": "#"}}',
        '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "#"}}',
        '{"prompt": "a", "max_tokens": 1, "extra": {"a": @}}',
        '{"prompt": ["#", "#"], "max_tokens": 1}',
    ),
    "/v1/chat/completions": (
        "{"
        + CHAT
        + ', "tools": [{"type": "function", "function": {"name": "f", "parameters": @}}]}',
        "{"
        + CHAT
        + ', "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '
        "@}}}",
        "{" + CHAT + ', "chat_template_kwargs": {"a": @}}',
        '{"messages": [{"role": "user", "content": @}], "max_tokens": 1}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "#"}]}], '
        '"max_tokens": 1}',
        '{"messages": [{"role": "user", "content": "a"}, ' + CALL + '], "max_tokens": 1}',
    ),
    "/v1/messages": (
        '{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", '
        '"input_schema": @}]}',
        '{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result", '
        '"tool_use_id": "c", "content": @}]}]}',
    ),
    "/v1/responses": (
        '{"input": [{"type": "message", "role": "user", "content": @}], "max_output_tokens": 16}',
        '{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "#"}], '
        '"max_output_tokens": 16}',
    ),
}
REQUIRED = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "text_1": "a",
    "text_2": "a",
    "query": "a",
    "documents": ["a"],
    "max_tokens": 1,
    "tokens": [1],
    "input_file_id": "a",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "lora_name": "a",
    "lora_path": "a",
}


class Http:
    """An app of a faked engine, called without a socket."""

    def __init__(self, folder: Path, make: Callable[[], FakeEngine] | None = None) -> None:
        """`make`: makes the engine."""
        self.runner = asyncio.Runner()
        self._engine, self._app = self.runner.run(self._made(folder, make))
        self._status = 0

    async def _made(
        self, folder: Path, make: Callable[[], FakeEngine] | None
    ) -> tuple[FakeEngine, Starlette]:
        engine = FakeEngine(demo_tokenizer(), ("a",)) if make is None else make()
        (folder / "adapters").mkdir()
        return engine, create_app(
            engine,
            ServerSettings(
                batch_directory=str(folder / "batches"), adapter_directory=str(folder / "adapters")
            ),
        )

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> int:
        """Return the status."""
        return self.runner.run(self._post(path, body, content_type))

    async def _post(self, path: str, body: bytes, content_type: str) -> int:
        parts = [body[start : start + 65_536] for start in range(0, len(body), 65_536)] or [b""]
        received = iter(
            [{"type": "http.request", "body": part, "more_body": True} for part in parts[:-1]]
        )
        last, never = (
            [{"type": "http.request", "body": parts[-1], "more_body": False}],
            asyncio.Event(),
        )
        statuses = []

        async def receive() -> Message:
            if (message := next(received, None)) is not None:
                return message
            if last:
                return last.pop()
            await never.wait()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", content_type.encode())],
            "client": None,
            "server": None,
            "app": self._app,
        }
        await self._app.router(scope, receive, send)
        return int(statuses[0])

    def held_s(self, path: str, bodies: Sequence[bytes]) -> float:
        """Post bodies at once; return the most processor time of this process between two turns of
        the event loop."""
        return self.runner.run(self._held_s(path, bodies))

    async def _held_s(self, path: str, bodies: Sequence[bytes]) -> float:
        longest, last = 0.0, time.process_time()

        async def turn() -> None:
            nonlocal longest, last
            while True:
                now = time.process_time()
                longest, last = max(longest, now - last), now
                await asyncio.sleep(0.005)

        turning = asyncio.create_task(turn())
        await asyncio.gather(*(self._post(path, body, "application/json") for body in bodies))
        await asyncio.sleep(0.01)
        turning.cancel()
        return longest

    def close(self) -> None:
        self._engine.close()
        self.runner.close()


IN_TEXT = {**TEXTS, **PATTERNS, **JSON, **TEMPLATES}


class Hostile(NamedTuple):
    """A kind of input in a place of a body."""

    place: str
    name: str  # of the input
    make: Generator
    field: Hashable = None  # the name and type of that whose value it is

    def __str__(self) -> str:
        return f"{self.name} in {self.place}"

    @property
    def holes(self) -> int:
        return self.place.count(self.hole)

    @property
    def hole(self) -> str:
        return TEXT_HOLE if TEXT_HOLE in self.place else HOLE

    @property
    def key(self) -> str:
        """Return a key; bodies with equal keys have equal contents."""
        return f"{self.name} for each {self.holes} x {self.hole}"

    def content(self, size: int) -> bytes:
        """Return the content of each hole. The total is at most about `size` bytes."""
        size //= self.holes
        if self.hole == HOLE:
            return self.make(size)
        swells = max(1.0, len(escaped(self.make(SIZE))) / SIZE)
        return escaped(self.make(int(size / swells)))

    def body(self, content: bytes) -> bytes:
        return self.place.encode().replace(self.hole.encode(), content)


def escaped(content: bytes) -> bytes:
    """Return a text as it is written within a JSON string."""
    return json.dumps(content.decode(errors="replace"))[1:-1].encode()


def bodies(path: str, kind: type, *, all_of_them: bool) -> Iterator[Hostile]:
    """Yield the hostile bodies of an endpoint: each kind of input in some fields; in all of them,
    if so."""
    fields: Sequence[str] = kind.__struct_encode_fields__  # type: ignore[attr-defined]
    minimal = {name: value for name, value in REQUIRED.items() if name in fields}
    types = get_type_hints(kind)
    places: dict[str, Hashable] = {}
    for name in fields:
        whole = json.dumps({**minimal, name: HOLE}).replace(f'"{HOLE}"', HOLE)
        places[whole] = f"{name}: {types.get(name)}"
    for name in fields:
        places[json.dumps({**minimal, name: TEXT_HOLE})] = f"{name}: {types.get(name)} as text"
    places |= dict.fromkeys((HOLE, '{"a": @}', *PLACES.get(path, ())))
    for number, (place, field) in enumerate(places.items()):
        inputs = list((IN_TEXT if TEXT_HOLE in place else JSON).items())
        # otherwise each place has some input, and each input some place
        chosen = inputs if all_of_them else [inputs[number % len(inputs)]]
        for name, make in chosen:
            yield Hostile(place, name, make, field)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[Http]:
    http = Http(folder)
    yield http
    http.close()


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    options = "dovetail_grammars.options:GrammarOptions"
    path = "dovetail_grammars.llguidance_backend:LLGuidance"
    backend = ComponentRef("grammar", "llguidance", path, options_model=options)
    trials = GrammarTrials(backend, BYTES, 3)
    trials.check(GrammarSpec("regex", "a"), PATIENCE_S)  # starts a process
    yield trials
    trials.close()


@pytest.fixture(scope="module")
def readers(
    folder: Path, http: Http, trials: GrammarTrials
) -> dict[str, Callable[[bytes], object]]:
    """Return the reader of each kind of input that isn't a body, by the names of `INPUTS`."""
    adapter = write_adapter(folder / "adapter")
    capacity = AdapterCapacity(2, 16, ADAPTED)
    renderer = TemplateRenderer(Limits(max_template_s=0.05))

    def of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def write_and_read(content: bytes) -> object:
            (folder / name).write_bytes(content)
            return read(folder / name)

        return write_and_read

    def adapter_config(content: bytes) -> object:
        config = (
            config_of(**json.loads(content))
            if content.startswith((b'{"target', b'{"rank'))
            else None
        )
        (adapter / CONFIG).write_bytes(content if config is None else json.dumps(config).encode())
        try:
            return read_adapter(AdapterFiles.find(str(adapter)), capacity)
        finally:
            (adapter / CONFIG).write_text(json.dumps(config_of()))

    def adapter_header(content: bytes) -> object:
        weights = (adapter / WEIGHTS).read_bytes()
        (adapter / WEIGHTS).write_bytes(safetensors(content))
        try:
            return read_adapter(AdapterFiles.find(str(adapter)), capacity)
        finally:
            (adapter / WEIGHTS).write_bytes(weights)

    def batch(path: Path) -> object:
        scanned = scan(path, "/v1/completions", LARGEST)
        return [request_at(path, offset, LARGEST) for offset in scanned.left]

    def parsed(name: str | None, content: bytes) -> None:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "properties": {"s": {"type": "string"}, "j": {"type": "object"}}
                    },
                },
            }
        ]
        parser = parser_named(name, "think", tools=tools)
        text = content.decode(errors="replace")
        for start in range(0, len(text), 32):
            parser.feed(text[start : start + 32])
        parser.finish()

    facts = PoolingFacts(SCORER, 4096, "max_model_len")
    scoring = Intake(
        IntakeFacts(Limits(), 4096, 1024, GenerationDefaults(), "fake", "fake", pooling=facts),
        demo_tokenizer,
        Random(0),
    ).pooling

    def pair(content: bytes) -> object:
        text = content.decode()
        halves = text[: len(text) // 2], text[len(text) // 2 :]
        return scoring.plan_scores([halves], PoolingParams(truncate_prompt_tokens=64)).prompts.all()

    compiler = GrammarCompiler(
        LLGuidance(GrammarOptions(), BYTES), Limits(max_grammar_s=0.03), trials=trials
    )

    def compiled(kind: SpecKind, content: bytes) -> object:
        return compiler.compile(GrammarSpec(kind, content.decode())).result()

    def tokenizer(path: Path) -> object:
        return Tokenizer.load(path.parent)

    (folder / "tokenizer").mkdir()
    (folder / "vocabulary").mkdir()
    with suppress(DovetailError):
        Tokenizer.load(folder / "tokenizer")  # imports transformers
    return {
        "a model's JSON file": of_file("config.json", read_json_object),
        "a line of prompts": lambda content: parse_json(content.decode(errors="replace")),
        "a batch file": of_file("batch.jsonl", batch),
        "an uploaded form": lambda content: http.post(
            "/v1/files", content, "multipart/form-data; boundary=b"
        ),
        "an adapter's config": adapter_config,
        "an adapter's patterns": adapter_config,
        "an adapter's header": adapter_header,
        "a schema as text": lambda content: Structured(
            json_schema=content.decode(errors="replace")
        ).depth(),
        "a schema's values": lambda content: Structured(
            json_schema={"enum": [json.loads(content)]}
        ).depth(),
        "a regular expression": lambda content: Structured(regex=content.decode()).depth(),
        "a compiled grammar": partial(compiled, "grammar"),
        "a compiled schema": partial(compiled, "json_schema"),
        "a compiled expression": partial(compiled, "regex"),
        "a chat template": lambda content: renderer.render(
            ChatTemplate(content.decode(), given=True), {"a": 1}
        ),
        "the variables of a chat template": lambda content: reads(content.decode(), EFFORT),
        "a text to be tokenized": lambda content: demo_tokenizer().encode(content.decode()),
        "a pair to be scored": pair,
        "tokenizer_config.json": of_file("tokenizer/tokenizer_config.json", tokenizer),
        "tokenizer.json": of_file("vocabulary/tokenizer.json", tokenizer),
        **{
            f"answers in the format {name}": lambda content, name=name: parsed(name, content)
            for name in ("hermes", "llama3_json", "mistral", "qwen3_coder", "glm45")
        },
    }


INPUTS: Mapping[str, Mapping[str, Generator]] = {
    "a model's JSON file": JSON,
    "a line of prompts": JSON,
    "a batch file": LINES,
    "an uploaded form": FORMS,
    "an adapter's config": JSON,
    "an adapter's patterns": ADAPTER_CONFIGS,
    "an adapter's header": {**HEADERS, **JSON},
    "a schema as text": {**JSON, **TEXTS},
    "a regular expression": PATTERNS,
    "a compiled grammar": GRAMMARS,
    "a compiled schema": SCHEMAS,
    "a compiled expression": PATTERNS,
    "a chat template": TEMPLATES,
    "the variables of a chat template": {**TEMPLATES, **TEXTS},
    "a text to be tokenized": TEXTS,
    "a pair to be scored": {
        name: TEXTS[name]
        for name in ("one letter", "spaces", "words", "wide", "combining", "marks")
    },
    "tokenizer_config.json": {
        name: JSON[name] for name in ("deep lists", "distinct keys", "long integers")
    },  # loading takes 0.1 s
    "tokenizer.json": {
        **TOKENIZERS,
        **{name: JSON[name] for name in ("deep lists", "distinct keys", "long integers")},
    },
    **{
        f"answers in the format {name}": TEXTS
        for name in ("hermes", "llama3_json", "mistral", "qwen3_coder", "glm45")
    },
}


def check_time(
    what: str, make: Generator, read: Callable[[bytes], object], size: int, cpu_s: float = CPU_S
) -> None:
    content = make(size)
    bound_s = cpu_s + CPU_S_PER_BYTE * len(content)

    def attempt() -> None:
        with suppress(DovetailError, msgspec.MsgspecError):
            read(content)

    took_s = least_cpu_s(attempt, bound_s)
    assert took_s <= bound_s, f"{what}: {took_s:.2f} s for {len(content)} bytes"


def check_held(what: str, http: Http, path: str, bodies: Sequence[bytes]) -> None:
    held_s = least_s(lambda: http.held_s(path, bodies), LOOP_HELD_S)
    assert held_s <= LOOP_HELD_S, f"{what}: {held_s:.2f} s"


def check_memory(what: str, make: Generator, read: Callable[[bytes], object], size: int) -> None:
    content = make(size)
    tracemalloc.start()
    try:
        with suppress(DovetailError, msgspec.MsgspecError):
            read(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY_BYTES + MEMORY_PER_BYTE * len(content), (
        f"{what}: {peak} bytes for {len(content)}"
    )


@pytest.mark.parametrize("name", INPUTS)
def test_readers_take_little_time_per_byte(
    name: str, readers: Mapping[str, Callable[[bytes], object]]
) -> None:
    for kind, make in INPUTS[name].items():
        check_time(f"{name}: {kind}", make, readers[name], SIZE, OWN_PROCESS_CPU_S.get(name, CPU_S))


SLOWLY_TRACED = [name for name in INPUTS if name.startswith("answers")] + [
    "an adapter's patterns",
    "a compiled expression",
    "tokenizer_config.json",
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow("tracing memory") if name in SLOWLY_TRACED else ()
        )
        for name in INPUTS
    ],
)
def test_readers_take_little_memory_per_byte(
    name: str, readers: Mapping[str, Callable[[bytes], object]]
) -> None:
    for kind, make in INPUTS[name].items():
        check_memory(f"{name}: {kind}", make, readers[name], SIZE if FULL else MEMORY_SIZE)


ENDPOINTS = [
    (operation.path, operation.request) for operation in OPERATIONS if operation.request is not None
]


@pytest.mark.parametrize(("path", "kind"), ENDPOINTS, ids=[path for path, _ in ENDPOINTS])
def test_endpoints_take_little_time_per_byte(path: str, kind: type, http: Http) -> None:
    for one in bodies(path, kind, all_of_them=FULL):
        check_time(
            f"{path}: {one}",
            lambda size, one=one: one.body(one.content(size)),  # type: ignore[misc]
            lambda body: http.post(path, body),
            SIZE,
        )


def large_bodies() -> Mapping[str, list[tuple[str, Hostile]]]:
    """Return hostile bodies of all endpoints with their paths; those of equal contents together,
    since it takes longer to make 32 MB than to refuse them. All endpoints decode bodies in one way:
    fields of equal names and types are sent to one of them, in the full profile to each."""
    found = defaultdict(list)
    sent: set[Hashable] = set()
    for path, kind in ENDPOINTS:
        for one in bodies(path, kind, all_of_them=False):
            if FULL or one.field is None or one.field not in sent:
                sent.add(one.field)
                found[one.key].append((path, one))
        if "chat_template" in kind.__struct_encode_fields__:  # type: ignore[attr-defined]
            conversation = {"messages": REQUIRED["messages"], "max_tokens": 1}
            place = json.dumps({**conversation, "chat_template": TEXT_HOLE})
            one = Hostile(place, "open code", TEMPLATES["open code"])
            found[one.key].append((path, one))
    for make in ("half marks", "nested repeats"):  # for a model with room for them
        one = Hostile('{"prompt": "#", "max_tokens": 1}', make, IN_TEXT[make])
        found[one.key].append(("/v1/completions", one))
    return found


LARGE_BODIES = large_bodies()


@pytest.mark.slow("bodies of 32 MB")
@pytest.mark.parametrize("key", LARGE_BODIES)
def test_the_largest_bodies_never_hold_the_event_loop(key: str, http: Http) -> None:
    same = LARGE_BODIES[key]
    content = same[0][1].content(LARGEST - 10_000)
    for path, one in same:
        check_held(f"{path}: {one}", http, path, [one.body(content)])


@pytest.mark.slow("bodies of 32 MB")
@pytest.mark.parametrize("path", APIS)
def test_bodies_with_images_never_hold_the_event_loop(path: str, tmp_path: Path) -> None:
    http = Http(tmp_path, seeing)
    room = LARGEST - 10_000
    part = image(path, "QUJD")
    parts = {
        "one large image": [image(path, "QUJD" * (Limits().max_image_bytes // 3))],
        "four images": [image(path, "QUJD" * (room // 16))] * 4,
        "many images": [part] * min(50_000, room // len(json.dumps(part)) - 1),
    }
    for name, given in parts.items():
        body = json.dumps(asked(path, *given)).encode()
        assert len(body) <= LARGEST
        check_held(name, http, path, [body])
    http.close()


@pytest.mark.slow("bodies of 20 MB together")
def test_many_large_bodies_at_once_never_hold_the_event_loop(http: Http) -> None:
    for name, make in JSON.items():
        body = b'{"prompt": "a", "max_tokens": 1, "extra": {"a": ' + make(1_200_000) + b"}}"
        check_held(name, http, "/v1/completions", [body] * 16)


ITEMS_CPU_S = 5.0  # joining them one by one took half a minute
ITEMS = {  # of /v1/responses, of which each body has as many as it may
    "texts of one answer": {"type": "message", "role": "assistant", "content": "x" * 300},
    "results of a tool": {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "x" * 300}],
    },
}


@pytest.mark.slow("bodies of 16 MB")
@pytest.mark.parametrize("name", ITEMS)
def test_conversations_of_many_items_take_linear_time_beside_the_event_loop(
    name: str, http: Http
) -> None:
    item = json.dumps(ITEMS[name]).encode()
    parts = item.count(b":") + item.count(b"{") + item.count(b"[")

    def make(size: int) -> bytes:
        return b",".join([item] * min(size // len(item), 198_000 // parts))

    content = make(LARGEST)

    def read() -> None:
        body = msgspec.json.decode(b'{"input":[%b]}' % content, type=ResponsesRequest)
        chat_messages(None, read_items(body.input))

    took_s = least_cpu_s(read, ITEMS_CPU_S)
    assert took_s <= ITEMS_CPU_S, f"{name}: {took_s:.2f} s"
    check_held(name, http, "/v1/responses", [b'{"input":[%b]}' % make(LARGEST - 10_000)])


@pytest.mark.slow("seconds of four grammars")
def test_four_grammars_at_once_are_refused_after_another_users_schema_is_compiled(
    trials: GrammarTrials,
) -> None:
    """The order says it, on a machine of any speed: the schema comes last, and is served first."""
    limits = Limits(max_grammar_s=3.0)
    compiler = GrammarCompiler(
        LLGuidance(GrammarOptions(), BYTES), limits, trials=trials, threads=2
    )
    endless: list[tuple[SpecKind, Generator]] = [
        ("grammar", GRAMMARS["ambiguous"]),
        ("json_schema", SCHEMAS["patterns of keys"]),
    ]
    hostile = [
        compiler.compile(GrammarSpec(kind, make(size).decode()))
        for kind, make in endless
        for size in (SIZE, SIZE + 100)
    ]
    compiler.compile(GrammarSpec("json_schema", '{"type": "integer"}')).result(PATIENCE_S)
    assert not any(future.done() for future in hostile)
    for future in hostile:
        assert "longer than 3 s (limits.max_grammar_s)" in str(future.exception(PATIENCE_S))
    compiler.close()
