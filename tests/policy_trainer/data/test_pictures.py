"""Pictures in users' rows: what is read, where they stand in messages, and hostile files."""

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile

from policy_trainer.config import EvalConfig
from policy_trainer.data.pictures import decode, encode, plain, with_pictures, with_readable_pictures
from policy_trainer.data.problem import Problem
from policy_trainer.data.vision import PictureProcessor
from shared.errors import UserError
from tests.policy_trainer.vision_models import picture

PNG = encode(picture(8, 6))
QUESTION = Problem("1", ({"role": "user", "content": "What is it?"},), "What is it?")


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


# Which file format stores each Pillow mode that a file can store without loss.
FILES = {**dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA"), "PNG"), **dict.fromkeys(("CMYK", "LAB"), "TIFF")}
DEEP = [mode for mode in Image.MODES if mode.startswith(("I", "F"))]


def colours() -> Image.Image:
    """Semi-transparent on one side."""
    image = picture(8, 6)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def of_mode(image: Image.Image, mode: str) -> Image.Image:
    """The picture in this mode; transparent areas become white if the mode has no transparency."""
    image = image.convert("LA") if image.mode == "La" else image
    if mode == "La":
        return image.convert("LA").convert("La")
    if image.has_transparency_data and mode not in ("LA", "PA", "RGBA", "RGBa"):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert(mode)


def images_of(value: Any, folder: Path = Path()) -> tuple[bytes, ...]:
    return with_pictures(QUESTION, {"images": value}, "row 1", folder).images


class TestPixelsOfAPrompt:
    """Eight 1-bit pictures take 66 kB in a row, but 4 GB in a processor."""

    LARGE = saved(Image.new("1", (8192, 8192)), "PNG")

    def test_are_bounded_before_anything_is_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(self: Any) -> None:
            raise AssertionError("decoded")

        monkeypatch.setattr(ImageFile.ImageFile, "load", load)
        message = r"its 8 pictures have 536870912 pixels in all; a prompt may have at most 134217728; make them smaller"
        with pytest.raises(UserError, match=rf"^row 1: {message}"):
            images_of([self.LARGE] * 8)
        problem = Problem("", ({"role": "user", "content": "?"},), images=(self.LARGE,) * 8)
        processor = PictureProcessor(EvalConfig(model="none"), None)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=message):  # a task of the user's own has no rows
            processor.expand("", problem.images)

    def test_may_be_as_many_as_that(self) -> None:
        assert images_of([self.LARGE] * 2) == (self.LARGE,) * 2


