import json
from pathlib import Path

import pytest

from sgl_blend.fallback import FallbackReason
from sgl_blend.report import BlendReport

ROOT = Path(__file__).parents[1]


def test_every_reason_has_a_code_and_a_sentence_of_its_own() -> None:
    # StrEnum would make two names with one code the same reason.
    assert len(FallbackReason) == len(FallbackReason.__members__)
    assert [reason.value for reason in FallbackReason] == [r.name.lower() for r in FallbackReason]
    sentences = {reason.message for reason in FallbackReason}
    assert len(sentences) == len(FallbackReason)
    assert all(len(sentence.split()) >= 3 for sentence in sentences)


@pytest.mark.parametrize("reason", FallbackReason, ids=lambda reason: str(reason.name))
def test_a_client_is_told_code_and_sentence(reason: FallbackReason) -> None:
    told = BlendReport(prompt_tokens=3, policy="hkvd", ratio=0.5, fallback=reason).for_client()
    assert json.loads(json.dumps(told)) == told
    assert (told["fallback"], told["fallback_message"]) == (reason.name.lower(), reason.message)


def test_a_blended_request_has_neither() -> None:
    told = BlendReport(prompt_tokens=3, policy="hkvd", ratio=0.5).for_client()
    assert told["fallback"] is told["fallback_message"] is None


@pytest.mark.parametrize("reason", FallbackReason, ids=lambda reason: str(reason.name))
def test_every_reason_is_given_somewhere(reason: FallbackReason) -> None:
    code = [
        path.read_text()
        for top in ("sgl_blend", "scheduler")
        for path in (ROOT / top).rglob("*.py")
    ]
    assert any(f"FallbackReason.{reason.name}" in text for text in code)
