"""Looks at a machine and a configuration before the start, measures the machine, and plans a configuration."""
