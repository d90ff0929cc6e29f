"""The check of users' Lark grammars: both libraries extend the syntax by what a backend can't keep its contract with."""

from __future__ import annotations

import re

from dovetail.api.grammar import GrammarSpec
from dovetail_grammars.specs import refuse

NOT_SYNTAX = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')  # strings, regular expressions, comments
_SPECIAL_TOKEN = re.compile(r"<[^\s<>]*>")
_ATTRIBUTE = re.compile(r"[\[,]\s*(stop|temperature|max_tokens)\b")


def check_lark(spec: GrammarSpec, lark: str) -> None:
    """Raise `RequestError` if special tokens are called for, which aren't text, or attributes that concern sampling."""
    syntax = NOT_SYNTAX.sub("", lark)
    if special := _SPECIAL_TOKEN.search(syntax):
        refuse(spec, f"{special[0]}: special tokens aren't text, and never come")
    if attribute := _ATTRIBUTE.search(syntax):
        refuse(spec, f"the attribute {attribute[1]} isn't supported")
