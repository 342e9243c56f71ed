"""One blended forward before the server takes requests: whatever cannot blend ends the start here.

The checks of compatibility.py look at the model from outside. Whether its layers let rows go only
shows when they run; the first blended request would find out and take the scheduler with it. So the
real fusor runs a prompt of a few made-up tokens, with an exact prefix, a chunk of which half is dropped
and a question, on slots that are free and are given back. Nothing of it reaches the tree or the
metrics.
"""

import time

import torch

from sgl_blend.engine.forward import next_token_logits
from sgl_blend.engine.models import layer_pools, model_class, runner_of
from sgl_blend.engine.objects import ForwardBatch, Scheduler
from sgl_blend.engine.trial_batch import borrowed_slots, prefill_batch
from sgl_blend.errors import UnsupportedError
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.plan import BlendPlan, ReusedSpan
from sgl_blend.fusion.sources import PoolSlots
from sgl_blend.kernels.delta_rope import clear_slots
from sgl_blend.policies import POLICIES
from sgl_blend.settings.config import BlendConfig

_HEAD = 2
_CHUNK = 8
_ROWS = 16
_RATIO = 0.5
ROWS_BELOW, ROWS_ABOVE = _ROWS - _HEAD, _ROWS - _HEAD - int(_RATIO * _CHUNK)
"""Rows of its layers up to the check layer, and of those above."""
_SELECTING_POLICY = "hkvd"
"""Stands in for a policy that drops its rows before the first layer and so asks less of a model."""


def run_trial(fusor: Fusor, scheduler: Scheduler, config: BlendConfig) -> float:
    """Run one blended forward and return its seconds; every rank must take part.

    Args:
        fusor: The server's.
        scheduler: SGLang's, idle.
        config: Its policy is tried.

    Raises:
        UnsupportedError: The model cannot be blended, or the pool is too small for a few tokens.
    """
    runner = runner_of(scheduler)
    model = model_class(runner)
    pools = layer_pools(runner)
    with borrowed_slots(scheduler, [_ROWS, _HEAD + _CHUNK]) as borrowed:
        if borrowed is None:
            raise UnsupportedError(
                f"enable_blend: the KV pool cannot hold a prompt of {_ROWS} tokens beside a chunk; "
                "raise --max-total-tokens"
            )
        slots, path = borrowed
        for pool in (*pools.k, *pools.v):
            clear_slots(pool, path)  # memory that nobody wrote to may hold what is no number
        with prefill_batch(scheduler, slots) as batch:
            begun = time.perf_counter()
            try:
                finite = _gives_finite_logits(fusor, batch, _plan(PoolSlots(path), config))
            # What a foreign model raises is not known; nothing of it is swallowed.
            except Exception as err:
                raise UnsupportedError(
                    f"enable_blend: models of class {model} cannot be blended: a trial with "
                    f"made-up tokens failed with {type(err).__name__}: {err}"
                ) from err
            seconds = time.perf_counter() - begun
    if not finite:
        raise UnsupportedError(
            f"enable_blend: models of class {model} cannot be blended: a trial with made-up tokens "
            "gave logits that are not finite"
        )
    return seconds


@torch.inference_mode()
def _gives_finite_logits(fusor: Fusor, batch: ForwardBatch, plan: BlendPlan) -> bool:
    output = fusor.run(batch, [plan.step(0, _ROWS)])
    # The look at the logits waits for the device, and so for its errors.
    return bool(next_token_logits(output).isfinite().all())


def _plan(path: PoolSlots, config: BlendConfig) -> BlendPlan:
    policy = config.blend_policy
    if POLICIES[policy].skips_full_layers or POLICIES[policy].fixed_ratio is not None:
        policy = _SELECTING_POLICY
    # The chunk stands one token after the exact prefix, so its keys are moved.
    return BlendPlan(
        exact=ReusedSpan(0, _HEAD, 0, path),
        spans=(ReusedSpan(_HEAD + 1, _HEAD + 1 + _CHUNK, _HEAD, path),),
        computed_from=_ROWS - 1,
        policy=policy,
        ratio=_RATIO,
    )
