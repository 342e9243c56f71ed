"""Which ways an evaluation asks, in which order, on which servers."""

from typing import Any

from sgl_blend.commands.evaluation.evaluate import Settings
from sgl_blend.commands.evaluation.scores import Way


def settings(**changed: Any) -> Settings:
    values: dict[str, Any] = {
        "model_path": "m",
        "policies": ["hkvd", "random"],
        "ratios": [0.1, 0.2],
        "check_layers": [1],
        "build_prefixes": ["first"],
    }
    return Settings(**{**values, **changed})


def test_every_policy_is_asked_at_every_ratio() -> None:
    ways = settings().ways()
    assert [(way.policy, way.ratio) for way in ways] == [
        ("hkvd", 0.1),
        ("hkvd", 0.2),
        ("random", 0.1),
        ("random", 0.2),
    ]


def test_a_policy_with_a_ratio_of_its_own_is_asked_once() -> None:
    ways = settings(policies=["none", "hkvd", "all"]).ways()
    assert [(way.policy, way.ratio) for way in ways] == [
        ("none", 0.0),
        ("hkvd", 0.1),
        ("hkvd", 0.2),
        ("all", 1.0),
    ]


def test_what_is_named_twice_is_asked_once() -> None:
    twice = settings(policies=["hkvd", "hkvd"], ratios=[0.1, 0.1], check_layers=[1, 1])
    assert twice.ways() == [Way("hkvd", 0.1, 1, "first")]


def test_the_ways_of_one_server_come_together() -> None:
    ways = settings(check_layers=[1, 2], build_prefixes=["first", "bos"]).ways()
    servers = [(way.check_layer, way.build_prefix) for way in ways]
    assert servers[::4] == [(1, "first"), (1, "bos"), (2, "first"), (2, "bos")]
    assert servers == sorted(servers, key=servers.index)
    assert len(ways) == 16


def test_the_oracle_may_be_evaluated() -> None:
    settings(policies=["oracle"]).check()
