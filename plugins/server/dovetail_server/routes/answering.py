"""What `/v1/responses` and `/v1/messages` share: conversations become jobs for the engine, and the model's text becomes an answer's parts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.front.chat import ChatOptions
from dovetail.front.tokenizer import TokenizedText
from dovetail.request import CompletionOutput, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_server.exchange import Exchange, Part
from dovetail_server.parsers import Content, OutputParser
from dovetail_server.protocol.answer_parts import AnswerParts, PartWriter


class AnswerListener(Part):
    """The listener of one answer: it parses the text as it comes. `output` is the last one."""

    def __init__(self, exchange: Exchange, parser: OutputParser | None, writer: PartWriter | None) -> None:
        super().__init__(exchange)
        self._parser = parser
        self.parts = AnswerParts(writer)
        self.output: CompletionOutput | None = None

    def take(self, output: RequestOutput) -> None:
        sample = output.outputs[0]
        if self._parser is None:
            self.parts.add((Content(sample.text),))
        else:
            self.parts.add(self._parser.feed(sample.text))
        if output.finished:
            if self._parser is not None:
                self.parts.add(self._parser.finish())
            self.parts.finish(cut=sample.finish_reason == "length")
            self.output = sample
