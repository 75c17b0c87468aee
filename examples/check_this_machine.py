"""Ask the doctor from Python: the same lines as `kvreshard doctor`, as data, to act upon.

A deployment can refuse to start an engine where a line is an error, and log the remedies.
"""

from kvreshard import check_host, check_route, describe, load, parse_engine

# The port that vLLM would listen at, and no transfer between two processes.
for line in check_host(port=None, loopback=False):
    print(f"{line.check}: {line.status}")

# The check that `--peer` makes with engine metadata it has fetched: two layouts are enough.
model = load("llama-3.1-8b")
prefill, decode = (
    describe(model, parse_engine(words), name) for name, words in (("p", "tp=4"), ("d", "tp=2,order=HND"))
)
for line in check_route(prefill, decode):
    print(f"{line.check}: {line.status}: {line.text}")
