"""The version of the code, from git."""

import shutil
import subprocess
from pathlib import Path

import pytest

from imagenet_cls import versions


def test_code_version_is_the_commit_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None without git, outside of a checkout, and where another repository ignores the folder."""

    def git(*words: str | Path) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", tmp_path, *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(versions, "__file__", str(package / "versions.py"))
    assert versions.code_version() is None
    git("init", "--quiet")
    (tmp_path / ".git" / "info" / "exclude").write_text("package\n")
    assert versions.code_version() is None
    git("add", "--force", "package")
    git("commit", "--quiet", "-m", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "notes.txt").touch()  # outside of the package
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))  # as in a hook of another repository
    assert versions.code_version() == {"commit": head, "uncommitted_changes": False}
    (package / "__init__.py").write_text("1")
    assert versions.code_version() == {"commit": head, "uncommitted_changes": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.code_version() is None
