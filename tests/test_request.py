from __future__ import annotations

import math
import time
from array import array
from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_blend.errors import RequestError
from sgl_blend.policies import NAMED
from sgl_blend.protocol.request import (
    ChunkedPrompt,
    Overrides,
    Span,
    locate_chunks,
    parse_overrides,
)
from sgl_blend.settings.config import BlendConfig

SEP = 9
CONFIG = BlendConfig(enable_blend=True, blend_recompute_ratio=0.25, blend_policy="random")

tokens = st.lists(st.integers(0, 100_000).filter(lambda token: token != SEP), max_size=6)


def ids(*values: int) -> array[int]:
    return array("q", values)


def split(*values: int) -> tuple[list[int], list[tuple[int, int]]]:
    prompt = locate_chunks(ids(*values), None, SEP)
    return list(prompt.token_ids), [(span.start, span.stop) for span in prompt.spans]


# Separators


def test_pieces_between_separators_are_chunks_and_the_outer_ones_are_not() -> None:
    assert split(1, SEP, 2, 3, SEP, 4, SEP, 5) == ([1, 2, 3, 4, 5], [(1, 3), (3, 4)])


def test_a_prompt_without_separator_has_no_chunks() -> None:
    assert split(1, 2, 3) == ([1, 2, 3], [])


def test_a_single_separator_is_taken_out_and_makes_no_chunk() -> None:
    assert split(1, SEP, 2) == ([1, 2], [])


def test_doubled_separators_make_no_empty_chunk() -> None:
    assert split(1, SEP, 2, SEP, SEP, 3, SEP, 4) == ([1, 2, 3, 4], [(1, 2), (2, 3)])


def test_leading_and_trailing_separators_leave_the_prompt_one_chunk() -> None:
    assert split(SEP, 1, 2, SEP) == ([1, 2], [(0, 2)])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_prompt_of_nothing_but_separators_is_refused(count: int) -> None:
    with pytest.raises(RequestError, match="empty without its separators"):
        split(*[SEP] * count)


def test_an_empty_prompt_has_no_chunks() -> None:
    assert split() == ([], [])


def test_without_a_separator_token_every_token_is_text() -> None:
    prompt = locate_chunks(ids(1, SEP, 2, SEP), None, None)
    assert prompt == ChunkedPrompt(ids(1, SEP, 2, SEP), ())


@given(before=tokens, chunks=st.lists(tokens, min_size=1, max_size=8), after=tokens)
def test_splitting_gives_back_what_was_joined(
    before: list[int], chunks: list[list[int]], after: list[int]
) -> None:
    joined = list(before)
    for chunk in chunks:
        joined += [SEP, *chunk]
    joined += [SEP, *after]
    assume(any(token != SEP for token in joined))

    prompt = locate_chunks(array("q", joined), None, SEP)

    assert list(prompt.token_ids) == [*before, *chain(*chunks), *after]
    found = [list(prompt.token_ids[span.start : span.stop]) for span in prompt.spans]
    assert found == [chunk for chunk in chunks if chunk]
    assert [span.start for span in prompt.spans] == [
        len(before) + sum(map(len, chunks[:index])) for index, chunk in enumerate(chunks) if chunk
    ]


@given(before=tokens, chunks=st.lists(tokens.filter(bool), max_size=5), after=tokens)
def test_a_chunk_wrapped_in_its_own_two_separators_is_the_same_chunk(
    before: list[int], chunks: list[list[int]], after: list[int]
) -> None:
    # sgl_blend.chunk() wraps; joining by hand shares the separator.
    wrapped = [*before, *chain(*([SEP, *chunk, SEP] for chunk in chunks)), *after]
    shared = [*before, SEP, *chain(*([*chunk, SEP] for chunk in chunks)), *after]
    assume(before or chunks or after)

    assert locate_chunks(array("q", wrapped), None, SEP) == locate_chunks(
        array("q", shared), None, SEP
    )


def test_the_prompt_given_is_left_alone() -> None:
    given_ids = ids(1, SEP, 2, SEP, 3)

    locate_chunks(given_ids, None, SEP)

    assert given_ids == ids(1, SEP, 2, SEP, 3)


@pytest.mark.parametrize("typecode", ["q", "i", "l"])
def test_the_stripped_prompt_keeps_the_type_of_the_tokens(typecode: str) -> None:
    prompt = locate_chunks(array(typecode, [1, SEP, 2, SEP]), None, SEP)
    assert prompt.token_ids.typecode == typecode


