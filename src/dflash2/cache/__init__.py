"""Which blocks exist, who holds them, who may start: lookup, reservation, admission, rebalance."""
