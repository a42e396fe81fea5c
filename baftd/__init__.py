"""baftd, a checkpoint daemon for distributed training. Importing it costs nothing and imports no framework."""

__version__ = "0.1.0"
