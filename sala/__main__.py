"""`python -m sala` is the command `sala`."""

from sala.cli import main

main()
