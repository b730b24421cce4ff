"""Recorded traffic run through the real table and policy, with pools that hold no bytes."""
