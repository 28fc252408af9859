"""Runs a script as in an environment that has `pip install .` and nothing else.

python tests/bare.py SCRIPT: modules of distributions that the package does not require, directly or
not, cannot be imported.
"""

import importlib.metadata
import runpy
import sys

from packaging.requirements import Requirement


def required(name, found=None):
    """The distributions that come with one, by name, itself among them."""
    found = set() if found is None else found
    key = name.lower().replace("_", "-")
    if key not in found:
        found.add(key)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, found)
    return found


class Absent:
    """Finds modules that are not there."""

    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def main():
    there = required("memory_saving_gradients")
    absent = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & there
    }
    for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent(absent))
    runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
