"""A judge that reads the same answers in shuffled orders, so that no place is an advantage.

    python -m examples.frontend.judge [--url http://127.0.0.1:30000]

Rubric and answers are chunks. Only the first call computes them: later ones hold the same texts in
another order.
"""

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import sglang as sgl

import sgl_blend
from examples.frontend.serving import arguments, blending, documents, show

SYSTEM = "You compare answers by a rubric.\n"
RUBRIC = (
    "An answer is good if it names the functions that matter, says what they return, and warns of "
    "errors that they raise. It is better if it has an example that runs. Length is no merit: of "
    "two answers that say the same, the shorter one is better. An answer that invents a function "
    "is bad, whatever else it has.\n"
)
ROUNDS = 4


@sgl.function  # type: ignore[untyped-decorator]
def judge(s: Any, answers: Sequence[str]) -> None:
    """Name the best of some answers."""
    s += SYSTEM + sgl_blend.chunk(RUBRIC) + "".join(map(sgl_blend.chunk, answers))
    s += sgl_blend.plain("The best answer is number ")
    s += sgl.gen("verdict", max_tokens=2, temperature=0)


def main() -> None:
    args = arguments("Judge the same answers in shuffled orders.")
    answers = documents(4)
    orders = random.Random(4).sample(list(permutations(range(len(answers)))), ROUNDS)
    calls = []
    with blending(args.url, short=args.short):
        for order in orders:
            state = judge.run(answers=[answers[number] for number in order])
            calls.append((f"order {order}", state.get_meta_info("verdict")))
        show("the same answers in four orders", calls)


if __name__ == "__main__":
    main()
