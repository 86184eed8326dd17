import json

from typer.testing import CliRunner

from shoal.app.cli import app


def invoke(*words):
    return CliRunner().invoke(app, ["score", *words])


def test_the_board_of_published_runs():
    result = invoke("--published", "training", "--last", "2")
    assert result.exit_code == 0
    assert "published training runs" in result.output and "megatron-bridge" in result.output


def test_the_board_as_json():
    data = json.loads(invoke("--published", "serving", "-o", "json").output)
    assert len(data["rows"]) + len(data["skipped"]) == 439
    assert data["median_error"] < 0.2


def test_another_kind_is_refused():
    result = invoke("--published", "retrieval")
    assert result.exit_code != 0
    assert "training, serving, closed-loop or a CSV file" in str(result.exception or result.output)


def test_a_file_of_closed_loops(tmp_path):
    from shoal.cost.published.silicon import read_silicon

    rows = [dict(row) for row in read_silicon()[:40]]
    rows[1]["model_path"] = "someone/Nothing-1B"
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]))
    result = invoke("--published", str(path), "--last", "3")
    assert result.exit_code == 0
    assert "MiniMax-M2.5" in result.output and "not replayed: 1 rows" in result.output
    data = json.loads(invoke("--published", str(path), "-o", "json").output)
    assert data["models_left_out"]["tpot"]["rows"] + sum(data["skipped"].values()) == 40


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    for wrong in (path, tmp_path / "none.csv"):
        result = invoke("--published", str(wrong))
        assert result.exit_code != 0
        assert wrong.name in str(result.exception or result.output)
