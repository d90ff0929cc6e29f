"""The checks that hold the clauses of `dovetail.api.tokenizer`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "module": {
        "made once in the engine's process": held("repeatable", "processes", "chat_repeatable"),
        "*": TOLD,
    },
    "TokenizerContext": TOLD,
    "Chat": {
        "end inside the last message": held("chat", "chat_refuses", "chat_text"),
        "A key without a value": held("chat_refuses"),
        "*": TOLD,
    },
    "TokenizerCapabilities": {
        "later versions": TOLD,
        "*": held("exact", "hygiene.capabilities"),
    },
    "Tokenizer": {
        "Several threads": held("threads", "chat_threads"),
        "files that are missing": held("damaged"),
    },
    "Tokenizer.vocabulary": {"Ids that the model has": TOLD, "*": held("vocabulary", "exact")},
    "Tokenizer.special_ids": {"no text becomes": held("special"), "*": TOLD},
    "Tokenizer.eos_ids": held("vocabulary"),
    "Tokenizer.around": held("vocabulary"),
    "Tokenizer.encode": {
        "without those around it": held("encode", "repeatable"),
        "looks like a special token": held("special"),
        "may be empty or megabytes long": held("encode", "exact_long", "linear"),
        "*": held("encode"),
    },
    "Tokenizer.encode_chat": {
        "What messages contain": held("chat_text"),
        "Raises `RequestError`": held(
            "chat_refuses", but="formats may leave out the reasoning of earlier answers"
        ),
        "*": held("chat"),
    },
}
