"""``python -m dmconfig`` is the command ``dmconfig``."""

from dmconfig.cli import main

if __name__ == "__main__":
    main()