def test_many_separators_are_split_quickly() -> None:
    start = time.process_time()

    prompt = locate_chunks(array("q", [1, SEP] * 200_000), None, SEP)

    assert len(prompt.spans) == 199_999
    assert time.process_time() - start < 10


# Offsets


@st.composite
def disjoint_spans(draw: st.DrawFn) -> tuple[int, list[int]]:
    bounds = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    bounds = sorted(bounds)[: len(bounds) // 2 * 2]
    return draw(st.integers(max(bounds, default=0), 80)), bounds


@given(disjoint_spans())
def test_offsets_become_spans(case: tuple[int, list[int]]) -> None:
    num_tokens, offsets = case

    prompt = locate_chunks(array("q", range(100, 100 + num_tokens)), offsets, SEP)

    assert list(prompt.token_ids) == list(range(100, 100 + num_tokens))
    assert [bound for span in prompt.spans for bound in (span.start, span.stop)] == offsets


def test_neighbouring_spans_may_touch() -> None:
    prompt = locate_chunks(ids(1, 2, 3, 4), (0, 2, 2, 4), None)
    assert prompt.spans == (Span(0, 2), Span(2, 4))


def test_no_offsets_are_no_chunks() -> None:
    assert locate_chunks(ids(1, 2), (), SEP).spans == ()


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 3, 2, 4),  # overlap
        (2, 3, 0, 1),  # descending spans
        (3, 1),  # descending bounds
        (2, 2),  # empty
        (0, 2, 2, 2),  # empty, after another
        (0, 6),  # ends past the prompt
        (5, 6),  # starts at its end
        (-1, 2),
        (-3, -1),
        (0, 1 << 62),
        (-(1 << 80), 1 << 80),
    ],
    ids=str,
)
def test_spans_that_do_not_ascend_inside_the_prompt_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(
        RequestError,
        match=r"^sgl_blend_spans must ascend without overlap inside the prompt's 5 tokens, got \[",
    ):
        locate_chunks(ids(1, 2, 3, 4, 5), offsets, SEP)


def test_beside_spans_a_separator_is_a_token_like_any_other() -> None:
    # The author of a document may have written it; that must not end anybody's request.
    prompt = locate_chunks(ids(1, SEP, 2, SEP), (0, 2), SEP)
    assert prompt == ChunkedPrompt(ids(1, SEP, 2, SEP), (Span(0, 2),))


def test_an_empty_list_of_spans_marks_nothing_and_keeps_separators() -> None:
    assert locate_chunks(ids(1, SEP, 2, SEP), (), SEP) == ChunkedPrompt(ids(1, SEP, 2, SEP), ())


def test_more_spans_than_tokens_are_refused_by_count() -> None:
    with pytest.raises(
        RequestError, match=r"^sgl_blend_spans has 3 spans for a prompt of 2 tokens"
    ):
        locate_chunks(ids(1, 2), (0, 1, 1, 2, 2, 3), SEP)


def test_a_million_spans_are_answered_quickly() -> None:
    offsets = list(range(2_000_000))
    start = time.process_time()

    overrides = parse_overrides({"sgl_blend_spans": offsets}, CONFIG)
    with pytest.raises(RequestError, match=r"^sgl_blend_spans has 1000000 spans"):
        locate_chunks(array("q", [1]) * 1000, overrides.offsets, SEP)
    spans = locate_chunks(array("q", [1]) * 2_000_000, overrides.offsets, SEP).spans

    assert len(spans) == 1_000_000
    assert time.process_time() - start < 10


