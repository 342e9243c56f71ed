"""The blended forward of a loaded model: checked, tried and measured."""

import logging
from dataclasses import dataclass
from typing import Any

from sgl_blend.engine.adapters import serves_adapters
from sgl_blend.engine.compatibility import check_adapters, check_layers, check_model, check_runner
from sgl_blend.engine.facts import ServerFacts
from sgl_blend.engine.graph_capture import CudaRecorder, graphs_may_be_paused
from sgl_blend.engine.layer_loop import lend_layer_loop
from sgl_blend.engine.models import (
    decoder_layers,
    layer_pools,
    longest_prompt,
    model_dtype,
    query_heads,
)
from sgl_blend.engine.objects import Scheduler
from sgl_blend.engine.rotary import read_rotary_embedding
from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.fusion.fusor import Fusor
from sgl_blend.fusion.graphs import RowBucketGraphs
from sgl_blend.fusion.layouts.mha import MHALayout
from sgl_blend.fusion.memory import DeviationMemory
from sgl_blend.fusion.plan import LayerSplit
from sgl_blend.fusion.rotation import Rotation, check_rotation, rotation_errors
from sgl_blend.fusion.row_sizes import NO_SIZES, RowSizes
from sgl_blend.kernels.ragged_attention import RaggedKernel
from sgl_blend.settings.config import BlendConfig
from sgl_blend.tuning.cost_model import CostModel, measure
from sgl_blend.tuning.kernel_choice import choose_kernel, fixed_kernel
from sgl_blend.tuning.row_sizes import measure_sizes
from sgl_blend.tuning.trial import ROWS_ABOVE, ROWS_BELOW, run_trial
from sgl_blend.tuning.warm_up import warm_up

logger = logging.getLogger(__name__)

_TIMED_TRIALS = 3
_MEMORIES = 4
"""How many times the tokens of the pool deviations are remembered of."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """The blended forward of a model, and what was measured of it.

    Attributes:
        fusor: Runs it.
        memory_tokens: Of how many tokens it can remember deviations.
        cost_model: When it is faster than a full prefill; None if that does not count.
        times: What a prefill takes; None if nothing goes by it.
        sizes: Numbers of rows that it multiplies well.
        rotation: Of its keys.
        described: For /server_info.
    """

    fusor: Fusor
    memory_tokens: int
    cost_model: CostModel | None
    times: CostModel | None
    sizes: RowSizes
    rotation: Rotation
    described: dict[str, Any]


def make_fusion(
    config: BlendConfig, scheduler: Scheduler, facts: ServerFacts, tp_group: TPGroup
) -> Fusion:
    """Check the model, choose a kernel, try the forward and measure it."""
    runner = facts.runner
    check_model(runner)
    check_runner(runner, config.blend_check_layer)
    lend_layer_loop(runner)
    layers, dtype = decoder_layers(runner), model_dtype(runner)
    check_layers(layers)
    check_adapters(runner, layers)
    rotation = Rotation(read_rotary_embedding(layers))
    errors = rotation_errors(rotation, dtype, longest_prompt(runner))
    if not config.blend_eval:  # an evaluation is to see how wrong it is
        check_rotation(errors, dtype)
    split = LayerSplit(config.blend_check_layer, len(layers))
    pools = layer_pools(runner)
    layout = MHALayout(pools, neox=rotation.neox)
    heads = query_heads(layers[-1])
    kernel = choose_kernel(config.blend_attention, pools, heads, dtype, tp_group)
    # Two bytes a token, a hundred thousandth of its KV: room for chunks that were evicted, too.
    memory = DeviationMemory(_MEMORIES * pools.v[0].shape[0], pools.v[0].device)
    graphs = _graphs(config, scheduler, facts, split, kernel, tp_group)
    fusor = Fusor(runner, rotation, split, layout, kernel, tp_group, memory, graphs)
    run_trial(fusor, scheduler, config)
    if layout.is_on_gpu:
        warm_up(
            runner,
            layers[-1],
            pools,
            kernel,
            rotation,
            facts.most_requests,
            rounds=config.blend_store_profile is not None,
        )
    if graphs is not None:
        graphs.capture()
        if graphs.buckets:
            run_trial(fusor, scheduler, config)  # once more, now with them
    may_depend = config.blend_on_miss != "build"
    goes_by_times = config.blend_when == "faster" or config.blend_store_profile is not None
    times = None
    if may_depend and goes_by_times:
        measured = measure(runner, layers[-1], pools, kernel, rotation, tp_group)
        few_s = [run_trial(fusor, scheduler, config) for _ in range(_TIMED_TRIALS)]
        times = CostModel(measured, split).with_forward(
            tp_group.agree(few_s), below=ROWS_BELOW, above=ROWS_ABOVE
        )
    cost_model = times if config.blend_when == "faster" else None
    sizes = NO_SIZES
    if may_depend:  # else an answer may not depend on how fast this machine was
        sizes = measure_sizes(runner, layers[-1], pools.v[0].device, tp_group)
    ratio = config.blend_recompute_ratio
    return Fusion(
        fusor,
        len(memory),
        cost_model,
        times,
        sizes,
        rotation,
        {
            "attention": kernel.name,
            "dtype": str(dtype).removeprefix("torch."),
            "kv_dtype": str(pools.k[0].dtype).removeprefix("torch."),
            "least_rows": None if cost_model is None else cost_model.least_rows(ratio),
            "row_sizes": list(sizes.sizes),
            "rotation_errors": {str(delta): error for delta, error in errors.items()},
        },
    )


def _graphs(
    config: BlendConfig,
    scheduler: Scheduler,
    facts: ServerFacts,
    layers: LayerSplit,
    kernel: RaggedKernel,
    tp_group: TPGroup,
) -> RowBucketGraphs | None:
    """Return the graphs of a server, not captured yet; None where there is nothing to capture."""
    fixed = fixed_kernel(kernel)
    if config.blend_cuda_graph == "off" or fixed is None or not fixed.can_be_captured:
        return None
    if serves_adapters(facts.runner):
        return None  # which rows are an adapter's changes with every batch
    if graphs_may_be_paused(facts.args):
        logger.info("sgl-blend: no CUDA graphs with SGLANG_MEMORY_SAVER_CUDA_GRAPH")
        return None
    return RowBucketGraphs(scheduler, layers, fixed, CudaRecorder(tp_group), tp_group)
