"""``sgl-blend verify``: what it measures, what it suggests, and builds that it must refuse."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import StartEngine, model_folder, start_engine
from forked import run_program
from harness import Driver
from tiny_models import make_text_model

from sgl_blend.commands.evaluation.bundled import bundled_digest, bundled_items
from sgl_blend.commands.evaluation.cuts import KINDS
from sgl_blend.commands.evaluation.judge import Bounds, Judgement
from sgl_blend.commands.evaluation.prompts import Templates
from sgl_blend.commands.evaluation.verify import Exactness, Plan, Verdict
from sgl_blend.settings.config import BlendConfig
from sgl_blend.settings.preset import FORMAT, NOT_JUDGED, Profile, Quality, load_profile

__all__ = ["model_folder", "start_engine"]  # fixtures

ROOT = Path(__file__).parents[1]


def exactness(**changes: Any) -> Exactness:
    facts = {
        "rotation_errors": {1: 1e-7, 1000: 1e-7},
        "dtype": "float32",
        "kv_dtype": "float32",
        "noise_kl": 0.0,
        "ratio_one_kl": 1e-9,
        "true_kv_kl": 1e-9,
        "moved_kl": 1e-9,
        "architecture": "abc",
    }
    return Exactness(**{**facts, **changes})


def test_an_exact_engine_passes() -> None:
    assert exactness().why_not() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rotation_errors": {1: 1e-7, 1000: 0.1}}, "keys moved by 1000 tokens are off by 1.0e-01"),
        ({"ratio_one_kl": 2e-6}, "with every token recomputed the answer is 2.0e-06 nats"),
        ({"ratio_one_kl": float("nan")}, "with every token recomputed"),
        ({"true_kv_kl": 2e-6}, "with rows dropped whose KV is the true one the answer is 2.0e-06"),
        ({"true_kv_kl": float("nan")}, "with rows dropped"),
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


def test_with_kv_in_8_bit_ratio_one_may_differ_by_the_noise() -> None:
    changed = exactness(kv_dtype="float8_e4m3fn", ratio_one_kl=1e-3, noise_kl=6e-4, moved_kl=0.2)
    assert changed.why_not() is None


def verdict(**judgement: Any) -> Verdict:
    plan = Plan(
        model_path="m",
        bounds=Bounds(0.1, 0.97),
        items=bundled_items(),
        data="mine.jsonl",
        digest="ab",
        templates=Templates(),
    )
    return Verdict(plan, exactness(), Judgement(**judgement))


def test_a_refused_model_has_no_profile() -> None:
    with pytest.raises(ValueError, match="no setting is acceptable"):
        verdict(refusal="no").profile()


def test_where_nothing_was_judged_the_profile_holds_the_defaults_and_says_so() -> None:
    profile = verdict(not_judged="too few").profile()
    assert BlendConfig.from_settings(profile.settings) == BlendConfig()
    assert set(profile.settings) > {"blend_policy", "blend_recompute_ratio", "blend_check_layer"}
    assert profile.quality == Quality(
        judged=False, data="mine.jsonl", digest="ab", prompts=256, reason="too few"
    )


# --- through the engine ---


def run_verify(model: Path, python_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command as users do; an engine takes the process's other children with it."""
    command = [sys.executable, "-m", "sgl_blend", "verify", "--model-path", str(model), *flags]
    settings = {"PYTHONPATH": str(python_path), "OMP_NUM_THREADS": "1"}  # the matrices are tiny
    return run_program(command, python_path, timeout_s=600, **settings)


def write_data(path: Path, count: int, num_letters: int = 40) -> Path:
    """Write prompts over three short chunks, for models that read bytes and know nothing."""
    draw = random.Random(5)

    def letters() -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(num_letters))

    lines = [
        {"system": "s" * 20, "chunks": [letters() for _ in range(3)], "question": f"q{number}"}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps({**line, "answer": "x"}) + "\n" for line in lines))
    return path


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.engine
def test_a_model_is_verified_and_its_profile_is_served(model_folder: Path, tmp_path: Path) -> None:
    model = make_text_model("llama-llama3", model_folder)
    data = write_data(tmp_path / "mine.jsonl", 96)
    profile, facts = tmp_path / "profile.json", tmp_path / "facts.json"
    # Half of the first tokens would have to agree, and plain reuse must not be seen to do so well.
    flags = ["--data", str(data), "--max-kl", "1e-3", "--min-top1", "0.5", "--ratios", "0.15,0.95"]
    flags += ["--policies", "hkvd", "--check-layers", "1"]
    flags += ["--profile", str(profile), "--json", str(facts)]

    done = run_verify(model, ROOT, *flags)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("this model may be blended")
    found = json.loads(facts.read_text())
    assert found["passed"] is True
    assert 0 < found["ratio_one_kl"] <= 1e-6  # it went through the blended layers
    assert 0 < found["true_kv_kl"] <= 1e-6
    assert max(found["rotation_errors"].values()) < 1e-6
    assert found["cheapest"]["n"] == 64
    saved = load_profile(str(profile))
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    assert saved.quality == Quality(judged=True, data="mine.jsonl", digest=digest, prompts=96)
    config = BlendConfig.resolve({"enable_blend": True, "blend_preset": str(profile)})
    assert config.blend_recompute_ratio == found["cheapest"]["ratio"]


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.engine
def test_without_prompts_that_can_tell_nothing_is_judged(
    model_folder: Path, tmp_path: Path
) -> None:
    model = make_text_model("llama-llama3", model_folder)
    profile = tmp_path / "profile.json"

    done = run_verify(model, ROOT, "--limit", "3", "--profile", str(profile))

    assert done.returncode == 3, done.stdout + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert "not judged: 3 prompts are too few" in last
    assert "give at least 131 with --data" in last
    saved = load_profile(str(profile))
    assert (saved.quality.judged, saved.quality.data) == (False, "package")
    assert (saved.quality.prompts, saved.quality.digest) == (3, bundled_digest())
    config = BlendConfig.resolve({"enable_blend": True, "blend_preset": str(profile)})
    default = BlendConfig(enable_blend=True, blend_preset=str(profile))
    assert config == default


