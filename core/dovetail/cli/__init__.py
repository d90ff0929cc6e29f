"""The `dovetail` command. Modules here import what is heavy inside the functions that need it: `--help` must be quick."""
