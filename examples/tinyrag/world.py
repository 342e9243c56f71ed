"""The world of the test model: prompts whose answers depend on more than one chunk.

A prompt is a system text, 4 to 8 chunks and a question, as words. People pick things; what a person
picked is stated in one of these ways:

    direct   alice picked mango .                 the chunk alone tells
    ref      bob chose that fruit too .           the last fruit named before, in an earlier chunk; if
                                                  another was, in a chunk before that one
    alias    carol took bob's choice too .        bob's is in an earlier chunk
    alias2   an alias of a ref or of an alias     two hops
    latest   two direct statements in different chunks; the last one holds

What a fact token of a ref or an alias means is known only to a model that saw the earlier chunk.
Which of two statements holds is known only from where they stand; held-out questions ask for it where
they stand LATEST_GAP words or more apart (docs/quality.md says what happens below).

Every direct statement pairs a person with a thing. One pair in eight is reserved: training states
no reserved pair, held-out prompts state no other, so no statement of one is ever found in the other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.tinyrag.words import (
    ACTIONS,
    ADJECTIVES,
    ADVERBS,
    ASK,
    BOS,
    CHUNK,
    CLOSINGS,
    EOS,
    NAMES,
    NOUNS,
    OPENINGS,
    PREPOSITIONS,
    QUESTION,
    THINGS,
    VALUES,
    VERBS,
    vocabulary,
)

LATEST_GAP = 150
KINDS = ("direct", "ref", "alias", "alias2", "latest")
BLOCK_KINDS = ("direct", "alias", "latest")
"""What a question can find out by itself where chunks do not see each other: two steps are enough."""


def is_reserved(name: str, value: str) -> bool:
    """Tell whether the statement that name picked value belongs to held-out prompts."""
    return (3 * NAMES.index(name) + VALUES.index(value)) % 8 == 0


@dataclass(frozen=True, slots=True)
class Size:
    """How long prompts are: inclusive ranges."""

    chunks: tuple[int, int]
    facts: tuple[int, int]
    """Facts per chunk."""
    words: tuple[int, int]
    """Words per chunk; facts are never cut for it."""


FULL = Size(chunks=(4, 8), facts=(1, 4), words=(32, 72))
STAGES = (
    Size(chunks=(2, 3), facts=(2, 4), words=(0, 0)),
    Size(chunks=(2, 4), facts=(2, 4), words=(12, 28)),
    Size(chunks=(3, 6), facts=(1, 4), words=(24, 48)),
    FULL,
)
"""The curriculum, from bare facts to full prompts."""


@dataclass(slots=True)
class Fact:
    """One statement.

    Attributes:
        owner: Who.
        value: What, resolved.
        kind: One of KINDS but latest, which is a matter of how often the owner is spoken of.
        sentence: Its words.
        anchor: Index in the sentence of the word that stands for the value.
        source: The mention or fact that resolves it; None if direct.
        chunk: Number of its chunk.
        offset: Index of its first word in the chunk, set when the chunk is written.
    """

    owner: str
    value: str
    kind: str
    sentence: list[str]
    anchor: int
    source: "Fact | None"
    chunk: int
    offset: int = 0


@dataclass(slots=True)
class World:
    """A prompt without its question, and what is true in it."""

    system: list[str]
    chunks: list[list[str]]
    facts: list[Fact]
    truth: dict[str, Fact] = field(default_factory=dict)
    """Per person the fact that holds."""
    num_statements: dict[str, int] = field(default_factory=dict)

    def kind_of_question(self, name: str) -> str:
        """Name the kind of the question about a person."""
        return "latest" if self.num_statements[name] > 1 else self.truth[name].kind

    def anchor(self, fact: Fact) -> int:
        """Return the place of a fact's anchor in the prompt, BOS and chunk markers counted."""
        before = sum(1 + len(chunk) for chunk in self.chunks[: fact.chunk])
        return 1 + len(self.system) + before + 1 + fact.offset + fact.anchor

    def latest_gap(self, name: str) -> int:
        """Return how many words lie between the two statements about a person."""
        older, newer = (self.anchor(fact) for fact in self.facts if fact.owner == name)
        return newer - older


