"""Counters, history, metrics and the views on them."""
