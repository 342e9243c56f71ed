import pytest
from triton.errors import TritonError

from sgl_blend.commands.bench import kernel_speed
from sgl_blend.commands.bench.kernel_speed import measure
from support import DEVICE


def test_every_kernel_is_timed_against_the_roof_of_its_device() -> None:
    found = measure(DEVICE.type, ["tiny"])

    assert not found.errors
    rows = found.rows
    assert [row.kernel.split()[0] for row in rows] == [
        "copy_rotated_layers",
        "kv_deviation_at",
        "unquantise",
        "segmented_topk",
        "select_rows",
        "compact_rows",
        "ragged_attention",
    ]
    for row in rows:
        assert row.ms > 0
        assert row.num_bytes > 0
        assert row.share == pytest.approx(row.roofline_ms / row.ms)


def test_a_kernel_that_fails_costs_its_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise TritonError("out of resource\nand more")

    monkeypatch.setattr(kernel_speed, "compact_rows", fail)
    found = measure("cpu", ["tiny"])

    assert found.errors == ["compact_rows, tiny: out of resource"]
    assert len(found.rows) == 6


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^shapes: expected some of tiny, .*, got 'huge'$"):
        measure("cpu", ["huge"])
