from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, msgpack_decode, msgpack_encode
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_blend.errors import RequestError
from sgl_blend.protocol.request import RESERVED_SALT, check_salt, check_wire_types

# Wire types

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)
custom_params = st.one_of(
    nested,
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), nested, max_size=3),
)


def to_scheduler_and_back(params: Any) -> Any:
    """Send sampling parameters over SGLang's wire."""
    request = TokenizedGenerateReqInput(
        rid="r",
        input_text="",
        input_ids=array("q", [1]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(custom_params=params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    return msgpack_decode(msgpack_encode(request)).sampling_params.custom_params


@given(custom_params)
def test_what_is_accepted_arrives_at_the_scheduler_unchanged(params: Any) -> None:
    try:
        check_wire_types(params)
    except RequestError:
        return
    arrived = to_scheduler_and_back(params)

    as_lists = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (params or {}).items()
    }
    assert (arrived or {}) == as_lists


@given(
    st.dictionaries(
        st.text(),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(),
            st.lists(st.integers(-(1 << 63), (1 << 63) - 1)),
            st.dictionaries(st.text(), st.booleans()),
        ),
    )
)
def test_what_fits_the_wire_is_accepted(params: dict[str, Any]) -> None:
    check_wire_types(params)


def test_no_custom_params_are_accepted() -> None:
    check_wire_types(None)


def test_a_nested_list_is_what_ends_a_stock_scheduler() -> None:
    with pytest.raises(ValueError, match=r"^Expected .*, got `array` - at "):
        to_scheduler_and_back({"spans": [[0, 1]]})


@pytest.mark.parametrize("params", [[], "x", 1, [("a", 1)]], ids=repr)
def test_custom_params_that_are_no_object_are_refused(params: Any) -> None:
    with pytest.raises(RequestError, match=r"^custom_params must be an object, got "):
        check_wire_types(params)


@pytest.mark.parametrize(
    "value",
    [
        [[0, 1]],
        [{"a": 1}],
        {"a": [1]},
        {"a": {"b": 1}},
        1 << 63,
        -(1 << 63) - 1,
        [1 << 64],
        math.nan,
        [math.inf],
        {"a": -math.inf},
        b"bytes",
        {1, 2},
        1j,
    ],
    ids=repr,
)
def test_a_value_that_the_wire_cannot_carry_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^custom_params\['name'\] must be a scalar, a flat"):
        check_wire_types({"other": 1, "name": value})


@pytest.mark.parametrize(
    "params", [{"x": "\ud800"}, {"\ud800": 1}, {"x": {"\ud800": 1}}], ids=ascii
)
def test_text_that_is_no_unicode_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        check_wire_types(params)


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^custom_params must have text keys$"):
        check_wire_types({1: 1})
    with pytest.raises(RequestError, match=r"^custom_params\['x'\] must have text keys$"):
        check_wire_types({"x": {1: 1}})


# Salts


@pytest.mark.parametrize("salt", [None, "", "tenant", "sgl-blend", "x" + RESERVED_SALT])
def test_a_salt_of_the_clients_own_is_accepted(salt: str | None) -> None:
    check_salt("cache_salt", salt)


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("rest", ["", "c:0:", "x"])
def test_a_salt_that_begins_like_ours_is_refused_by_name(rest: str, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name} must not begin with 'sgl-blend:'$"):
        check_salt(name, RESERVED_SALT + rest)
