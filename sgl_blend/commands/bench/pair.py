"""A blending and a stock server at the same time, asleep while the other works."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_blend.commands.common.server import KEEP_MEMORY, Server, launched, stock_environment

NAMES = ("stock", "blend")

BLEND_FLAGS = ("--enable-blend", "--blend-when", "always")
"""By default a server blends only where its own times say that it wins: a benchmark wants to see."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How both servers are started.

    Attributes:
        model: Folder or name.
        dummy: Whether the model has no weights.
        flags: Further flags of both.
        blend_flags: Further flags of the blending one.
        num_tokens: KV that both should hold where it need not be shared with a GPU's weights.
        num_requests: That run at the same time there.
    """

    model: Path | str
    dummy: bool
    flags: Sequence[str]
    blend_flags: Sequence[str]
    num_tokens: int
    num_requests: int

    def common_flags(self, num_tokens: int | None) -> list[str]:
        """Return the flags of both servers.

        Args:
            num_tokens: Size of the KV pool; None for what fits a GPU, or on a CPU what is asked for.
        """
        size = []
        if not torch.cuda.is_available():
            num_tokens = num_tokens or self.num_tokens
            size = ["--max-running-requests", str(self.num_requests)]
        load = ["--load-format", "dummy"] if self.dummy else []
        if num_tokens is not None:
            load += ["--max-total-tokens", str(num_tokens)]
        return [
            *("--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "warning"),
            *size,
            *load,
            *self.flags,
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two running servers.

    Attributes:
        stock: SGLang alone, radix cache on.
        blend: With the plugin, and every prompt blended.
        num_tokens: KV that each can hold, the smaller one's.
    """

    stock: Server
    blend: Server
    num_tokens: int

    def __getitem__(self, name: str) -> Server:
        return {"stock": self.stock, "blend": self.blend}[name]


@contextmanager
def both(settings: ServerSettings, logs: Path) -> Iterator[Pair]:
    """Run both servers for the time of a with block.

    On a GPU one starts after the other: each takes its share of what it finds free, and the second
    one's KV pool is made as large as the first one's.

    Args:
        settings: How.
        logs: Folder for what they print.

    Raises:
        ServerError: One did not start.
    """
    on_gpu = torch.cuda.is_available()
    memory = () if on_gpu else KEEP_MEMORY
    num_tokens = None
    with ExitStack() as stack:
        flags = settings.common_flags(num_tokens)
        stock = stack.enter_context(
            launched(settings.model, flags, logs / "stock.log", (*memory, *stock_environment()))
        )
        if on_gpu:
            num_tokens = _count_tokens(stock.wait())
        flags = [*settings.common_flags(num_tokens), *BLEND_FLAGS, *settings.blend_flags]
        blend = stack.enter_context(launched(settings.model, flags, logs / "blend.log", memory))
        servers = stock.wait(), blend.wait()
        yield Pair(*servers, num_tokens=min(map(_count_tokens, servers)))


def _count_tokens(server: Server) -> int:
    """Return how many tokens of KV a server can hold."""
    return int(server.server_info()["max_total_num_tokens"])
