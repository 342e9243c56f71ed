"""SGLang's own test kits, against a stock and a blending server: nothing fails on ours alone.

The kits come with the installed SGLang. Some ask a real model for facts, which a tiny random one does
not know; those tests fail on both servers.
"""

import importlib
import io
import random
import unittest
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import FLAGS
from tiny_models import VOCAB_SIZE, make_text_model

from sgl_blend.commands.common.server import running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLEND = ("--enable-blend", "--blend-when", "always")
KITS = {
    "basic_api_contract_kit": ["BasicAPIContractMixin"],
    "basic_scheduler_stress_kit": ["BasicSchedulerStressMixin"],
    "matched_stop_kit": ["MatchedStopMixin"],
    "anthropic_messages_kit": ["AnthropicMessagesMixin"],
    "json_constrained_kit": ["JSONConstrainedMixin"],
    "json_mode_kit": ["JSONModeMixin"],
    "regex_constrained_kit": ["RegexConstrainedMixin"],
    "ebnf_constrained_kit": ["EBNFConstrainedMixin"],
    "abort_timeout_kit": ["AbortAllMixin"],
    "pause_generation_kit": ["PauseResumeInPlaceMixin"],
}
SAMPLED = {"regex_constrained_kit", "ebnf_constrained_kit"}
"""Kits that sample their answers: a random model's answer may end at the token limit, out of form."""
TRIES_OF_SAMPLED = 6
FEWEST_PASSED = 20
"""Less would mean that the kits do not run at all."""


class _Alive:
    """Stands for the server's process, which the kits ask whether it lives."""

    def poll(self) -> int | None:
        return None


def make_case(kit: str, mixin: str, url: str) -> type[unittest.TestCase]:
    """Return a kit's tests against a server."""
    base = getattr(importlib.import_module(f"sglang.test.kits.{kit}"), mixin)
    attributes: dict[str, Any] = {
        "base_url": url,
        "model": "default",
        "api_key": "none",
        "process": _Alive(),
        "abort_all_max_new_tokens": 4000,  # the tiny model's context holds no 16,000
        "client": openai.Client(api_key="none", base_url=f"{url}/v1"),
    }
    return type(mixin, (base, unittest.TestCase), attributes)


def _outcome(case: unittest.TestCase) -> str:
    """Run one test of a kit: "passed", "skipped", or the end of what it failed with."""
    result = unittest.TextTestRunner(io.StringIO()).run(case)
    failed = [text[-500:] for _, text in (*result.failures, *result.errors)]
    return failed[0] if failed else "skipped" if result.skipped else "passed"


def outcomes(url: str) -> dict[str, str]:
    """Return what each test of every kit came to; one that samples passes if one of its tries does."""
    found: dict[str, str] = {}
    for kit, mixins in KITS.items():
        for mixin in mixins:
            case = make_case(kit, mixin, url)
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                for _ in range(TRIES_OF_SAMPLED if kit in SAMPLED else 1):
                    found[f"{mixin}.{name}"] = outcome = _outcome(case(name))
                    if outcome in ("passed", "skipped"):
                        break
    return found


class _TinyVocabulary(random.Random):
    """Draws token ids that the tiny model has, where the kit draws some of a large one."""

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, VOCAB_SIZE - 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model("llama", tmp_path_factory.mktemp("kits-model"))


@pytest.mark.filterwarnings("ignore")
def test_what_passes_on_stock_passes_on_a_blending_server(model: Path, tmp_path: Path) -> None:
    found = []
    for name, flags in (("stock", ()), ("blend", BLEND)):
        with running(model, [*FLAGS, *flags], tmp_path / name) as server:
            found.append(outcomes(server.url))
    stock, blend = found
    assert stock.keys() == blend.keys()
    worse = {name: blend[name] for name in blend if blend[name] != "passed" == stock[name]}
    assert worse == {}
    passed = [name for name, outcome in stock.items() if outcome == "passed"]
    assert len(passed) >= FEWEST_PASSED, {k: v for k, v in stock.items() if v != "passed"}


@pytest.mark.filterwarnings("ignore")
def test_a_tree_of_prompts_is_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = importlib.import_module("sglang.test.kits.radix_cache_server_kit")
    monkeypatch.setattr(kit, "random", _TinyVocabulary(5))
    with running(model, [*FLAGS, *BLEND], tmp_path / "log") as server:
        kit.run_radix_attention_test(server.url)
        server.wait_for_builds()
        pool = server.info()["pool"]
    assert pool["locked"] == 0
    assert pool["free"] + pool["evictable"] == pool["capacity"]
