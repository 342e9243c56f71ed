"""Map and reduce over documents: each is read alone, then all are read together.

    python -m examples.frontend.map_reduce [--url http://127.0.0.1:30000]

The documents are chunks. The map step stores their KV, each behind the system prompt. The reduce step
reads them all in one prompt, and their KV is reused wherever they stand in it.
"""

from collections.abc import Sequence
from typing import Any

import sglang as sgl

import sgl_blend
from examples.frontend.serving import arguments, blending, documents, show

SYSTEM = "You read documentation of Python modules and answer briefly.\n"


@sgl.function  # type: ignore[untyped-decorator]
def summarise(s: Any, texts: Sequence[str], question: str) -> None:
    """Take a note of each text, then answer from all texts and notes."""
    s += SYSTEM
    readers = s.fork(len(texts))
    for reader, text in zip(readers, texts, strict=True):
        reader += sgl_blend.chunk(text) + sgl_blend.plain("Which functions are described?\n")
        reader += sgl.gen("note", max_tokens=8, temperature=0)
    readers.join()
    s += "".join(map(sgl_blend.chunk, texts))
    for number, reader in enumerate(readers, start=1):
        s += sgl_blend.plain(f"Note {number}: {reader['note']}\n")
    s += sgl_blend.plain(question + "\n")
    s += sgl.gen("answer", max_tokens=16, temperature=0)
    s["calls"] = [
        *((f"map {number}", one.get_meta_info("note")) for number, one in enumerate(readers, 1)),
        ("reduce", s.get_meta_info("answer")),
    ]


def main() -> None:
    args = arguments("Read documents one by one, then all together.")
    with blending(args.url, short=args.short):
        state = summarise.run(texts=documents(4), question="Which two would you use together?")
        show("map and reduce", state["calls"])
        print("answer:", repr(state["answer"]))


if __name__ == "__main__":
    main()
