"""For SGLang frontend programs: mark a text as a reusable chunk."""

from dataclasses import dataclass

from sgl_blend.errors import ConfigError


@dataclass(slots=True)
class _Configured:
    """The separator of this process; frontend programs run in threads that share it."""

    separator: str | None = None


_configured = _Configured()


def configure(url: str | None = None, *, separator: str | None = None) -> str:
    """Learn the separator, from a server or as given, for all later calls of chunk().

    Args:
        url: Base URL of a server started with --enable-blend.
        separator: The separator itself, instead of asking.

    Returns:
        The separator.

    Raises:
        ConfigError: Neither is given, or the server does not blend or has no separator.
    """
    if separator is None:
        if url is None:
            raise ConfigError("configure() needs a url or a separator")
        separator = _ask(url)
    _configured.separator = separator
    return separator


def chunk(text: str) -> str:
    """Mark text as a chunk whose KV may be reused wherever it stands in a prompt.

    Raises:
        ConfigError: configure() was not called.
    """
    separator = _configured.separator
    if separator is None:
        raise ConfigError("call sgl_blend.configure(url) before sgl_blend.chunk(text)")
    return f"{separator}{text}{separator}"


def _ask(url: str) -> str:
    import json
    from urllib.request import urlopen

    with urlopen(f"{url.rstrip('/')}/server_info", timeout=30) as response:
        info = json.load(response)
    states = info.get("internal_states") or [{}]
    separator = states[0].get("sgl_blend", {}).get("separator")
    if not isinstance(separator, str):
        raise ConfigError(f"the server at {url} does not blend or has no separator")
    return separator
