"""The process in which chat templates are rendered: `chat_rendering` starts it, and asks it through
standard input and output, a line of JSON each.

A template is an untrusted program: it comes with the model or the request. Jinja's sandbox denies
access to files and to Python's internals, but can't limit time or memory. A process can: this one
has a memory limit, and a watchdog that ends it after a timeout.

It runs as a file of its own, without the rest of Dovetail, so that it starts in the time that it
takes to import Jinja.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's, for Jinja

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.environment import Template

_TEMPLATE = "<chat template>"  # its name in tracebacks
_LONGEST_REASON = 300  # characters: templates write reasons, too


class _Compiled(NamedTuple):
    template: Template
    variables: frozenset[str]  # those that it reads


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`: marks the assistant's part for those who train on it.
    Here it renders what is in it."""

    tags = {"generation"}  # noqa: RUF012 as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that begin with an underscore: they lead to Python's insides."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*given, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError(
                f"a name in a namespace may not begin with an underscore, as {name} does"
            )
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that chat templates are written for: transformers' `apply_chat_template`
    has set the fashion."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=16)
def _compiled(text: str) -> _Compiled:
    tree = _ENVIRONMENT.parse(text, filename=_TEMPLATE)
    variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
    code = _ENVIRONMENT.compile(tree, filename=_TEMPLATE)
    return _Compiled(
        _ENVIRONMENT.template_class.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None)),
        variables,
    )


class TemplateRefused(Exception):
    """Why there is no text: a kind and its details, as `chat_rendering` puts them in words."""

    def __init__(
        self, kind: str, *, line: int | None = None, reason: object = "", names: Sequence[str] = ()
    ) -> None:
        super().__init__(kind)
        self.answer = {
            "kind": kind,
            "line": line,
            "reason": str(reason)[:_LONGEST_REASON],
            "names": [name[:_LONGEST_REASON] for name in names[:5]],
        }


def render(text: str, variables: Mapping[str, Any], must_read: list[str], max_chars: int) -> str:
    """Return the template `text` with these variables.

    Raises `TemplateRefused`; also if it doesn't look at one of the variables `must_read`.
    """
    compiled = _readable(text)
    if unread := [name for name in must_read if name not in compiled.variables]:
        raise TemplateRefused("unread", names=unread)
    try:
        return _generated(compiled, variables, max_chars)
    except (TemplateRefused, MemoryError):
        raise
    except jinja2.TemplateError as error:
        if type(error) is jinja2.TemplateError:  # `raise_exception`
            raise TemplateRefused("refuses", reason=error.message) from None
        raise TemplateRefused("fails", line=_line(error), reason=error.message) from None
    except Exception as error:  # a template meets every error that Python has
        raise TemplateRefused("fails", line=_line(error), reason=error) from None


def _readable(text: str) -> _Compiled:
    """Compile a template. Raises `TemplateRefused`."""
    try:
        return _compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateRefused("syntax", line=error.lineno, reason=error.message) from None
    except (RecursionError, SyntaxError, MemoryError):
        # Python's limits to what is nested, while Jinja makes Python of it
        raise TemplateRefused("nested") from None
    except Exception as error:  # such as half a surrogate pair in it
        raise TemplateRefused("fails", reason=error) from None


def _generated(compiled: _Compiled, variables: Mapping[str, Any], max_chars: int) -> str:
    pieces = []
    chars = 0
    for piece in compiled.template.generate(variables):
        pieces.append(piece)
        chars += len(piece)
        if chars > max_chars:
            raise TemplateRefused("long")
    return "".join(pieces)


def _line(error: BaseException) -> int | None:
    """The template's line that raised it."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _bound_memory(most_bytes: int) -> None:
    """All allocations beyond raise MemoryError. Where there is no such bound (Windows, and macOS,
    which doesn't keep it), time alone bounds it."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    except (ImportError, OSError, ValueError):
        pass


def _serve(requests: BinaryIO, answers: BinaryIO, most_bytes: int) -> None:
    """Answer until the parent has gone, or the memory ran out: what is left of a process then is
    not to be trusted."""
    _bound_memory(most_bytes)
    for line in requests:
        try:
            answer = json.dumps(_answer(line), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            answers.write(b'"memory"\n')
            break
        answers.write(answer + b"\n")
        answers.flush()


def _answer(line: bytes) -> list[dict[str, Any]]:
    """A text, or why there is none, for each set of variables; `null` only asks whether this
    process is there."""
    request = json.loads(line)
    if request is None:
        return []
    # by a thread of C: also amidst a single operation, and with the parent gone
    faulthandler.dump_traceback_later(request.pop("max_s"), exit=True)
    try:
        return [
            _text_or_reason(request["text"], variables, request["must_read"], request["max_chars"])
            for variables in request["variables"]
        ]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _text_or_reason(*arguments: Any) -> dict[str, Any]:
    try:
        return {"text": render(*arguments)}
    except TemplateRefused as refused:
        return refused.answer


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]))
