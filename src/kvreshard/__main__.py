"""`python -m kvreshard`: the same as `kvreshard`."""

from kvreshard.cli import main

if __name__ == "__main__":
    main()
