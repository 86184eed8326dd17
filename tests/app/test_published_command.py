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
    assert "training or serving" in str(result.exception or result.output)
