"""`python -m equikd` is the `equikd` command, for where the script is not on the path."""

from equikd.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
