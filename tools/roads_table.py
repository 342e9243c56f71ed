"""Write the tables of docs/roads.md from the code's own lists.

.venv/bin/python tools/roads_table.py           # rewrite what stands between the marks
"""

from pathlib import Path

from sgl_blend.engine.compatibility import REFUSALS, SERVED
from sgl_blend.fallback import FallbackReason

PAGE = Path(__file__).parents[1] / "docs" / "roads.md"
BEGIN, END = "<!-- tables: tools/roads_table.py -->\n", "<!-- end of tables -->\n"


def tables() -> str:
    """Return the tables of what is served, dropped and refused."""
    served = "".join(f"| {road.name} | {road.how} | {road.test} |\n" for road in SERVED)
    dropped = "".join(f"| `{reason}` | {reason.message} |\n" for reason in FallbackReason)
    refused = "".join(f"| `{refusal.flag}` | {refusal.why} |\n" for refusal in REFUSALS)
    return (
        f"\n## Served\n\n| road | how | shown by |\n|---|---|---|\n{served}"
        "\n## Dropped for one request, and counted\n\n"
        f"| `fallback` | `fallback_message` |\n|---|---|\n{dropped}"
        f"\n## Refused at start\n\n| flag to change | why |\n|---|---|\n{refused}\n"
    )


def with_tables(page: str) -> str:
    """Return a page with fresh tables between its marks."""
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}{tables()}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
