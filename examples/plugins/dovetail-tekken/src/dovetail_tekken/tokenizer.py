"""`TekkenTokenizer`: tekken.json of the model's folder, read by mistral-common."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerCapabilities, TokenizerContext
from dovetail.errors import ModelLoadError, RequestError
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pydantic import BaseModel

CALL_ID = re.compile("[a-zA-Z0-9]{9}")  # all that mistral-common accepts
KEYS = {  # of messages, by role
    "system": {"role", "content"},
    "developer": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "tool_call_id", "name"},
}


class TekkenTokenizer(Tokenizer):
    """The tokenizer of Mistral's models from Nemo on."""

    capabilities = TokenizerCapabilities(chat=True, exact=True)

    def __init__(self, options: BaseModel, context: TokenizerContext) -> None:
        super().__init__(options, context)
        path = context.directory / "tekken.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} isn't there: this model has no tekken vocabulary")
        try:
            self.mistral: MistralTokenizer[Any, Any, Any, Any, Any] = MistralTokenizer.from_file(path)
            self.tekken: Tekkenizer = self.mistral.instruct_tokenizer.tokenizer
            self.special = frozenset(range(self.tekken.num_special_tokens))
            self.begin = self.tekken.bos_id
            self.end = self.tekken.eos_id
        except Exception as error:  # an assertion, a key, JSON, base64: whatever is damaged
            raise ModelLoadError(f"{path} is damaged: {type(error).__name__}: {str(error)[:200]}") from error

    def vocabulary(self) -> Sequence[bytes]:
        return [self.tekken.id_to_byte_piece(token_id, SpecialTokenPolicy.KEEP) for token_id in range(self.tekken.n_words)]

    @property
    def special_ids(self) -> Collection[int]:
        return self.special

    @property
    def eos_ids(self) -> Collection[int]:
        return (self.end,)

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        return (self.begin,), ()

    def encode(self, text: str) -> Sequence[int]:
        try:
            return self.tekken.encode(text, bos=False, eos=False)
        except ValueError as error:
            # its regular expression needs more stack than there is, for a megabyte of spaces
            raise RequestError(f"the text can't be split into tokens: {error}") from None

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        for name in chat.variables.keys() - {"reasoning_effort"}:
            raise RequestError(f"chat_template_kwargs.{name}: mistral-common knows only reasoning_effort")
        messages = [as_openai(message, f"messages[{index}]") for index, message in enumerate(chat.messages)]
        try:
            request = ChatCompletionRequest.from_openai(
                messages, list(map(dict, chat.tools)) or None, continue_final_message=chat.continues, **chat.variables
            )
            return list(self.mistral.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError) as error:  # pydantic's errors are ValueErrors
            raise RequestError(f"mistral-common rejects the conversation: {' '.join(str(error).split())[:400]}") from None


def as_openai(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message with the arguments of calls as JSON, and ids of calls that mistral-common
    accepts. Raises `RequestError` for a role or key that it would reject, or leave out."""
    known = KEYS.get(message["role"])
    if known is None:
        raise RequestError(f"{place}.role: Mistral's formats have none called {message['role']!r}")
    for key in message.keys() - known:
        raise RequestError(f"{place}.{key}: Mistral's formats have no place for it in a message of role {message['role']}")
    made = dict(message)
    if "tool_calls" not in message:
        made.setdefault("content", "")  # mistral-common requires one
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "id": call_id(call.get("id")), "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    if "tool_call_id" in message:
        made["tool_call_id"] = call_id(message["tool_call_id"])
    return made


def call_id(given: Any) -> str:
    """Return an id of nine letters and digits: the given one, or one that depends on it alone."""
    return given if isinstance(given, str) and CALL_ID.fullmatch(given) else hashlib.sha256(str(given).encode()).hexdigest()[:9]
