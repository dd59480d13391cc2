"""The documentation's site, without what builds it: `make docs` checks the links."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tools.site.pages import REFERENCE, ROOT, collect

NAVIGATION = re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "tools/site/mkdocs.yml").read_text(), re.MULTILINE)


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    collect(tmp_path / "pages")
    pages = {page.relative_to(tmp_path / "pages").as_posix() for page in (tmp_path / "pages").rglob("*.md")}
    assert pages == set(NAVIGATION)


@pytest.mark.parametrize("name", [name for names in REFERENCE.values() for name in names])
def test_the_reference_has_what_exists(name: str) -> None:
    module, _, value = name.rpartition(".")
    assert getattr(import_module(module), value).__doc__
