"""`Conversation`: a chat request in the one form that the server answers. The bodies of all chat APIs convert themselves: `to_conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dovetail.front.chat import ChatOptions
from dovetail.sampling_params import SamplingParams
from dovetail_server.protocol.structured import Demand


class Conversation(NamedTuple):
    """A chat request, independent of its API."""

    messages: Sequence[Mapping[str, Any]]  # in OpenAI's chat format
    options: ChatOptions
    params: SamplingParams
    demand: Demand