@pytest.mark.parametrize("offsets", [[0], [0, 1, 2], "01", {"0": 1}, 3, True, 0.5], ids=repr)
def test_spans_that_are_no_flat_list_of_pairs_are_refused(offsets: Any) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend_spans must be a flat list \[start0, end0"):
        parse_overrides({"sgl_blend_spans": offsets}, CONFIG)


@pytest.mark.parametrize(
    "offsets",
    [[False, True], [0, 1.0], [0, "1"], [0, None], [[0, 1], [2, 3]], [0, math.nan]],
    ids=repr,
)
def test_spans_that_hold_more_than_integers_are_refused(offsets: Any) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend_spans must hold integers only$"):
        parse_overrides({"sgl_blend_spans": offsets}, CONFIG)


# Overrides


@pytest.mark.parametrize("params", [None, {}, {"temperature_of": "others", "x": [1]}], ids=repr)
def test_a_silent_request_gets_the_server_settings(params: dict[str, Any] | None) -> None:
    assert parse_overrides(params, CONFIG) == Overrides(
        enabled=True, ratio=0.25, policy="random", offsets=None
    )


@pytest.mark.parametrize(("policy", "ratio"), [("none", 0.0), ("block", 0.0), ("all", 1.0)])
@pytest.mark.parametrize("asked", [{}, {"sgl_blend_ratio": 0.5}])
def test_a_policy_of_one_ratio_has_it_whatever_is_asked(
    policy: str, ratio: float, asked: dict[str, float]
) -> None:
    assert parse_overrides({"sgl_blend_policy": policy, **asked}, CONFIG).ratio == ratio


def test_a_request_may_override_everything() -> None:
    params = {
        "sgl_blend": False,
        "sgl_blend_ratio": 1,
        "sgl_blend_policy": "first-k",
        "sgl_blend_spans": [0, 2],
    }

    overrides = parse_overrides(params, CONFIG)

    assert overrides == Overrides(enabled=False, ratio=1.0, policy="first-k", offsets=(0, 2))
    assert type(overrides.ratio) is float


@pytest.mark.parametrize("slo", [0, -1, "100", True, math.nan, math.inf, [100]])
def test_a_malformed_deadline_is_refused(slo: Any) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend_slo_ms must be a positive number of milli"):
        parse_overrides({"sgl_blend_slo_ms": slo}, CONFIG)


def test_a_request_may_have_a_deadline_of_its_own() -> None:
    config = BlendConfig(enable_blend=True, blend_store_profile="p", blend_ttft_slo_ms=300.0)
    assert parse_overrides({}, CONFIG).slo_ms is None
    assert parse_overrides({}, config).slo_ms == 300.0
    assert parse_overrides({"sgl_blend_slo_ms": 50}, config).slo_ms == 50.0


@pytest.mark.parametrize("name", ["sgl_blend_ration", "sgl_blend_", "sgl_blender", "sgl_blend-x"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not known; expected one of sgl_blend, "):
        parse_overrides({name: 1}, CONFIG)


def test_a_name_of_any_length_makes_a_short_message() -> None:
    with pytest.raises(RequestError) as caught:
        parse_overrides({"sgl_blend" + "x" * 100_000: 1}, CONFIG)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "ratio",
    [math.nan, math.inf, -math.inf, -0.001, 1.001, True, False, "0.5", None, [0.5], 2**62],
    ids=repr,
)
def test_a_ratio_that_is_no_share_is_refused(ratio: Any) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend_ratio must be a number in \[0, 1\], got "):
        parse_overrides({"sgl_blend_ratio": ratio}, CONFIG)


@pytest.mark.parametrize("policy", ["HKVD", "", "cacheblend", None, 1, ["hkvd"]], ids=repr)
def test_a_policy_that_does_not_exist_is_refused_and_the_message_lists_those_that_do(
    policy: Any,
) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend_policy must be one of ") as caught:
        parse_overrides({"sgl_blend_policy": policy}, CONFIG)
    assert all(name in str(caught.value) for name in NAMED)


@pytest.mark.parametrize("enabled", [0, 1, "false", None, []], ids=repr)
def test_a_switch_that_is_no_boolean_is_refused(enabled: Any) -> None:
    with pytest.raises(RequestError, match=r"^sgl_blend must be true or false, got "):
        parse_overrides({"sgl_blend": enabled}, CONFIG)


def test_a_request_finds_what_the_server_does() -> None:
    assert parse_overrides({}, BlendConfig(enable_blend=True, blend_find="known")).find == "known"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (True, "sgl_blend_find must be one of marks, known, learned, got True"),
        ("all", "sgl_blend_find must be one of marks, known, learned, got 'all'"),
        (
            "learned",
            "sgl_blend_find learned needs a server that was started with --blend-find learned",
        ),
    ],
)
def test_a_request_may_not_find_more_than_the_server(asked: Any, sentence: str) -> None:
    config = BlendConfig(enable_blend=True, blend_find="known")
    with pytest.raises(RequestError, match=f"^{sentence}$"):
        parse_overrides({"sgl_blend_find": asked}, config)
    assert parse_overrides({"sgl_blend_find": "marks"}, config).find == "marks"
