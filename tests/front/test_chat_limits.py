"""No chat template harms the engine: endless computation and memory exhaustion are stopped with an
error that names the limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dovetail.config.limits import Limits
from dovetail.errors import DovetailError, MissingExtraError, RequestError
from dovetail.front.chat_rendering import ChatTemplate, TemplateRenderer

pytestmark = pytest.mark.usefixtures("own_template_processes")
LIMITS = Limits(max_template_s=30, max_template_bytes=2**28, max_chat_chars=1_000_000)
HELLO = ChatTemplate("Hello {{ name }}!")


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(LIMITS)
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def hurried() -> Iterator[TemplateRenderer]:
    """With little time."""
    renderer = TemplateRenderer(Limits(max_template_s=0.25))
    yield renderer
    renderer.close()


def processes_of(renderer: TemplateRenderer) -> list[subprocess.Popen[bytes]]:
    """Return the idle processes of models' own templates."""
    return [process._process for process in renderer._own._idle]


def loops(depth: int, body: str = "") -> str:
    return "{% for i in range(100000) %}" * depth + body + "{% endfor %}" * depth


@pytest.mark.parametrize(
    "text",
    [
        loops(2),
        "{% macro m() %}" + loops(2, "x") + "{% endmacro %}{{ m() | length }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ lipsum(n=10 ** 9) }}",
    ],
)
def test_a_template_that_never_ends_is_refused(hurried: TemplateRenderer, text: str) -> None:
    with pytest.raises(
        RequestError,
        match=r"the chat_template takes longer than 0.25 s for this conversation "
        r"\(limits.max_template_s\)",
    ):
        hurried.render(ChatTemplate(text, given=True), {})


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ ' ' | indent(10 ** 10) }}",
        "{{ {'a': 1} | tojson(indent=10 ** 10) }}",
        "{{ 1 .to_bytes(10 ** 10, 'big') }}",
        "{% set x = 'x' * 10 ** 6 %}{{ x | replace('x', x) }}",
        "{% set x = 'x' * 10 ** 6 %}{{ ([x] * 10 ** 6) | join }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% "
        "endfor %}",
    ],
)
def test_a_template_that_fills_the_memory_is_refused(renderer: TemplateRenderer, text: str) -> None:
    with pytest.raises(
        RequestError,
        match=r"takes more than 268,435,456 bytes of memory for this conversation "
        r"\(limits.max_template_bytes\)",
    ):
        renderer.render(ChatTemplate(text), {})


@pytest.mark.parametrize(
    "text",
    [
        loops(2, "ab" * 40),
        "{{ 'x' * 1000001 }}",
        "{{ range(100000) | list }}{{ range(100000) | list }}",
    ],
)
def test_a_template_that_writes_without_end_is_refused(
    renderer: TemplateRenderer, text: str
) -> None:
    with pytest.raises(
        RequestError,
        match=r"makes more than 1,000,000 characters of this conversation "
        r"\(limits.max_chat_chars\)",
    ):
        renderer.render(ChatTemplate(text), {})


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        (
            "x" * 10_000_000,
            {},
            r"at most 100,000 characters \(limits.max_template_chars\), got 10,000,000",
        ),
        ("{% if a %}" * 10_000 + "{% endif %}" * 10_000, {}, "limits.max_template_chars"),
        ("{% if a %}" * 4_000 + "{% endif %}" * 4_000, {}, "is nested too deeply"),
        ("{{ " + "(" * 9_000, {}, "is nested too deeply"),
        ("{{ " + "1+" * 9_000 + "1 }}", {}, "is nested too deeply"),
        (
            "{{ a }}",
            {"a": "x" * 1_000_001},
            r"a conversation must have at most 1,000,000 characters \(limits.max_chat_chars\), got "
            r"1,000,",
        ),
        ("{{ range(10 ** 9) | list }}", {}, "fails on this conversation"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, "fails on this conversation"),
    ],
    ids=range(8),
)
def test_what_is_too_large_or_too_deep_is_refused(
    renderer: TemplateRenderer, text: str, variables: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        renderer.render(ChatTemplate(text), variables)


def test_what_is_nested_too_deeply_for_json_is_refused(renderer: TemplateRenderer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        renderer.render(HELLO, {"name": deep})
    with pytest.raises(RequestError, match="plain JSON values"):
        renderer.render(HELLO, {"name": object()})


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ [].append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{{ x.__init__.__globals__ }}",
    ],
)
def test_python_is_out_of_reach(renderer: TemplateRenderer, text: str) -> None:
    with contextlib.suppress(RequestError):
        assert renderer.render(ChatTemplate(text), {"x": {}}) == ""


