"""``python -m sgl_blend`` is ``sgl-blend``."""

import sys

from sgl_blend.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
