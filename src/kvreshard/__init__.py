"""Move a request's KV cache from one inference engine to another, whatever the two layouts are."""

__version__ = "0.1.0.dev0"
