"""Checks users' Lark grammars: both libraries extend the syntax in ways that would break a backend's contract."""

from __future__ import annotations

import re

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.specs import refuse

NOT_SYNTAX = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')  # strings, regular expressions, comments
_SPECIAL_TOKEN = re.compile(r"<[^\s<>]*>")
_ATTRIBUTE = re.compile(r"[\[,]\s*(stop|temperature|max_tokens)\b")


def check_lark(spec: GrammarSpec, lark: str) -> None:
    """Raise `RequestError` for special tokens, which aren't text, and for attributes that affect sampling."""
    syntax = NOT_SYNTAX.sub("", lark)
    if special := _SPECIAL_TOKEN.search(syntax):
        refuse(spec, f"{special[0]}: special tokens aren't text and can't be generated")
    if attribute := _ATTRIBUTE.search(syntax):
        refuse(spec, f"the attribute {attribute[1]} isn't supported")
