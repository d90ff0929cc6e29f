"""Reports of runs: one self-contained HTML file, with its figures as PNG and its numbers as CSV
beside it."""
