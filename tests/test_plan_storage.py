"""``sgl-blend plan-storage``: what it reads, says and refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_blend.commands.cli import main
from sgl_blend.commands.planning import plan_storage_command, tier_trial
from sgl_blend.errors import CommandError
from sgl_blend.tuning.links import LinkSpeed

LINES = [
    {"name": "fast", "gb_per_s": 50, "latency_ms": 0.01, "usd_per_gb_month": 2},
    {"name": "good", "gb_per_s": 10, "latency_ms": 1, "usd_per_gb_month": 0.1},
    {"name": "slow", "gb_per_s": 1, "latency_ms": 30, "usd_per_gb_month": 0.02},
]
SIZES = (
    *("--kv-bytes-per-token", "100000", "--library-tokens", "1000000"),
    *("--request-tokens", "10000", "--request-chunks", "10", "--ratio", "0.2"),
)
SPEED = ("--prefill-tokens-per-s", "10000")


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.json"
    path.write_text(json.dumps(LINES))
    return path


def test_the_command_prints_and_writes_what_it_chose(
    tiers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    command = ["plan-storage", *SIZES, *SPEED, "--tiers", str(tiers), "--json", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == (
        "Cheapest that adds no delay: good, 10.00 USD a month. It loads a request in 110 ms, within "
        "the 200 ms that recomputing takes anyway."
    )
    for row in (
        ("fast", "20.1", "200.00"),
        ("good", "110", "chosen"),
        ("slow", "1300", "too slow"),
    ):
        assert any(all(cell in line for cell in row) for line in printed.splitlines()), row
    report = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert report["chosen"] == "good"
    assert report["summary"] == printed.splitlines()[-1]
    assert report["recompute_s"] == pytest.approx(0.2)
    assert report["demand"]["library_tokens"] == 1_000_000
    assert report["circumstances"]["command"].startswith("sgl-blend plan-storage ")
    rows = {row["tier"]["name"]: row for row in report["tiers"]}
    assert list(rows) == ["fast", "good", "slow"]
    assert rows["good"]["load_s"] == pytest.approx(0.11)
    assert rows["good"]["stored_bytes"] == 100_000_000_000
    assert rows["slow"]["verdict"] == "too slow"
    assert rows["slow"]["needed_bytes_per_s"] is None


def asked(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Run the command and return its last line."""
    assert main(["plan-storage", *arguments]) == status
    return capsys.readouterr().out.splitlines()[-1]


def test_where_nothing_suits_it_says_what_comes_nearest(
    tiers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*SIZES, *SPEED, "--tiers", str(tiers))
    tiers.write_text(json.dumps([{**LINES[1], "gb_per_s": 4}, LINES[2]]))
    assert asked(capsys, *flags, status=1) == (
        "No tier suits. good comes nearest: it loads a request in 260 ms, longer than the 200 ms that "
        "recomputing takes anyway. It would need 5.263 GB/s, and has 4."
    )
    tiers.write_text(json.dumps([LINES[2]]))
    assert asked(capsys, *flags, status=1).endswith(
        "No bandwidth would do: its latency alone takes that long."
    )
    tiers.write_text(json.dumps([{**LINES[0], "capacity_gb": 50}]))
    assert asked(capsys, *flags, status=1) == (
        "No tier suits. fast comes nearest: it is fast enough, but holds 50 GB of 100 GB."
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}, 131_072),
        ({"num_key_value_heads": 8, "head_dim": 64, "dtype": "float32"}, 131_072),
        ({"torch_dtype": "float16"}, 2 * 32 * 4096 * 2),
    ],
)
def test_the_size_of_kv_is_read_from_the_config(
    config: dict[str, Any], expected: int, tiers: Path, tmp_path: Path
) -> None:
    base = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**base, **config}))
    out = tmp_path / "plan.json"
    flags = ("--model-path", str(tmp_path), "--library-tokens", "10", "--json", str(out))
    main(["plan-storage", *flags, *SPEED, "--tiers", str(tiers)])
    assert json.loads(out.read_text())["demand"]["kv_bytes_per_token"] == expected


