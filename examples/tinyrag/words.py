"""Every word of the test model's world."""

BOS, EOS, UNKNOWN, PAD, CHUNK, ASK, SPARE = (
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<doc>",
    "<ask>",
    "<|reserved|>",
)
SPECIAL = (PAD, BOS, EOS, UNKNOWN, CHUNK, ASK, SPARE)

NAMES = (
    "alice bob carol dave erin frank grace heidi ivan judy karl laura mike nina oscar peggy quinn "
    "rosa sam tina ugo vera walt xenia yuri zoe anton bella carl dora emil flora gus hanna igor "
    "jana kurt lena milo nora otto paula rafa sonja tom ulla viktor wanda aldo berta cora dirk "
    "elsa fritz gina hugo ines jonas kira leon mona nils olga"
).split()
THINGS = {
    "fruit": "mango kiwi plum pear fig lemon apple melon".split(),
    "color": "crimson azure amber olive ivory indigo scarlet teal".split(),
    "tool": "hammer chisel wrench drill pliers shovel rake anvil".split(),
    "animal": "otter falcon badger heron lynx beaver raven weasel".split(),
    "metal": "copper iron zinc nickel cobalt bronze silver titanium".split(),
    "flower": "tulip rose daisy lily orchid poppy iris violet".split(),
    "fabric": "linen velvet cotton denim satin wool felt canvas".split(),
    "vehicle": "tram canoe wagon ferry sled scooter bicycle kayak".split(),
}
VALUES = [value for values in THINGS.values() for value in values]
VERBS = "picked chose took wanted".split()

ADJECTIVES = "old quiet narrow green early distant wooden bright empty cold heavy small".split()
NOUNS = (
    "bridge harbor garden market window river station library kitchen meadow tower road letter "
    "engine lantern stairway"
).split()
PREPOSITIONS = "near behind under beside above beyond".split()
ACTIONS = "stood rested waited turned shone slept moved remained".split()
ADVERBS = "slowly again often today quietly there".split()
OPENINGS = (
    "you answer questions from the notes below .",
    "read the notes and answer in one word .",
    "the notes below tell who picked what .",
    "answer from the notes and from nothing else .",
)
CLOSINGS = ("be brief .", "be exact .", "the last statement holds .", "do not guess .")
GLUE = "the was that too 's choice . : what by".split()

QUESTION = "what was picked by"


def vocabulary() -> list[str]:
    """Return every word, special tokens first; a word's place is its token id."""
    plain = [
        *NAMES,
        *(f"{name}'s" for name in NAMES),
        *VALUES,
        *THINGS,
        *VERBS,
        *ADJECTIVES,
        *NOUNS,
        *PREPOSITIONS,
        *ACTIONS,
        *ADVERBS,
        *GLUE,
        *(word for text in (*OPENINGS, *CLOSINGS, QUESTION) for word in text.split()),
    ]
    return list(dict.fromkeys([*SPECIAL, *plain]))
