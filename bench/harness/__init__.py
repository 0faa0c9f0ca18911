"""How to measure: rounds, processes, the machine, the findings."""
