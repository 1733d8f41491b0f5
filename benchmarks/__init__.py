"""Speed of detection: `python -m benchmarks` (or `make bench`) prints tables and writes JSON and a plot."""
