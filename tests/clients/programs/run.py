"""Run the checks of one client: `run.py NAME URL` calls each public function of `NAME.py` with the
server's URL.

The last line of stdout is a JSON object: check -> null, or the error. Runs in the client's
environment; imports nothing of this repository.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from typing import Any
from urllib.request import Request, urlopen

MODEL = "demo"
TEXTS = ["ROMEO:", "JULIET: my love"]
ASK = [{"role": "user", "content": "Speak!"}]
# a red square, as PNG
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQV"
    "R42mO4YKBAEmIY1TCqYfhqAADM5yAQMiJu6gAAAABJRU5ErkJggg=="
)
LOOK = "What is it?"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Verona", "Mantua"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def plain(url: str, path: str, **body: Any) -> Any:
    """Return what the server answers to a request without any client."""
    request = Request(
        url + path,
        json.dumps({"model": MODEL, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def spoken(url: str, max_tokens: int = 8) -> str:
    """Return the greedy answer to `ASK`."""
    text: str = plain(
        url, "/v1/chat/completions", messages=ASK, max_tokens=max_tokens, temperature=0
    )["choices"][0]["message"]["content"]
    return text


def images_url() -> str:
    """Return the URL of the server whose model reads images."""
    return os.environ["DOVETAIL_TEST_IMAGES_URL"]


def seen() -> str:
    """Return the greedy answer to `PICTURE` and `LOOK`."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": LOOK}]}]
    fields = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = plain(images_url(), "/v1/chat/completions", **fields)
    text: str = answer["choices"][0]["message"]["content"]
    return text


def embedded(url: str) -> list[list[float]]:
    """Return the vectors of `TEXTS`."""
    return [one["embedding"] for one in plain(url, "/v1/embeddings", input=TEXTS)["data"]]


def alike(vectors: Any, others: Any) -> bool:
    """Return whether two lists of vectors are the same up to rounding."""
    pairs = zip(vectors, others, strict=True)
    return all(
        abs(a - b) < 1e-6 for vector, other in pairs for a, b in zip(vector, other, strict=True)
    )


def main(name: str, url: str) -> None:
    """Call the checks of the client `name` and print their results."""
    module = importlib.import_module(name)
    checks = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and key[0] != "_"
    }
    results: dict[str, str | None] = {}
    for key, check in checks.items():
        try:
            check(url)
        except Exception as error:
            traceback.print_exc()
            results[key] = f"{type(error).__name__}: {error}"
        else:
            results[key] = None
    print(json.dumps(results))


if __name__ == "__main__":
    sys.modules["run"] = sys.modules["__main__"]  # the module that programs import
    main(*sys.argv[1:])
