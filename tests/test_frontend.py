import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend

from sgl_blend.client.chunks import chunk, configure, plain
from sgl_blend.errors import ConfigError


@contextmanager
def server(info: Any, api_key: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve one JSON document at every path; yields the base URL and the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps(info).encode()
            is_known = api_key is None or self.headers["Authorization"] == f"Bearer {api_key}"
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", asked
        finally:
            httpd.shutdown()
            thread.join()


def alone(function: Callable[[], Any]) -> Any:
    """Call with settings of its own, so that no test configures another."""
    return copy_context().run(function)


@pytest.mark.parametrize("slash", ["", "/"])
def test_the_separator_is_learnt_from_the_server(slash: str) -> None:
    def program() -> tuple[str, str]:
        return configure(f"{url}/base{slash}"), chunk("text")

    with server({"internal_states": [{"sgl_blend": {"separator": "<|sep|>"}}]}) as (url, asked):
        assert alone(program) == ("<|sep|>", "<|sep|>text<|sep|>")
    assert asked == ["/base/server_info"]


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"internal_states": []},
        {"internal_states": [{}]},
        {"internal_states": [{"sgl_blend": {}}]},
        {"internal_states": [{"sgl_blend": {"separator": None}}]},
    ],
    ids=json.dumps,
)
def test_a_server_that_does_not_blend_is_reported(info: Any) -> None:
    with (
        server(info) as (url, _),
        pytest.raises(ConfigError, match=f"^the server at {url} does not blend or has no sep"),
    ):
        alone(lambda: configure(url))


BLENDS = {"internal_states": [{"sgl_blend": {"separator": "|"}}]}


def test_a_server_with_an_api_key_is_asked_with_it() -> None:
    with server(BLENDS, api_key="secret") as (url, _):
        assert alone(lambda: configure(url, api_key="secret")) == "|"
        with pytest.raises(ConfigError, match=r"wants its API key: configure\(url, api_key=...\)$"):
            alone(lambda: configure(url))


def test_a_server_that_does_not_answer_is_named() -> None:
    with server(BLENDS) as (url, _):
        pass
    with pytest.raises(ConfigError, match=f"^the server at {url} cannot be asked: .*refused"):
        alone(lambda: configure(url))


def test_a_given_separator_is_taken_without_asking() -> None:
    def program() -> str:
        assert configure("http://nobody.invalid", separator="|") == "|"
        return chunk("a b")

    assert alone(program) == "|a b|"


def test_configuring_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^configure\(\) needs a url or a separator$"):
        alone(configure)


@pytest.mark.parametrize("name", ["chunk", "plain"])
def test_a_text_before_configuring_is_refused(name: str) -> None:
    # In a process of its own: the separator, once known, is known to the whole process.
    done = subprocess.run(
        [sys.executable, "-c", f"import sgl_blend; sgl_blend.{name}('text')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "call sgl_blend.configure(url) before" in done.stderr


def test_the_last_configuration_counts() -> None:
    def program() -> str:
        configure(separator="|")
        configure(separator="#")
        return chunk("x")

    assert alone(program) == "#x#"


def ask(answers: list[str]) -> Any:
    def program(s: Any, document: str) -> None:
        answers.append(chunk(document))

    return sgl.function(program)


def test_a_frontend_program_marks_its_chunks() -> None:
    answers: list[str] = []

    def run() -> None:
        configure(separator="|")
        ask(answers).run(document="a", backend=BaseBackend())

    alone(run)
    assert answers == ["|a|"]


def test_a_batch_of_frontend_programs_marks_its_chunks() -> None:
    answers: list[str] = []

    def run() -> None:
        configure(separator="|")
        documents = [{"document": "a"}, {"document": "b"}]
        ask(answers).run_batch(documents, backend=BaseBackend(), num_threads=2)

    alone(run)
    assert sorted(answers) == ["|a|", "|b|"]


BROKEN = "<\u200b|sep|>"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a b", "a b"),
        ("", ""),
        ("a <|sep|> b", f"a {BROKEN} b"),
        ("<|sep|>", BROKEN),
        ("<|sep|><|sep|>", BROKEN * 2),
        ("<|se<|sep|>p|>", f"<|se{BROKEN}p|>"),
        ("<|sep", "<|sep"),
    ],
)
def test_a_separator_in_a_text_of_others_is_broken(text: str, safe: str) -> None:
    configure(separator="<|sep|>")
    assert plain(text) == safe
    assert chunk(text) == f"<|sep|>{safe}<|sep|>"


@pytest.mark.parametrize("separator", ["<|sep|>", "aa", "aba", "#"])
@pytest.mark.parametrize("text", ["a", "aaa", "ab", "xaba", "ababa", "<|sep|>", "#", "a#b", "b"])
def test_a_chunk_has_two_separators_whatever_is_in_it(separator: str, text: str) -> None:
    # Read as a tokenizer does, from the left.
    configure(separator=separator)
    marked = chunk(text)
    assert marked.startswith(separator)
    assert marked.find(separator, len(separator)) == len(marked) - len(separator)


def test_what_is_broken_reads_the_same() -> None:
    configure(separator="<|sep|>")
    assert plain("a <|sep|> b").replace("\u200b", "") == "a <|sep|> b"
