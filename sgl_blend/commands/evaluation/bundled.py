"""The prompts that come with the package: documents about one small place, and questions."""

import hashlib
import json
import random
from importlib.resources import files

from sgl_blend.commands.evaluation.items import Item

NUM_PROMPTS = 256
_NUM_DOCUMENTS = 5


def bundled_items() -> list[Item]:
    """Return the prompts: five documents in some order, and a question.

    What the question needs is among the documents, mostly in two of them. Two prompts never hold the
    same documents in the same order.
    """
    text = json.loads(_read())
    documents, questions = text["documents"], text["questions"]
    items = []
    for number in range(NUM_PROMPTS):
        question = questions[number % len(questions)]
        draw = random.Random(f"bundled/{number}")
        others = [name for name in documents if name not in question["needs"]]
        names = question["needs"] + draw.sample(others, _NUM_DOCUMENTS - len(question["needs"]))
        draw.shuffle(names)
        items.append(
            Item(
                system=text["system"],
                chunks=tuple(documents[name] for name in names),
                question=question["text"],
                answers=("not scored",),
            )
        )
    return items


def bundled_digest() -> str:
    """Return the SHA-256 of the file that the prompts are made from, as hexadecimal digits."""
    return hashlib.sha256(_read()).hexdigest()


def _read() -> bytes:
    return files("sgl_blend.commands.evaluation").joinpath("prompts.json").read_bytes()
