"""The lab held against measurements by others: one script a check, `docs/lab/fidelity.md` has what they print.

Each wants `--traces DIR`, a folder with the public files that `docs/lab/fidelity.md` names, in the layout that it shows.
"""
