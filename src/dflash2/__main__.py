"""``python -m dflash2`` is the same as the console script."""

from dflash2.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
