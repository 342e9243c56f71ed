"""Pages of SGLang's host memory, in one order whatever the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_blend.engine.tiers import MIN_PAGE_TOKENS
from sgl_blend.errors import UnsupportedError
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import ITEM_BYTES

_BITS = {2: torch.int16, 4: torch.int32}

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Of SGLang's --hicache-mem-layout. A page of page_head mixes what ranks of other servers own."""


class HostPages:
    """The pages of a host pool that keeps K and V per head.

    A page's bytes are those of [K/V, layer, token, head, channel]. In SGLang's flat pages the order
    follows the layout (mem_cache/pool_host/mha.py).

    Args:
        pool: SGLang's MHATokenToKVPoolHost.

    Attributes:
        form: What a page is made of.

    Raises:
        UnsupportedError: The pool is of another kind or layout, or its pages are too small.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._viewed: torch.Tensor | None = None
        self._bits: NDArray[Any] = np.empty(0)
        self._check()
        dtype = str(pool.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise UnsupportedError(f"--hicache-storage-backend: pages of {dtype} are not supported")
        self.form = PageFormat(dtype, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim)
        buffer = pool.kv_buffer
        per_page = 2 * pool.layer_num * pool.page_size * pool.head_num * pool.head_dim
        if not isinstance(buffer, torch.Tensor) or buffer.numel() != pool.page_num * per_page:
            raise UnsupportedError(
                f"--hicache-storage-backend: host pool {type(pool).__name__} is not supported"
            )

    def _check(self) -> None:
        pool = self._pool
        kinds = {kind.__name__ for kind in type(pool).__mro__}
        if "MHATokenToKVPoolHost" not in kinds:
            raise UnsupportedError(
                f"--hicache-storage-backend: host pool {type(pool).__name__} is not supported"
            )
        if pool.layout not in LAYOUTS:
            raise UnsupportedError(
                f"--hicache-mem-layout {pool.layout} is not supported with a storage backend, "
                f"only {', '.join(LAYOUTS)}"
            )
        if pool.page_size < MIN_PAGE_TOKENS:
            raise UnsupportedError(
                f"--page-size must be at least {MIN_PAGE_TOKENS} with a storage backend, "
                f"got {pool.page_size}"
            )

    def read(self, slot: int) -> memoryview:
        """Return a copy of the page that begins at a slot."""
        return np.array(self._page_at(slot), order="C").reshape(-1).view(np.uint8).data

    def write(self, slot: int, page: bytearray) -> None:
        """Put a page where another began; bits are kept, also those of NaN."""
        # Not by torch: its threads would take the cores from those that decode the next pages, and each
        # of its operations, also to view a tensor, lets go of Python's lock, for which they wait, too.
        held = self._page_at(slot)
        held[...] = np.frombuffer(page, held.dtype).reshape(held.shape)

    def _page_at(self, slot: int) -> NDArray[Any]:
        """View the bits of a page of the pool as integers: [K/V, layer, token, head, channel]."""
        pool, tokens = self._pool, self.form.tokens
        if self._viewed is not pool.kv_buffer:
            self._bits = pool.kv_buffer.view(_BITS[ITEM_BYTES[self.form.dtype]]).numpy()
            self._viewed = pool.kv_buffer  # last, as threads that write look at it
        if pool.layout == "layer_first":
            return self._bits[:, :, slot : slot + tokens]
        if pool.layout == "page_first":
            return self._bits[:, slot : slot + tokens].swapaxes(1, 2)
        return self._bits[:, slot // tokens]

    def canonical(self, flat: torch.Tensor) -> memoryview:
        """Return the bytes of one of SGLang's flat pages, in our order."""
        return self._ordered(flat).contiguous().view(-1).numpy().data

    def fill(self, flat: torch.Tensor, page: bytearray) -> None:
        """Fill one of SGLang's flat pages; bits are kept, also those of NaN."""
        ordered = self._ordered(flat)
        ordered.copy_(torch.frombuffer(page, dtype=torch.uint8).view(ordered.shape))

    def _ordered(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat page as uint8 [K/V, layer, token, bytes of all heads]."""
        _, layers, tokens, _, _ = self.form.shape
        width = self.form.unit_bytes // tokens
        octets = flat.reshape(-1).view(torch.uint8)
        if self._pool.layout == "page_first":
            return octets.view(2, tokens, layers, width).transpose(1, 2)
        return octets.view(2, layers, tokens, width)
