"""`python -m asyncrl.cli`."""

from asyncrl.cli import main

if __name__ == "__main__":
    main()
