"""The tokenizer: it turns text into token ids, and returns the bytes of each id. This one has an id for each byte, and needs no files."""

from collections.abc import Collection, Sequence

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerCapabilities
from dovetail.errors import RequestError

SPECIAL = ("<s>", "</s>", "<user>", "<assistant>")
BOS, EOS, USER, ASSISTANT = range(256, 256 + len(SPECIAL))


class AcmeTokenizer(Tokenizer):
    """A tokenizer of bytes. A conversation is `<s><user>question<assistant>answer</s><user>question<assistant>`."""

    capabilities = TokenizerCapabilities(chat=True, exact=True)

    def vocabulary(self) -> Sequence[bytes]:
        return [bytes([byte]) for byte in range(256)] + [name.encode() for name in SPECIAL]

    @property
    def special_ids(self) -> Collection[int]:
        return (BOS, EOS, USER, ASSISTANT)

    @property
    def eos_ids(self) -> Collection[int]:
        return (EOS,)

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        return (BOS,), ()

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def encode_chat(self, chat: Chat) -> Sequence[int]:
        if chat.tools:
            raise RequestError("tools: acme has no form for them")
        for name in chat.variables:
            raise RequestError(f"chat_template_kwargs.{name}: acme knows no variables")
        ids = [BOS]
        for index, message in enumerate(chat.messages):
            role, content = message["role"], message.get("content", "")
            if role not in ("user", "assistant"):
                raise RequestError(f"messages[{index}].role: acme has no form for {role!r}")
            for key in message.keys() - {"role", "content"}:
                raise RequestError(f"messages[{index}].{key}: acme has no form for it")
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            ids += [USER if role == "user" else ASSISTANT, *self.encode(text)]
            if role == "assistant" and not (chat.continues and index == len(chat.messages) - 1):
                ids.append(EOS)
        return [*ids, ASSISTANT] if chat.begins_answer else ids
