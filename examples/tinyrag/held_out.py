"""Write held-out prompts: python -m examples.tinyrag.held_out --seed 7 --count 500 held_out.jsonl.

No statement of theirs is in any training prompt, whatever the seeds (see world.is_reserved).
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from examples.tinyrag.world import make_held_out


def write_items(path: Path, items: Iterable[dict[str, object]]) -> None:
    """Write items to a file, one JSON object a line."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write held-out prompts for sgl-blend eval.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_items(args.out, make_held_out(args.seed, args.count))


if __name__ == "__main__":
    main()
