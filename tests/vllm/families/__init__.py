"""What vLLM's own model classes cache, family by family, without an engine and without weights."""
