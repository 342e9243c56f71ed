import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.errors import RequestError
from sgl_blend.policies import POLICIES
from sgl_blend.protocol.request import RESERVED_SALT, check_salt
from sgl_blend.radix_ext.namespaces import (
    ModelFingerprint,
    architecture,
    blend_salt,
    chunk_salt,
    fingerprint,
    may_leave_server,
    probe_salt_of,
    rounded_salt_of,
)
from sgl_blend.scheduler.loaded_model import LoadedModel
from sgl_blend.settings.config import BlendConfig

# Salts made of the very words and marks that namespaces are made of.
salts = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.lists(
        st.sampled_from(
            ["sgl-blend:", "c:", "b:", "q:", "p:", ":", "hkvd", "0.15", "1", "0123456789abcdef"]
        ),
        max_size=6,
    ).map("".join),
)
models = st.sampled_from(["a", "b"]).map(fingerprint)
ways = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "ratio": st.floats(0, 1, allow_subnormal=False).filter(lambda ratio: str(ratio) != "-0.0"),
        "check_layer": st.integers(1, 100),
        "serial": st.one_of(st.none(), st.integers(0, 1000)),
    }
)


def tenant(salt: str | None) -> str:
    """Stock SGLang does not tell an empty salt from none either."""
    return salt or ""


def is_accepted(salt: str | None) -> bool:
    try:
        check_salt("cache_salt", salt)
    except RequestError:
        return False
    return True


@given(a=st.tuples(models, salts), b=st.tuples(models, salts))
def test_chunks_of_different_models_or_tenants_never_meet(
    a: tuple[str, str | None], b: tuple[str, str | None]
) -> None:
    same = (a[0], tenant(a[1])) == (b[0], tenant(b[1]))
    assert (chunk_salt(a[0], a[1]) == chunk_salt(b[0], b[1])) is same  # type: ignore[arg-type]


@given(model=models, salt=salts)
def test_rounded_chunks_and_probes_are_apart_and_stay_on_the_server(
    model: ModelFingerprint, salt: str | None
) -> None:
    chunks = chunk_salt(model, salt)
    rounded, probes = rounded_salt_of(chunks), probe_salt_of(chunks)
    assert len({chunks, rounded, probes}) == 3
    assert probe_salt_of(rounded) == probes
    assert may_leave_server(chunks, model)
    assert not may_leave_server(rounded, model)
    assert not may_leave_server(probes, model)


@given(a=st.tuples(models, salts, ways), b=st.tuples(models, salts, ways))
def test_prompts_blended_in_different_ways_never_meet(
    a: tuple[str, str | None, dict[str, object]], b: tuple[str, str | None, dict[str, object]]
) -> None:
    same = (a[0], tenant(a[1]), a[2]) == (b[0], tenant(b[1]), b[2])
    names = [blend_salt(model, salt, **way) for model, salt, way in (a, b)]  # type: ignore[arg-type]
    assert (names[0] == names[1]) is same


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "random"},
        {"ratio": 0.2},
        {"ratio": 0.15000000000000002},
        {"check_layer": 2},
        {"serial": 0},
        {"serial": 1},
        {"model": fingerprint("other")},
        {"client_salt": "tenant"},
    ],
    ids=str,
)
def test_any_single_difference_is_another_namespace(change: dict[str, object]) -> None:
    way: dict[str, object] = {
        "model": fingerprint("model"),
        "client_salt": None,
        "policy": "hkvd",
        "ratio": 0.15,
        "check_layer": 1,
        "serial": None,
    }
    assert blend_salt(**way) != blend_salt(**{**way, **change})  # type: ignore[arg-type]


@given(model=models, a=salts, b=salts, way=ways)
def test_chunks_and_blended_prompts_never_meet(
    model: str, a: str | None, b: str | None, way: dict[str, object]
) -> None:
    assert chunk_salt(model, a) != blend_salt(model, b, **way)  # type: ignore[arg-type]


@given(client=salts, model=models, other=salts, way=ways)
def test_a_salt_that_a_client_may_choose_names_no_namespace_of_ours(
    client: str | None, model: str, other: str | None, way: dict[str, object]
) -> None:
    ours = {chunk_salt(model, other), blend_salt(model, other, **way)}  # type: ignore[arg-type]

    assert not any(is_accepted(name) for name in ours)
    if is_accepted(client):
        assert client not in ours
        assert not (client or "").startswith(RESERVED_SALT)


def test_a_digit_does_not_change_sides() -> None:
    model = fingerprint("model")
    names = {
        blend_salt(model, salt, policy="hkvd", ratio=ratio, check_layer=layer, serial=serial)
        for ratio in (0.1, 0.11)
        for layer in (1, 11)
        for serial in (None, 1, 11)
        for salt in (None, "1", "11", ":1", "1:")
    }
    assert len(names) == 2 * 2 * 3 * 5


@given(model=models, victim=salts, way=ways, attacker=ways)
def test_no_piece_of_a_name_makes_a_salt_that_reaches_the_name(
    model: str, victim: str | None, way: dict[str, object], attacker: dict[str, object]
) -> None:
    names = [chunk_salt(model, victim), blend_salt(model, victim, **way)]  # type: ignore[arg-type]
    for name in names:
        for piece in {name[start:] for start in range(len(name))} - {tenant(victim)}:
            assert chunk_salt(model, piece) not in names  # type: ignore[arg-type]
            assert blend_salt(model, piece, **attacker) not in names  # type: ignore[arg-type]


@given(a=st.text(), b=st.text())
def test_different_models_have_different_fingerprints(a: str, b: str) -> None:
    assert (fingerprint(a) == fingerprint(b)) is (a == b)


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    # A stored chunk outlives the process that wrote it, and hash() does not.
    assert fingerprint("model") == "9372c470eeadd5ec"


def test_an_architecture_is_the_same_wherever_the_model_lies() -> None:
    config = {"num_hidden_layers": 2, "_name_or_path": "a", "transformers_version": "5"}
    same = {"_name_or_path": "b", "num_hidden_layers": 2, "dtype": "bfloat16"}
    assert architecture(config) == architecture(same)
    assert architecture(config) != architecture({**config, "num_hidden_layers": 3})


def test_changed_weights_that_look_alike_share_nothing() -> None:
    """A digest sees samples; neither namespaces nor names in storage may go by it alone."""
    config = BlendConfig(enable_blend=True)
    model = LoadedModel("m", lambda: "0" * 32, config, TPGroup(), quality="")
    seen = [(model.weights, model.fingerprint)]
    for _ in range(2):
        model.renew()
        assert model.settle()
        seen.append((model.weights, model.fingerprint))
    weights, fingerprints = map(set, zip(*seen, strict=True))
    assert len(weights) == len(fingerprints) == 3
