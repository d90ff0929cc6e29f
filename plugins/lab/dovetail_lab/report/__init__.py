"""A report of runs: one HTML file that needs nothing else, and the same figures as PNG and the same numbers as CSV beside it."""
