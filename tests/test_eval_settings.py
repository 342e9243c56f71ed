"""Which variants an evaluation asks, in which order, on which servers."""

from typing import Any

from sgl_blend.commands.evaluation.evaluate import Settings
from sgl_blend.commands.evaluation.scores import Variant


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
    variants = settings().variants()
    assert [(variant.policy, variant.ratio) for variant in variants] == [
        ("hkvd", 0.1),
        ("hkvd", 0.2),
        ("random", 0.1),
        ("random", 0.2),
    ]


def test_a_policy_with_a_ratio_of_its_own_is_asked_once() -> None:
    variants = settings(policies=["none", "hkvd", "all"]).variants()
    assert [(variant.policy, variant.ratio) for variant in variants] == [
        ("none", 0.0),
        ("hkvd", 0.1),
        ("hkvd", 0.2),
        ("all", 1.0),
    ]


def test_what_is_named_twice_is_asked_once() -> None:
    twice = settings(policies=["hkvd", "hkvd"], ratios=[0.1, 0.1], check_layers=[1, 1])
    assert twice.variants() == [Variant("hkvd", 0.1, 1, "first")]


def test_the_ways_of_one_server_come_together() -> None:
    variants = settings(check_layers=[1, 2], build_prefixes=["first", "bos"]).variants()
    servers = [(variant.check_layer, variant.build_prefix) for variant in variants]
    assert servers[::4] == [(1, "first"), (1, "bos"), (2, "first"), (2, "bos")]
    assert servers == sorted(servers, key=servers.index)
    assert len(variants) == 16


def test_the_oracle_may_be_evaluated() -> None:
    settings(policies=["oracle"]).check()
