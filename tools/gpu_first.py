"""The first ninety seconds on a GPU: the numbers that decide what to do next. No server is started.

    python -m tools.gpu_first --json first.json        # --tiny for a try on a CPU

1. Linear work of a layer by rows, replayed from a CUDA graph: which numbers of rows are cheap.
2. Host time of a layer that is launched kernel by kernel: is a blended forward bound by its host?
3. Attention of scattered rows by tile and number of splits: are the defaults the best ones?
4. The copy of KV beside two full layers: is it hidden?
5. The layers above the check layer, launched one by one and as one graph: what do graphs give?

The model is Llama-3.1-8B's shape in bfloat16, in plain torch: SGLang's own modules come on top of the
host's time. Everything found so far is written after each of the five.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sgl_blend.commands.common.records import describe_machine
from sgl_blend.kernels.delta_rope import LayerPools, copy_rotated_layers
from sgl_blend.kernels.ragged_attention import RaggedKernel, ragged_kernel
from sgl_blend.kernels.ragged_attention_tiles import TileShape, choose_tile

NUM_LAYERS = 32
ABOVE = 29
"""Layers above check layer 2."""
SYSTEM, QUESTION = 640, 64
"""Tokens in front of what is reused, the first chunk among them, and after it."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        distinct: Layers with weights of their own, beyond any cache.
        rows: Of which linear work is timed.
        prompts: Name, kept rows and positions of each prompt whose attention is timed.
        repeats: Of each measurement.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    distinct: int
    rows: tuple[int, ...]
    prompts: tuple[tuple[str, int, int], ...]
    repeats: int


FULL = Sizes(
    4096, 14336, 32, 8, 128, 8,
    (64, 128, 192, 256, 320, 384, 416, 448, 480, 512, 576, 640, 768, 896, 1024, 1280, 2048, 2624, 3136,
     3328, 8192),
    (("1.7k", 217, 1728), ("3.2k", 448, 3264), ("8k", 1153, 8192), ("16k", 2384, 16000),
     ("32k", 4760, 32000)),
    20,
)  # fmt: skip
TINY = Sizes(64, 128, 4, 2, 16, 2, (8, 16), (("tiny", 80, 768),), 3)
TILES = (
    TileShape(128, 64, 8, 3),
    TileShape(128, 64, 8, 4),
    TileShape(128, 128, 8, 2),
    TileShape(64, 64, 4, 3),
    TileShape(64, 128, 4, 2),
)
SPLITS = (1, 2, 3, 4, 8)
SPLIT_ROWS = 2000
"""More kept rows than this fill a device without splits."""

