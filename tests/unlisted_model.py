"""Start the real scheduler on a tiny model of a class that was never blended.

SGLang asks for other attention backends when it reads of this architecture, so the model is loaded
under the name of a listed one. `listed` puts its class on the allow-list.
"""

import json
import os
from pathlib import Path

from tiny_models import COMMON, THETA


def make_exaone4(path: Path) -> None:
    """Write a model whose norm after attention takes one argument and adds no residual."""
    import transformers

    rope = {**THETA, "rope_type": "default"}
    kinds = ["full_attention"] * int(COMMON["num_hidden_layers"])
    config = transformers.Exaone4Config(
        **COMMON, rope_parameters=rope, sliding_window=None, layer_types=kinds, pad_token_id=0
    )
    transformers.Exaone4ForCausalLM(config).save_pretrained(path)
    written = path / "config.json"
    settings = {**json.loads(written.read_text()), "architectures": ["LlamaForCausalLM"]}
    written.write_text(json.dumps(settings))


def start_unlisted(folder: Path, *, listed: bool) -> None:
    """Start the scheduler and end the process; to be run in one of its own."""
    from harness import Driver, engine_settings
    from sglang.srt.models.exaone4 import Exaone4ForCausalLM
    from sglang.srt.models.registry import ModelRegistry

    from sgl_blend.engine import compatibility

    make_exaone4(folder)
    ModelRegistry.models["LlamaForCausalLM"] = Exaone4ForCausalLM
    if listed:
        compatibility.MODELS = {**compatibility.MODELS, "Exaone4ForCausalLM": "listed here"}
    settings = {"model_path": str(folder), "enable_blend": True, "blend_check_layer": 1}
    Driver(engine_settings(settings))
    os._exit(0)  # its threads would go on
