"""Counts what a blended forward would launch on a GPU, on a machine that has none.

Counted is, by part of the forward:

    operations   every one that torch dispatches, unless it only allocates or looks at memory another
                 way. A device would launch what the CPU runs, copies and concatenations too.
    kernels      each call of an entry of kernels/ as what its Triton twin launches (LAUNCHES). What
                 its torch reference does instead is not counted.
    modules      each call of a module without children inside a decoder layer as one. On the CPU norms,
                 rotary embeddings and activations are several operations; on CUDA each is one kernel.
    uploads      each call of kernels/upload.py that sends host memory to the device.

Inside decoder layers the operations of stock code count as well; outside only those of ours do. Host
memory is no device's: what prepares it must dispatch nothing, or is counted as a launch here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

ROOT = str(Path(__file__).parents[1])
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
LAUNCHES = {
    "kernels.delta_rope.copy_rotated_layers": 1,
    "kernels.delta_rope.delta_rope_tables": 1,
    "kernels.kv_deviation.kv_deviation_at": 1,
    "kernels.row_compaction.compact_rows": 1,
    "kernels.segmented_topk.select_rows": 1,
    "engine.forward.write_kv": 1,  # SGLang's kernel store_cache
}
"""Launches of a call on CUDA. tests/test_launches.py holds those of kernels/ against Triton's twins."""
ATTENTION_LAUNCHES = 2
"""Scattered attention, and the merge of its shares if the KV is split."""
PLAN_LAUNCHES = 1
"""Slots of several requests are put one after another."""
PREPARATION = "preparation"
END = "end"


@dataclass
class Launches:
    """What one forward launched, by part: preparation, the number of a layer, or the end."""

    parts: dict[str | int, Counter[str]] = field(default_factory=dict)
    uploads: int = 0

    def of(self, part: str | int) -> int:
        return self.parts.get(part, Counter()).total()


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; see above."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = Launches()
        self.part: str | int = PREPARATION
        self._depth = 0

    def add(self, name: str, count: int = 1) -> None:
        self.launches.parts.setdefault(self.part, Counter())[name] += count

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = op.overloadpacket.__name__
        is_launch = op.namespace != "profiler" and name not in ALLOCATES and not _is_view(op)
        if is_launch and not self._depth and (isinstance(self.part, int) or _is_ours()):
            self.add(f"{name} {_place()}")
        return op(*args, **(kwargs or {}))

    def as_one(
        self, call: Callable[..., Any], name: str, count: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Run something, and count it as so many launches whatever it does."""
        if not self._depth and count:
            self.add(name, count)
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def send(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.launches.uploads += not self._depth
        return self.as_one(call, "upload", 1, *args, **kwargs)

    def enter_layer(self, call: Callable[..., Any], number: int, last: int, *args: Any) -> Any:
        self.part = number
        result = call(*args)
        self.part = END if number == last else number + 1  # what stands between belongs to the next
        return result


def _is_view(op: Any) -> bool:
    """Tell whether an operation returns memory of its arguments and writes none."""
    arguments = [a.alias_info for a in op._schema.arguments if a.alias_info is not None]
    results = [r.alias_info for r in op._schema.returns]
    return bool(results) and all(results) and not any(a.is_write for a in arguments)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours() -> bool:
    """Tell whether code of ours runs, and called nothing of SGLang's in between."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if "/sglang/" in name:
            return False
        if name.startswith(ROOT) and "/.venv/" not in name and "/tests/" not in name:
            return True
    return False


def _place() -> str:
    """Return where an operation comes from, for people."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if ("/sglang/" in name or name.startswith(ROOT)) and "/tests/" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
    return "?"


@contextmanager
def counted(layers: list[Any], kernel: Any) -> Iterator[Launches]:
    """Count what runs in a with block.

    Args:
        layers: The model's decoder layers.
        kernel: The RaggedKernel that the forward uses.
    """
    counter = LaunchCounter()
    with ExitStack() as stack:
        for path, count in LAUNCHES.items():
            _replace(stack, path, partial(_wrap, counter.as_one, count))
        _replace(stack, "kernels.upload.to_device", lambda call, _: partial(counter.send, call))
        for name, count in (("run", ATTENTION_LAUNCHES), ("plan", PLAN_LAUNCHES)):
            wrapped = _wrap(counter.as_one, count, getattr(kernel, name), name)
            stack.enter_context(patch.object(kernel, name, wrapped))
        last = len(layers) - 1
        for number, layer in enumerate(layers):
            entered = partial(counter.enter_layer, layer.forward, number, last)
            stack.enter_context(patch.object(layer, "forward", entered))
            for name, module in layer.named_modules():
                if not list(module.children()) and not name.endswith("attn"):
                    one = partial(counter.as_one, module.forward, name, 1)
                    stack.enter_context(patch.object(module, "forward", one))
        stack.enter_context(counter)
        yield counter.launches


def _wrap(
    as_one: Callable[..., Any], count: int, call: Callable[..., Any], name: str
) -> Callable[..., Any]:
    return partial(as_one, call, name, count)


def _replace(stack: ExitStack, path: str, wrap: Callable[[Any, str], Any]) -> None:
    """Replace a function of ours wherever a module of ours has imported it."""
    module, name = path.rsplit(".", 1)
    original = getattr(sys.modules[f"sgl_blend.{module}"], name)
    for owner, loaded in list(sys.modules.items()):
        if owner.startswith("sgl_blend.") and getattr(loaded, name, None) is original:
            stack.enter_context(patch.object(loaded, name, wrap(original, name)))
