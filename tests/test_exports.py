import importlib

import pytest

import sgl_blend
from sgl_blend import errors


def test_the_public_names_are_these() -> None:
    assert sgl_blend.__all__ == [
        "BlendConfig",
        "BlendError",
        "ConfigError",
        "RequestError",
        "UnsupportedError",
        "chunk",
        "configure",
        "plain",
    ]


@pytest.mark.parametrize("name", sgl_blend.__all__)
def test_a_public_name_is_importable_and_documented(name: str) -> None:
    assert getattr(importlib.import_module("sgl_blend"), name).__doc__


@pytest.mark.parametrize(
    "error",
    [errors.ConfigError, errors.UnsupportedError, errors.RequestError, errors.CommandError],
)
def test_every_error_is_a_blend_error(error: type[Exception]) -> None:
    assert error.__bases__ == (errors.BlendError,)


def test_a_blend_error_is_what_sglang_answers_with_400() -> None:
    assert errors.BlendError.__bases__ == (ValueError,)


def test_there_are_no_other_errors() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {
        "BlendError",
        "ConfigError",
        "UnsupportedError",
        "RequestError",
        "CommandError",
    }
