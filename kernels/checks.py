"""Argument checks shared by the kernels: one sentence per error, what was expected and what came."""

import torch


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Raise unless tensor has the given shape (None fits any size) and dtype.

    Raises:
        ValueError: A dimension or the dtype differs.
    """
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise unless what stands after one index of the first dimension is contiguous.

    Raises:
        ValueError: It is not.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"{name}: expected contiguous rows, got strides {tensor.stride()}")
        expected *= size
