"""Pages that may not be shared have no name in common, and the operator's key is read with care."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.errors import ConfigError
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.names import ObjectNames, Rank, StoreKey, WeightsInUse, read_key_file

FORM = PageFormat("bfloat16", 6, 16, 2, 64)
ALONE = Rank(0, 1)
SECRET = bytes(range(32))
KEY = StoreKey.of(SECRET)


def _in_use(weights: str = "w" * 32, rotary: str = "rotary") -> WeightsInUse:
    made = WeightsInUse()
    made.renew(weights, rotary)
    return made


def _names(form: PageFormat = FORM, rank: Rank = ALONE, key: StoreKey | None = None) -> ObjectNames:
    return ObjectNames(form, rank, _in_use(), key)


def _name(names: ObjectNames, page_hash: str = "ab" * 32) -> str:
    label = names.label(page_hash)
    assert label is not None
    return label.name


def _renewed(weights: str, rotary: str) -> ObjectNames:
    return ObjectNames(FORM, ALONE, _in_use(weights, rotary))


def test_a_name_stays_what_it_is() -> None:
    # Another spelling would make every stored page unreachable.
    assert _name(_names()) == "sgb1-lossless-ea67fd6956edc3062f856ab267ea7f29"
    assert _name(_names(key=KEY)) == "sgb1-lossless-ecff11e0d672e846403bd5ed178f7b74"


def test_everything_that_changes_a_page_changes_its_name() -> None:
    others = [
        _names(replace(FORM, dtype="float16")),
        _names(replace(FORM, layers=7)),
        _names(replace(FORM, heads=4)),
        _names(replace(FORM, dim=128)),
        _names(replace(FORM, tokens=32)),
        _names(replace(FORM, heads=1, dim=128)),
        _names(rank=Rank(0, 2)),
        _names(rank=Rank(1, 2)),
        _names(key=KEY),
        _names(key=StoreKey.of(bytes(32))),
        _renewed("v" * 32, "rotary"),
        _renewed("w" * 32, "yarn"),
        _renewed("w" * 31, "wrotary"),
    ]
    found = [_name(names) for names in (_names(), *others)]
    found += [_name(_names(), "ba" * 32), _name(_names(), "ab" * 31)]
    assert len(set(found)) == len(found)


def test_two_servers_with_the_same_weights_share() -> None:
    assert _name(_names()) == _name(_names())
    assert _name(_names(key=KEY)) == _name(_names(key=StoreKey.of(SECRET)))


@given(
    st.sets(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=20),
    st.sets(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=20),
)
def test_tenants_whose_pages_differ_have_no_name_in_common(
    ours: set[str], theirs: set[str]
) -> None:
    names = _names()
    common = {_name(names, page) for page in ours} & {_name(names, page) for page in theirs - ours}
    assert not common


def test_new_weights_have_new_names_and_the_old_ones_come_back_with_them() -> None:
    weights = _in_use()
    names = ObjectNames(FORM, ALONE, weights)
    old = _name(names)
    weights.renew("v" * 32, "rotary")
    assert _name(names) != old
    weights.renew("w" * 32, "rotary")
    assert _name(names) == old


def test_weights_that_nobody_knows_have_no_names() -> None:
    weights = WeightsInUse()
    names = ObjectNames(FORM, ALONE, weights)
    assert names.label("ab" * 32) is None
    weights.renew("w" * 32)
    assert names.label("ab" * 32) is not None
    weights.renew(None)
    assert names.label("ab" * 32) is None


def test_a_label_says_what_its_name_digests() -> None:
    label = _names().label("ab" * 32)
    assert label is not None
    assert (label.format, label.weights, label.rotary) == (FORM, "w" * 32, "rotary")


def test_names_and_pages_have_keys_of_their_own() -> None:
    assert len({KEY.names, KEY.pages, SECRET}) == 3


# --- the key file -------------------------------------------------------------------------------


WriteKey = Callable[..., str]


@pytest.fixture
def write_key(tmp_path: Path) -> WriteKey:
    def write(content: bytes, mode: int = 0o600) -> str:
        path = tmp_path / "key"
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    return write


@pytest.mark.parametrize(
    "content",
    [SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode() + b"\n"],
    ids=["bytes", "hex", "upper case and a line end"],
)
def test_a_key_file_is_read(write_key: WriteKey, content: bytes) -> None:
    assert read_key_file(write_key(content)) == KEY
    assert read_key_file(write_key(content, 0o400)) == KEY


@pytest.mark.parametrize(
    "content",
    [b"", bytes(31), bytes(33), b"\xff" * 64, b"g" * 64, b"ab" * 33, b"ab" * 31, bytes(10_000)],
)
def test_a_file_that_holds_no_key_is_refused(write_key: WriteKey, content: bytes) -> None:
    with pytest.raises(ConfigError, match="must hold 32 bytes or 64 hexadecimal characters"):
        read_key_file(write_key(content))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_key_that_others_may_use_is_refused(write_key: WriteKey, mode: int) -> None:
    with pytest.raises(ConfigError, match=r"open to others .* chmod 600"):
        read_key_file(write_key(SECRET, mode))


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--blend-store-key-file .*No such file"):
        read_key_file(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_key_file(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_key_file(str(tmp_path / "pipe"))


def test_an_error_does_not_show_the_key(write_key: WriteKey) -> None:
    content = SECRET.hex().encode() + b"00"
    with pytest.raises(ConfigError) as caught:
        read_key_file(write_key(content))
    assert SECRET.hex()[:8] not in str(caught.value)
    assert os.sep in str(caught.value)
