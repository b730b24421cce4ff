"""Pools: memory that holds blocks at slots. Which slot holds what is the table's business, not theirs."""
