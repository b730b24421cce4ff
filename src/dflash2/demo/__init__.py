"""``dflash2 demo``: a real model serves more context than its fast memory holds, with the same answers."""
