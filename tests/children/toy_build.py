"""Child script: builds a copy of the repository, reusing the original's object files.

A unit is compiled if its files are not those that its object in the other tree was made of. So a
copy with one more family compiles this family's units, and links.
"""

import sys
from dataclasses import replace
from pathlib import Path

from fusedops import building, toolchain
from fusedops.cache import publish


def main(original: Path) -> None:
    """Builds fusedops, which is a copy of `original`, in place; prints what is compiled."""
    work = toolchain.ROOT / "build" / "temp"
    work.mkdir(parents=True)
    torch = toolchain.Torch.installed()
    every = [*building.steps([torch], work)]
    reused = {step.made: output for step in every if (output := object_of(step, original))}
    for output, theirs in reused.items():
        if output.endswith(".gch"):  # beside the header that the flags name
            Path(output).symlink_to(theirs)
    *left, link = (step for step in every if step.made not in reused)
    print(*(Path(step.made).name for step in left), sep="\n")
    link = replace(link, sources=tuple(reused.get(name, name) for name in link.sources))
    (work / "build.ninja").write_text(building.rules() + "".join(map(str, [*left, link])))
    building._run([*toolchain.ninja(), "-C", str(work)])
    publish(Path(link.made), torch, toolchain.ROOT / "fusedops")


def object_of(step: building.Step, original: Path) -> str | None:
    """Returns the other tree's build output for a step with equal sources."""
    output = original / Path(step.made).relative_to(toolchain.ROOT)
    if step.rule == "link" or not output.exists():
        return None
    for source in map(Path, step.sources):  # files, or lists of a unit's files
        theirs = original / source.relative_to(toolchain.ROOT)
        if not theirs.exists() or theirs.read_bytes() != source.read_bytes():
            return None
    return str(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
