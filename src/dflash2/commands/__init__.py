"""One module per sub-command of ``dflash2``; each imports what is heavy only when it runs."""
