"""Derived tolerances: a result may be as wrong as plain torch in the same dtype, and no more."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton kernels are tested: on the CPU they run in Triton's interpreter (conftest.py)."""

# The interpreter truncates where a GPU rounds, and multiplies bfloat16 as integers in tl.dot.
KERNEL_DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
SINGLE_FIRST = [
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    KERNEL_DTYPES[2],
]
"""The same, half precision with the slow tests: where it takes no path that other tests do not take."""


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative root-mean-square error of got against a float64 oracle."""
    want = want.double()
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def assert_as_good_as(
    got: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor, slack: float = 1.25
) -> None:
    """Accept got if it is as near to the float64 oracle as plain torch in the same dtype."""
    assert got.shape == oracle.shape, f"shape {tuple(got.shape)} is not {tuple(oracle.shape)}"
    assert torch.isfinite(got).all(), "result has NaN or infinity"
    allowed = slack * rms_error(reference, oracle) + 1e-7
    actual = rms_error(got, oracle)
    assert actual <= allowed, f"relative RMS error {actual:.2e} > {allowed:.2e}"
