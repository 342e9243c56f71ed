"""Row compaction: the kept rows of everything a batch carries by row, moved in one launch.

out[i] = tensor[rows[i]]     for each of up to four tensors
"""

from collections.abc import Sequence

import torch

from sgl_blend.kernels.checks import check_rows, check_tensor

MAX_TENSORS = 4


def compact_rows(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather the same rows of several tensors.

    Args:
        rows: int64 [k], row numbers; each may come several times.
        tensors: 1 to 4 tensors [num_rows, ...] of any dtype and width, the rest of a row contiguous.

    Returns:
        New contiguous tensors [k, ...], in order, bit for bit what the rows hold.

    Raises:
        ValueError: There are too many tensors, they differ in rows, or a row is not contiguous.
    """
    check_tensor("rows", rows, shape=(None,), dtype=torch.int64)
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ValueError(f"tensors: expected 1 to {MAX_TENSORS}, got {len(tensors)}")
    for number, tensor in enumerate(tensors):
        check_rows(f"tensors[{number}]", tensor)
        if tensor.shape[0] != tensors[0].shape[0]:
            raise ValueError(
                f"tensors[{number}]: expected {tensors[0].shape[0]} rows, got {tensor.shape[0]}"
            )
    if not rows.is_cuda:
        return _compact_rows_torch(rows, tensors)
    from sgl_blend.kernels.row_compaction_triton import compact_rows_triton

    return compact_rows_triton(rows, tensors)


def _compact_rows_torch(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.index_select(0, rows) for tensor in tensors]
