"""Pictures of problems: encoded image files from users' rows, checked before a run and decoded when they are needed."""

import base64
import binascii
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.data.problem import Message, Problem
from shared.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

# Where a picture stands in a text: EasyR1's placeholder.
PLACEHOLDER = "<image>"
PICTURE_COLUMNS = ("images", "image")
# How the data URLs begin that `data_url` writes.
PNG_URL = "data:image/png;base64,"

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_ACCEPTED = "PNG, JPEG, WebP, GIF, BMP and TIFF are read"
_MAX_PICTURES = 256
_MAX_BYTES = 64 * 2**20
# Decoded, 200 MB. Small files can claim far more.
_MAX_PIXELS = 2**26
# For all pictures of a prompt together, since they are decoded together: processors need 8 bytes a pixel, 1 GB in all.
_MAX_PROMPT_PIXELS = 2**27
# More than 8 bits a channel; Pillow would cut their values off.
_DEEP_MODES = ("F", "I")
_ORIENTATION = 0x0112


def has_pictures(row: Mapping[str, Any]) -> bool:
    """Whether a row has pictures."""
    return any(_listed(row.get(column)) for column in PICTURE_COLUMNS)


def with_pictures(problem: Problem, row: Mapping[str, Any], where: str, folder: Path) -> Problem:
    """The problem with the pictures in the row's column `images` or `image`, if there are any.

    where: the row's place, for errors. folder: in which paths of pictures begin. Raises UserError for a picture that
    cannot be used, and if the messages have places for more or fewer pictures.
    """
    given = [column for column in PICTURE_COLUMNS if _listed(row.get(column))]
    if not given:
        return problem
    if len(given) > 1:
        raise UserError(f"{where}: has pictures in both {' and '.join(given)}", "leave one out")
    values = _listed(row[given[0]])
    if len(values) > _MAX_PICTURES:
        raise UserError(f"{where}: {given[0]} has {len(values)} pictures, and a prompt may have {_MAX_PICTURES}")
    places = [f"{where}: picture {number} of {len(values)} in {given[0]}" for number in range(1, len(values) + 1)]
    images = tuple(_bytes(value, place, folder) for value, place in zip(values, places, strict=True))
    check_pixels(images, where)
    for image, place in zip(images, places, strict=True):
        with _explained(place):
            _check(image)
    extras = {name: value for name, value in problem.extras.items() if name not in PICTURE_COLUMNS}
    return replace(problem, images=images, messages=tuple(placed(problem.messages, images, where)), extras=extras)


def placed(messages: Sequence[Message], images: Sequence[bytes], where: str) -> Sequence[Message]:
    """The messages with a placeholder for each picture: those that they have, else all in front of the first user's
    message, as in TRL. Without pictures a placeholder is any text. where: the beginning of errors.

    Raises UserError for other numbers of placeholders, and if there is no user's message.
    """
    if not images:
        return messages
    count = len(images)
    places = sum(message["content"].count(PLACEHOLDER) for message in messages)
    if places == count:
        return messages
    if places:
        raise UserError(
            f"{where}: has {count} pictures and {places} places for them",
            f"write {PLACEHOLDER} once for each picture, or nowhere: then all stand in front of the question",
        )
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise UserError(f"{where}: has pictures but no message of a user, in front of which they would stand")
    content = PLACEHOLDER * count + messages[first]["content"]
    return (*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :])


def require_pillow() -> None:
    """Raises UserError where pictures could not be read."""
    with _explained("a picture"):
        import PIL.Image  # noqa: F401


def decode(data: bytes) -> "Image":
    """The picture in RGB, upright; what is transparent becomes white. Raises UserError for one that is damaged."""
    with _explained("a picture"), _opened(data) as picture:
        return _flat(picture)


def plain(data: bytes) -> bytes:
    """The same picture as a file that every reader decodes as `decode` does: as it is, or as PNG if readers would
    disagree on its orientation or transparency."""
    with _explained("a picture"), _opened(data) as picture:
        if not picture.has_transparency_data and picture.getexif().get(_ORIENTATION, 1) == 1:
            return data
    return encode(decode(data))


def encode(picture: "Image") -> bytes:
    """The picture as PNG."""
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def small(data: bytes, side: int) -> bytes:
    """The picture as PNG with at most `side` pixels a side. Raises UserError for one that is damaged."""
    picture = decode(data)
    picture.thumbnail((side, side))
    return encode(picture)


def data_url(file: bytes) -> str:
    """An image file as text. It is called PNG, whatever it is: readers go by its content."""
    return PNG_URL + base64.b64encode(file).decode()


def from_data_url(url: str) -> bytes:
    """The file in a data URL. Raises ValueError for one that is not base64."""
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError("must be base64 as a data URL: data:image/png;base64,…")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is not base64: {error}") from None


