"""The `dovetail` command. Its modules import heavy packages inside the functions that need them:
`--help` must be quick."""
