"""Studies: a base and variants of it over several seeds, ``dsv41 ablate`` and ``dsv41 compare``."""
