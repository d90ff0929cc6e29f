"""The contract of the interfaces: `contract.json`, which is shipped with Dovetail.

`document` reads it, `source` reads the same from Python source without importing it, `diff`
compares two contracts, and `faults` compares a component's source with one. None of them imports
torch or a component. `python -m tools.contract` writes the file.
"""
