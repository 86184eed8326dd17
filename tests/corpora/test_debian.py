"""The package index of a machine, read from a made-up one."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.corpora.debian import DebianPackage, debian_packages

TEXT = """Package: b
Section: libs
Maintainer: Some One <one@example.org>
Installed-Size: 12
Size: 3456
Depends: libc6 (>= 2.34), a | c, libc6:any (<< 3),
 d
Pre-Depends: dpkg
Suggests: e (>= 1) | f
Tag: role::shared-lib, implemented-in::c,
 admin::kernel
Description: a library
 with more to say: here
  Package: not this

Package: a
Description: another

Package: b
Section: older
"""

B = DebianPackage(
    name="b",
    section="libs",
    maintainer="Some One <one@example.org>",
    size_bytes=3456,
    installed_bytes=12 * 1024,
    description="a library",
    depends=("a", "d", "dpkg", "libc6"),
    related=("a", "c", "d", "dpkg", "e", "f", "libc6"),
    tags=("admin::kernel", "implemented-in::c", "role::shared-lib"),
)


def lists(root: Path) -> Path:
    place = root / "var/lib/apt/lists"
    place.mkdir(parents=True)
    return place


@pytest.mark.parametrize("ending", ["", ".gz", ".lz4"])
def test_lists_of_packages(tmp_path: Path, ending: str) -> None:
    path = lists(tmp_path) / f"host_dists_main_binary-amd64_Packages{ending}"
    if ending == ".gz":
        path.write_bytes(gzip.compress(TEXT.encode()))
    elif ending:
        arrow = pytest.importorskip("pyarrow")
        with arrow.CompressedOutputStream(str(path), "lz4") as stream:
            stream.write(TEXT.encode())
    else:
        path.write_text(TEXT)
    index = debian_packages(tmp_path)
    assert [row.name for row in index.rows] == ["a", "b"]
    assert index.rows[1] == B
    assert index.sources == (str(path),)
    assert index.note == "2 packages are few; apt-get update fetches the others"


def test_installed_packages(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(TEXT)
    index = debian_packages(tmp_path)
    assert len(index.rows) == 2
    assert index.note.startswith("only installed packages")


def test_no_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no index of packages"):
        debian_packages(tmp_path)


def test_a_damaged_index(tmp_path: Path) -> None:
    (lists(tmp_path) / "x_Packages.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(DataError, match=r"x_Packages.gz: cannot be read"):
        debian_packages(tmp_path)
