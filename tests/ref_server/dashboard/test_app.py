"""The page's files as any client gets them."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from ref_server.service.service import Service

VIEWER = Path(__file__).parents[3] / "shared" / "viewer"
OURS = [
    path for path in sorted(VIEWER.iterdir()) if path.suffix in (".js", ".html", ".css") and "uPlot" not in path.name
]


@pytest.fixture(scope="module")
def page(http: httpx.Client) -> httpx.Response:
    return http.get("/")


def test_the_page_is_at_the_root_under_a_strict_policy(page: httpx.Response) -> None:
    assert (page.status_code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["img-src"] == "'self' data: blob:"
    assert {policy[name] for name in ("base-uri", "frame-ancestors", "form-action")} == {"'none'"}
    assert page.headers["X-Content-Type-Options"] == "nosniff"


def test_everything_that_the_page_names_is_there(http: httpx.Client, page: httpx.Response) -> None:
    named = set(re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page.text))
    for path in OURS:
        named |= {f"dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert len(named) > 20
    for name in sorted(named):
        answer = http.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["Content-Security-Policy"] == page.headers["Content-Security-Policy"]
    assert http.get("/dashboard/main.js").headers["Content-Type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize("name", ["none.js", "..%2Ffiles.py", "%2e%2e/app.py", "index.html%00"])
def test_nothing_else_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/dashboard/{name}").status_code in (401, 403, 404)


def test_a_copy_that_is_still_right_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/dashboard/main.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = http.get("/dashboard/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    assert http.get("/dashboard/main.js", headers={"If-None-Match": '"of an older server"'}).content == first.content


def test_the_plotting_library_has_its_licence(http: httpx.Client) -> None:
    assert "MIT" in http.get("/dashboard/uPlot-LICENSE.txt").text


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_text_becomes_markup_and_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    source = path.read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|setHTML|\bon\w+=\""
    assert re.findall(ways, source) == []
    assert re.findall(r"https?://", source) == []
    assert " style=" not in source


def test_the_page_needs_no_token(
    make_service: Callable[..., Service], serve: Callable[[Service], AbstractContextManager[httpx.Client]]
) -> None:
    with serve(make_service(token="0123456789abcdef-secret", legacy=True, legacy_insecure=True)) as http:
        assert http.get("/").status_code == http.get("/dashboard/page.css").status_code == 200
        assert http.get("/", headers={"Host": "evil.example"}).status_code == 403
        assert http.get("/v1/queue").status_code == 401
        assert http.get("/get").content == b"empty"
