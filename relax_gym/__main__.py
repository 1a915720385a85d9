"""`python -m relax_gym` is the `relax-gym` command."""

from relax_gym.cli import main

main()
