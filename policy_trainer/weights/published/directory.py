"""Published weights in a directory that trainer and workers share.

Each version is a directory; `latest.json` is replaced in one rename, so that a reader sees the old version
or the new one, never half of one.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from policy_trainer.weights.published.publication import KEPT, Publication, Save, weights_versions
from shared.atomic_files import write_json
from shared.errors import UserError
from shared.spelling import spell_setting

LATEST = "latest.json"


class WeightsDirectory:
    """`Publisher` and `PublishedWeights` of one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = weights_versions(root)

    def publish(self, save: Save, publication: Publication) -> None:
        """Writes the version, then points latest.json at it, then removes old ones.

        Weights are synced although a resumed trainer publishes new ones. latest.json must survive a power cut, because
        it has the epoch that the next trainer's must exceed, and a worker that starts before that trainer loads what it
        names. Nothing else would tell the worker that a file is torn: safetensors checks its length, and a network file
        system may leave zeros at the full length.
        """
        if not self.has(publication):  # at the end of a run only latest.json changes
            with self._versions.write(publication.epoch, publication.version) as directory:
                save(directory)
        # `directory` is for other programs' samplers.
        write_json(self._root / LATEST, {"directory": publication.name, **asdict(publication)})
        self._versions.remove_old(keep=KEPT)

    def has(self, publication: Publication) -> bool:
        return (self._root / publication.name).is_dir()

    def newest(self) -> Publication | None:
        """Raises UserError for a damaged latest.json."""
        path = self._root / LATEST
        try:
            return Publication.parse(_read_newest(path))
        except FileNotFoundError:
            return None
        except UserError as error:
            again = f"start the trainer again with {spell_setting('resume', True)}, which writes a new one"
            raise UserError(f"{error}; {path} is damaged", f"delete it, and {again}") from None

    @contextmanager
    def reading(self, publication: Publication, reader: str) -> Iterator[Path]:
        """Reads through hard links, which the publisher does not remove.

        On a network file system, reading a file without a name is an error or kills the process (SIGBUS). Without hard
        links the version is read by its first names.
        """
        version, link = self._root / publication.name, self._root / f".read-by-{reader}"
        shutil.rmtree(link, ignore_errors=True)  # left by a killed reader
        try:
            yield version if not _link_files(version, link) else link
        finally:
            shutil.rmtree(link, ignore_errors=True)

    def describe(self) -> str:
        return str(self._root)


def _link_files(version: Path, link: Path) -> bool:
    """Whether the files of a directory have second names in `link` now. Raises FileNotFoundError if it is gone."""
    names = [file.name for file in version.iterdir()]
    try:
        link.mkdir()
        for name in names:
            (link / name).hardlink_to(version / name)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _read_newest(path: Path) -> bytes:
    """The content of a file that others replace. On NFS a file that is replaced while it is read is stale."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_bytes()
