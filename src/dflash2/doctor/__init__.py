"""Checks and measurements of this machine, before and at start."""
