"""Moves batches of blocks between tiers through staging; knows slots, not blocks."""
