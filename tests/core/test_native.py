"""The builder of native code: caching, errors, concurrency."""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core import native
from shoal.core.errors import BuildError

ADD = 'extern "C" long add(long a, long b) { return a + b; }'


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "_LOADED", {})


def test_builds_and_calls():
    library = native.build(ADD, name="add")
    library.add.restype, library.add.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long]
    assert library.add(2**40, 5) == 2**40 + 5


def test_second_build_compiles_nothing(monkeypatch):
    first = native.build(ADD, name="add")
    assert native.build(ADD, name="add") is first
    monkeypatch.setattr(native, "_LOADED", {})
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.build(ADD, name="add").add(1, 2) == 3


def test_the_path_depends_on_source_flags_cpu_and_compiler(monkeypatch):
    paths = {
        native.library_path(ADD, name="add"),
        native.library_path(ADD + " ", name="add"),
        native.library_path(ADD, name="add", flags=("-DX=1",)),
    }
    monkeypatch.setattr(native, "cpu_model", lambda: "another CPU")
    paths.add(native.library_path(ADD, name="add"))
    monkeypatch.setattr(native, "compiler", lambda: "/opt/other/g++")
    paths.add(native.library_path(ADD, name="add"))
    assert len(paths) == 5


def test_flags_reach_the_compiler():
    source = 'extern "C" int value() { return VALUE; }'
    assert native.build(source, name="value", flags=("-DVALUE=41",)).value() == 41


def test_two_processes_build_the_same_source_at_once():
    code = f"from shoal.core.native import build\nprint(build({ADD!r}, name='race').add(20, 22))"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert [child.communicate()[0].strip() for child in children] == [b"42"] * 3
    place = native.library_path(ADD, name="race").parent
    assert [path.suffix for path in place.iterdir()] == [".so"]


def _cut(library: bytes) -> bytes:
    return library[: len(library) // 2]


def _flipped(library: bytes) -> bytes:
    middle = len(library) // 2
    return library[:middle] + bytes([library[middle] ^ 0xFF]) + library[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"not a library", _cut, lambda x: x[:-1], _flipped],
    ids=["empty", "text", "cut in half", "cut by a byte", "a byte changed"],
)
def test_a_damaged_library_is_built_again_and_never_loaded(damage, monkeypatch):
    path = native.library_path(ADD, name="add")
    native.build(ADD, name="add")
    whole = path.read_bytes()
    path.unlink()  # what is mapped here stays as it is
    path.write_bytes(damage(whole))
    monkeypatch.setattr(native, "_LOADED", {})
    loaded = []
    load = native.ctypes.CDLL
    monkeypatch.setattr(
        native.ctypes, "CDLL", lambda at: loaded.append(Path(at).read_bytes()) or load(at)
    )
    assert native.build(ADD, name="add").add(1, 1) == 2
    assert len(loaded) == 1
    assert loaded[0] != damage(whole)
    assert native._sealed(path)


def test_a_library_of_another_processor_is_never_loaded(monkeypatch):
    """Neither under its own name, nor when it is renamed to that of this processor."""
    other = {**native._cpuinfo(), "model": "another", "flags": "fpu sse2"}
    monkeypatch.setattr(native, "_cpuinfo", lambda: other)
    monkeypatch.setattr(native, "FLAGS", tuple(f for f in native.FLAGS if "march" not in f))
    foreign = 'extern "C" long add(long, long) { return -1; }'  # as if it could not run here
    native.build(foreign, name="add")
    theirs = native.library_path(foreign, name="add")
    monkeypatch.undo()
    monkeypatch.setenv("SHOAL_HOME", str(theirs.parents[1]))
    monkeypatch.setattr(native, "_LOADED", {})
    ours = native.library_path(ADD, name="add")
    assert ours != theirs
    ours.write_bytes(theirs.read_bytes())
    assert native.build(ADD, name="add").add(1, 2) == 3


@pytest.mark.parametrize("key", ["model name", "vendor_id", "cpu family", "model", "flags"])
def test_the_path_depends_on_all_that_tells_processors_apart(key, monkeypatch):
    path = native.library_path(ADD, name="add")
    info = native._cpuinfo()
    monkeypatch.setattr(native, "_cpuinfo", lambda: {**info, key: f"{info.get(key, '')} x"})
    assert native.library_path(ADD, name="add") != path


def test_a_wrong_source_names_the_first_error_and_leaves_nothing():
    with pytest.raises(BuildError, match=r"native code 'bad': bad\.cpp:1.*error.*undeclared_name"):
        native.build('extern "C" int f() { return undeclared_name; }', name="bad")
    assert not any(native.library_path("", name="bad").parent.iterdir())


def test_without_a_compiler_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        native.build(ADD, name="add")


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be written"):
        native.build(ADD, name="add")


@pytest.mark.parametrize("name", ["", "../x", "a b", "x" * 65])
def test_names_are_plain(name):
    with pytest.raises(BuildError, match="letters, digits"):
        native.build(ADD, name=name)


def test_a_small_source_takes_well_under_a_second():
    times = []
    for index in range(3):
        begin = time.monotonic()
        native.build(f'extern "C" int f{index}() {{ return 1; }}', name="quick")
        times.append(time.monotonic() - begin)
    # Far above what it takes (0.1 s), far below a torch extension's 25 s.
    assert min(times) < 2


def test_needs_no_torch():
    code = "import sys, shoal.core.native; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