class _Writer:
    """Writes one world, chunk after chunk."""

    def __init__(self, draw: random.Random, size: Size, *, held_out: bool) -> None:
        self._draw = draw
        self._size = size
        self._held_out = held_out
        self._free_names = draw.sample(NAMES, len(NAMES))
        self._named: dict[str, list[Fact]] = {}  # class -> the direct facts that named it, in order
        self._targets: set[str] = set()  # who an alias speaks of; their pick never changes
        self._world = World(system=_system(draw), chunks=[], facts=[])

    def write(self) -> World:
        draw, size = self._draw, self._size
        for chunk in range(draw.randint(*size.chunks)):
            facts = [self._fact(chunk) for _ in range(draw.randint(*size.facts))]
            self._world.chunks.append(self._chunk(facts))
        return self._world

    def _fact(self, chunk: int) -> Fact:
        options = [self._ref, self._alias, self._alias, self._alias2, self._alias2, self._update]
        self._draw.shuffle(options)
        fact = None
        if self._draw.random() < 0.62:
            fact = next((f for option in options if (f := option(chunk)) is not None), None)
        fact = fact or self._direct(self._free_names.pop(), chunk)
        world = self._world
        world.facts.append(fact)
        world.truth[fact.owner] = fact
        world.num_statements[fact.owner] = world.num_statements.get(fact.owner, 0) + 1
        return fact

    def _direct(self, owner: str, chunk: int, old: str | None = None) -> Fact:
        choices = [v for v in VALUES if is_reserved(owner, v) == self._held_out and v != old]
        value = self._draw.choice(choices)
        sentence = [owner, self._draw.choice(VERBS), value, "."]
        fact = Fact(owner, value, "direct", sentence, 2, None, chunk)
        self._named.setdefault(class_of(value), []).append(fact)
        return fact

    def _ref(self, chunk: int) -> Fact | None:
        named = [
            (kind, facts[-1])
            for kind, facts in self._named.items()
            # Of two in one chunk the later one is hard to tell from where they stand.
            if facts[-1].chunk < chunk and (len(facts) == 1 or facts[-2].chunk < facts[-1].chunk)
        ]
        if not named:
            return None
        kind, source = self._draw.choice(named)
        owner = self._free_names.pop()
        sentence = [owner, self._draw.choice(VERBS), "that", kind, "too", "."]
        return Fact(owner, source.value, "ref", sentence, 3, source, chunk)

    def _alias(self, chunk: int) -> Fact | None:
        return self._alias_of(("direct",), "alias", chunk)

    def _alias2(self, chunk: int) -> Fact | None:
        return self._alias_of(("ref", "alias"), "alias2", chunk)

    def _alias_of(self, kinds: Sequence[str], kind: str, chunk: int) -> Fact | None:
        world = self._world
        sources = [
            fact
            for name, fact in world.truth.items()
            if fact.kind in kinds and fact.chunk < chunk and world.num_statements[name] == 1
        ]
        if not sources:
            return None
        source = self._draw.choice(sources)
        self._targets.add(source.owner)
        owner = self._free_names.pop()
        sentence = [owner, self._draw.choice(VERBS), f"{source.owner}'s", "choice", "too", "."]
        return Fact(owner, source.value, kind, sentence, 2, source, chunk)

    def _update(self, chunk: int) -> Fact | None:
        world = self._world
        old = [
            fact
            for name, fact in world.truth.items()
            if fact.kind == "direct"
            and fact.chunk < chunk
            and name not in self._targets
            and world.num_statements[name] == 1
        ]
        if not old:
            return None
        fact = self._draw.choice(old)
        return self._direct(fact.owner, chunk, old=fact.value)

    def _chunk(self, facts: list[Fact]) -> list[str]:
        """Write facts in order with fillers between them."""
        num_words = self._draw.randint(*self._size.words)
        pieces: list[Fact | list[str]] = list(facts)
        length = sum(len(fact.sentence) for fact in facts)
        while length < num_words:
            filler = _filler(self._draw)
            pieces.insert(self._draw.randint(0, len(pieces)), filler)
            length += len(filler)
        words: list[str] = []
        for piece in pieces:
            if isinstance(piece, Fact):
                piece.offset = len(words)
            words += piece.sentence if isinstance(piece, Fact) else piece
        return words


def class_of(value: str) -> str:
    """Return the class of a thing, such as fruit."""
    return next(kind for kind, values in THINGS.items() if value in values)


def make_world(draw: random.Random, size: Size = FULL, *, held_out: bool = False) -> World:
    """Write a prompt without a question."""
    return _Writer(draw, size, held_out=held_out).write()


def _system(draw: random.Random) -> list[str]:
    return f"{draw.choice(OPENINGS)} {draw.choice(CLOSINGS)}".split()


def _filler(draw: random.Random) -> list[str]:
    noun, other = draw.sample(NOUNS, 2)
    middle = ["the", draw.choice(ADJECTIVES), noun, draw.choice(ACTIONS)]
    place = [draw.choice(PREPOSITIONS), "the", other]
    return [*middle, *draw.choice((place, [draw.choice(ADVERBS)], [*place, "again"])), "."]


