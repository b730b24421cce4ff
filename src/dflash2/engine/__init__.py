"""The reference engine: scheduler, model runner, paged attention, sampling."""
