"""Keep the keys and values that the future will read; drop the rest."""

__version__ = "0.1.0.dev0"
