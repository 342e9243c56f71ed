"""The agent: ten steps over real files and documents, and what it tells the model at each.

The system prompt begins with a clock, so no two prompts begin alike. The agent keeps the results of its
last retrieval only: documents come, go and change order. What it read from files stays, and a file that
it edited is read again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]

INSTRUCTIONS = (
    "You maintain a small Python program together with its users. You work in steps: look for "
    "documents, read files, edit them, check them, and read them again after each change. Use one "
    "tool or several in a step. Give facts from documents and files only, name the one that a fact "
    "is from, and say so if none has it. Keep changes small, keep the style of the file, and never "
    "touch what you were not asked to touch."
)
TASK = "Write a note in queue.py about how its queues are ordered, and check bisect.py beside it."
START_S = 9 * 3600
STEP_S = 47


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and what it is asked."""

    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """What the agent does before it asks the model again.

    Attributes:
        says: The assistant's words beside its calls.
        calls: In this order.
        retrieves: Whether the results replace those of the last retrieval.
    """

    says: str
    calls: tuple[Call, ...]
    retrieves: bool = False


def _fetch(says: str, *names: str) -> Step:
    return Step(says, tuple(Call("fetch", {"document": name}) for name in names), retrieves=True)


def _read(says: str, *paths: str) -> Step:
    return Step(says, tuple(Call("read", {"path": path}) for path in paths))


NOTE = "        # Which entry is taken next is a matter of _get, which a subclass may change."
STEPS = (
    _fetch("I look for what may help.", "heapq", "calendar", "csv", "statistics"),
    _read("I read both files.", "queue.py", "bisect.py"),
    _fetch("Which documents fit the files?", "csv", "heapq", "fractions", "calendar"),
    Step(
        "I write the note.",
        (Call("edit", {"path": "queue.py", "after": "def task_done(", "line": NOTE}),),
    ),
    _read("I read the file again.", "queue.py"),
    _fetch("Are there better documents now?", "calendar", "fractions", "heapq", "datetime"),
    Step("I check the other file.", (Call("check", {"path": "bisect.py"}),)),
    _fetch("Back to what I had at first.", "heapq", "csv", "calendar", "fractions"),
    _read("I read the other file once more.", "bisect.py"),
    _fetch("A last look at all of it.", "fractions", "heapq", "statistics", "csv"),
)


class Tools:
    """The agent's tools; they work on real files and documents.

    Args:
        folder: With the files.
        documents: Texts by name.
    """

    def __init__(self, folder: Path, documents: Mapping[str, str]) -> None:
        self._folder = folder
        self._documents = documents

    def use(self, call: Call) -> str:
        """Return what a tool answers.

        Raises:
            ValueError: There is no such tool.
        """
        match call.tool:
            case "fetch":
                name = call.arguments["document"]
                return f'<document name="{name}">\n{self._documents[name]}</document>'
            case "read":
                path = call.arguments["path"]
                return f'<file path="{path}">\n{(self._folder / path).read_text()}</file>'
            case "edit":
                return self._edit(**call.arguments)
            case "check":
                path = call.arguments["path"]
                compile((self._folder / path).read_text(), path, "exec")
                return f"{path} has no syntax error"
        raise ValueError(f"there is no tool {call.tool!r}")

    def _edit(self, path: str, after: str, line: str) -> str:
        file = self._folder / path
        lines = file.read_text().splitlines()
        at = next(number for number, text in enumerate(lines) if after in text) + 1
        file.write_text("\n".join([*lines[:at], line, *lines[at:]]) + "\n")
        return f"line {at + 1} of {path} is new"


@dataclass
class Agent:
    """Keeps the conversation.

    Attributes:
        tools: What it works with.
        history: A pair for each step that is still in the prompt: the step, and its messages.
    """

    tools: Tools
    history: list[tuple[Step, list[Message]]] = field(default_factory=list)

    def prompts(self, steps: Sequence[Step] = STEPS) -> Iterator[list[Message]]:
        """Do the steps; yield the messages that the model gets after each."""
        for number, step in enumerate(steps):
            self._do(number, step)
            now = START_S + number * STEP_S
            clock = f"It is {now // 3600:02}:{now // 60 % 60:02}:{now % 60:02}."
            yield [
                {"role": "system", "content": f"{clock}\n{INSTRUCTIONS}"},
                {"role": "user", "content": TASK},
                *(message for _, messages in self.history for message in messages),
            ]

    def _do(self, number: int, step: Step) -> None:
        calls = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
            }
            for place, call in enumerate(step.calls)
        ]
        messages: list[Message] = [{"role": "assistant", "content": step.says, "tool_calls": calls}]
        for call, told in zip(step.calls, calls, strict=True):
            answer = self.tools.use(call)
            messages.append({"role": "tool", "tool_call_id": told["id"], "content": answer})
        if step.retrieves:
            self.history = [(old, kept) for old, kept in self.history if not old.retrieves]
        self.history.append((step, messages))
