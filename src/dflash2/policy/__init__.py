"""Decides what is hot, what leaves and what is fetched ahead; moves nothing."""
