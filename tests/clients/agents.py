"""A server for coding agents: an engine that calls the agent's shell once, and then answers with
what the command printed. Asked to look at a file, it reads that, and says whether it is a picture.
Asked to edit a file without tools, it writes one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dovetail.front.tokenizer import Tokenizer
from tests.media.checkpoints import checkpoint, written
from tests.server.fake_engine import FakeRequest
from tests.server.pictures import media_facts
from tests.server.scripted import TEMPLATE, Script, ScriptedEngine
from tests.server.serving import serving_in_thread

MODEL = "coder"  # as in the documentation
WORD = "wherefore"  # the command prints it
COMMAND = f"echo {WORD}"
ROOM = 2**20  # characters of the longest conversation: an agent's instructions and tools are long
CALLS: Mapping[str, Mapping[str, Any]] = {  # the shells of agents
    "exec_command": {"cmd": COMMAND},
    "shell": {"command": ["bash", "-lc", COMMAND]},
    "Bash": {"command": COMMAND, "description": "Print a word"},
    "bash": {"command": COMMAND, "description": "Print a word"},
}
LOOK = re.compile(r"Look at (\S+)")
SEEN = "I see a picture."
KIND = "mistral3"
# with images among the parts of a content
SEEING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in "
    "message.content or [] %}{{ '" + written(KIND) + "' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}",
)
_TOOL = re.compile(r'"name": "(\w+)"')
_RESULT = re.compile(rf"\n<tool>(?:(?!\n<\w+>).)*{WORD}", re.DOTALL)


class AgentEngine(ScriptedEngine):
    """Calls the shell that the prompt describes, unless the prompt has the command's result."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.load(checkpoint(KIND))
        tokenizer.use_chat_template(SEEING)
        super().__init__(tokenizer, media=media_facts(KIND), max_model_len=ROOM)
        # nothing limits its thoughts, which would then begin every answer
        intake = dataclasses.replace(self.info.intake, has_masks=False)
        self.info = dataclasses.replace(self.info, model=MODEL, intake=intake)

    async def _run(self, request: FakeRequest) -> None:
        self.script = answer_to(request.prompt or "")
        await super()._run(request)


def answer_to(prompt: str) -> Script:
    """Return what the model writes after a prompt."""
    if looked := LOOK.search(prompt):
        return _look(looked[1], prompt)
    shells = [name for name in _TOOL.findall(prompt) if name in CALLS]
    if "file listing" in prompt:
        return Script(f"speech.txt\n```\n{WORD}\n```\n")
    if not shells:
        return Script("A title")
    if _RESULT.search(prompt):
        return Script(f"It said {WORD}.")
    call = {"name": shells[0], "arguments": CALLS[shells[0]]}
    return Script(f"Let me see.\n<tool_call>{json.dumps(call)}</tool_call>")


def _look(file: str, prompt: str) -> Script:
    """Read a file, unless the prompt has an image."""
    if written(KIND) in prompt:
        return Script(SEEN)
    if '"name": "Read"' not in prompt:
        return Script("A title")
    call = {"name": "Read", "arguments": {"file_path": file}}
    return Script(f"Let me see.\n<tool_call>{json.dumps(call)}</tool_call>")


@contextmanager
def served_agents() -> Iterator[str]:
    """Serve the engine; the URL."""
    with serving_in_thread(AgentEngine) as url:
        yield url
