"""The digest of loaded weights: the same for the same weights, another after any change it can see."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from sgl_blend.engine.weights import SAMPLE, digest_of, weights_digest

Edit = Callable[[nn.Module], object]


class Model(nn.Module):
    """A little of everything that holds weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(300, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(64, 128) for _ in range(3))
        self.head = nn.Linear(64, 300, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight  # tied
        self.turned = nn.Parameter(torch.randn(70, 90).t(), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.packed = nn.Parameter(
            torch.randint(-128, 128, (64, 100), dtype=torch.int8), requires_grad=False
        )
        self.eighth = nn.Parameter(
            torch.randn(64, 100).to(torch.float8_e4m3fn), requires_grad=False
        )
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.register_buffer("zero_points", torch.arange(50))
        self.register_buffer("table", torch.randn(1000), persistent=False)


def test_the_same_weights_have_the_same_digest_wherever_they_lie() -> None:
    model = Model()
    other = Model(seed=5)
    other.load_state_dict(model.state_dict())
    other.turned = nn.Parameter(model.turned.contiguous(), requires_grad=False)
    assert digest_of(model) == digest_of(model) == digest_of(other)
    assert len(digest_of(model)) == 32
    assert digest_of(model) == weights_digest(SimpleNamespace(model=model))


def test_what_is_no_weight_does_not_count() -> None:
    model = Model()
    before = digest_of(model)
    model.table.fill_(3)  # type: ignore[operator]
    model.eval()
    model.requires_grad_(False)
    assert digest_of(model) == before


def _element(name: str, index: int) -> Edit:
    def edit(model: nn.Module) -> None:
        flat = dict(model.state_dict())[name]
        flat.view(torch.uint8).reshape(-1)[index] ^= 1

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        _element("embed.weight", 0),
        _element("layers.2.bias", 4 * 127),
        _element("layers.0.weight", 0),
        _element("packed", 0),
        _element("eighth", 0),
        _element("zero_points", 8 * 49),
        lambda model: model.scale.data.add_(1e-3),
        lambda model: model.turned.data[0].add_(1),
        lambda model: model.turned.data[:, 3].add_(1),
        lambda model: model.layers[1].weight.data.mul_(1.001),
        lambda model: model.layers[1].weight.data[:, 17].add_(1),
        lambda model: model.layers[1].weight.data[77].add_(1),
        lambda model: model.embed.weight.data.copy_(model.embed.weight.data.flip(0)),
        lambda model: model.embed.float(),
        lambda model: model.register_buffer("more", torch.zeros(1)),
        lambda model: model.register_parameter("empty", nn.Parameter(torch.empty(8, 0))),
        lambda model: model.packed.data.copy_(-model.packed.data),
    ],
)
def test_a_change_is_seen(edit: Edit) -> None:
    model = Model()
    before = digest_of(model)
    with torch.no_grad():
        edit(model)
    assert digest_of(model) != before


def test_two_tensors_that_change_places_are_seen() -> None:
    model = Model()
    before = digest_of(model)
    first, second = model.layers[0], model.layers[1]
    first.weight, second.weight = second.weight, first.weight
    assert digest_of(model) != before


def test_a_tensor_of_another_name_is_seen() -> None:
    def named(name: str) -> str:
        return digest_of(nn.ParameterDict({name: torch.ones(3)}))

    assert named("q") == named("q") != named("k")


@pytest.mark.parametrize("rows", [64, 4096, 1000, 4097])
@pytest.mark.parametrize("columns", [1, 64, 4096, 1000])
def test_samples_are_few_and_in_all_columns_and_rows_from_end_to_end(
    rows: int, columns: int
) -> None:
    tensor = nn.Parameter(torch.arange(rows * columns).view(rows, columns), requires_grad=False)
    module = nn.Module()
    module.register_parameter("weight", tensor)
    with patch("torch.cat", wraps=torch.cat) as joined:
        digest_of(module)
    seen = joined.call_args.args[0][0].view(torch.int64)
    assert len(seen) <= SAMPLE
    assert len(seen) >= min(rows * columns, SAMPLE) // 2
    assert seen[0] == 0
    assert seen[-1] >= rows * columns - 2 * (rows * columns // SAMPLE + 1)
    wanted = min(columns, SAMPLE) if rows * columns > SAMPLE else columns
    assert len(set((seen % columns).tolist())) >= wanted // 2


def test_the_device_is_asked_once_for_many_tensors() -> None:
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))
    with patch("torch.cat", wraps=torch.cat) as sent:
        digest_of(model)
    assert sent.call_count == 2  # 200 tensors


def test_it_is_cheap() -> None:
    # As many tensors as an 8B model has; its size does not count, for only samples are read.
    model = nn.ModuleList(nn.Linear(512, 512) for _ in range(150))
    begin = time.perf_counter()
    digest_of(model)
    assert time.perf_counter() - begin < 1.0
