"""The builder of native code: caching, errors, concurrency."""

import ctypes
import subprocess
import sys
import time

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


def test_a_damaged_library_is_built_again():
    path = native.library_path(ADD, name="add")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert native.build(ADD, name="add").add(1, 1) == 2


def test_a_wrong_source_names_the_first_error_and_leaves_nothing():
    with pytest.raises(BuildError, match=r"native code 'bad': bad\.cpp:1.*error.*undeclared_name"):
        native.build('extern "C" int f() { return undeclared_name; }', name="bad")
    assert not any(native.library_path("", name="bad").parent.iterdir())


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
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
