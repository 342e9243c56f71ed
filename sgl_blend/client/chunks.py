"""For programs that write prompts: mark a text as a reusable chunk, and keep others from marking it.

Separators in a prompt are read wherever they stand, so text of others must not bring its own: it
would cut the prompt into other chunks than the program meant. chunk() and plain() therefore break a
separator in their text with a zero-width space after its first character. It is broken and not
refused, because a document's author must not be able to end the request; and not cut out, because
what is left on both sides could make another one. The text looks the same, and the model reads it as
text, never as the control token.
"""

from dataclasses import dataclass

from sgl_blend.errors import ConfigError

_BREAK = "\u200b"


@dataclass(slots=True)
class _Configured:
    """The separator of this process; frontend programs run in threads that share it."""

    separator: str | None = None


_configured = _Configured()


def configure(
    url: str | None = None, *, separator: str | None = None, api_key: str | None = None
) -> str:
    """Learn the separator, from a server or as given, for all later calls of chunk().

    Args:
        url: Base URL of a server started with --enable-blend.
        separator: The separator itself, instead of asking.
        api_key: The server's --api-key, if it has one.

    Returns:
        The separator.

    Raises:
        ConfigError: Neither is given, the server cannot be asked, or it does not blend or has no
            separator.
    """
    if separator is None:
        if url is None:
            raise ConfigError("configure() needs a url or a separator")
        separator = _ask(url, api_key)
    _configured.separator = separator
    return separator


def chunk(text: str) -> str:
    """Mark text as a chunk whose KV may be reused wherever it stands in a prompt.

    Args:
        text: Anybody's; a separator in it is broken as plain() does.

    Raises:
        ConfigError: configure() was not called.
    """
    separator = _separator("chunk")
    return f"{separator}{_broken(text, separator)}{separator}"


def plain(text: str) -> str:
    """Return text that marks no chunk: a separator in it is broken with a zero-width space.

    For whatever stands beside chunks and was written by somebody else, such as a question.

    Raises:
        ConfigError: configure() was not called.
    """
    return _broken(text, _separator("plain"))


def _separator(caller: str) -> str:
    if _configured.separator is None:
        raise ConfigError(f"call sgl_blend.configure(url) before sgl_blend.{caller}(text)")
    return _configured.separator


def _broken(text: str, separator: str) -> str:
    """Break every separator in text, and one that its end would make with a separator after it."""
    if len(separator) == 1:  # which cannot be broken
        return text.replace(separator, "")
    parts = []
    start = 0
    while (found := (text + separator).find(separator, start)) < len(text):
        parts += [text[start : found + 1], _BREAK]
        start = found + 1
    return "".join([*parts, text[start:]])


def _ask(url: str, api_key: str | None) -> str:
    import json
    from http import HTTPStatus
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/server_info", headers=headers), timeout=30) as got:
            info = json.load(got)
    except HTTPError as err:
        if err.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            reason = f"the server at {url} wants its API key: configure(url, api_key=...)"
            raise ConfigError(reason) from None
        raise ConfigError(f"the server at {url} answers with HTTP {err.code}") from None
    except (OSError, ValueError) as err:
        raise ConfigError(f"the server at {url} cannot be asked: {err}") from None
    states = info.get("internal_states") or [{}]
    separator = states[0].get("sgl_blend", {}).get("separator")
    if not isinstance(separator, str):
        raise ConfigError(f"the server at {url} does not blend or has no separator")
    return separator
