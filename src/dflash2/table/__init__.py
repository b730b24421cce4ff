"""The page table and the index from token prefixes to blocks."""
