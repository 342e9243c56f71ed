"""Check that a built wheel holds every module of the repository and nothing else at top level."""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(wheel: str) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {"sgl_blend": "sgl_blend"} | {
        top: f"sgl_blend/{top}" for top in ("radix_ext", "scheduler", "kernels")
    }
    modules = [
        f"{target}/{path.relative_to(ROOT / top).as_posix()}"
        for top, target in sources.items()
        for path in sorted((ROOT / top).rglob("*.py"))  # follows no links
    ]
    missing = [name for name in modules if name not in names]
    top_level = {name.split("/")[0] for name in names}
    strangers = {name for name in top_level if not name.startswith("sgl_blend")}
    if missing or strangers:
        print(f"{wheel}: missing {missing}, unexpected {sorted(strangers)}")
        return 1
    print(f"{wheel}: {len(names)} files, all modules there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