class TestForms:
    @pytest.mark.parametrize(
        "value",
        [
            PNG,
            [PNG],
            {"bytes": PNG, "path": None},
            {"bytes": PNG, "path": "never-read.png"},
            f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        ],
    )
    def test_of_values(self, value: Any) -> None:
        assert images_of(value) == (PNG,)
        assert with_pictures(QUESTION, {"image": value}, "row 1", Path()).images == (PNG,)

    def test_paths_begin_in_the_directory_of_the_data(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        assert images_of(["a.png", str(tmp_path / "a.png"), {"path": "a.png"}], tmp_path) == (PNG,) * 3

    @pytest.mark.parametrize("row", [{}, {"images": None}, {"image": []}, {"image": {"bytes": None, "path": None}}])
    def test_a_row_without_pictures_is_a_text(self, row: dict[str, Any]) -> None:
        assert with_pictures(QUESTION, row, "row 1", Path()) is QUESTION

    def test_rewards_do_not_get_them_as_columns(self) -> None:
        problem = Problem("1", QUESTION.messages, extras={"images": [PNG], "level": 2})
        assert with_pictures(problem, {"images": [PNG]}, "row 1", Path()).extras == {"level": 2}

    @pytest.mark.parametrize("value", [picture(8, 6), PNG, {"bytes": PNG, "path": None}])
    def test_rows_of_python_become_json(self, value: Any) -> None:
        (read,) = images_of(with_readable_pictures({"images": [value]}, "row 1")["images"])
        assert decode(read).tobytes() == picture(8, 6).tobytes()

    @pytest.mark.parametrize("mode", [mode for mode in Image.MODES if mode not in DEEP])
    def test_pictures_of_python_are_read_as_their_files_are(self, mode: str) -> None:
        given = of_mode(colours(), mode)
        expected = decode(saved(given, FILES[mode])) if mode in FILES else of_mode(given, "RGB")
        (read,) = images_of(with_readable_pictures({"images": [given]}, "row 1")["images"])
        assert decode(read).tobytes() == expected.tobytes()

    @pytest.mark.parametrize("mode", DEEP)
    def test_deep_pictures_of_python_are_refused_as_their_files_are(self, mode: str) -> None:
        with pytest.raises(UserError, match=r"^row 1: picture 1 of 1 in images: has more than 8 bits a channel"):
            with_readable_pictures({"images": [Image.new(mode, (8, 6))]}, "row 1")

    def test_a_picture_of_python_stands_upright(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jpg"
        file.write_bytes(saved(turned(), "JPEG", exif=turned().getexif()))
        with Image.open(file) as opened:
            (read,) = images_of(with_readable_pictures({"images": opened}, "row 1")["images"])
        assert decode(read).size == (6, 8)
        assert decode(read).tobytes() == decode(file.read_bytes()).tobytes()

    def test_a_picture_of_python_with_several_frames_is_refused(self) -> None:
        several = saved(picture(8, 6), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 6))])
        with (
            Image.open(io.BytesIO(several)) as opened,
            pytest.raises(UserError, match=r"^row 1: picture 1 of 1 in image: is animated"),
        ):
            with_readable_pictures({"image": opened}, "row 1")

    def test_of_a_phones_pictures_the_first_is_read(self) -> None:
        phones = saved(picture(64, 48), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 6))])
        assert images_of(phones) == (phones,)
        with Image.open(io.BytesIO(phones)) as opened:
            (read,) = images_of(with_readable_pictures({"images": [opened]}, "row 1")["images"])
        assert decode(read).tobytes() == decode(phones).tobytes() == decode(saved(picture(64, 48), "JPEG")).tobytes()

    def test_relative_paths_of_python_become_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        monkeypatch.chdir(tmp_path)
        row = with_readable_pictures({"image": "a.png", "level": 1}, "row 1")
        assert row["level"] == 1
        assert images_of(row["image"], Path("/")) == (PNG,)


class TestPlaces:
    def messages(self, *contents: str, count: int = 2) -> list[str]:
        spoken = tuple({"role": "user", "content": content} for content in contents)
        made = with_pictures(Problem("", spoken), {"images": [PNG] * count}, "row 1", Path())
        return [message["content"] for message in made.messages]

    def test_placeholders_of_the_text_are_kept(self) -> None:
        assert self.messages("a <image>b", "<image>") == ["a <image>b", "<image>"]

    def test_without_any_all_stand_in_front_of_the_first_users_message(self) -> None:
        assert self.messages("a", "b") == ["<image><image>a", "b"]

    @pytest.mark.parametrize("count", [1, 3])
    def test_another_number_is_refused(self, count: int) -> None:
        with pytest.raises(UserError, match=rf"^row 1: has {count} pictures and 2 places for them; write <image> once"):
            self.messages("<image><image>", count=count)

    def test_a_conversation_without_a_user_is_refused(self) -> None:
        spoken = Problem("", ({"role": "system", "content": "a"},))
        with pytest.raises(UserError, match="no message of a user"):
            with_pictures(spoken, {"images": [PNG]}, "row 1", Path())

    def test_two_columns_are_refused(self) -> None:
        with pytest.raises(UserError, match="in both images and image"):
            with_pictures(QUESTION, {"images": [PNG], "image": PNG}, "row 1", Path())


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few hundred bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def damaged_inside() -> bytes:
    """A JPEG whose ends are right."""
    data = bytearray(saved(picture(64, 48), "JPEG"))
    start = data.index(b"\xff\xda")
    data[start + 20 : start + 24] = b"\xff\xc0\x00\x02"  # a header among the pixels
    return bytes(data)


