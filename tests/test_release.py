"""What a release consists of: one version everywhere, a changelog in its form, files that other programs read."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
HEADINGS = re.findall(r"^##+ .*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
SCHEMAS = {
    "CITATION.cff": "citation-file-format",
    "compose.yaml": "compose-spec",
    ".github/workflows/release.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
}


def test_the_version_is_the_same_everywhere() -> None:
    releases = [heading for heading in HEADINGS if re.match(r"## \[\d", heading)]
    assert releases[0].startswith(f"## [{VERSION}] - ")
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_is_in_the_form_of_keep_a_changelog() -> None:
    assert HEADINGS[0] == "## [Unreleased]"
    for heading in HEADINGS[1:]:
        assert re.fullmatch(
            r"## \[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}|### (Added|Changed|Deprecated|Removed|Fixed|Security)", heading
        ), heading


@pytest.mark.parametrize("file", SCHEMAS)
def test_files_for_other_programs(file: str) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{SCHEMAS[file]}", str(ROOT / file)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_for_github_is_checked() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.y*ml")}
    assert files == {file for file in SCHEMAS if file.startswith(".github")}
