"""Files that would run code when a pickle is read: refused, and nothing of them runs."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_files import config, saved

from shoal.checkpoint.formats.dcp_metadata import read_metadata
from shoal.checkpoint.formats.pickles import load
from shoal.checkpoint.formats.transfer import open_any, transfer
from shoal.checkpoint.inspect import find, listing, verify
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.core.errors import CheckpointError, CorruptError, ShoalError


class Touch:
    """Unpickled by an ordinary reader, this makes a file."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return (open, (self.canary, "w"))


class System(Touch):
    def __reduce__(self):
        return (os.system, (f"touch {self.canary}",))


def nested(canary):
    """Hidden in the state of a class that is allowed."""
    return (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(tR(dS'x'\ncos\nsystem\n(S'touch "
        + str(canary).encode()
        + b"'\ntRsb."
    )


def by_hand(canary):
    """Opcodes of the oldest protocol, which name a function in text."""
    return b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."


def instance(canary):
    return b"(S'touch " + str(canary).encode() + b"'\nios\nsystem\n."


def through_getattr(canary):
    return (
        b"c__builtin__\ngetattr\n(cposix\nsystem\nS'__call__'\ntR(S'touch "
        + str(canary).encode()
        + b"'\ntR."
    )


PICKLES = {
    "open": lambda c: pickle.dumps({"x": Touch(c)}),
    "system": lambda c: pickle.dumps(System(c)),
    "nested": nested,
    "global": by_hand,
    "inst": instance,
    "getattr": through_getattr,
}


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


@pytest.fixture
def dcp(tmp_path):
    saved(tmp_path / "store", config())
    return transfer(tmp_path / "store", tmp_path / "dcp", "dcp")


def test_the_canary_sings_where_an_ordinary_reader_is_used(canary):
    for name in ("system", "global", "inst"):
        pickle.loads(PICKLES[name](canary))
        assert canary.exists()
        canary.unlink()


@pytest.mark.parametrize("name", PICKLES)
def test_metadata_of_dcp(tmp_path, canary, name):
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(PICKLES[name](canary))
    for use in (open_any, listing):
        with pytest.raises(CheckpointError, match=r"could run code; refused and not executed"):
            use(dcp)
    assert find(dcp).kind == "dcp"
    assert "not executed" in verify(dcp).problems[0]
    assert not canary.exists()


@pytest.mark.slow
def test_objects_beside_the_tensors_of_dcp(tmp_path, canary):
    import torch.distributed.checkpoint as theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save(
            {"w": torch.ones(2), "shoal": Touch(canary)},
            checkpoint_id=tmp_path / "d",
            no_dist=True,
        )
    with pytest.raises(CheckpointError, match=r"shoal: holds io.open, which is neither"):
        open_any(tmp_path / "d")
    assert not canary.exists()


def hostile(value):
    """A file of torch.save whose pickle is another one."""
    plain, out = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.ones(2)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            data = value if entry.filename.endswith("data.pkl") else old.read(entry)
            new.writestr(entry.filename, data)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", PICKLES)
def test_tensors_of_dcp(dcp, canary, name):
    data = hostile(PICKLES[name](canary))
    index = read_metadata(dcp / ".metadata")
    place = next(iter(index.tensors["model.norm.weight"].pieces))[1]
    file = dcp / place.file
    raw = file.read_bytes()
    # Where a tensor lay now lies the hostile file; what it is too long for is cut.
    file.write_bytes(raw[: place.offset] + data + raw[place.offset + len(data) :])
    result = open_any(dcp)
    with pytest.raises(ShoalError):
        for tensor in result.names():
            result.tensor(tensor)
    assert not canary.exists()


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("to", ["deepspeed", pytest.param("megatron", marks=pytest.mark.slow)])
def test_rank_files(tmp_path, canary, to, name):
    saved(tmp_path / "store", config())
    place = transfer(tmp_path / "store", tmp_path / "d", to, mesh=RankLayout(tp=2))
    for file in place.rglob("*.pt"):
        shutil.copy(file, tmp_path / "kept")
        file.write_bytes(hostile(PICKLES[name](canary)))
        with pytest.raises(CheckpointError, match=r"not executed|is truncated or damaged"):
            open_any(place)
        shutil.copy(tmp_path / "kept", file)
    assert not canary.exists()


def test_an_archive_that_is_compressed_is_refused(tmp_path):
    plain = io.BytesIO()
    torch.save(torch.zeros(1000), plain)
    with (
        zipfile.ZipFile(plain) as old,
        zipfile.ZipFile(tmp_path / "f.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(CorruptError, match="may have been manipulated"):
        load(tmp_path / "f.pt")
    with pytest.raises(CorruptError, match="missing"):
        load(tmp_path / "none.pt")


@pytest.mark.slow
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_metadata_of_any_bytes_is_an_error_or_an_index(dcp, data):
    """Flipped bytes never give anything else than an error of ours, or tensors."""
    file = dcp / ".metadata"
    kept = dcp / "kept"
    if not kept.exists():
        shutil.copy(file, kept)
    raw = bytearray(kept.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw[: data.draw(st.integers(1, len(raw)))]))
    try:
        read_metadata(file)
    except CheckpointError as error:
        assert str(file) in str(error)
