"""Everything with a clock, a socket or a retry: handshakes, leases, loads."""
