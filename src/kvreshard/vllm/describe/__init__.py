"""Description of one rank: from vLLM's registered caches, specifications and configuration to an `EngineLayout` with that rank.

| file | holds |
|---|---|
| `rank` | `describe_rank`: groups, fields, shards and regions of a rank |
| `place` | the rank's place among all ranks, and which part of a cache it holds |
| `layer_info` | properties of a layer that its specification and memory do not show |
| `layer_view` | where a layer's pages lie, from its registered tensor |
| `interiors` | how each attention backend fills a page: the table of all that is known |
| `paged`, `states` | the kind of a layer with pages of tokens, or with states (`state_forms`: the table of their forms) |
| `model_config` | what the model's configuration determines: draft layers, number of KV heads |
"""

from kvreshard.vllm.describe.rank import describe_rank

__all__ = ["describe_rank"]