Attend = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class First:
    """The measurements; found holds what came of them, times in ms."""

    sizes: Sizes
    device: torch.device
    path: Path | None
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.layers = [self._make_layer() for _ in range(self.sizes.distinct)]
        rows = max(length for _, _, length in self.sizes.prompts) + 1
        shape = rows, self.sizes.kv_heads, self.sizes.head_dim
        self.k, self.v = (self._random(*shape) for _ in range(2))
        self.slots = torch.randperm(rows - 1, device=self.device) + 1

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _make_layer(self) -> list[torch.Tensor]:
        s = self.sizes
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        shapes = ((q + 2 * kv, s.hidden), (s.hidden, q), (2 * s.intermediate, s.hidden))
        return [
            self._random(*shape) * shape[1] ** -0.5
            for shape in (*shapes, (s.hidden, s.intermediate))
        ]

    def time(self, work: Callable[[], object]) -> float:
        """Return the median ms of some work, the device's part included."""
        for _ in range(3):
            work()
        times = []
        for _ in range(self.sizes.repeats):
            if self.device.type == "cuda":
                make_event: Any = torch.cuda.Event  # torch does not say its types
                start, stop = (make_event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                stop.record()
                stop.synchronize()
                times.append(float(start.elapsed_time(stop)))
            else:
                started = time.perf_counter()
                work()
                times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)

    def graph_of(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture some work; on a CPU it stays what it is."""
        if self.device.type != "cuda":
            return work
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return lambda: graph.replay()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _note(self, name: str, value: object, line: str) -> None:
        self.found[name] = value
        print(line, flush=True)

    def save(self) -> None:
        """Write down everything found so far."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    # --- what a layer is ---

    def _linears(self, x: torch.Tensor, layer: list[torch.Tensor]) -> torch.Tensor:
        s = self.sizes
        mixed = F.linear(F.linear(x, layer[0])[:, : s.heads * s.head_dim], layer[1])
        return F.linear(F.linear(mixed, layer[2])[:, : s.intermediate], layer[3])

    def _layer(
        self, x: torch.Tensor, rest: torch.Tensor, layer: list[torch.Tensor], attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch what a decoder layer launches."""
        s = self.sizes
        rest = rest + x
        projected = F.linear(F.rms_norm(rest, (s.hidden,)), layer[0])
        heads = projected[:, : s.heads * s.head_dim].view(-1, s.heads, s.head_dim)
        rest = rest + F.linear(attend(heads).reshape(len(x), -1), layer[1])
        both = F.linear(F.rms_norm(rest, (s.hidden,)), layer[2])
        gated = F.silu(both[:, : s.intermediate]) * both[:, s.intermediate :]
        return F.linear(gated, layer[3]), rest

    def _stack(self, x: torch.Tensor, count: int, attend: Attend) -> torch.Tensor:
        rest = x
        for number in range(count):
            x, rest = self._layer(x, rest, self.layers[number % len(self.layers)], attend)
        return x

    # --- the five ---

    def linear_by_rows(self) -> None:
        """Time the four products of a layer, one graph for each number of rows."""
        flop = 2 * sum(weight.numel() for weight in self.layers[0])
        for rows in self.sizes.rows:
            x = self._random(rows, self.sizes.hidden)

            def chain(x: torch.Tensor = x) -> None:
                for layer in self.layers:
                    x = self._linears(x, layer) * 0.1

            ms = self.time(self.graph_of(chain)) / len(self.layers)
            speed = flop * rows / ms / 1e9
            self._note(
                f"linear {rows}", ms, f"linear {rows:5d} rows {ms:8.4f} ms {speed:7.0f} TFLOP/s"
            )

    def host_by_layer(self) -> None:
        """Time how long the host needs to launch a layer."""
        x = self._random(4, self.sizes.hidden)  # few rows: the device is done at once
        times = []
        for _ in range(10):
            self._wait()
            started = time.perf_counter()
            self._stack(x, NUM_LAYERS, lambda heads: heads)
            times.append((time.perf_counter() - started) * 1e3 / NUM_LAYERS)
        ms = statistics.median(times)
        self._note("host a layer", ms, f"host, a layer of torch alone {ms:.4f} ms")

    def _prompt(self, kept: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and queries of a prompt's kept rows: scattered ones and the question."""
        reusable = torch.randperm(length - SYSTEM - QUESTION, device=self.device)
        chosen = reusable[: kept - QUESTION].sort().values + SYSTEM
        question = torch.arange(length - QUESTION, length, device=self.device)
        return torch.cat([chosen, question]), self._random(
            kept, self.sizes.heads, self.sizes.head_dim
        )

    def attention(self) -> None:
        """Time scattered attention in every way it can be cut."""
        s = self.sizes
        kernel = ragged_kernel(self.device)
        for name, kept, length in s.prompts:
            positions, q = self._prompt(kept, length)
            plan = kernel.plan(positions, [kept], [self.slots[:length]], self.dtype)
            scale = s.head_dim**-0.5
            flop = 4 * s.heads * s.head_dim * int((positions + 1).sum())

            def default(
                kernel: RaggedKernel = kernel, q: torch.Tensor = q, plan: Any = plan
            ) -> Any:
                return kernel.run(q, self.k, self.v, plan, scale=s.head_dim**-0.5)

            ways = {"default": default, **dict(self._tiles(q, plan, scale))}
            times = {way: self.time(work) for way, work in ways.items()}
            best = min(times, key=lambda way: times[way])
            for way, ms in times.items():
                line = f"attention {name:>4} {way:24} {ms:8.4f} ms {flop / ms / 1e9:6.0f} TFLOP/s"
                self._note(f"attention {name} {way}", ms, line)
            loss = times["default"] / times[best] - 1
            self._note(
                f"best {name}", best, f"attention {name:>4}: best {best}, default {loss:+.0%}"
            )

    def _tiles(
        self, q: torch.Tensor, plan: Any, scale: float
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield every tile and number of splits that starts on this device."""
        if self.device.type != "cuda":
            return
        from triton.errors import TritonError

        from sgl_blend.kernels.ragged_attention_triton import ragged_attention_triton

        for tile in dict.fromkeys((choose_tile(self.sizes.head_dim, self.dtype), *TILES)):
            for splits in SPLITS:
                if splits > 1 and len(q) > SPLIT_ROWS:
                    continue
                name = (
                    f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages} / {splits}"
                )

                def work(tile: TileShape = tile, splits: int = splits) -> Any:
                    return ragged_attention_triton(
                        q, self.k, self.v, plan, scale=scale, tile=tile, num_splits=splits
                    )

                try:
                    work()
                except (TritonError, RuntimeError) as err:  # such as too much shared memory
                    print(f"attention {name}: {str(err).splitlines()[0]}")
                    continue
                yield name, work

    def copy_beside(self) -> None:
        """Time the copy of a prompt's KV alone and beside two full layers."""
        s = self.sizes
        tokens, rows = (2560, 2624) if self.device.type == "cuda" else (64, 64)
        buffers = [
            self._random(2 * tokens + 1, s.kv_heads, s.head_dim) for _ in range(2 * (ABOVE + 1))
        ]
        pools = LayerPools(tuple(buffers[: ABOVE + 1]), tuple(buffers[ABOVE + 1 :]))
        source, dest = (torch.randperm(2 * tokens, device=self.device) + 1).chunk(2)
        angle = torch.rand(tokens, s.head_dim // 2, device=self.device)
        x = self._random(rows, s.hidden)

        def copy() -> None:
            copy_rotated_layers(
                pools, range(ABOVE), source, dest, angle.cos(), angle.sin(), neox=True
            )

        full = self.graph_of(
            lambda: [self._linears(x, self.layers[n % s.distinct]) for n in range(2)]
        )
        alone, layers = self.time(copy), self.time(full)
        both = self.time(lambda: self._beside(copy, full))
        # On a CPU nothing runs beside anything.
        share = f"{1 - (both - layers) / alone:.0%}" if self.device.type == "cuda" else "none"
        self._note(
            "copy", {"alone": alone, "two layers": layers, "both": both},
            f"copy {alone:.3f} ms, two full layers {layers:.3f} ms, both {both:.3f} ms: "
            f"{share} of the copy is hidden",
        )  # fmt: skip

    def _beside(self, copy: Callable[[], object], full: Callable[[], object]) -> None:
        if self.device.type != "cuda":
            copy()
            full()
            return
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy()
        full()
        torch.cuda.current_stream().wait_stream(side)

    def graph_of_layers(self) -> None:
        """Time the layers above the check layer, one by one and as a graph."""
        s = self.sizes
        kernel = ragged_kernel(self.device)
        _, kept, length = s.prompts[min(1, len(s.prompts) - 1)]
        positions, _ = self._prompt(kept, length)
        plan = kernel.plan(positions, [kept], [self.slots[:length]], self.dtype)
        x = self._random(kept, s.hidden)

        def attend(heads: torch.Tensor) -> torch.Tensor:
            return kernel.run(heads, self.k, self.v, plan, scale=s.head_dim**-0.5)

        def layers() -> torch.Tensor:
            return self._stack(x, ABOVE, attend)

        eager, graph = self.time(layers), self.time(self.graph_of(layers))
        self._note(
            "layers above", {"rows": kept, "eager": eager, "graph": graph},
            f"{ABOVE} layers of {kept} rows: one by one {eager:.3f} ms, as a graph {graph:.3f} ms",
        )  # fmt: skip


def main() -> int:
    """Measure the five, each of them whatever becomes of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, for a try on a CPU")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --tiny runs everything small on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # so little work is slower with more of them
    failed = 0
    with torch.inference_mode():
        first = First(TINY if args.tiny else FULL, device, args.json)
        first._note("machine", str(describe_machine()), str(describe_machine()))
        for step in (
            first.linear_by_rows,
            first.host_by_layer,
            first.graph_of_layers,
            first.copy_beside,
            first.attention,
        ):
            try:
                step()
            except RuntimeError as err:  # of CUDA; the others may still be measured
                failed += 1
                print(f"{step.__name__} failed: {err}", flush=True)
            first.save()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
