"""SGLang on a machine without CUDA: the settings that every engine and server needs there."""

from collections.abc import Mapping

CPU_SETTINGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
}
"""Keyword arguments of ``sglang.Engine``."""


def to_flags(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return an engine's keyword arguments as flags of ``sglang.launch_server``."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in settings.items())
    return tuple(word for pair in pairs for word in pair)


CPU_FLAGS = to_flags(CPU_SETTINGS)
"""The same as flags of a server; flags that come later in a command line win."""