def test_a_template_that_was_stopped_leaves_the_next_one_unharmed() -> None:
    renderer = TemplateRenderer(Limits(max_template_s=0.5))
    for text in ("{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 10 }}", "{{ x.y.z }}", "{% if %}"):
        with pytest.raises(RequestError):
            renderer.render(ChatTemplate(text), {})
        assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"
    renderer.close()


@pytest.mark.slow("waits until a stopped process is replaced")
def test_a_process_that_is_stopped_is_replaced() -> None:
    renderer = TemplateRenderer(Limits(max_template_s=0.25))
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"
    [process] = processes_of(renderer)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"limits.max_template_s"):
        renderer.render(HELLO, {"name": "you"})
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"
    assert processes_of(renderer) != [process]
    renderer.close()


@pytest.mark.slow("renders in many threads")
def test_many_threads_each_get_their_own_text(
    renderer: TemplateRenderer, hurried: TemplateRenderer
) -> None:
    """While others give templates that never end."""
    never = ChatTemplate(loops(3), given=True)
    with ThreadPoolExecutor(10) as threads:
        stuck = [threads.submit(hurried.render, never, {}) for _ in range(2)]
        names = [str(i) * (i % 50) for i in range(300)]
        assert list(threads.map(lambda name: renderer.render(HELLO, {"name": name}), names)) == [
            f"Hello {name}!" for name in names
        ]
        assert all(isinstance(future.exception(), RequestError) for future in stuck)
    assert 1 <= len(processes_of(renderer)) <= 4


def test_templates_that_came_with_requests_do_not_keep_the_models_own_waiting(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all of theirs are at work
    monkeypatch.setattr(renderer._given, "_free", threading.Semaphore(0))
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"


# Processes


def test_a_process_that_was_killed_is_replaced(renderer: TemplateRenderer) -> None:
    renderer.render(HELLO, {})
    for process in processes_of(renderer):
        process.kill()
        process.wait()
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"


def test_a_process_is_kept_for_the_next_conversation() -> None:
    renderer = TemplateRenderer(LIMITS)
    renderer.render(HELLO, {})
    [process] = processes_of(renderer)
    renderer.render(HELLO, {})
    assert processes_of(renderer) == [process]
    renderer.close()
    assert process.poll() is not None
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"
    renderer.close()


def test_a_process_ends_with_its_renderer() -> None:
    renderer = TemplateRenderer(LIMITS)
    renderer.render(HELLO, {})
    [process] = processes_of(renderer)
    del renderer
    assert process.poll() is not None


def test_a_process_ends_when_its_parent_is_gone() -> None:
    code = f"""
import os, signal
from dovetail.front.chat_rendering import *
renderer = TemplateRenderer({LIMITS!r})
renderer.render({HELLO!r}, {{}})
print(renderer._own._idle[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code = (
        "from dovetail.config.limits import Limits\nfrom dovetail.front.chat_rendering import "
        "ChatTemplate\n" + code
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL
    while is_running(int(parent.stdout)):
        os.sched_yield()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_fork_starts_processes_of_its_own(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer.render(HELLO, {})
    before = processes_of(renderer)
    kept = list(renderer._own._idle)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"
    assert not set(before) & set(processes_of(renderer))
    monkeypatch.undo()
    for process in kept:
        process.end()


def test_an_interrupt_ends_the_process_so_that_no_answer_is_mistaken_for_anothers(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer.render(HELLO, {})
    [*_, process] = renderer._own._idle

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        renderer.render(HELLO, {})
    assert not process.alive
    assert renderer.render(HELLO, {"name": "you"}) == "Hello you!"


def test_no_environment_variable_of_the_engine_reaches_a_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    renderer = TemplateRenderer(LIMITS)
    renderer.render(HELLO, {})
    [process] = processes_of(renderer)
    with open(f"/proc/{process.pid}/environ") as environment:
        assert "secret" not in environment.read()
    renderer.close()


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.front.chat_rendering.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"chat templates need Jinja; install with: pip install"
    ):
        TemplateRenderer(LIMITS).render(HELLO, {})


def test_a_process_that_does_not_start_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("/bin/false", "/nowhere"):
        monkeypatch.setattr(sys, "executable", command)
        with pytest.raises(
            DovetailError, match="the process that renders chat templates doesn't start"
        ):
            TemplateRenderer(LIMITS).render(HELLO, {})


@pytest.mark.parametrize(
    "limits",
    [Limits(max_template_bytes=2**27), Limits(max_template_s=86_400, max_template_bytes=2**63 - 1)],
)
def test_the_least_memory_that_may_be_set_is_enough_and_the_most_is_possible(
    limits: Limits,
) -> None:
    renderer = TemplateRenderer(limits)
    assert renderer.render(HELLO, {"name": "x" * 10**6}) == f"Hello {'x' * 10**6}!"
    renderer.close()
