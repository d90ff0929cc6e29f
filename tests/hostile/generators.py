"""Hostile inputs of any size: each makes the most work per byte that its author could think of. A
new one is a row."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

Generator = Callable[[int], bytes]  # size -> an input of about that many bytes


def repeated(unit: str | bytes, begin: str | bytes = b"", end: str | bytes = b"") -> Generator:
    """Return a generator of one unit many times."""
    unit, begin, end = (
        text.encode() if isinstance(text, str) else text for text in (unit, begin, end)
    )
    return lambda size: begin + unit * (size // len(unit)) + end


def within(make: Generator, begin: bytes, end: bytes) -> Generator:
    """Return a generator of the same between two texts."""
    return lambda size: begin + make(size) + end


def _distinct_keys(size: int) -> bytes:
    return b"{" + b",".join(b'"%x":0' % number for number in range(size // 9)) + b"}"


JSON: dict[str, Generator] = {
    "empty lists": repeated("[],", "[", "[]]"),
    "empty objects": repeated("{},", "[", "{}]"),
    "small objects": repeated('{"a":[]},', "[", "{}]"),
    "distinct keys": _distinct_keys,
    "equal keys": repeated('"a":0,', "{", '"a":0}'),
    "deep lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep objects": lambda size: b'{"a":' * (size // 6) + b"0" + b"}" * (size // 6),
    "open lists": repeated("["),
    "open objects": repeated('{"a":'),
    "integers": repeated("257,", "[", "1]"),
    "long integers": repeated("9" * 4_000 + ",", "[", "1]"),
    "one integer": repeated("9"),
    "integers of 99 digits": repeated("9" * 99 + ",", "[", "1]"),
    "digits in a string": repeated("9" * 99 + "a", '"', '"'),
    "numbers": repeated("1.5,", "[", "1]"),
    "long numbers": repeated("0." + "1" * 500 + ",", "[", "1]"),
    "large exponents": repeated("1e308,", "[", "1]"),
    "empty strings": repeated('"",', "[", '""]'),
    "strings": repeated('"ab",', "[", '""]'),
    "wide strings": repeated('"\U0001f600",', "[", '""]'),
    "one string": repeated("a", '"', '"'),
    "escapes": repeated(r"\n", '"', '"'),
    "escaped quotes": repeated(r"\"", '"', '"'),
    "backslashes": repeated("\\\\", '"', '"'),
    "half surrogates": repeated(r"\ud800", '"', '"'),
    "an open string": repeated("a", '"'),
    "spaces": repeated(" ", "", "0"),
    "brackets in a string": repeated("[{:", '"', '"'),
    "bytes that are no text": repeated(b"\xff", '"', '"'),
    "null": repeated("null,", "[", "null]"),
}

TEXTS: dict[str, Generator] = {
    "one letter": repeated("a"),
    "spaces": repeated(" "),
    "lines": repeated("\n"),
    "words": repeated("a b "),
    "wide": repeated("\U0001f600"),
    "combining": repeated("\u0301", "a"),
    "brackets": repeated("["),
    "braces": repeated("{"),
    "quotes": repeated('"'),
    "backslashes": repeated("\\"),
    "marks": repeated("<|im_end|>"),
    "half marks": repeated("<tool_call"),
    "thoughts": repeated("<think>"),
    "calls": repeated('<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "open calls": repeated('<tool_call>\n{"name": "f", "arguments": {"a": ['),
    "functions": repeated("<function=f><parameter=s>"),
    "arguments": repeated("<arg_key>s</arg_key><arg_value>", "<tool_call>f"),
    "one long argument": repeated("[1,", '<tool_call>{"name": "f", "arguments": {"s": '),
    "one long parameter": repeated("[1,", "<tool_call><function=f><parameter=j>"),
    "JSON calls": repeated('{"name": "f", "parameters": {"s": "'),
    "Mistral's calls": repeated("[TOOL_CALLS]f[ARGS]{"),
}

PATTERNS: dict[str, Generator] = {
    "nested repeats": repeated("(a+)+"),
    "dots": repeated(".*"),
    "alternatives": repeated("a|aa|"),
    "groups": lambda size: b"(" * (size // 2) + b")" * (size // 2),
    "counts": repeated("a{1000}"),
    "nested counts": lambda size: b"(?:" * (size // 12) + b"a" + b"){1000}" * (size // 12),
    "classes": repeated(r"[\w\d]"),
    "look-aheads": repeated("(?=a)"),
    "names": repeated("a.b_c"),
}


def _rule(first: str, unit: Callable[[int], str], chars: int) -> Generator:
    """Return a generator of a Lark grammar that begins with `first`, and goes on with units of so
    many characters."""
    return lambda size: (first + "".join(map(unit, range(size // chars)))).encode()


def _ambiguous(size: int) -> bytes:
    return b'start: start start | "a"' + b" | start? start" * (size // 15)


GRAMMARS: dict[str, Generator] = {
    "ambiguous": _ambiguous,
    "without an end": _rule("start: start start", lambda n: f' | start "{n:x}"', 14),
    "empty parts": _rule("start: a a a\na: ", lambda n: f' "{n:x}"? a? |', 13),
    "intersections": _rule("start: A\nA: /.*/", lambda n: f" & /.*{n:x}.*/", 12),
    "complements": _rule("start: A\nA: /.*/", lambda n: f" & ~(/.*{n:x}.{{9}}/)", 19),
    "a chain": _rule("start: r0", lambda n: f"\nr{n}: r{n + 1}", 13),
    "doubling rules": _rule("start: r0", lambda n: f"\nr{n}: r{n + 1} r{n + 1}", 19),
    "deep brackets": lambda size: b"start: " + b"(" * (size // 2) + b'"a"' + b")" * (size // 2),
    "repeats of repeats": lambda size: (
        b"start: " + b"(" * (size // 8) + b"b" + b"){0,99}" * (size // 8)
    ),
}


def _schemas(key: str, unit: Callable[[int], object], chars: int) -> Generator:
    """Return a generator of a schema with a list of others under `key`, each of so many
    characters."""
    return lambda size: json.dumps({key: [unit(n) for n in range(size // chars)]}).encode()


def _key_patterns(size: int) -> bytes:
    return json.dumps({"patternProperties": {f"^k{n}$": {} for n in range(size // 14)}}).encode()


def _doubling_refs(size: int) -> bytes:
    refs = [{"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(size // 60)]
    definitions = {str(n): ref for n, ref in enumerate([*refs, {}])}
    return json.dumps({"$ref": "#/$defs/0", "$defs": definitions}).encode()


SCHEMAS: dict[str, Generator] = {
    "patterns of keys": _key_patterns,
    "multiples": _schemas("prefixItems", lambda n: {"multipleOf": 10_000 - n}, 22),
    "bounds of bounds": _schemas(
        "allOf", lambda n: {"anyOf": [{"minimum": n}, {"maximum": -n}]}, 46
    ),
    "doubling references": _doubling_refs,
    "alternatives": _schemas("anyOf", lambda n: {"properties": {"a": {"const": n}}}, 40),
    "values": _schemas("enum", lambda n: f"{n:x}", 8),
}

TEMPLATES: dict[str, Generator] = {
    "text": repeated("a"),
    "outputs": repeated("{{ 1 }}"),
    "operators": repeated("1+", "{{ ", "1 }}"),
    "brackets": repeated("(", "{{ "),
    "blocks": lambda size: b"{% if a %}" * (size // 21) + b"{% endif %}" * (size // 21),
    "strings": repeated("'a' ~ ", "{{ ", "'' }}"),
    "loops": repeated("{% for x in range(99999) %}"),
    "open code": repeated("{{"),
    "open statements": repeated("{% 'a"),
    "open comments": repeated("{#"),
    "spaces": repeated(" ", "{{", "}}"),
}


def _tokenizer(vocabulary: str, merges: str = "", added: str = "", normalizers: str = "") -> bytes:
    steps = (
        f'"normalizer":{{"type":"Sequence","normalizers":[{normalizers}]}},' if normalizers else ""
    )
    model = f'{{"type":"BPE","vocab":{{{vocabulary}}},"merges":[{merges}]}}'
    return f'{{"version":"1.0","added_tokens":[{added}],{steps}"model":{model}}}'.encode()


def _added_token(number: int) -> str:
    flags = '"special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false'
    return f'{{"id":{number},"content":"t{number:x}",{flags}}}'


_AB = '"a":0,"b":1,"ab":2'
TOKENIZERS: dict[str, Generator] = {
    "a vocabulary": lambda size: _tokenizer(
        ",".join(f'"a{number:x}":{number}' for number in range(size // 14))
    ),
    "merges": lambda size: _tokenizer(_AB, merges=",".join(['"a b"'] * (size // 6))),
    "a merge that isn't in the vocabulary": lambda size: _tokenizer(
        '"a":0', merges=",".join(['"a a"'] * (size // 6))
    ),
    "added tokens": lambda size: _tokenizer(
        _AB, added=",".join(map(_added_token, range(size // 110)))
    ),
    "normalizers": lambda size: _tokenizer(
        _AB, normalizers=",".join(['{"type":"Lowercase"}'] * (size // 21))
    ),
}


def _form(content: bytes) -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        + content
        + b"\r\n--b--\r\n"
    )


_FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n'
FORMS: dict[str, Generator] = {
    "line ends": lambda size: _form(_FILE + b"\r\n" + b"\r\n" * (size // 2)),
    "half boundaries": lambda size: _form(_FILE + b"\r\n" + b"\r\n--" * (size // 4)),
    "carriage returns": lambda size: _form(_FILE + b"\r\n" + b"\r" * size),
    "dashes": lambda size: _form(_FILE + b"\r\n" + b"-" * size),
    "parts": lambda size: _form(
        b'Content-Disposition: form-data; name="a"\r\n\r\n\r\n--b\r\n' * (size // 50)
    ),
    "headers": lambda size: _form(_FILE + b"a: b\r\n" * (size // 6) + b"\r\n"),
    "a long header": lambda size: _form(_FILE + b"a: " + b"b" * size + b"\r\n\r\n"),
    "parameters": lambda size: _form(
        b"Content-Disposition: form-data" + b'; name="a"' * (size // 10) + b"\r\n\r\n"
    ),
    "backslashes": lambda size: _form(
        b'Content-Disposition: form-data; name="' + b"\\" * size + b'"\r\n\r\n'
    ),
    "preamble": lambda size: b"\r\n" * (size // 2) + _form(_FILE + b"\r\n"),
    "no end": lambda size: b"--b\r\n" + _FILE + b"\r\n" + b"a" * size,
}

LINES: dict[str, Generator] = {
    "blank": repeated("\n"),
    "spaces": repeated(" "),
    "requests": repeated('{"custom_id":"a","url":"/v1/completions","body":{}}\n'),
    "objects": repeated("{}\n"),
    "no objects": repeated("0\n"),
    "no JSON": repeated("{\n"),
    **{
        f"a body of {name}": within(
            make, b'{"custom_id":"a","url":"/v1/completions","body":', b"}\n"
        )
        for name, make in JSON.items()
    },
}


def safetensors(header: bytes) -> bytes:
    """Return a safetensors file without any tensor's data."""
    return struct.pack("<Q", len(header)) + header


