"""OpenAI-compatible HTTP routes over the reference engine."""
