"""Let the CUDA-built torchvision wheel import beside CPU torch.

There is no CPU wheel of the torchvision that SGLang pins, and its compiled operators cannot load
without CUDA; its Python part then fails because it registers shape functions for operators that do
not exist. Declaring those operators by name, without an implementation, is enough: nothing here
calls them. `make setup` installs this file into the virtual environment with a one-line .pth.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_OPERATOR = re.compile(r"register_(?:meta|fake)\(\"(?:torchvision::)?(\w+)\"")
_libraries: list[object] = []  # a torch.library.Library undoes its definitions when it is freed


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Steps in once, just before torchvision itself is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torchvision")
        if spec is not None and spec.origin is not None:
            import torch

            if torch.version.cuda is None:
                registrations = Path(spec.origin).with_name("_meta_registrations.py")
                library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
                for name in sorted(set(_OPERATOR.findall(registrations.read_text()))):
                    library.define(f"{name}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
                _libraries.append(library)
        return None


sys.meta_path.insert(0, _DeclareOperators())