def with_readable_pictures(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row as JSON in another directory can hold it: pictures in Pillow's form or as bytes become data URLs, and
    their paths absolute. where: the row's place. Raises UserError for anything that would be refused in a file."""
    readable: dict[str, Any] = dict(row)
    for column in PICTURE_COLUMNS:
        if values := _listed(row.get(column)):
            places = (f"{where}: picture {number} of {len(values)} in {column}" for number in range(1, len(values) + 1))
            readable[column] = [_readable(value, place) for value, place in zip(values, places, strict=True)]
    return readable


def absolute(value: str | Path) -> str:
    """The absolute path of a picture whose path is relative to the working directory; URLs are unchanged."""
    text = str(value)
    return text if text.startswith("data:") or "://" in text else str(Path(value).absolute())


def _readable(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if hasattr(value, "getexif"):  # Pillow's own type, which is not imported for texts
        with _explained(place):
            _check_kind(value)
            value = encode(_flat(value))
    if isinstance(value, bytes):
        return data_url(value)
    return absolute(value) if isinstance(value, str | Path) else value


def _flat(picture: "Image") -> "Image":
    """The picture in RGB and upright; transparent areas become white."""
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(picture.convert("LA") if picture.mode == "La" else picture)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    white = Image.new("RGBA", upright.size, "white")
    return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")


def _listed(value: Any) -> list[Any]:
    if value is None or (isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") is None):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def check_pixels(pictures: Sequence[bytes], where: str) -> None:
    """Raises UserError if the pictures of a prompt have too many pixels in all. Nothing is decoded: a few kilobytes can
    decode to gigabytes. A file whose size cannot be read counts as 0."""
    total = sum(map(_claimed_pixels, pictures))
    if total > _MAX_PROMPT_PIXELS:
        raise UserError(
            f"{where}: its {len(pictures)} pictures have {total} pixels in all; a prompt may have at most "
            f"{_MAX_PROMPT_PIXELS}",
            "make them smaller",
        )


def _claimed_pixels(data: bytes) -> int:
    with suppress(UserError), _explained("a picture"), _opened(data) as picture:
        return math.prod(picture.size)
    return 0


def _bytes(value: Any, where: str, folder: Path) -> bytes:
    with _explained(where):
        return _read(value, folder)


def _read(value: Any, folder: Path) -> bytes:
    """The bytes of an image file: given, in a data URL, or in a local file."""
    if isinstance(value, Mapping):  # how datasets stores a picture
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a path, a data URL, or the bytes of an image file, got {type(value).__name__}")
    if value.startswith("data:"):
        return from_data_url(value)
    if "://" in value:
        raise ValueError("is a URL, and nothing is fetched: download it and give its path")
    return _from_file(folder / value)


def _from_file(path: Path) -> bytes:
    try:
        if not path.is_file():  # a device or a pipe could be read forever
            raise ValueError(f"there is no file {path}; paths begin in the directory of the data, or are absolute")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _check(data: bytes) -> None:
    """Raises ValueError or OSError for a file that is no picture, is damaged, or is too large. Decodes as little as
    possible, since every row is checked."""
    if not data:
        raise ValueError("is empty")
    if len(data) > _MAX_BYTES:
        raise ValueError(f"has more than {_MAX_BYTES // 2**20} MiB")
    with _opened(data) as picture:
        width, height = picture.size
        if width * height > _MAX_PIXELS:
            raise ValueError(f"has {width} x {height} pixels, more than {_MAX_PIXELS}: make it smaller")
        _check_kind(picture)
        _check_whole(picture, data)


def _check_kind(picture: "Image") -> None:
    """Raises ValueError for files with several pictures, and for values that Pillow would clip. In an MPO, which phones
    write, the further pictures are only previews and other views of the first, which is the one that viewers show."""
    if picture.format != "MPO" and (frames := getattr(picture, "n_frames", 1)) > 1:
        raise ValueError(f"is animated or has several pages ({frames}): save one of them as PNG")
    if picture.mode.startswith(_DEEP_MODES):
        raise ValueError(f"has more than 8 bits a channel (mode {picture.mode}): convert it to 8 bits")


def _check_whole(picture: "Image", data: bytes) -> None:
    match picture.format:
        case "PNG":
            picture.verify()  # the checksums
        case "JPEG" | "MPO":
            picture.draft("RGB", (1, 1))  # decodes an eighth of each side, in an eighth of the time
            picture.load()
        case "WEBP":
            if len(data) < int.from_bytes(data[4:8], "little") + 8:
                raise ValueError("is truncated")
        case _:
            picture.load()


@contextmanager
def _opened(data: bytes) -> "Iterator[Image]":
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            picture = Image.open(BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"is not an image file: {_ACCEPTED}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"has more than {_MAX_PIXELS} pixels: make it smaller") from None
    with picture:
        yield picture


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turns what Pillow and the checks raise into UserError. where: the beginning of the message."""
    try:
        yield
    except ModuleNotFoundError:
        raise UserError(
            "data: pictures need Pillow, which is not installed", "pip install 'tandem-grpo[vision]'"
        ) from None
    except (ValueError, OSError, SyntaxError, EOFError, IndexError, OverflowError) as error:  # as Pillow does
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{where}: {reason}") from None
