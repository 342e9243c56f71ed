"""What ``sgl-blend plan-storage`` reads: a model's config, a file of tiers, a profile's speed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from sgl_blend.commands.bench.shapes import full_config
from sgl_blend.errors import CommandError
from sgl_blend.tuning.storage_plan import Tier

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Number types of KV, and the bytes of one value."""

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Kind = TypeVar("_Kind")


class TierLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier of a file of tiers, in the units that vendors use; fields as in ``Tier``."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    gb_per_s: _Positive
    latency_ms: Annotated[float, msgspec.Meta(ge=0)]
    usd_per_gb_month: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    capacity_gb: _Positive | None = None
    servers: Annotated[int, msgspec.Meta(ge=1)] = 1
    loads_at_once: Annotated[float, msgspec.Meta(ge=1)] | None = None

    def to_tier(self) -> Tier:
        """Return it in bytes and seconds."""
        return Tier(
            name=self.name,
            bytes_per_s=self.gb_per_s * 1e9,
            latency_s=self.latency_ms / 1e3,
            usd_per_gb_month=self.usd_per_gb_month,
            capacity_bytes=None if self.capacity_gb is None else self.capacity_gb * 1e9,
            servers=self.servers,
            loads_at_once=self.loads_at_once,
        )


def read_tiers(path: Path) -> list[Tier]:
    """Read a JSON list of tiers.

    Raises:
        CommandError: It cannot be read, is not such a list, or names a tier twice or none.
    """
    lines = _decode(path, list[TierLine])
    if not lines:
        raise CommandError(f"{path}: expected at least one tier")
    seen = set()
    for line in lines:
        if line.name in seen:
            raise CommandError(f"{path}: two tiers are named {line.name!r}")
        if line.loads_at_once is not None and line.loads_at_once > line.servers:
            raise CommandError(
                f"{path}: tier {line.name!r} has loads_at_once {line.loads_at_once:g}, more than "
                f"its {line.servers} servers"
            )
        seen.add(line.name)
    return [line.to_tier() for line in lines]


@dataclass(frozen=True, slots=True)
class ModelKV:
    """Size of a model's KV.

    Attributes:
        bytes_per_token: Keys and values of all layers.
        num_layers: None if only the bytes are known.
    """

    bytes_per_token: int
    num_layers: int | None = None


class _Config(msgspec.Struct, frozen=True):
    """The fields of a Hugging Face config.json that KV depends on."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1)]
    num_attention_heads: Annotated[int, msgspec.Meta(ge=1)]
    hidden_size: Annotated[int, msgspec.Meta(ge=1)]
    num_key_value_heads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    head_dim: Annotated[int, msgspec.Meta(ge=1)] | None = None
    kv_lora_rank: int | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


def kv_of_shape(name: str, dtype: str | None) -> ModelKV:
    """Return the size of the KV of a published shape (bench/shapes.py)."""
    return _kv_of(msgspec.convert(full_config(name), _Config), name, dtype)


def kv_of_model(folder: Path, dtype: str | None) -> ModelKV:
    """Return the size of a model's KV.

    Args:
        folder: With a config.json.
        dtype: Of the KV, one of DTYPE_BYTES; by default the config's.

    Raises:
        CommandError: There is no such file, or it does not say what is needed.
    """
    return _kv_of(_decode(folder / "config.json", _Config), str(folder), dtype)


def _kv_of(config: _Config, name: str, dtype: str | None) -> ModelKV:
    if config.kv_lora_rank is not None:
        raise CommandError(f"{name} keeps no KV by head; give --kv-bytes-per-token")
    found = dtype or config.dtype or config.torch_dtype
    if found not in DTYPE_BYTES:
        raise CommandError(f"{name}: expected a --dtype of {', '.join(DTYPE_BYTES)}, got {found}")
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * heads * head_dim
    return ModelKV(values * DTYPE_BYTES[found], config.num_hidden_layers)


class _Tokens(msgspec.Struct, frozen=True):
    layer_rows: Annotated[int, msgspec.Meta(ge=1)]


class _Profile(msgspec.Struct, frozen=True):
    """The fields of what ``bench profile --json`` writes that speed follows from."""

    batch: Annotated[int, msgspec.Meta(ge=1)]
    ttft_s: _Positive
    tokens: _Tokens


def prefill_speed_of(path: Path, num_layers: int | None) -> float:
    """Return tokens per second from what ``sgl-blend bench profile --json`` wrote.

    A blended prefill computes other rows in each layer. So its rows in all layers, divided by the
    number of layers, count as tokens.

    Args:
        path: Of the file.
        num_layers: Of the model that was measured.

    Raises:
        CommandError: It is no such file, or the number of layers is not known.
    """
    if num_layers is None:
        raise CommandError("--profile needs --shape or --model-path, for the number of layers")
    found = _decode(path, _Profile)
    return found.batch * found.tokens.layer_rows / num_layers / found.ttft_s


def _decode(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as err:
        raise CommandError(f"cannot read {path}: {err.strerror}") from err
    except msgspec.DecodeError as err:
        raise CommandError(f"{path}: {err}") from err
