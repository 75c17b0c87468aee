"""Ask the doctor from Python: the same lines as `kvreshard doctor`, as data, to act upon.

A deployment can refuse to start an engine where a line is an error, and log the remedies.
"""

from functools import partial

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.cli.doctor import check_route
from kvreshard.cli.doctor_host import bounded, check_files, check_memlock, check_python, check_shm

for name, check in (
    ("python", check_python),
    ("locked memory", check_memlock),
    ("shared memory", check_shm),
    ("file descriptors", check_files),
):
    for line in bounded(name, check, 10.0):
        print(f"{line.check}: {line.status}")

# The check that `--peer` makes with a card it has fetched: two layouts are enough.
model = load("llama-3.1-8b")
prefill, decode = (
    describe(model, parse_engine(words), name) for name, words in (("p", "tp=4"), ("d", "tp=2,order=HND"))
)
for line in bounded("route", partial(check_route, prefill, decode), 30.0):
    print(f"{line.check}: {line.status}: {line.text}")
