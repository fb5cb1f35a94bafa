"""`python -m pardnn`: the command line, where the script is not on the path."""

from pardnn.cli.main import main

if __name__ == "__main__":
    main()
