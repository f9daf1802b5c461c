"""``python -m lightning_modules`` is the same as ``dsv41``."""

from lightning_modules.entry import main

if __name__ == "__main__":
    main()