def test_a_shape_and_a_number_type_may_be_named(tiers: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    flags = ("--shape", "llama-3.1-8b", "--dtype", "float32", "--library-tokens", "10")
    main(["plan-storage", *flags, *SPEED, "--tiers", str(tiers), "--json", str(out)])
    assert json.loads(out.read_text())["demand"]["kv_bytes_per_token"] == 262_144


def test_the_speed_is_read_from_a_profile(tiers: Path, tmp_path: Path) -> None:
    # 8 layers and 12,769 rows in all of them are the work of 1,596 tokens, here two at once.
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"batch": 2, "ttft_s": 0.5, "tokens": {"layer_rows": 12_769}}))
    out = tmp_path / "plan.json"
    flags = ("--shape", "tiny", "--library-tokens", "10", "--profile", str(profile))
    assert main(["plan-storage", *flags, "--tiers", str(tiers), "--json", str(out)]) == 0
    speed = json.loads(out.read_text())["demand"]["prefill_tokens_per_s"]
    assert speed == pytest.approx(2 * 12_769 / 8 / 0.5)


# --- what is refused ---


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan-storage", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


WRONG_TIERS: dict[str, tuple[str, str]] = {
    "no JSON": ("tiers", "JSON is malformed"),
    "no list": ("{}", "Expected `array`, got `object`"),
    "empty": ("[]", "expected at least one tier"),
    "missing field": ('[{"name": "a", "gb_per_s": 1}]', "missing required field `latency_ms`"),
    "unknown key": (json.dumps([{**LINES[0], "gbps": 1}]), "unknown field `gbps`"),
    "bandwidth": (json.dumps([{**LINES[0], "gb_per_s": 0}]), "> 0.0 - at `$[0].gb_per_s`"),
    "latency": (json.dumps([{**LINES[0], "latency_ms": -1}]), ">= 0.0 - at `$[0].latency_ms`"),
    "price": (json.dumps([{**LINES[0], "usd_per_gb_month": -1}]), "at `$[0].usd_per_gb_month`"),
    "absurd price": (
        json.dumps([{**LINES[0], "usd_per_gb_month": 1e308}]),
        "at `$[0].usd_per_gb_month`",
    ),
    "capacity": (json.dumps([LINES[0], {**LINES[1], "capacity_gb": 0}]), "`$[1].capacity_gb`"),
    "servers": (json.dumps([{**LINES[0], "servers": 0}]), "at `$[0].servers`"),
    "name": (json.dumps([{**LINES[0], "name": ""}]), "at `$[0].name`"),
    "twice": (json.dumps([LINES[0], LINES[0]]), "two tiers are named 'fast'"),
    "at once": (
        json.dumps([{**LINES[0], "servers": 2, "loads_at_once": 3}]),
        "tier 'fast' has loads_at_once 3, more than its 2 servers",
    ),
}


