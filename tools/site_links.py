"""A hook of mkdocs: links from docs/ to other files of the repository lead to its web page.

On GitHub such links are relative and work as they are. The site holds docs/ alone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **more: Any) -> str:
    """Return a page's text with absolute links to what is not part of the site."""

    def absolute(found: re.Match[str]) -> str:
        folder = posixpath.dirname(f"docs/{page.file.src_uri}")
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if target.startswith("docs/"):
            return found[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target}{found[2] or ''})"

    return LINK.sub(absolute, markdown)
