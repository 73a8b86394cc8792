"""Print the dependencies of the distribution and of the extras named (``a,b``), for an image layer that changes only with them."""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    with Path("pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(requirements([extra for extra in sys.argv[1].split(",") if extra])))
