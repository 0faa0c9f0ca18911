"""The version of the distribution. It is defined nowhere else."""

__version__ = "0.1.0"
