"""One file a part; `run(bench)` runs it."""