def jpeg_with_thumbnail() -> bytes:
    """Its thumbnail ends with the mark that ends a JPEG."""
    thumbnail = saved(picture(8, 6), "JPEG")
    whole = saved(picture(64, 48), "JPEG")
    return whole[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + whole[2:]


class TestHostileFiles:
    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "is empty"),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image file: PNG, JPEG"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n", "is not an image file"),
            (b"\0" * 100, "is not an image file"),
            (PNG[:-20], ""),
            (PNG[:60] + b"\0" + PNG[61:], ""),
            (saved(picture(64, 48), "JPEG")[:-40], "is truncated"),
            (jpeg_with_thumbnail()[:-40], "is truncated"),
            (damaged_inside(), "broken data stream"),
            (saved(picture(64, 48), "WEBP")[:-10], ""),
            (saved(picture(64, 48), "BMP")[:-10], ""),
            (saved(picture(8, 6), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 6))]), "is animated"),
            (saved(Image.new("I;16", (8, 6), 40_000), "PNG"), "more than 8 bits a channel"),
            (saved(Image.new("F", (8, 6), 0.5), "TIFF"), "more than 8 bits a channel"),
            (bomb(), "pixels"),
            (saved(Image.new("1", (10_000, 7_000)), "PNG"), "has 10000 x 7000 pixels, more than"),
        ],
    )  # fmt: skip
    def test_are_refused_by_row_and_place(self, data: bytes, reason: str) -> None:
        with pytest.raises(UserError, match=rf"^row 1: picture 2 of 2 in images: .*{reason}"):
            images_of([PNG, data])

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("https://example.com/a.png", "is a URL, and nothing is fetched"),
            ("file:///etc/passwd", "is a URL"),
            ("/etc/passwd", "is not an image file"),
            ("../../etc/passwd", "there is no file|is not an image file"),
            ("/dev/zero", "there is no file"),
            ("missing.png", "there is no file .*; paths begin in the directory of the data"),
            ("data:image/png;base64,!!", "is not base64"),
            ("data:image/png,abc", "must be base64"),
            (17, "must be a path, a data URL, or the bytes of an image file, got int"),
            ({"bytes": "https://a", "path": None}, "is a URL"),
            ("a\0b", ""),
        ],
    )
    def test_other_values_are_refused(self, value: Any, reason: str) -> None:
        with pytest.raises(UserError, match=rf"^row 1: picture 1 of 1 in images: .*({reason})"):
            images_of([value])

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UserError, match="there is no file"):
            images_of(["pipe"], tmp_path)

    def test_ten_thousand_in_a_row_are_refused_without_reading_them(self) -> None:
        with pytest.raises(UserError, match="has 10000 pictures, and a prompt may have 256"):
            images_of(["https://example.com"] * 10_000)


def turned() -> Image.Image:
    image = picture(8, 6)
    image.getexif()[0x0112] = 6
    return image


class TestDecoding:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: saved(picture(8, 6).convert("CMYK"), "JPEG"),
            lambda: saved(picture(8, 6).convert("P"), "PNG"),
            lambda: saved(picture(8, 6).convert("L"), "PNG"),
            lambda: saved(picture(8, 6).convert("1"), "PNG"),
            lambda: saved(picture(8, 6), "GIF"),
            lambda: saved(picture(8, 6), "WEBP"),
        ],
    )
    def test_other_modes_become_rgb(self, make: Callable[[], bytes]) -> None:
        (data,) = images_of([make()])
        assert decode(data).mode == "RGB" and decode(data).size == (8, 6)
        assert plain(data) is data, "engines decode it in the same way"

    def test_transparent_places_become_white(self) -> None:
        image = Image.new("RGBA", (8, 6), (0, 0, 0, 0))
        image.putpixel((1, 1), (0, 0, 0, 255))
        for data in (saved(image, "PNG"), plain(saved(image, "PNG"))):
            assert decode(data).getpixel((0, 0)) == (255, 255, 255)
            assert decode(data).getpixel((1, 1)) == (0, 0, 0)
        assert Image.open(io.BytesIO(plain(saved(image, "PNG")))).mode == "RGB"

    def test_turned_pictures_become_upright(self) -> None:
        data = saved(turned(), "JPEG", exif=turned().getexif())
        assert decode(data).size == (6, 8)
        assert Image.open(io.BytesIO(plain(data))).size == (6, 8)
