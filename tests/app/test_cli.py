"""The command line as a user meets it, by output and status."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import shoal_command
from shoal.machine.described import load


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a described machine saved as the local one."""
    place = tmp_path_factory.mktemp("home")
    load("laptop").save(place / "machine.yaml")
    return place


def shoal(home: Path, *words: object, **environment: str) -> shoal_command.Completed:
    return shoal_command.shoal(*words, SHOAL_HOME=str(home), **environment)


def refused(done: shoal_command.Completed, *parts: str) -> None:
    """One clear line, no traceback, status 2."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    "old", ["plan tune Qwen3-8B -q", "bench planes --quick", "study duo routed", "plan decode x"]
)
def test_an_old_spelling_says_the_new_one(home: Path, old: str) -> None:
    name = old.split()[1]
    refused(shoal(home, *old.split()), f"{name}: renamed to shoal explain {name}")


def test_help_and_version(home: Path) -> None:
    done = shoal(home, "--help")
    assert done.returncode == 0
    for verb in (
        "probe",
        "plan",
        "train",
        "serve",
        "bench",
        "model",
        "score",
        "claims",
        "dash",
        "doctor",
        "demo",
    ):
        assert f" {verb} " in done.stdout
    # In a process of its own, once.
    words = [sys.executable, "-m", "shoal", "--version"]
    assert subprocess.run(words, capture_output=True, text=True).stdout.startswith("shoal 0.")


def test_plan_ranks_and_saves(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    done = shoal(
        home,
        "plan",
        "train",
        "Qwen3-14B",
        "-m",
        "16xH100",
        "--tokens",
        "20B",
        "--out",
        out,
        "-o",
        "json",
        "--top",
        3,
    )
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)
    assert len(plans) == 3
    steps = [plan["estimate"]["step_s"] for plan in plans]
    assert all(step["low"] < step["value"] < step["high"] for step in steps)
    # Of plans that are within a hundredth of the fastest, the plainest is first.
    assert steps[0]["value"] <= 1.01 * min(step["value"] for step in steps)
    assert plans[0]["fits"]
    assert plans[0]["estimate"]["usd"]["value"] > 100
    saved = yaml.safe_load(out.read_text())
    assert saved["job"]["parallel"] == plans[0]["job"]["parallel"]
    text = shoal(home, "plan", "train", "Llama-3-70B", "-m", "8xH100").stdout
    assert "does not fit" in text
    assert "this would" in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("plan", "train", "Qwen3-14"), ("Qwen3-14",)),
        (("plan", "train", "Qwen3-14B", "-m", "9xZ80"), ("9xZ80",)),
        (("plan", "train", "Qwen3-14B", "--tokens", "many"), ("300M or 20B",)),
        (("plan", "train", "Qwen3-14B", "--planner", "best"), ("search", "rules")),
        (("train", "--set", "optimzer=muon"), ("did you mean 'optimizer'",)),
        (("train", "--set", "optimizer=mun"), ("did you mean 'muon'",)),
        (("train", "--set", "seq_len=-4"), ("seq_len", "-4")),
        (("train", "--set", "seq_len"), ("path=value",)),
        (("train", "--ranks", "3"), ("parallel.dp = 3", "at most 16")),
        (("train", "--steps", "5", "--minutes", "1"), ("give one of them",)),
        (("train", "no-such-job.yaml"), ("no-such-job.yaml", "cannot be read")),
        (("train", "--launch", "pbs"), ("torchrun, slurm, kubernetes",)),
        (("model", "ls", "no-such-dir"), ("no-such-dir",)),
        (("claims", "run", "disect"), ("did you mean 'dissect'",)),
        (("claims", "run"), ("no claim is named",)),
    ],
)
def test_what_is_wrong_is_said(home: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(shoal(home, *words), *parts)


def test_environment_is_a_layer(home: Path) -> None:
    done = shoal(home, "train", "--dry-run", SHOAL_OPTIMIZER="muon", SHOAL_SEED="7")
    assert done.returncode == 0, done.stderr
    assert "SHOAL_SEED" in done.stdout
    refused(shoal(home, "train", "--dry-run", SHOAL_SEAD="7"), "SHOAL_SEAD", "did you mean 'seed'")


def test_a_wrong_file_names_line_and_key(home: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("seed: 1\nparallel: {ddp: 2}\n")
    refused(shoal(home, "train", job), "job.yaml", "ddp", "did you mean 'dp'")
    job.write_text("seed: [1\n")
    refused(shoal(home, "train", job), "job.yaml, line 2")
    job.write_bytes(b"\xff\x00\xfe")
    refused(shoal(home, "train", job), "not text in UTF-8")
    machine = tmp_path / "machine.yaml"
    raw = load("laptop").model_dump(mode="json", exclude_none=True)
    raw["device"]["matmul_flops"] = {"fp32": 1e30}
    machine.write_text(yaml.safe_dump(raw))
    refused(shoal(home, "plan", "train", "shoal-4m", "-m", machine), "fp32", "FLOP/s")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda p: None, ("missing",)),
        (lambda p: (p / "missing").mkdir(), ("missing",)),
        (lambda p: (p / "missing").write_bytes(b""), ("missing",)),
        (lambda p: (p / "missing").write_bytes(bytes(range(256)) * 50), ("missing",)),
        (lambda p: (p / "missing").write_text("too short\n"), ("one batch",)),
    ],
)
def test_bad_data(home: Path, tmp_path: Path, make: object, parts: tuple[str, ...]) -> None:
    make(tmp_path)  # type: ignore[operator]
    job = tmp_path / "job.yaml"
    job.write_text(
        f"data: {{name: text, path: {tmp_path / 'missing'}}}\nsteps: 2\nmodel: shoal-0.3m\n"
    )
    refused(shoal(home, "train", job, "--dir", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_launch_files_are_written(home: Path, tmp_path: Path) -> None:
    done = shoal(home, "train", "--launch", "slurm", "--dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "launch.sbatch").exists()
    assert (tmp_path / "run" / "plan.yaml").exists()


def test_schema_is_json(home: Path) -> None:
    schema = json.loads(shoal(home, "train", "--schema").stdout)
    assert "optimizer" in schema["properties"]


def test_claims_list_has_every_row(home: Path) -> None:
    rows = json.loads(shoal(home, "claims", "list", "-o", "json").stdout)
    assert [row["id"] for row in rows] == list(range(146))
    assert {"id", "name", "room", "status", "evidence", "threshold", "measured"} <= set(rows[0])


def test_claims_list_fits_80_columns_and_leaves_out_what_is_planned(home: Path) -> None:
    text = shoal(home, "claims", "list").stdout
    assert max(map(len, text.splitlines())) <= 80
    planned = int(text.split(" planned,")[0].split()[-1])
    assert " planned " not in text.rsplit("\n", 3)[0] and f"{planned} have no result" in text
    names = [line.split()[0] for line in text.splitlines()[3:-3] if line.strip()]
    more = shoal(home, "claims", "list", "--all").stdout
    assert len(more.splitlines()) >= len(text.splitlines()) + planned - 1 and len(names) > 40
    whole = shoal(home, "claims", "list", "-v", "--status", "works", "--room", "serve").stdout
    assert "needs >=" in whole and "(mechanism)" in whole
    refused(shoal(home, "claims", "list", "--status", "foo"), "falls_short", "planned")


def test_options_of_a_claim_are_set_and_recorded_as_the_command_takes_them(
    home: Path, tmp_path: Path
) -> None:
    from shoal.claims.run import run as judge

    record = judge("itemsets", quick=True, options={"pairs": 3}, results=tmp_path).record
    assert record.options == {"pairs": 3} and record.command.endswith("--set pairs=3")
    done = shoal(home, *shlex.split(record.command)[1:], "--results", tmp_path)
    assert done.returncode == 0 and "operations_growth" in done.stdout, done.stderr
    run = ("claims", "run", "--quick", "--results", tmp_path)
    refused(shoal(home, *run, "itemsets", "--set", "pairs"), "expected pairs=VALUE")
    refused(shoal(home, *run, "itemsets", "--set", "foo=1"), "no such key")
    refused(shoal(home, *run, "itemsets", "lifl", "--set", "pairs=1"), "for one claim")


def test_score_and_doctor(home: Path) -> None:
    assert "no runs yet" in shoal(home, "score").stdout
    text = shoal(home, "doctor").stdout
    assert max(map(len, text.splitlines())) <= 160 and "probe: run" in text
    checks = json.loads(shoal(home, "doctor", "-o", "json").stdout)
    assert {"python", "torch", "compiler"} <= {check["name"] for check in checks}


def test_a_verb_imports_no_other() -> None:
    code = (
        "import sys\nfrom shoal.app.cli import app\n"
        "app(['doctor', '--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.startswith('shoal.app.commands.')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.strip() == "['shoal.app.commands.doctor']"