# --- training text ---


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence.

    Attributes:
        tokens: Token ids: BOS, system, chunks, then several questions with their answers.
        answers: (index of the token that predicts it, kind) of every answer word.
        guides: (role, query index, key index): where the attention of a role's heads should go.
    """

    tokens: list[int]
    answers: list[tuple[int, str]]
    guides: list[tuple[str, int, int]]


_IDS = {word: number for number, word in enumerate(vocabulary())}


def make_example(
    draw: random.Random, size: Size, num_questions: int, kinds: Sequence[str] = KINDS
) -> Example:
    """Write a training sequence; each question is answered before the next is asked.

    Args:
        draw: Decides everything.
        size: Of the prompt.
        num_questions: At most; there may be fewer persons to ask about.
        kinds: Of questions.
    """
    world = make_world(draw, size)
    words = [BOS, *world.system]
    for chunk in world.chunks:
        words += [CHUNK, *chunk]
    guides: list[tuple[str, int, int]] = []
    for fact in world.facts:
        place = world.anchor(fact)
        guides.append(("owner", place, place - fact.anchor))
        if fact.source is not None:
            role = "ref" if fact.kind == "ref" else "alias"
            guides.append((role, place, world.anchor(fact.source)))
    answers = []
    for name in _ask_about(draw, world, num_questions, kinds):
        words += [ASK, *QUESTION.split(), name]
        kind = world.kind_of_question(name)
        answers.append((len(words) - 1, kind))
        fact = world.truth[name]
        guides.append(("read", len(words) - 1, world.anchor(fact)))
        if fact.source is not None:
            guides.append(("hop", len(words) - 1, world.anchor(fact.source)))
        words += [fact.value, EOS]
    return Example([_IDS[word] for word in words], answers, guides)


def _ask_about(draw: random.Random, world: World, count: int, kinds: Sequence[str]) -> list[str]:
    """Draw names, all kinds alike as far as there are any."""
    by_kind: dict[str, list[str]] = {}
    for name in world.truth:
        if (kind := world.kind_of_question(name)) in kinds:
            by_kind.setdefault(kind, []).append(name)
    for names in by_kind.values():
        draw.shuffle(names)
    chosen: list[str] = []
    while by_kind and len(chosen) < count:
        kind = draw.choice(list(by_kind))
        chosen.append(by_kind[kind].pop())
        if not by_kind[kind]:
            del by_kind[kind]
    return chosen


# --- held-out prompts ---

SHARES = {"direct": 0.15, "ref": 0.3, "alias": 0.25, "alias2": 0.2, "latest": 0.1}
"""Kinds of held-out questions."""


def make_held_out(seed: int, count: int, only: Sequence[str] = KINDS) -> list[dict[str, object]]:
    """Write held-out items as ``sgl-blend eval`` reads them, the kind of question beside them.

    Args:
        seed: Of the prompts.
        count: Items.
        only: Kinds of questions, in the order of KINDS.
    """
    draw = random.Random(f"held-out/{seed}")
    kinds = [kind for kind in only for _ in range(round(SHARES[kind] * count))]
    kinds = (kinds + list(only) * count)[:count]
    draw.shuffle(kinds)
    return [_held_out_item(draw, kind) for kind in kinds]


def make_latest(seed: int, count: int, gaps: tuple[int, int]) -> list[dict[str, object]]:
    """Write held-out items of the kind latest, so many words from statement to statement.

    Args:
        seed: Of the prompts.
        count: Items.
        gaps: Least number of words, and the first that is too many.
    """
    draw = random.Random(f"latest/{seed}/{gaps}")
    label = f"latest, {gaps[0]} to {gaps[1] - 1} words apart"
    return [{**_held_out_item(draw, "latest", gaps), "kind": label} for _ in range(count)]


def _held_out_item(
    draw: random.Random, kind: str, gaps: tuple[int, int] = (LATEST_GAP, 10**6)
) -> dict[str, object]:
    while True:
        world = make_world(draw, held_out=True)
        names = [
            name
            for name in world.truth
            if world.kind_of_question(name) == kind
            and (kind != "latest" or gaps[0] <= world.latest_gap(name) < gaps[1])
        ]
        if names:
            break
    name = draw.choice(names)
    return {
        "system": " ".join(world.system),
        "chunks": [" ".join(chunk) for chunk in world.chunks],
        "question": f"{QUESTION} {name}",
        "answers": [world.truth[name].value],
        "kind": kind,
    }
