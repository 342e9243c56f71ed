"""CacheBlend for SGLang, as a plugin: reuse the KV of text chunks wherever they stand."""

from sgl_blend.config import BlendConfig
from sgl_blend.errors import BlendError, ConfigError, RequestError, UnsupportedError
from sgl_blend.frontend import chunk, configure, plain

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
