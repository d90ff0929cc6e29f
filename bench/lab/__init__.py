"""Validation of the lab against measurements by others: one script per check;
`docs/lab/fidelity.md` has their output.

Each wants `--traces DIR`, a folder with the public files that `docs/lab/fidelity.md` names, in the
layout that it shows.
"""
