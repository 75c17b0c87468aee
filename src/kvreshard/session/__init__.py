"""Everything with a clock, a socket or a retry: the life of a transfer."""
