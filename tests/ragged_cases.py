"""Rows of several requests scattered over a pool, and dense attention to compare with."""

from dataclasses import dataclass

import torch

from sgl_blend.kernels.ragged_attention import RaggedKernel, TorchRagged

NUM_SLOTS = 2_000


@dataclass
class Rows:
    """What plan_ragged takes."""

    positions: torch.Tensor
    num_rows: list[int]
    kv_slots: list[torch.Tensor]


@dataclass
class Case:
    """One call of ragged_attention: rows of several requests scattered over a pool."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    batch: Rows
    scale: float

    def run(self, kernel: RaggedKernel | None = None) -> torch.Tensor:
        rows, kernel = self.batch, kernel or TorchRagged()
        plan = kernel.plan(rows.positions, rows.num_rows, rows.kv_slots, self.q.dtype)
        return kernel.run(self.q, self.k_pool, self.v_pool, plan, scale=self.scale)

    def to(self, dtype: torch.dtype) -> "Case":
        q, k_pool, v_pool = (x.to(dtype) for x in (self.q, self.k_pool, self.v_pool))
        return Case(q, k_pool, v_pool, self.batch, self.scale)

    def on(self, device: torch.device) -> "Case":
        q, k_pool, v_pool = (x.to(device) for x in (self.q, self.k_pool, self.v_pool))
        rows = self.batch
        slots = [x.to(device) for x in rows.kv_slots]
        batch = Rows(rows.positions.to(device), rows.num_rows, slots)
        return Case(q, k_pool, v_pool, batch, self.scale)


def make_case(
    counts: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    v_head_dim: int | None = None,
    seed: int = 0,
) -> Case:
    """Choose counts[i] rows of request i at random; the last one is often the last position."""
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    positions, kv_slots = [], []
    # Slots of the requests are interleaved at random: a pool after much traffic.
    free = torch.randperm(NUM_SLOTS, generator=g)
    for count in counts:
        seq_len = count + int(torch.randint(0, 1 + count // 2, (1,), generator=g))
        positions.append(torch.randperm(seq_len, generator=g)[:count].sort().values)
        kv_slots.append(free[:seq_len])
        free = free[seq_len:]
    q = torch.randn(sum(counts), num_heads, head_dim, generator=g)
    k_pool = torch.randn(NUM_SLOTS, num_kv_heads, head_dim, generator=g)
    v_pool = torch.randn(NUM_SLOTS, num_kv_heads, v_head_dim or head_dim, generator=g)
    batch = Rows(torch.cat(positions), counts, kv_slots)
    # Not the usual 1 / sqrt(head_dim), which is what attention takes when it is told nothing.
    return Case(q, k_pool, v_pool, batch, scale=1.7 * head_dim**-0.5)


def dense(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Softmax over all of a request's KV with a mask by position, one query head at a time."""
    q, k_pool, v_pool = (x.to(dtype) for x in (case.q, case.k_pool, case.v_pool))
    ratio = q.shape[1] // k_pool.shape[1]
    out = torch.empty(*q.shape[:2], v_pool.shape[-1], dtype=dtype, device=q.device)
    first = 0
    for count, slots in zip(case.batch.num_rows, case.batch.kv_slots, strict=True):
        position = case.batch.positions[first : first + count]
        hidden = torch.arange(len(slots), device=q.device)[None, :] > position[:, None]
        for head in range(q.shape[1]):
            k, v = k_pool[slots, head // ratio], v_pool[slots, head // ratio]
            scores = (q[first : first + count, head] @ k.T) * case.scale
            weight = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[first : first + count, head] = weight @ v
        first += count
    return out
