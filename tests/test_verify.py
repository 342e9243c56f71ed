"""``sgl-blend verify``: what it measures, what it suggests, and builds that it must refuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import model_folder
from programs import run_program
from tiny_models import make_text_model

from sgl_blend.config import BlendConfig
from sgl_blend.evaluation.verify import Exactness, Verdict, bundled_items, find_cheapest

__all__ = ["model_folder"]  # fixture

ROOT = Path(__file__).parents[1]


def row(kl: float, cost: float | None, check_layer: int | None = 1) -> Any:
    return SimpleNamespace(kl=kl, layer_rows_share=cost, check_layer=check_layer)


def exactness(**changes: Any) -> Exactness:
    facts = {
        "rotation_errors": {1: 1e-7, 1000: 1e-7},
        "dtype": "float32",
        "noise_kl": 0.0,
        "ratio_one_kl": 1e-9,
        "architecture": "abc",
    }
    return Exactness(**{**facts, **changes})


def test_the_cheapest_setting_within_the_bound_is_found() -> None:
    full, good, cheap, bad = row(0, 1.0, None), row(0.05, 0.4), row(0.1, 0.3), row(0.2, 0.1)
    found = [find_cheapest([full, good, cheap, bad], bound) for bound in (0.1, 0.07, 0.01)]
    assert found == [cheap, good, None]
    assert find_cheapest([full, row(0.0, None)], 0.1) is None


def test_of_equally_cheap_settings_the_nearer_one_is_found() -> None:
    near, far = row(0.01, 0.3), row(0.02, 0.3)
    assert find_cheapest([far, near], 0.1) is near


def test_an_exact_engine_passes() -> None:
    assert exactness().why_not() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rotation_errors": {1: 1e-7, 1000: 0.1}}, "keys moved by 1000 tokens are off by 1.0e-01"),
        ({"ratio_one_kl": 2e-6}, "with every token recomputed the answer is 2.0e-06 nats"),
        ({"ratio_one_kl": float("nan")}, "with every token recomputed"),
        ({"dtype": "float32", "ratio_one_kl": 1e-3, "noise_kl": 1e-2}, "more than 1.0e-06"),
        ({"dtype": "bfloat16", "ratio_one_kl": 1e-3, "noise_kl": 1e-4}, "more than 2.0e-04"),
    ],
)
def test_an_engine_that_is_not_exact_is_refused(changes: dict[str, Any], sentence: str) -> None:
    why = exactness(**changes).why_not()
    assert why is not None
    assert sentence in why
    assert why.endswith("this model must not be blended")


def test_in_bfloat16_ratio_one_may_differ_by_the_noise() -> None:
    changed = exactness(
        dtype="bfloat16", rotation_errors={1: 5e-3}, ratio_one_kl=1e-3, noise_kl=6e-4
    )
    assert changed.why_not() is None


def test_a_refused_model_has_no_profile() -> None:
    with pytest.raises(ValueError, match="no setting is acceptable"):
        Verdict(exactness(), [], None, None, "no").profile(0.1)


def test_the_bundled_prompts_shuffle_their_documents() -> None:
    items = bundled_items()
    assert len(items) == 16
    assert len({item.chunks for item in items}) == 16
    assert all(len(set(item.chunks)) == 5 for item in items)
    # A document stands in different places, so its KV is moved.
    places = {
        item.chunks.index(items[0].chunks[0]) for item in items if items[0].chunks[0] in item.chunks
    }
    assert len(places) >= 4


# --- through the engine ---


def run_verify(model: Path, python_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do; an engine takes the process's other children with it."""
    command = [sys.executable, "-m", "sgl_blend", "verify", "--model-path", str(model), *flags]
    return run_program(command, python_path, timeout_s=600, PYTHONPATH=str(python_path))


@pytest.mark.engine
def test_a_model_is_verified_and_its_profile_is_served(model_folder: Path, tmp_path: Path) -> None:
    model = make_text_model("llama-llama3", model_folder)
    profile, facts = tmp_path / "profile.json", tmp_path / "facts.json"
    flags = ["--limit", "3", "--max-kl", "1000", "--ratios", "0.15,0.5", "--policies", "hkvd"]
    flags += ["--check-layers", "1", "--profile", str(profile), "--json", str(facts)]

    done = run_verify(model, ROOT, *flags)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("this model may be blended")
    found = json.loads(facts.read_text())
    assert found["passed"] is True
    assert 0 < found["ratio_one_kl"] <= 1e-6  # it went through the blended layers
    assert max(found["rotation_errors"].values()) < 1e-6
    assert found["cheapest"]["ratio"] == 0.15
    config = BlendConfig(enable_blend=True, blend_profile=str(profile)).with_profile()
    assert config.blend_recompute_ratio == 0.15


SABOTAGE = {
    "sign flipped": (
        "kernels/delta_rope.py",
        "sin = new_sin * old_cos - new_cos * old_sin",
        "sin = new_cos * old_sin - new_sin * old_cos",
    ),
    "off by one position": (
        "rope.py",
        "(self.embedding.cos_sin_cache, old_position, new_position)",
        "(self.embedding.cos_sin_cache, old_position, new_position - 1)",
    ),
    "rope scaling dropped": (
        "rope.py",
        "(self.embedding.cos_sin_cache, old_position, new_position)",
        "(__import__('sglang').srt.layers.rotary_embedding.base.RotaryEmbedding("
        "self.embedding.head_size, self.embedding.rotary_dim, len(self.embedding.cos_sin_cache), "
        "10000, self.neox, torch.float32).cos_sin_cache, old_position, new_position)",
    ),
}


# Each takes two engines; `make verify-demo` refuses a sabotaged build in CI as well.
@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        "sign flipped",
        pytest.param("off by one position", marks=pytest.mark.slow),
        pytest.param("rope scaling dropped", marks=pytest.mark.slow),
    ],
)
def test_a_sabotaged_build_is_refused(model_folder: Path, tmp_path: Path, name: str) -> None:
    file, right, wrong = SABOTAGE[name]
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sgl_blend", tmp_path / "sgl_blend", ignore=ignore)
    path = tmp_path / "sgl_blend" / file
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    model = make_text_model("llama-llama3", model_folder)

    done = run_verify(model, tmp_path, "--limit", "2")

    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("this model must not be blended")
    assert "off by" in done.stdout.splitlines()[-1]
