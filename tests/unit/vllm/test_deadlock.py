"""Is a circle of waiting engines noticed, and nothing else?"""

from kvreshard.vllm.deadlock import DeadlockDetector


def test_one_gives_up_after_every_while_without_a_sign_of_life() -> None:
    now_s = 100.0
    deadlock = DeadlockDetector(30.0, lambda: now_s)
    said = []
    for second, is_still in enumerate([False, *[True] * 65, False, *[True] * 29, False, *[True] * 31]):
        now_s = 100.0 + second
        if deadlock.step(is_still):
            said.append(second)
    assert said == [31, 61, 127]
