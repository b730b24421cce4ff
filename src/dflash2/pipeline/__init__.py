"""DSpark: requests reach the scheduler ready to run (tokenised, adapter loaded, batched)."""
