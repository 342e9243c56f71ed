"""Engines that store chunks in few bits, by a profile of the tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from codec_cases import profile_of
from engines import StartEngine
from harness import Driver
from stored_chunks import CHUNKS, SYSTEM, ask, flush
from stored_files import PAGE, settings

from sgl_blend.engine.models import decoder_layers
from sgl_blend.engine.rotary import read_rotary_embedding
from sgl_blend.engine.weights import weights_digest
from sgl_blend.radix_ext.namespaces import rounded_salt_of
from sgl_blend.storage.codec.coder import Rotation
from sgl_blend.storage.codec.levels import write_profile
from sgl_blend.storage.codec.quantiser import turn
from sgl_blend.storage.container import PageFormat

Measured = tuple[list[Any], str, torch.Tensor, bool]


def _measure(driver: Driver, salt: str) -> Measured:
    """Return KV of the chunks, the digest of the weights, and how keys are rotated."""
    flush(driver)
    ask(driver, salt)
    own = driver.chunk_salt(salt)
    kv = [driver.kv(SYSTEM + chunk, own) for chunk in CHUNKS]
    runner = driver.scheduler.tp_worker.model_runner
    embedding = read_rotary_embedding(decoder_layers(runner))
    return kv, weights_digest(runner), embedding.table.float().cpu(), embedding.neox


@pytest.fixture(scope="module")
def profile(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a profile of the tiny model, from KV that its engine computed."""
    kv, weights, rows, neox = start_engine(**settings()).call(_measure, "measured")
    turned = Rotation(rows, neox)
    pages = []
    for layers in kv:
        page = torch.stack(
            [
                torch.stack([k.float() for k, _ in layers]),
                torch.stack([v.float() for _, v in layers]),
            ]
        )
        cos, sin = turned.tables(0, page.shape[2])
        for layer in range(page.shape[1]):
            page[0, layer] = turn(page[0, layer], cos, -sin, neox=neox)
        pages.append(page)
    _, layers, tokens, heads, dim = pages[0].shape
    form = PageFormat("float32", layers, tokens, heads, dim)
    path = tmp_path_factory.mktemp("profile") / "model.sgbprofile"
    write_profile(profile_of(form, weights=weights, pages=pages), path)
    return path


def coded(profile: Path, levels: str, **more: Any) -> dict[str, Any]:
    return settings(blend_store_profile=str(profile), blend_store_levels=levels, **more)


def rounded_kv(driver: Driver, salt: str) -> list[Any]:
    """Return KV of a chunk as it came from storage."""
    return driver.kv(SYSTEM + CHUNKS[1], rounded_salt_of(driver.chunk_salt(salt)))


def of_chunk(kv: list[Any]) -> list[Any]:
    """Leave out the pages of the build prefix, which come at the coarsest level: nobody reads them."""
    start = len(SYSTEM) // PAGE * PAGE
    return [tuple(part[start:] for part in layer) for layer in kv]
