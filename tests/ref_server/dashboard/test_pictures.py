"""Pictures of a prompt in the group viewer."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.scoring.reference import NoReferenceModel
from ref_server.service.service import Service
from shared.batch import TokenGroup
from tests.ref_server.calls import Rollout, Serve, admit, bearer
from tests.ref_server.dashboard.conftest import Tab

TOKEN = "train-0123456789abcdef"
PLACEHOLDER = 9
PATTERN = np.array([[[0, 128, 255], [255, 0, 0]], [[0, 255, 0], [10, 20, 30]], [[90] * 3, [200] * 3]], np.uint8)
# The height, the width and the red, green, blue and alpha values of an image as the browser draws it.
PIXELS = """async (image) => {
    await image.decode();
    const [width, height] = [image.naturalWidth, image.naturalHeight];
    const context = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
    context.drawImage(image, 0, 0);
    return [height, width, [...context.getImageData(0, 0, width, height).data]];
}"""


class Seeing(NoReferenceModel):
    """No model, but a text for each id."""

    def decode(self, ids: Sequence[int], **_: bool) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "".join("<|image_pad|>" if id == PLACEHOLDER else f"<{id}>" for id in ids)


@pytest.fixture
def seeing(tmp_path: Path, serve: Serve) -> Iterator[httpx.Client]:
    (tmp_path / "tokens").write_text(f"train {TOKEN}\n")
    config = ServeConfig(no_model=True, data_dir=tmp_path, token_file=tmp_path / "tokens")
    with serve(Service(Seeing(config), open_queue(config), config)) as http:
        http.headers.update(bearer(TOKEN))
        yield http


def test_pictures_are_shown_next_to_the_prompt(
    seeing: httpx.Client, open_tab: Callable[..., Tab], rollout: Rollout
) -> None:
    planes = np.stack([PATTERN, PATTERN[::-1]]).transpose(0, 3, 1, 2)
    prompt = np.array([1, *[PLACEHOLDER] * 700, 2])
    group = TokenGroup(prompt, np.arange(5), np.array([2, 3]), {"pixel_values": planes})
    batch = rollout(group=group, lengths=(2, 3))
    admit(seeing, batch)
    page = open_tab(seeing).at(f"#token={TOKEN}&/batch/{batch.id}")
    expect(page.get_by_role("list", name="Pictures of the prompt").get_by_role("img")).to_have_count(2)
    picture = page.get_by_alt_text("Picture 1 of 2 of the prompt")
    expect(picture).to_be_visible()
    height, width, values = picture.evaluate(PIXELS)
    np.testing.assert_array_equal(np.reshape(values, (height, width, 4))[..., :3], PATTERN)
    expect(page.locator(".prompt pre")).to_have_text("<1><|image_pad|> \N{MULTIPLICATION SIGN} 700 <2>")


def test_a_prompt_without_pictures_has_no_list(
    seeing: httpx.Client, open_tab: Callable[..., Tab], rollout: Rollout
) -> None:
    batch = rollout()
    admit(seeing, batch)
    page = open_tab(seeing).at(f"#token={TOKEN}&/batch/{batch.id}")
    expect(page.locator(".prompt")).to_be_visible()
    expect(page.locator(".pictures")).to_have_count(0)


def test_a_picture_that_cannot_be_read_is_reported(
    seeing: httpx.Client, open_tab: Callable[..., Tab], rollout: Rollout
) -> None:
    group = TokenGroup(np.arange(3), np.arange(5), np.array([5]), {"pixel_values": np.ones((1, 3, 4, 4), np.uint8)})
    batch = rollout(group=group, lengths=(5,))
    admit(seeing, batch)
    tab = open_tab(seeing)
    tab.page.route("**/images/0", lambda route: route.fulfill(status=404, json={"error": {"message": "it is gone"}}))
    page = tab.at(f"#token={TOKEN}&/batch/{batch.id}")
    expect(page.locator(".pictures")).to_have_text("Not all pictures can be shown: it is gone")
