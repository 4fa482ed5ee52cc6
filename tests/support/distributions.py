"""Small distributions in a folder, in the form in which an installer writes them."""

import textwrap
from pathlib import Path


def add_distribution(
    folder: Path, name: str, hooks: str = "", /, version: str = "1.0", **modules: str
) -> Path:
    """Write a distribution that registers hooks, as `name = module:attribute` lines.

    Returns the folder, for sys.path.
    """
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[other]\nx = y:z\n\n[graphstash.hooks]\n{hooks}\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(textwrap.dedent(text))
    return folder