def _tensors(entry: str) -> Generator:
    def make(size: int) -> bytes:
        names = (
            f'"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight":{entry}'
            for number in range(size // (70 + len(entry)))
        )
        return ("{" + ",".join(names) + "}").encode()

    return make


HEADERS: dict[str, Generator] = {
    "huge shapes": repeated(
        "9" * 4_000 + ",", '{"a":{"dtype":"F32","shape":[', '1],"data_offsets":[0,0]}}'
    ),
    "long shapes": repeated("9,", '{"a":{"dtype":"F32","shape":[', '1],"data_offsets":[0,0]}}'),
    "empty tensors": _tensors('{"dtype":"F32","shape":[0,0],"data_offsets":[0,0]}'),
    "many tensors": _tensors('{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'),
    "a long name": repeated(
        "a", '{"', '.lora_A.weight":{"dtype":"F32","shape":[0,0],"data_offsets":[0,0]}}'
    ),
    "a long dotted name": repeated(
        "layers.1.", '{"', 'lora_A.weight":{"dtype":"F32","shape":[0,0],"data_offsets":[0,0]}}'
    ),
    "metadata": lambda size: b'{"__metadata__":' + _distinct_keys(size) + b"}",
}


def _as_rank(make: Generator) -> Generator:
    return lambda size: json.dumps({"rank_pattern": {make(size).decode() + "X": 4}}).encode()


def _as_short_ranks(make: Generator) -> Generator:
    return lambda size: json.dumps(
        {"rank_pattern": {f"{make(40).decode()}{number}": 4 for number in range(size // 60)}}
    ).encode()


ADAPTER_CONFIGS: dict[str, Generator] = {
    "targets": lambda size: json.dumps(
        {"target_modules": [f"q{number}" for number in range(size // 9)]}
    ).encode(),
    "equal targets": repeated('"q_proj",', '{"target_modules":[', '"q_proj"]}'),
    "ranks of names": lambda size: json.dumps(
        {"rank_pattern": {f"q{number}": 4 for number in range(size // 12)}}
    ).encode(),
    **{f"a rank of {name}": _as_rank(make) for name, make in PATTERNS.items()},
    **{f"short ranks of {name}": _as_short_ranks(make) for name, make in PATTERNS.items()},
}
