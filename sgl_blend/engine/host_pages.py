"""Pages of SGLang's host memory, in one order whatever the layout."""

from __future__ import annotations

from typing import Any

import torch

from sgl_blend.engine.tiers import MIN_PAGE_TOKENS
from sgl_blend.errors import UnsupportedError
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.frames import ITEM_BYTES

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
        return self.canonical(self._pool.get_data_page(slot))

    def write(self, slot: int, page: bytearray) -> None:
        """Put a page where another began."""
        flat = torch.empty(self.form.page_bytes, dtype=torch.uint8).view(self._pool.dtype)
        self.fill(flat, page)
        self._pool.set_from_flat_data_page(slot, flat)

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
