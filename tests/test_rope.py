from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory, get_rope
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding

from sgl_blend.engine.rotary import RotaryEmbedding as OwnEmbedding
from sgl_blend.engine.rotary import read_rotary_embedding
from sgl_blend.errors import UnsupportedError
from sgl_blend.fusion import rotation as rope_module
from sgl_blend.fusion.rotation import (
    Rotation,
    check_rotation,
    rotation_errors,
)
from sgl_blend.kernels.delta_rope import delta_rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def make_rope(
    scaling: dict[str, Any] | None = None, *, neox: bool = True, base: int = 10_000
) -> Any:
    return get_rope(64, 64, 1024, base, neox, scaling, torch.float32)


def layers_of(*embeddings: Any) -> list[Any]:
    return [SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rope)) for rope in embeddings]


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=str)
def test_a_rotation_that_depends_on_the_position_alone_is_read(
    scaling: dict[str, Any] | None, neox: bool
) -> None:
    rope = make_rope(scaling, neox=neox)

    rotation = Rotation(read_rotary_embedding(layers_of(rope, rope, rope)))

    assert rotation.embedding.table is rope.cos_sin_cache
    assert rotation.neox is neox


def test_the_table_is_read_anew_each_time() -> None:
    # SGLang extends its table for longer prompts and casts it, by putting another in its place.
    rope = RotaryEmbedding(64, 64, 128, 10_000, True, torch.float32)
    rotation = Rotation(read_rotary_embedding(layers_of(rope)))
    position = torch.tensor([100]), torch.tensor([120])
    before = rotation.between(*position)

    rope._ensure_cos_sin_cache_length(5000)
    after = rotation.between(*position)
    beyond = rotation.between(torch.tensor([4000]), torch.tensor([4020]))

    for a, b in ((before, after), (before, beyond)):
        torch.testing.assert_close(a, b, rtol=0, atol=20 * 5000 * torch.finfo(torch.float32).eps)
    assert torch.equal(before[0], after[0])


def test_the_rotation_turns_forward_when_the_chunk_moves_forward() -> None:
    rotation = Rotation(read_rotary_embedding(layers_of(make_rope())))

    cos, sin = rotation.between(torch.tensor([3]), torch.tensor([4]))

    # The first frequency is one radian per position.
    one = torch.ones(())
    torch.testing.assert_close(cos[0, 0], one.cos())
    torch.testing.assert_close(sin[0, 0], one.sin())


def test_a_rotation_that_depends_on_the_prompts_length_is_refused() -> None:
    rope = make_rope(DYNAMIC)
    with pytest.raises(UnsupportedError, match=r"rotary embedding DynamicNTK.* is not supported"):
        read_rotary_embedding(layers_of(rope))


def test_every_kind_that_is_not_known_is_refused() -> None:
    kinds = {name for name in vars(factory) if name.endswith("RotaryEmbedding")}
    accepted = {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
    assert accepted < kinds
    for name in kinds - accepted:
        stranger = type(name, (RotaryEmbedding,), {"__init__": lambda self: None})()
        with pytest.raises(UnsupportedError, match=f"rotary embedding {name} is not supported"):
            read_rotary_embedding(layers_of(stranger))


@pytest.mark.parametrize(
    "layer",
    [SimpleNamespace(), SimpleNamespace(self_attn=object())],
    ids=["no attention", "no rotation"],
)
def test_a_model_without_rotary_embedding_is_refused(layer: Any) -> None:
    with pytest.raises(UnsupportedError, match="rotary embedding NoneType is not supported"):
        read_rotary_embedding([layer])


def test_layers_that_rotate_differently_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="decoder layers with different rotary embeddings"):
        read_rotary_embedding(layers_of(make_rope(), make_rope(base=500_000)))


def test_a_layer_in_the_middle_without_rotation_is_refused() -> None:
    rope = make_rope()
    with pytest.raises(UnsupportedError, match="decoder layers with different rotary embeddings"):
        read_rotary_embedding(layers_of(rope, None, rope))


def test_a_table_that_starts_elsewhere_is_refused() -> None:
    rope = RotaryEmbedding(64, 64, 64, 10_000, True, torch.float32, position_start=8)
    with pytest.raises(UnsupportedError, match="RotaryEmbedding without a plain cos/sin table"):
        read_rotary_embedding(layers_of(rope))


def test_several_linear_scalings_in_one_table_are_refused() -> None:
    rope = LinearScalingRotaryEmbedding(64, 64, 64, 10_000, True, [1.0, 4.0], torch.float32)
    with pytest.raises(UnsupportedError, match="linear RoPE scaling with more than one factor"):
        read_rotary_embedding(layers_of(rope))


# --- the check by numbers ---

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=str)
def test_moved_keys_agree_with_the_models_own_rotation(
    scaling: dict[str, Any] | None, neox: bool, dtype: torch.dtype
) -> None:
    rope = get_rope(64, 64, 40_000, 10_000, neox, scaling, dtype)

    rows = rope.cos_sin_cache.shape[0]
    errors = rotation_errors(Rotation(read_rotary_embedding(layers_of(rope))), dtype, rows + 7)

    limit = rows - 62  # 61 is the farthest position that the check starts from
    assert list(errors) == [delta for delta in (1, 1_000, 30_000) if delta < limit] + [limit]
    assert all(0 < error < torch.finfo(dtype).eps for error in errors.values())
    check_rotation(errors, dtype)


def test_no_key_is_moved_farther_than_the_longest_prompt() -> None:
    rope = get_rope(64, 64, 40_000, 10_000, True, None, torch.float32)
    errors = rotation_errors(Rotation(read_rotary_embedding(layers_of(rope))), torch.float32, 5_000)
    assert list(errors) == [1, 1_000, 5_000 - 62]


def _without_scaling(rotation: Rotation, old: Any, new: Any) -> Any:
    plain = RotaryEmbedding(64, 64, 40_000, 10_000, rotation.neox, torch.float32)
    return delta_rope_tables(plain.cos_sin_cache, old, new)


def _backwards(rotation: Rotation, old: Any, new: Any) -> Any:
    cos, sin = delta_rope_tables(rotation.embedding.table, old, new)
    return cos, -sin


def _one_too_far(rotation: Rotation, old: Any, new: Any) -> Any:
    last = rotation.embedding.table.shape[0] - 1
    return delta_rope_tables(rotation.embedding.table, old, (new + 1).clamp(max=last))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sabotage", [_without_scaling, _backwards, _one_too_far])
def test_a_wrong_rotation_is_refused(
    monkeypatch: pytest.MonkeyPatch, sabotage: Any, dtype: torch.dtype
) -> None:
    rope = get_rope(64, 64, 40_000, 10_000, True, LLAMA3, dtype)
    monkeypatch.setattr(rope_module.Rotation, "between", sabotage)

    errors = rotation_errors(Rotation(read_rotary_embedding(layers_of(rope))), dtype, 40_000)

    with pytest.raises(UnsupportedError, match=r"off by .* this model must not be blended"):
        check_rotation(errors, dtype)


def test_neighbours_taken_for_halves_are_refused() -> None:
    embedding = OwnEmbedding(make_rope(neox=True))
    embedding.neox = False
    rotation = Rotation(embedding)
    with pytest.raises(UnsupportedError, match="must not be blended"):
        check_rotation(rotation_errors(rotation, torch.float32, 2000), torch.float32)


def test_an_error_that_is_no_number_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="moved by 7 tokens are off by nan"):
        check_rotation({7: float("nan")}, torch.float32)
