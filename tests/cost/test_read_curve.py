from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.commands.explain import app
from shoal.core.errors import ConfigError, DataError
from shoal.cost.scaling.ask import fit_best
from shoal.cost.scaling.read import read_curve


def test_a_curve_goes_from_file_to_law(tmp_path: Path) -> None:
    file = tmp_path / "curve.csv"
    sizes = [2**n for n in range(8, 18)]
    lines = [f"{size},{3 * size**-0.25!r},,loss" for size in sizes]
    file.write_text("size,value,spread,metric\n" + "\n".join(lines) + "\n")
    points = read_curve(file)
    assert [point.size for point in points] == sizes
    assert points[0].spread is None
    assert points[0].metric == "loss"
    fitted = fit_best(points)
    assert fitted.predict(2**20).value == pytest.approx(3 * (2**20) ** -0.25, rel=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no column size and value"),
        ("size,value\n1,many\n", r"line 2: .*value"),
        ("size,value\n1,2,3\n", "line 2: more cells than columns"),
        ("size,value,sprad\n1,2,3\n", "did you mean 'spread'"),
        ("", "no column"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "curve.csv"
    file.write_text(text)
    with pytest.raises((DataError, ConfigError), match=message):
        read_curve(file)


def test_missing_and_binary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_curve(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text"):
        read_curve(tmp_path / "binary.csv")


def test_the_command_says_how_much_data_is_needed(tmp_path: Path) -> None:
    file, drawn = tmp_path / "curve.csv", tmp_path / "curve.svg"
    lines = [f"{2**n},{1.2 + 8 * (2**n) ** -0.3!r}" for n in range(6, 20)]
    file.write_text("size,value\n" + "\n".join(lines) + "\n")
    done = CliRunner().invoke(
        app, ["scaling", str(file), "--target", "1.5", "--picture", str(drawn)]
    )
    assert done.exit_code == 0, done.output
    assert "law power_floor" in done.stdout and "an error of 1.5 needs" in done.stdout
    assert drawn.read_text().startswith("<svg")
    done = CliRunner().invoke(app, ["scaling", str(file), "--target", "1"])
    assert "below the floor of this law: no data is enough" in done.stdout
    assert isinstance(CliRunner().invoke(app, ["scaling"]).exception, ConfigError)