@pytest.mark.engine
@pytest.mark.slow  # .ci/run runs it
def test_chunks_are_cut_in_other_places(model_folder: Path, tmp_path: Path) -> None:
    model = make_text_model("llama-llama3", model_folder)
    data, profile = (
        write_data(tmp_path / "mine.jsonl", 4, num_letters=70),
        tmp_path / "profile.json",
    )
    facts = tmp_path / "facts.json"
    flags = ["--data", str(data), "--cuts", "--json", str(facts), "--profile", str(profile)]
    flags += ["--max-kl", "1e-6"]

    done = run_verify(model, ROOT, *flags)

    assert done.returncode == 3, done.stdout + done.stderr[-2000:]
    record = json.loads(facts.read_text())
    documents, words, halves = record["cuts"]
    assert [one["kind"] for one in (documents, words, halves)] == [*KINDS]
    assert (documents["chunks"], words["chunks"], halves["chunks"]) == (12, 12, 24)
    assert documents["more_than_documents"] == 0
    assert len({one["kl"] for one in (documents, words, halves)}) == 3
    assert min(one["kl"] for one in (documents, words, halves)) > 0
    told = [line for line in done.stdout.splitlines() if line.startswith("cuts ")]
    assert len(told) == 3
    lose = [one["kind"] for one in (words, halves) if one["more_than_documents"] > 1e-6]
    warned = [line for line in done.stdout.splitlines() if line.startswith("warning ")]
    assert len(warned) == len(lose) > 0
    assert record["cuts_beyond_max_kl"] == lose
    measured = load_profile(str(profile)).measured
    assert measured["cuts"]["halves"] == halves["kl"]
    assert measured["cuts_beyond_max_kl"] == lose


@pytest.mark.slow  # .ci/run runs it
@pytest.mark.engine
def test_by_prompts_that_the_model_cannot_read_nothing_is_judged() -> None:
    done = run_verify(ROOT / "examples" / "tinyrag" / "model", ROOT, "--check-layers", "2")

    assert done.returncode == 3, done.stdout + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert "not judged: the model's tokenizer knows no token for" in last


def _describe(driver: Driver) -> dict[str, Any]:
    described: dict[str, Any] = driver.scheduler.sgl_blend.describe()
    return described


@pytest.mark.engine
def test_server_info_says_by_what_quality_was_judged(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    bare = start_engine(blend_check_layer=2).call(_describe)
    assert bare["quality"] == NOT_JUDGED
    quality = Quality(judged=True, data="mine.jsonl", digest="ab", prompts=131)
    path = tmp_path / "p.json"
    Profile(
        format=FORMAT,
        architecture=bare["architecture"],
        settings={"blend_recompute_ratio": 0.3},
        measured={},
        quality=quality,
    ).save(path)

    served = start_engine(blend_check_layer=2, blend_preset=str(path)).call(_describe)

    assert served["blend_recompute_ratio"] == 0.3
    assert served["quality"] == "judged by mine.jsonl (131 prompts)"


SABOTAGE = {
    "sign flipped": (
        "kernels/delta_rope.py",
        "sin = new_sin * old_cos - new_cos * old_sin",
        "sin = new_cos * old_sin - new_sin * old_cos",
    ),
    "off by one position": (
        "fusion/rotation.py",
        "(self.embedding.table, old_position, new_position)",
        "(self.embedding.table, old_position, new_position - 1)",
    ),
    "rope scaling dropped": (
        "fusion/rotation.py",
        "(self.embedding.table, old_position, new_position)",
        "(__import__('sglang').srt.layers.rotary_embedding.base.RotaryEmbedding("
        "self.embedding.head_size, self.embedding.table.shape[1], len(self.embedding.table), "
        "10000, self.neox, torch.float32).cos_sin_cache, old_position, new_position)",
    ),
    "kept rows write where others do": (
        "fusion/attention.py",
        "            counts=None if after.attention is None else after.attention.tensor,\n        )\n",
        "            counts=None if after.attention is None else after.attention.tensor,\n        )\n"
        "        self._batch.out_cache_loc = self._batch.out_cache_loc.roll(1)",
    ),
    "attention one position short": (
        "fusion/attention.py",
        "            row_positions(self._batch),\n",
        "            (row_positions(self._batch) - 1).clamp(min=0),\n",
    ),
    "attention misses a key": (
        "engine/forward.py",
        "return [table[i, :length] for i, length in enumerate(lengths)]",
        "return [table[i, :length].index_fill(0, torch.tensor([length // 2]), "
        "int(table[i, 0])) for i, length in enumerate(lengths)]",
    ),
}


# Each takes two engines; `make verify-demo` refuses a sabotaged build in CI as well.
@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "sign flipped", marks=pytest.mark.slow
        ),  # .ci/run does so in `make verify-demo`
        pytest.param("off by one position", marks=pytest.mark.slow),
        pytest.param("rope scaling dropped", marks=pytest.mark.slow),
        pytest.param("kept rows write where others do", marks=pytest.mark.slow),
        pytest.param("attention one position short", marks=pytest.mark.slow),
        pytest.param("attention misses a key", marks=pytest.mark.slow),
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
    wrong_keys = file in ("kernels/delta_rope.py", "fusion/rotation.py")
    sentence = "off by" if wrong_keys else "nats from full prefill"
    assert sentence in done.stdout.splitlines()[-1]
