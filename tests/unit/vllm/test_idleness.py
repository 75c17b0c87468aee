"""Does a rank wait only while its engine computes nothing?"""

from kvreshard.vllm.idleness import Idleness


def test_an_engine_is_idle_until_a_request_is_scheduled_and_again_once_it_has_finished() -> None:
    idleness = Idleness(1)
    assert idleness.step([], [])
    assert not idleness.step(["a", "b"], [])
    assert not idleness.step(["b"], ["a"])
    assert idleness.step([], ["b"])


def test_a_step_without_tokens_is_not_idle_while_another_is_under_way() -> None:
    idleness = Idleness(1)
    idleness.step(["a"], [])
    assert not idleness.step([], [])


def test_an_id_that_comes_back_counts_anew() -> None:
    idleness = Idleness(1)
    idleness.step(["a"], [])
    assert not idleness.step(["a"], ["a"])


def test_engines_that_step_together_never_wait() -> None:
    assert not Idleness(2).step([], [])
