"""`python -m kvkeep`, which launchers of several processes can start."""

from .cli import main

if __name__ == "__main__":
    main()
