"""What happens when two engines cannot exchange a cache: one error, before anything moves, that says which factor differs."""

from kvreshard import KvReshardError, compile_routes, describe, load, parse_engine

model = load("llama-3.1-8b")
prefill = describe(model, parse_engine("tp=2"), "prefill")

for what, decode_model, engine in (
    ("another cache dtype", model, "tp=4,dtype=fp8"),
    ("another model", load("qwen3-32b"), "tp=4"),
    ("nothing that matters", model, "tp=3,page=24,order=HND,pp=2"),
):
    decode = describe(decode_model, parse_engine(engine), "decode")
    try:
        compile_routes(prefill, decode)
        print(f"{what}: fine")
    except KvReshardError as error:
        print(f"{what}: {type(error).__name__}: {str(error).split(';')[0]}")
