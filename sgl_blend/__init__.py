"""CacheBlend for SGLang, as a plugin: reuse the KV of text chunks wherever they stand.

A client program imports this package where neither torch nor SGLang is installed, so each name is
loaded when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_blend.client.chunks import chunk, configure, plain
    from sgl_blend.errors import BlendError, ConfigError, RequestError, UnsupportedError
    from sgl_blend.settings.config import BlendConfig

__all__ = [
    "BlendConfig",
    "BlendError",
    "ConfigError",
    "RequestError",
    "UnsupportedError",
    "chunk",
    "configure",
    "plain",
]

_HOME = {
    "BlendConfig": "settings.config",
    **dict.fromkeys(("BlendError", "ConfigError", "RequestError", "UnsupportedError"), "errors"),
    **dict.fromkeys(("chunk", "configure", "plain"), "client.chunks"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
