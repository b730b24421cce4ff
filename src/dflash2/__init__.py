"""DFlash2: one runtime for the memory of LLM inference."""

__all__ = ["__version__"]

__version__ = "2.0.0"
