"""`python -m dovetail`: the `dovetail` command, where its script isn't on the path."""

from __future__ import annotations

from dovetail.cli.main import main

if __name__ == "__main__":
    main()
