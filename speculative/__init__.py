"""The engine: scheduling, drafting, verification and sampling over the networks in ``models``."""
