from pathlib import Path

import pytest

from imagenet_cls.data import index_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder. Small and new datasets are cached as well, on any file system."""
    monkeypatch.setenv("IMAGENET_CLS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index_cache, "MIN_IMAGES", 1)
    monkeypatch.setattr(index_cache, "MIN_AGE_SEC", -3600)
    file_systems = index_cache.FILE_SYSTEMS | {"overlay", "unknown"}
    monkeypatch.setattr(index_cache, "FILE_SYSTEMS", file_systems)
    return tmp_path / "cache"
