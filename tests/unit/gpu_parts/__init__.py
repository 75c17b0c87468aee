"""Parts of the GPU kit that go wrong, each in its way."""
