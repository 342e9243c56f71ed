"""Who pays for what is built of unmarked text."""

from sgl_blend.scheduler.credit import Credit


def test_a_tenant_pays_with_a_share_of_its_prompts() -> None:
    credit = Credit(0.25, start=0)
    assert not credit.spend("a", 1)
    credit.earn("a", 400)
    assert not credit.spend("a", 101)
    assert credit.spend("a", 60)
    assert credit.spend("a", 40)
    assert not credit.spend("a", 1)


def test_no_tenant_spends_what_another_earned() -> None:
    credit = Credit(0.25, start=0)
    credit.earn("victim", 400)
    assert not credit.spend("greedy", 1)
    assert credit.spend("victim", 100)


def test_all_tenants_have_one_start_together() -> None:
    credit = Credit(0.25, start=100)
    credit.earn("a", 40)
    assert credit.spend("a", 70)
    assert credit.saved("a") == 0
    assert credit.spend("b", 40)
    assert not credit.spend("c", 1)


def test_what_is_saved_up_is_bounded() -> None:
    credit = Credit(1.0, start=0)
    credit.earn("a", 10**9)
    assert credit.saved("a") == 16_384
    for number in range(20_000):
        credit.earn(str(number), 100)
    assert len(credit._saved) == 16_384
    assert credit.saved("a") == 0
    assert credit.saved("19999") == 100


def test_a_share_of_nothing_pays_for_nothing() -> None:
    credit = Credit(0.0)
    credit.earn("a", 10**6)
    assert not credit.spend("a", 1)
