import json
from pathlib import Path

import pytest

from sgl_blend.fallback import FallbackReason

ROOT = Path(__file__).parents[1]


def test_every_reason_has_a_sentence_of_its_own() -> None:
    # StrEnum would make two names with one sentence the same reason.
    assert len(FallbackReason) == len(FallbackReason.__members__)
    assert all(len(reason.split()) >= 3 for reason in FallbackReason)


@pytest.mark.parametrize("reason", FallbackReason, ids=lambda reason: str(reason.name))
def test_a_reason_survives_the_way_to_the_client(reason: FallbackReason) -> None:
    assert FallbackReason(json.loads(json.dumps(reason))) is reason


@pytest.mark.parametrize("reason", FallbackReason, ids=lambda reason: str(reason.name))
def test_every_reason_is_given_somewhere(reason: FallbackReason) -> None:
    code = [
        path.read_text() for top in ("sgl_blend", "scheduler") for path in (ROOT / top).glob("*.py")
    ]
    assert any(f"FallbackReason.{reason.name}" in text for text in code)
