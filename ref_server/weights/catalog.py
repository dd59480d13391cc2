"""Reads from the disk which versions are committed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from ref_server.weights.versions import Published
from shared.api import WeightsFile, WeightsName

# No uploaded file can have this name: it begins with a dot.
MANIFEST = ".manifest.json"


class Catalog:
    """The versions below a root: directories RUN/LINEAGE/EPOCH/VERSION with a manifest.

    They may go while they are listed: then they are left out.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def directory(self, name: WeightsName) -> Path:
        return self._root / name.path

    def runs(self) -> Iterator[str]:
        if self._root.is_dir():
            yield from sorted(path.name for path in self._root.iterdir() if not path.name.startswith("."))

    def read(self, name: WeightsName) -> Published | None:
        try:
            manifest = json.loads((self.directory(name) / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        files = {file: WeightsFile.model_validate(content) for file, content in manifest["files"].items()}
        return Published(name, manifest["number"], files, manifest["words"])

    def of_run(self, run: str) -> list[Published]:
        """The newest first; those of the lineage that committed last before all others."""
        names = [path.parts[-3:] for path in (self._root / run).glob("*/*/*")]
        known = [(line, int(epoch), int(one)) for line, epoch, one in names if epoch.isdecimal() and one.isdecimal()]
        found = [one for name in known if (one := self.read(WeightsName(run, *name)))]
        last = max(found, key=lambda one: one.number).name.lineage if found else ""
        return sorted(found, key=lambda one: (one.name.lineage == last, one.name.order), reverse=True)

    def newest(self, run: str, lineage: str | None) -> Published | None:
        """Of a lineage, or of the one that committed last."""
        return next((found for found in self.of_run(run) if lineage in (None, found.name.lineage)), None)

    def committed_at(self, name: WeightsName) -> float:
        try:
            return (self.directory(name) / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            return time.time()
