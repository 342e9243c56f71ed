"""Which kernel a server gets; speeds are only measured on a GPU."""

import math
from subprocess import CalledProcessError

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from harness import Driver

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.errors import UnsupportedError
from sgl_blend.kernels.delta_rope import LayerPools
from sgl_blend.kernels.ragged_attention import TorchRagged
from sgl_blend.tuning.kernel_choice import _seconds, choose_kernel

__all__ = ["model_folder", "start_engine"]  # fixtures


class OneRank(TPGroup):
    """A server of one rank, whose group is never asked."""

    def __init__(self) -> None:
        pass

    def agree(self, values: list[float]) -> list[float]:
        return values


def choose(wanted: str, device: str = "cpu") -> str:
    pool = torch.zeros(600, 2, 16, device=device)
    pools = LayerPools(k=(pool,), v=(pool.clone(),))
    return choose_kernel(wanted, pools, 4, torch.float32, OneRank()).name


def test_without_a_gpu_auto_is_torch() -> None:
    assert choose("auto") == choose("torch") == "torch"


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_gpu_kernel_is_refused_without_a_gpu(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--blend-attention {name} needs a CUDA device"):
        choose(name)


@pytest.mark.parametrize("error", [OSError, AttributeError, CalledProcessError(1, "cc")], ids=str)
def test_a_kernel_that_does_not_run_here_is_not_taken(error: type[Exception] | Exception) -> None:
    class Broken(TorchRagged):
        def run(self, *args: object, **kwargs: object) -> torch.Tensor:
            raise error

    pool = torch.zeros(600, 2, 16)
    pools = LayerPools(k=(pool,), v=(pool.clone(),))
    assert _seconds(Broken(), pools, 4, torch.float32) == math.inf


@pytest.mark.gpu
def test_on_a_gpu_auto_takes_one_that_runs() -> None:
    assert choose("auto", "cuda") in ("triton", "flashinfer", "torch")
    assert choose("triton", "cuda") == "triton"


def _attention(driver: Driver) -> str:
    return str(driver.runtime.describe()["attention"])


@pytest.mark.engine
def test_the_server_says_which_one_it_took(start_engine: StartEngine) -> None:
    kernels = ("triton", "flashinfer") if torch.cuda.is_available() else ("torch",)
    assert start_engine().call(_attention) in kernels
