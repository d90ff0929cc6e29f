"""`dovetail generate`, with an engine that repeats the prompt's letters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import EngineDeadError, RequestError
from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail.request.sampling_params import OutputKind, SamplingParams
from dovetail.request.structured import Structured


class Echo:
    """The part of `LLMEngine` that the command uses: runs one request at a time, the last added
    first, one letter per step."""

    made: Any = None
    images = None

    def __init__(self, config: Any) -> None:
        self.config, self.requests, self.closed = (
            config,
            dict[str, tuple[str, SamplingParams]](),
            False,
        )
        self.tokenizer, self.capacity = self, SimpleNamespace(max_model_len=1024)
        self.asked: dict[str, SamplingParams] = {}
        Echo.made = self

    @classmethod
    def from_config(cls, config: Any, progress: Any) -> Echo:
        progress("weights", 1, 2)
        progress("weights", 2, 2)
        return cls(config)

    chat_templates: ClassVar = {"default": "<{{ messages[0].content }}>"}
    special_tokens: ClassVar = dict[str, str]()
    encodes_chats, no_template = False, None

    def encode_all(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        assert not special_tokens
        return [[1]] * len(texts)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if prompt == "refused":
            raise RequestError("the prompt is empty")
        self.requests[request_id] = (getattr(prompt, "text", prompt), params)
        self.asked[request_id] = params

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        name, (prompt, params) = self.requests.popitem()
        if prompt == "interrupted":
            raise KeyboardInterrupt
        if prompt == "dead":
            raise EngineDeadError("the device is gone")
        if prompt == "failed":
            return [
                RequestOutput(
                    name,
                    prompt,
                    [1],
                    [CompletionOutput(0, "", [], finish_reason="error", stop_reason="out of luck")],
                    True,
                )
            ]
        text = str(prompt)[: params.max_tokens]
        pieces = list(text) if params.output_kind is OutputKind.DELTA else [text]
        samples = [[CompletionOutput(i, piece, [1]) for i in range(params.n)] for piece in pieces]
        for sample in samples[-1]:
            sample.finish_reason = "length"
        return [
            RequestOutput(name, prompt, [1], outputs, outputs is samples[-1]) for outputs in samples
        ]

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Echo]]:
    module = ModuleType("dovetail.front.llm_engine")
    module.LLMEngine = Echo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield Echo
    Echo.made = None


def generate(*args: str, **kwargs: Any) -> Any:
    return CliRunner().invoke(app, ["generate", "demo", *args], **kwargs)


def test_prompt_is_streamed_and_the_engine_closed() -> None:
    done = generate("hello", "--max-tokens", "4", "--set", "scheduler.x=1")
    assert (done.exit_code, done.stdout) == (0, "hell\n")
    assert Echo.made.closed
    assert Echo.made.config.scheduler.options == {"x": 1}


def test_trace_out_adds_an_observer_to_those_of_the_config() -> None:
    assert generate("x", "--set", "observers=[log]", "--trace-out", "t.json").exit_code == 0
    assert [(one.name, one.options) for one in Echo.made.config.observers] == [
        ("log", {}),
        ("dovetail:perfetto", {"path": "t.json"}),
    ]


def test_prompt_from_standard_input_and_chat() -> None:
    assert generate("-", input="hello").stdout == "hello\n"
    assert generate("hello", "--chat").stdout == "<hello>\n"


def test_sampling_parameters_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Echo, "add_request", lambda self, name, prompt, params: seen.append(params))
    generate(
        "x",
        "--temperature",
        "0",
        "--top-p",
        "0.5",
        "--top-k",
        "3",
        "--seed",
        "4",
        "--stop",
        "a",
        "--stop",
        "b",
        "--param",
        "min_tokens=2",
    )
    (params,) = seen
    assert (
        params.temperature,
        params.top_p,
        params.top_k,
        params.seed,
        params.stop,
        params.min_tokens,
    ) == (0, 0.5, 3, 4, ("a", "b"), 2)


def test_json_is_an_object_a_request(tmp_path: Path) -> None:
    (shown,) = map(json.loads, generate("hi", "--json", "--param", "n=2").stdout.splitlines())
    assert (shown["id"], shown["prompt"], [o["text"] for o in shown["outputs"]]) == (
        "0",
        "hi",
        ["hi", "hi"],
    )


def test_file_of_prompts_is_printed_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one"\n{"prompt": "two", "id": "b", "n": 2}\n{"messages": [{"role": "user", "content": '
        '"three"}]}\n'
    )
    done = generate("--prompts-file", str(path))
    assert (done.exit_code, done.stdout) == (
        0,
        "--- 1\none\n--- b (0)\ntwo\n--- b (1)\ntwo\n--- 3\n<three>\n",
    )
    assert {
        json.loads(line)["id"]
        for line in generate("--prompts-file", str(path), "--json").stdout.splitlines()
    } == {"1", "b", "3"}
    assert generate("--prompts-file", "-", input='"one"\n').stdout == "one\n"


def test_file_of_plain_text_and_chat_with_a_file() -> None:
    assert (
        generate("--prompts-file", "-", "--plain", input="one\r\ntwo\n").stdout
        == "--- 1\none\n--- 2\ntwo\n"
    )
    assert generate("--prompts-file", "-", "--plain", "--chat", input="one\n").stdout == "<one>\n"


def test_rules_of_the_answer_are_sampling_parameters(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    seen = []
    for args in (
        ["--json-schema", str(schema)],
        ["--regex", "a+"],
        ["--choice", "a", "--choice", "b"],
        ["--param", "structured={json_object: true}"],
    ):
        assert generate("x", *args).exit_code == 0
        seen.append(Echo.made.asked["0"].structured)
    expected = (
        {"json_schema": {"type": "object"}},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"json_object": True},
    )
    assert seen == [Structured(**rule) for rule in expected]  # type: ignore[arg-type]


def test_an_id_that_is_no_text_is_printed_as_an_escape() -> None:
    line = '{"id": "\\ud800", "prompt": "x"}\n{"id": 2, "prompt": "y"}'
    assert generate("--prompts-file", "-", input=line).stdout == "--- \\ud800\nx\n--- 2\ny\n"
    assert (
        json.loads(generate("--prompts-file", "-", "--json", input=line).stdout.splitlines()[1])[
            "id"
        ]
        == "\ud800"
    )


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "give one prompt, or --prompts-file"),
        (["x", "--prompts-file", "y"], 2, "give one prompt, or --prompts-file"),
        (["--prompts-file", "/there/is/none"], 2, "can't be read: No such file"),
        (["x", "--plain"], 2, "--plain says how to read a --prompts-file"),
        (["x", "--max-tokens", "0"], 2, "max_tokens must be an integer >= 1"),
        (
            ["x", "--param", "tempature=1"],
            2,
            "--param: tempature: unknown sampling parameter, did you mean temperature?",
        ),
        (
            ["x", "--param", "eagle=x"],
            2,
            '--param: eagle: unknown sampling parameter: not there yet; "Models that draft" is on '
            "the roadmap",
        ),
        (["x", "--regex", "a", "--choice", "b"], 2, "--regex and --choice contradict each other"),
        (
            ["x", "--regex", "a", "--param", "structured={regex: b}"],
            2,
            "--regex and --param structured contradict each other",
        ),
        (
            ["x", "--json-schema", "/there/is/none"],
            2,
            "--json-schema: /there/is/none: can't be read: No such file",
        ),
        (["x", "--regex", ""], 2, "structured.regex: it must be a non-empty string"),
        (["x", "--param", "n"], 2, "--param: expected key=value"),
        (["x", "--set", "zzz=1"], 2, "--set: zzz: unknown key"),
        (["refused"], 2, "request 0: the prompt is empty"),
        (["dead"], 1, "the device is gone"),
        (["failed"], 1, "request 0: error: out of luck"),
        (["failed", "--json"], 1, "request 0: error: out of luck"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(args: list[str], code: int, says: str) -> None:
    done = generate(*args)
    assert done.exit_code == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_closes_the_engine_and_exits_130() -> None:
    done = generate("interrupted")
    assert done.exit_code == 130
    assert "Traceback" not in done.output
    assert Echo.made.closed


def test_bad_line_of_a_file_stops_before_the_engine_is_made(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n{"prompt"\n')
    done = generate("--prompts-file", str(path))
    assert done.exit_code == 2
    assert f"{path}:2: not valid JSON" in done.stderr
    assert Echo.made is None
