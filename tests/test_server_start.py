"""Ways to start: the engine, replicas, and everything that is refused at start."""

import inspect
import json
import runpy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked, run_program
from harness import Engine
from programs import run_program as run_for_real
from servers import SERVER_FLAGS, Server, rag_text, start_server, stop
from tiny_models import make_model, make_text_model

from sgl_blend.commands.common.cpu import CPU_SETTINGS
from sgl_blend.commands.common.ports import reserve_port
from sgl_blend.settings.preset import FORMAT, Profile, Quality

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model("llama", tmp_path_factory.mktemp("server-model"))


ENGINE_PROGRAM = """
import json, sys
import sglang as sgl

if __name__ == "__main__":
    flags = json.loads(sys.argv[2])
    engine = sgl.Engine(model_path=sys.argv[1], enable_blend=True, blend_on_miss="build", **flags)
    separator = engine.get_server_info()["internal_states"][0]["sgl_blend"]["separator"]
    documents = ["Varna lies on the Black Sea. " * 3, "Capybaras swim well. " * 4]
    for order in ((0, 1), (1, 0)):
        text = "System." + separator + separator.join(documents[i] for i in order) + separator + "?"
        out = engine.generate(text, {"max_new_tokens": 2, "temperature": 0})
    print("REPORT", json.dumps(out["meta_info"]["sgl_blend"]))
    engine.shutdown()
"""


def test_the_engine_takes_the_same_settings_as_keywords(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENGINE_PROGRAM)
    flags = {**CPU_SETTINGS, "max_total_tokens": 4000, "mem_fraction_static": 0.3}
    done = run_program([sys.executable, str(program), str(model), json.dumps(flags)], tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    (report,) = json.loads(lines[0].removeprefix("REPORT "))
    assert report["chunk_hits"] == 2
    assert report["fallback"] is None


REFUSED = {
    "unknown policy": (["--enable-blend", "--blend-policy", "best"], "blend_policy must be one of"),
    "ratio": (["--enable-blend", "--blend-recompute-ratio", "2"], "blend_recompute_ratio must be"),
    "without enable": (["--blend-policy", "random"], "has no effect without enable_blend"),
    "check layer 0": (["--enable-blend", "--blend-check-layer", "0"], "must be at least 1"),
    "check layer too high": (
        ["--enable-blend", "--blend-check-layer", "99"],
        "blend_check_layer must be below the last of",
    ),
    "radix cache off": (
        ["--enable-blend", "--disable-radix-cache"],
        "--disable-radix-cache is not",
    ),
    "store without a key": (
        ["--enable-blend", "--blend-store-key-file", "/nowhere/key"],
        "/nowhere/key: No such file",
    ),
    "separator": (
        ["--enable-blend", "--blend-separator", "#"],
        "blend_separator '#' is not a special token of the vocabulary; it has ",
    ),
    "no codec profile": (
        ["--enable-blend", "--blend-store-profile", "/nowhere/profile"],
        "--blend-store-profile /nowhere/profile: No such file",
    ),
    "pipeline": (["--enable-blend", "--pp-size", "2"], "--pp-size is not supported"),
    "preferred parameters": (
        [
            "--enable-blend",
            "--preferred-sampling-params",
            '{"custom_params": {"sgl_blend_ratio": 2}}',
        ],
        "preferred_sampling_params: sgl_blend_ratio must be",
    ),
}


def _wait_for_builds_of_all(server: Server) -> list[dict[str, Any]]:
    """Return every replica's totals once none has a chunk to build."""
    for _ in range(200):
        states = server.request("/server_info")[1]["internal_states"]
        totals = [state["sgl_blend"] for state in states]
        if not any(total["chunks_pending"] for total in totals):
            return totals
        time.sleep(0.1)
    raise AssertionError("background builds did not end")


def test_data_parallel_replicas_blend_each_on_its_own(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    flags = ["--enable-blend", "--blend-when", "always", "--dp-size", "2"]
    from sglang.srt.utils import numa_utils

    # SGLang wants a NUMA node for each rank, and since 0.5.21 for each replica too.
    per_replica = "world_size" in inspect.signature(numa_utils.init_threads_binding).parameters
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1" if per_replica else "0"}
    server = start_server([*command, *flags], tmp_path / "log", tmp_path, environment=cores)
    try:
        orders = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1), (1, 0, 2))
        for number, order in enumerate(orders):
            server.generate(rag_text(*order, question=f"Question {number}?"))
            totals = _wait_for_builds_of_all(server)
    finally:
        stop(server)
    assert len(totals) == 2
    for total in totals:
        assert total["requests"] >= 2
        assert total["chunks_built"] == 3
        assert total["reused_tokens"] > 0


def _launch(flags: list[str]) -> None:
    """Do what ``python -m sglang.launch_server`` does."""
    sys.argv = ["launch_server.py", *flags]
    runpy.run_module("sglang.launch_server", run_name="__main__")


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_blended_with_are_refused(model: Path, name: str) -> None:
    flags, sentence = REFUSED[name]
    port = str(reserve_port())
    status, said = run_forked(
        _launch, ["--model-path", str(model), *flags, *SERVER_FLAGS, "--port", port]
    )
    assert status != 0
    told = [line for line in said.splitlines() if sentence in line]
    assert told
    assert all(line.startswith("error: ") for line in told)
    assert "Traceback" not in said


def test_a_model_that_is_not_served_is_refused_before_it_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (model / name).exists():
            shutil.copy(model / name, tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["OlmoForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model-path", str(tmp_path), "--enable-blend", *SERVER_FLAGS]
    status, said = run_forked(_launch, [*flags, "--port", str(reserve_port())])
    assert status != 0
    assert "error: enable_blend: models of class OlmoForCausalLM are not supported" in said
    assert "Traceback" not in said


def test_a_server_that_cannot_blend_does_not_start(model: Path, tmp_path: Path) -> None:
    quality = Quality(judged=False, data="", digest="", prompts=0)
    other = Profile(format=FORMAT, architecture="0123", settings={}, measured={}, quality=quality)
    other.save(tmp_path / "other.json")
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    flags = [
        "--enable-blend",
        "--blend-preset",
        str(tmp_path / "other.json"),
        "--port",
        str(reserve_port()),
    ]
    # Exactly as a user does, in the repository's root: its folders must not shadow packages.
    done = run_for_real([*command, *flags, *SERVER_FLAGS], Path(__file__).parents[1])
    assert done.returncode != 0
    assert "was made for another model" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("llama", {"blend_check_layer": 3}, "blend_check_layer must be below the last of 4 layers"),
        (
            "llama-dynamic",
            {"blend_check_layer": 1},
            "rotary embedding DynamicNTKScalingRotaryEmbedding is not supported",
        ),
    ],
)
def test_a_model_that_cannot_be_blended_ends_the_scheduler(
    tmp_path: Path, kind: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        Engine(make_model(kind, tmp_path), enable_blend=True, **settings)
