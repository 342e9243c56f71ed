"""A digest of the weights that a model runner has loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice

import msgspec
import torch

from sgl_blend.engine.objects import ModelRunner

SAMPLE = 4096
"""Elements of each tensor that are looked at, at most."""

_TENSORS_PER_TRANSFER = 128


def weights_digest(runner: ModelRunner) -> str:
    """Digest the weights of this rank: 32 hexadecimal characters.

    Of every parameter and every persistent buffer it sees the name, the shape, the dtype and up to
    4,096 elements, at equal distances from the first on. Where the weights were loaded from does not
    count. A tensor of up to 4,096 elements is seen as a whole.

    It does not see an edit that touches no sampled element, such as one changed weight in a large
    matrix. Training, merging and quantising touch all. Nor does it see tensors that are neither
    parameters nor persistent buffers (scales kept as plain attributes, tables of rotary embeddings),
    or settings that change the result of the same weights.

    The device gathers, and sends some 128 tensors at a time: a few MB for a model of 8B parameters.
    """
    return digest_of(runner.model)


@torch.no_grad()
def digest_of(model: torch.nn.Module) -> str:
    """Digest the weights of a module, as weights_digest does."""
    tensors = iter(sorted(model.state_dict().items()))
    digest = sha256()
    while group := list(islice(tensors, _TENSORS_PER_TRANSFER)):
        facts = [(name, list(t.shape), str(t.dtype)) for name, t in group]
        digest.update(msgspec.msgpack.encode(facts))
        for sample in _to_host([_sample(tensor) for _, tensor in group]):
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]


def _to_host(samples: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Bring samples to the host, in one transfer for each device they are on."""
    devices = dict.fromkeys(sample.device for sample in samples)
    for device in devices:
        yield torch.cat([sample for sample in samples if sample.device == device]).cpu()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of up to 4,096 elements of a tensor: uint8 [n]."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    step = _step(tensor)
    if tensor.is_contiguous():
        chosen = tensor.view(-1)[::step]
    else:  # which to flatten would copy all of it
        flat = torch.arange(0, tensor.numel(), step, device=tensor.device)
        chosen = tensor[torch.unravel_index(flat, tensor.shape)]
    return chosen.contiguous().view(torch.uint8)


def _step(tensor: torch.Tensor) -> int:
    """Return the distance between sampled elements.

    It shares no divisor with the length of a row. So the samples are spread over all columns.
    """
    step = max(1, -(-tensor.numel() // SAMPLE))
    while math.gcd(step, tensor.shape[-1]) > 1:
        step += 1
    return step
