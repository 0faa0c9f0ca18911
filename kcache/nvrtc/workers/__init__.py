"""Worker processes, which compile and do nothing else."""
