"""Describe two engines, route every decode rank, and look at who reads what from whom.

The layouts are made from arguments alone, so either side can do this for both; nothing is started and nothing is moved.
"""

from kvreshard import compile_routes, describe, explain, load, name_fields, parse_engine

model = load("gemma-4-26b-a4b")  # or the path of a config.json
prefill = describe(model, parse_engine("tp=4"), "prefill")
decode = describe(model, parse_engine("tp=8,order=HND"), "decode")

explanation = explain(compile_routes(prefill, decode))
for subject in explanation.subjects:
    print(name_fields(subject.fields))
    for reading in subject.readings:
        parts = ", ".join(str(part) for part in reading.parts if not part.is_whole)
        print(
            f"  decode ranks {reading.dst_ranks} read {parts} from prefill rank {reading.src_rank}, {reading.choice.way}"
        )
print(f"{explanation.bytes_per_token} bytes per token in all")
for tokens, num_bytes in explanation.window_bytes.items():
    print(f"{num_bytes} bytes per token of the last {tokens}")