@pytest.mark.parametrize("name", WRONG_TIERS)
def test_a_wrong_file_of_tiers_is_one_sentence(
    name: str, tiers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, sentence = WRONG_TIERS[name]
    tiers.write_text(text)
    said = refusal(capsys, *SIZES, *SPEED, "--tiers", str(tiers))
    assert said.startswith(f"sgl-blend: {tiers}: ")
    assert sentence in said


def test_other_wrong_inputs_are_one_sentence(
    tiers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given_tiers = ("--tiers", str(tiers))
    model = ("--library-tokens", "10", *SPEED, *given_tiers, "--model-path", str(tmp_path))
    assert "cannot read none.json: No such file" in refusal(
        capsys, *SIZES, *SPEED, "--tiers", "none.json"
    )
    assert "config.json: No such file" in refusal(capsys, *model)
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2}')
    assert "missing required field `num_attention_heads`" in refusal(capsys, *model)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    config.write_text(json.dumps(sizes))
    assert "expected a --dtype of float32, bfloat16, float16, got None" in refusal(capsys, *model)
    config.write_text(json.dumps({**sizes, "kv_lora_rank": 512}))
    assert "keeps no KV by head; give --kv-bytes-per-token" in refusal(capsys, *model)
    assert "--ratio must be a number in [0, 1], got 2.0" in refusal(
        capsys, *SIZES, *SPEED, *given_tiers, "--ratio", "2"
    )
    assert "give one of them" in refusal(capsys, *SIZES, *SPEED, *given_tiers, "--store-dir", ".")
    assert "leave it out" in refusal(capsys, *SIZES, *SPEED, *given_tiers, "--dtype", "float32")
    assert "--profile needs --shape" in refusal(capsys, *SIZES, *given_tiers, "--profile", "p")
    assert "is not a folder" in refusal(capsys, *SIZES, *SPEED, "--json", "no/such/out.json")
    profile = tmp_path / "p.json"
    profile.write_text('{"batch": 1, "ttft_s": 0.5, "tokens": {}}')
    shape = ("--shape", "tiny", "--library-tokens", "10", *given_tiers)
    assert "`layer_rows` - at `$.tokens`" in refusal(capsys, *shape, "--profile", str(profile))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--library-tokens", "0"],
        ["--request-tokens", "-1"],
        ["--prefill-tokens-per-s", "0"],
        ["--prefill-tokens-per-s", "inf"],
        ["--prefill-tokens-per-s", "nan"],
        ["--servers", "1.5"],
        ["--kv-bytes-per-token", "many"],
    ],
    ids=" ".join,
)
def test_a_wrong_number_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan-storage", *SIZES, *SPEED, *arguments])
    assert stopped.value.code == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err


# --- this machine ---


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    flags = ("--kv-bytes-per-token", "1000", "--library-tokens", "10", "--request-tokens", "10000")
    slow = ("--prefill-tokens-per-s", "10", "--trial-mb", "9")
    store = ("--store-dir", str(tmp_path), "--json", str(out))
    last = asked(capsys, *flags, *slow, *store)
    assert last.startswith("Slowest that adds no delay: ")
    assert last.endswith("No price is known.")
    rows = json.loads(out.read_text())["tiers"]
    assert {row["tier"]["name"] for row in rows} == {"host memory", f"files in {tmp_path.name}"}
    for row in rows:
        assert 1e6 < row["tier"]["bytes_per_s"] < 1e13
        assert row["tier"]["latency_s"] < 1.0
        assert row["tier"]["capacity_bytes"] > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "the trial's file is left"


def test_a_library_larger_than_the_memory_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        plan_storage_command, "time_host_copy", lambda num_bytes: LinkSpeed(1e-6, 1e12)
    )
    flags = ("--kv-bytes-per-token", "1000000", "--library-tokens", "1000000000")
    assert "host memory comes nearest: it is fast enough, but holds" in asked(
        capsys, *flags, *SPEED, status=1
    )


def test_each_read_of_the_trial_is_asked_to_come_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    forget, read = os.posix_fadvise, os.preadv

    def forgetting(descriptor: int, start: int, length: int, advice: int) -> None:
        assert (start, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        calls.append("forget")
        forget(descriptor, start, length, advice)

    def reading(descriptor: int, buffers: list[memoryview], at: int) -> int:
        calls.append("read")
        return read(descriptor, buffers, at)

    monkeypatch.setattr(os, "posix_fadvise", forgetting)
    monkeypatch.setattr(os, "preadv", reading)
    tier_trial.time_file_reads(tmp_path, 100_000)
    assert calls == ["forget", "read"] * 10


def test_a_folder_that_takes_no_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--store-dir .*none: No such file or directory"):
        tier_trial.time_file_reads(tmp_path / "none", 10_000)


def test_the_help_needs_msgspec_alone() -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'numpy', 'torch', 'sglang', 'transformers', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "from sgl_blend.commands.cli import main\n"
        "main(['plan-storage', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--tiers" in done.stdout
