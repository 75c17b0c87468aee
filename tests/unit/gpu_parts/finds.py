"""One check of each verdict; the failed ones do not end it."""

from bench.gpu.findings import Bench


def run(bench: Bench) -> None:
    with bench.check("raises"):
        raise ValueError("no such thing")
    with bench.check("fails") as found:
        found.fail("one")
        found.fail("two")
    bench.skip("is skipped", "a reason")
    with bench.check("passes") as found:
        found.ratio = 2.123456
        found.figure(gb_per_s=1234.5678, count=1_000_000, left_s=round(bench.left_s) > 0)
