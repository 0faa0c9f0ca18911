"""Processes that compile and nothing else."""
