"""Chunks that are built, stored behind the device, and asked for again: what tests of tiers share."""

from typing import Any

from harness import Answer, Driver, Prompt, rag_prompt, random_tokens
from stored_files import PAGE

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 72) for i in range(3)]
QUESTION = random_tokens(99, 12)


def prompt_of(salt: str, order: tuple[int, ...] = (2, 0, 1)) -> Prompt:
    return rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION, salt=salt)


def ask(driver: Driver, salt: str, order: tuple[int, ...] = (2, 0, 1)) -> Answer:
    (answer,) = driver.ask(prompt_of(salt, order))
    driver.settle()
    return answer


def chunk_kv(driver: Driver, salt: str) -> list[Any]:
    return driver.kv(SYSTEM + CHUNKS[1], driver.chunk_salt(salt))


def same(kv: list[Any], other: list[Any]) -> bool:
    return all(
        x.equal(y)
        for layer, layer_2 in zip(kv, other, strict=True)
        for x, y in zip(layer, layer_2, strict=True)
    )


def alike(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without what tells where the KV came from."""
    return {
        name: value
        for name, value in report.items()
        if name not in ("host_tokens", "storage_tokens", "chunk_levels", "load_ms")
    }


def num_pages(*paths: list[int]) -> int:
    """Return how many pages paths have that begin with the system prompt, and share those of it."""
    shared = len(SYSTEM) // PAGE
    return shared + sum(len(path) // PAGE - shared for path in paths)


def num_built(driver: Driver) -> int:
    return int(driver.runtime.describe()["chunks_built"])


def flush(driver: Driver) -> None:
    """Let nothing be left but what is stored."""
    driver.settle()
    driver.flush()


def fill(driver: Driver, salt: str) -> tuple[Answer, list[Any], int]:
    """Have all chunks built and stored; return a warm answer, KV of a chunk, and what was built."""
    flush(driver)
    built = num_built(driver)
    ask(driver, salt, (0, 1, 2))
    warm, kv = ask(driver, salt), chunk_kv(driver, salt)
    flush(driver)
    return warm, kv, num_built(driver) - built


def ask_for_stored(driver: Driver, salt: str) -> tuple[Answer, list[Any], int]:
    """Ask a server that holds nothing itself."""
    flush(driver)
    built = num_built(driver)
    answer = ask(driver, salt)
    return answer, chunk_kv(driver, salt), num_built(driver) - built
