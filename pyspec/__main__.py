"""`python -m pyspec`."""

from pyspec.cli import main

main()
