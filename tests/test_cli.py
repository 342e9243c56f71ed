"""The command line: what is wrong with it is one sentence and exit status 2."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import NUM_LAYERS, make_model

from sgl_blend.commands.cli import main
from sgl_blend.commands.common.console import print_line
from sgl_blend.commands.evaluation.evaluate import Settings
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig

LINE = json.dumps({"chunks": ["a"], "question": "?", "answer": "b"})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(LINE + "\n")
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that cannot be run and return its sentence."""
    status = main(["eval", *arguments])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip()


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown policy": (["--policies", "best"], "policy must be one of hkvd, "),
    "unknown policy among known ones": (["--policies", "hkvd,best"], "got 'best'"),
    "ratio": (["--ratios", "0.1,2"], "ratio must be a number in [0, 1], got 2.0"),
    "check layer": (["--check-layers", "0"], "blend_check_layer must be at least 1"),
    "build prefix": (["--build-prefixes", "first,last"], "blend_build_prefix must be one of"),
    "limit": (["--limit", "0"], "--limit must be at least 1"),
    "answer length": (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
    "template": (["--chunk-template", "{text}"], "unknown placeholder {text}"),
    "own engine argument": (["--engine-arg", "enable_blend=false"], "engine argument enable_blend"),
    "folder of the JSON": (["--json", "no/such/folder/out.json"], "no/such/folder is not a folder"),
    "folder of the plot": (["--plot", "no/such/folder/out.png"], "no/such/folder is not a folder"),
    "model": ([], "there is no model folder /no/such/model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_one_sentence(
    capsys: pytest.CaptureFixture[str], data: Path, name: str
) -> None:
    arguments, sentence = REFUSED[name]
    said = refusal(capsys, "--model-path", "/no/such/model", "--data", str(data), *arguments)
    assert said.startswith("sgl-blend: ")
    assert sentence in said


def test_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--model-path", "m", "--data", "none.jsonl")
    assert said == "sgl-blend: cannot read none.jsonl: No such file or directory"


def test_a_bad_line_is_one_sentence(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    data.write_text(f"{LINE}\n{{}}\n")
    said = refusal(capsys, "--model-path", "m", "--data", str(data))
    assert said == "sgl-blend: data.jsonl, line 2: Object missing required field `chunks`"


@pytest.mark.parametrize("package", ["rich", "rouge_score", "matplotlib"])
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: Path, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(capsys, "--model-path", "m", "--data", str(data), "--plot", "a.png")
    assert said == (
        f"sgl-blend: sgl-blend eval needs {package}; install them with "
        "`pip install 'sgl-blend[eval,sglang]'`"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ratios", "low"],
        ["--check-layers", "1.5"],
        ["--format", "csv"],
        ["--engine-arg", "dtype"],
        ["--engine-arg", "no name=3"],
    ],
    ids=" ".join,
)
def test_what_argparse_refuses_has_the_same_status(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["eval", "--model-path", "m", "--data", "d", *arguments])
    assert stopped.value.code == 2
    assert f"argument {arguments[0]}: " in capsys.readouterr().err


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    """Return the settings that a command line leads to."""
    found: list[Settings] = []

    def stop(settings: Settings, *rest: Any) -> None:
        found.append(settings)
        raise CommandError("enough")

    monkeypatch.setattr("sgl_blend.commands.evaluation.evaluate.evaluate", stop)
    assert main(["eval", "--model-path", "m", *arguments]) == 2
    (settings,) = found
    return settings


def test_what_is_left_out_is_the_servers_default(
    monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    settings = parsed(monkeypatch, "--data", str(data))
    server = BlendConfig()
    (variant,) = settings.variants()
    assert (variant.policy, variant.ratio) == (server.blend_policy, server.blend_recompute_ratio)
    assert (variant.check_layer, variant.build_prefix) == (
        server.blend_check_layer,
        server.blend_build_prefix,
    )
    assert settings.engine_args == {}


def test_lists_and_engine_arguments_are_read(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    settings = parsed(
        monkeypatch,
        *("--data", str(data), "--policies", "default, random", "--ratios", "0.1,0.2,0.1"),
        *("--check-layers", "1,2", "--build-prefixes", "first,none", "--max-new-tokens", "5"),
        *("--engine-arg", "dtype=float32", "--engine-arg", "max_total_tokens=4000"),
        *("--engine-arg", "trust_remote_code=true", "--question-template", "Q {question}"),
    )
    assert settings.policies == [BlendConfig().blend_policy, "random"]
    assert settings.ratios == [0.1, 0.2]
    assert settings.check_layers == [1, 2]
    assert settings.build_prefixes == ["first", "none"]
    assert settings.max_new_tokens == 5
    assert settings.templates.question_template == "Q {question}"
    assert settings.engine_args == {
        "dtype": "float32",
        "max_total_tokens": 4000,
        "trust_remote_code": True,
    }


def test_a_check_layer_the_model_does_not_have_is_one_sentence(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    path = make_model("llama", tmp_path)
    layers = f"1,{NUM_LAYERS - 1}"
    capsys.readouterr()
    said = refusal(capsys, "--model-path", str(path), "--data", str(data), "--check-layers", layers)
    assert said == (
        f"sgl-blend: check layer {NUM_LAYERS - 1} must be below the last of the model's "
        f"{NUM_LAYERS} layers"
    )


def test_the_help_needs_none_of_the_packages() -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'rouge_score', 'matplotlib', 'sglang', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from sgl_blend.commands.cli import main\n"
        "main(['eval', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--build-prefixes" in done.stdout


def test_a_sentence_is_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "gain in throughput [at equal TTFT]" + 30 * " not known"
    print_line(Console(width=40), sentence)
    assert capsys.readouterr().out == sentence + "\n"
