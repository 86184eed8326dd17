"""Files of ``deploy/``: what they say of Shoal is true, and they keep to their formats.

No Docker, Helm or Grafana runs here. The chart is rendered by a stand-in for Helm that knows what
the chart uses, and no more.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from shoal import __version__

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "shoal"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))


def flags():
    """Options of ``shoal serve``."""
    import typer

    from shoal.app.commands.serve import serve

    single = typer.Typer()
    single.command()(serve)
    return {name for option in typer.main.get_command(single).params for name in option.opts}


# The dashboard


def dashboard():
    return json.loads((DEPLOY / "grafana" / "shoal.json").read_text())


def test_the_dashboard_is_generated():
    place = DEPLOY / "grafana" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_dashboard", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DEPLOY / "grafana" / "shoal.json").read_text() == module.text()


def test_every_metric_of_the_dashboard_exists():
    pytest.importorskip("prometheus_client")
    from shoal.serve.cluster.router_metrics import ROUTER_METRICS
    from shoal.serve.http.metrics import METRICS

    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in dashboard()["templating"]["list"]]
    named = {name for query in queries for name in re.findall(r"shoal:\w+", query)}
    known = {*METRICS, *ROUTER_METRICS}
    assert len(named) > 15
    for name in named:
        assert name in known or (name.endswith("_bucket") and name.removesuffix("_bucket") in known)
        # A histogram has no sample of its plain name.
        assert not (name.endswith("_seconds") and f"{name}_bucket" not in named)
    for query in queries:
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")


def test_panels_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


# The image


def instructions():
    """(instruction, rest) of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_the_image_is_built_as_linters_want_it():
    result = instructions()
    names = [name for name, _ in result]
    known = {
        *("FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE"),
        *("HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    assert set(names) <= known
    for name, rest in result:
        if name == "FROM":
            assert re.search(r":\d", rest), f"{rest}: no version"
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
            packages = rest.partition("apt-get install")[2].partition("&&")[0].split()
            assert all("=" in word for word in packages if not word.startswith("-"))
        if name == "RUN" and "pip install" in rest:
            assert rest.count("pip install") == rest.count("--no-cache-dir")
        assert "KEY" not in rest or name not in ("ENV", "RUN")
    assert names.count("ENTRYPOINT") == names.count("CMD") == names.count("HEALTHCHECK") == 1
    (user,) = [rest for name, rest in result if name == "USER"]
    assert int(user) > 0
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_the_image_copies_what_there_is():
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert all((DEPLOY.parent / source).exists() for source in sources)


def test_the_image_runs_what_there_is():
    (words,) = [json.loads(rest) for name, rest in instructions() if name == "CMD"]
    assert {word for word in words if word.startswith("--")} <= flags()


# Compose


def test_compose():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose) <= {"name", "services", "volumes", "secrets", "networks", "configs"}
    keys = {
        *("image", "build", "command", "environment", "ports", "volumes", "restart", "secrets"),
        *("stop_grace_period", "security_opt", "cap_drop", "shm_size", "depends_on"),
    }
    for name, service in compose["services"].items():
        assert set(service) <= keys, name
        assert re.search(r":v?\d", service["image"]), f"{service['image']}: no version"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert set(service.get("depends_on", [])) <= set(compose["services"])
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"], source
    shoal = compose["services"]["shoal"]
    assert (DEPLOY / shoal["build"]["context"] / shoal["build"]["dockerfile"]).exists()
    assert {word for word in shoal["command"] if word.startswith("--")} <= flags()
    drain = float(shoal["command"][shoal["command"].index("--drain-timeout") + 1])
    assert float(shoal["stop_grace_period"].rstrip("s")) > drain


def test_prometheus_asks_where_the_server_is():
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["shoal:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/key"
    for place in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(place.read_text())["apiVersion"] == 1


# The chart


def value(path):
    result = VALUES
    for name in path.split("."):
        result = result[name]
    return result


def render(text):
    """What Helm would make of a template, with the values of the chart."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    defined = dict(
        re.findall(r'\{\{- define "([\w.]+)" -\}\}\n(.*?)\n\{\{- end \}\}', helpers, re.DOTALL)
    )

    def block(match):
        indent, expression = match.groups()
        if expression.startswith("include "):
            name, depth = re.fullmatch(
                r'include "([\w.]+)" \. \| nindent (\d+)', expression
            ).groups()
            body = defined[name]
        else:
            name, depth = re.fullmatch(
                r"toYaml \.Values\.([\w.]+) \| nindent (\d+)", expression
            ).groups()
            body = yaml.safe_dump(value(name)).rstrip()
        assert len(indent) == int(depth)
        return "\n".join(" " * int(depth) + line for line in body.splitlines())

    def inline(match):
        expression = match.group(1)
        if expression in (".Release.Name", ".Chart.Name"):
            return "shoal"
        added = re.fullmatch(r"add \.Values\.([\w.]+) (\d+)", expression)
        if added:
            return str(value(added.group(1)) + int(added.group(2)))
        name, quoted = re.fullmatch(r"\.Values\.([\w.]+)( \| quote)?", expression).groups()
        return json.dumps(value(name)) if quoted else str(value(name))

    text = re.sub(r"^( *)\{\{- ((?:include|toYaml) .*?) \}\}$", block, text, flags=re.M)
    text = re.sub(r"^ *\{\{- (?:if \.Values\.[\w.]+|end) \}\}\n", "", text, flags=re.M)
    return re.sub(r"\{\{ (.*?) \}\}", inline, text)


def test_the_chart_names_its_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["apiVersion"] == "v2"
    assert set(chart) >= {"name", "description", "version", "appVersion"}
    assert chart["name"] == CHART.name
    assert VALUES["image"]["tag"] == chart["appVersion"] == __version__


def test_values_are_of_their_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    for wrong in ({"pods": -1}, {"image": {**VALUES["image"], "tag": "latest"}}, {"typo": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**VALUES, **wrong}, schema)


def test_values_are_used():
    text = "".join(template.read_text() for template in TEMPLATES)
    used = set(re.findall(r"\.Values\.([\w.]+)", text))

    def leaves(values, prefix=""):
        for name, inner in values.items():
            whole = prefix + name
            if whole in used or not isinstance(inner, dict):
                yield whole
            else:
                yield from leaves(inner, f"{whole}.")

    assert set(leaves(VALUES)) == used


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_templates_become_objects(template):
    text = template.read_text()
    assert len(re.findall(r"\{\{- if ", text)) == len(re.findall(r"\{\{- end ", text))
    rendered = yaml.safe_load(render(text))
    assert rendered["kind"] in ("Deployment", "Service", "ServiceMonitor")
    assert rendered["metadata"]["labels"]["app.kubernetes.io/name"] == "shoal"


def test_the_pod():
    pod = yaml.safe_load(render((CHART / "templates" / "deployment.yaml").read_text()))
    spec = pod["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    given = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
    assert given <= flags()
    assert spec["terminationGracePeriodSeconds"] > VALUES["serve"]["drainSeconds"]
    assert pod["spec"]["selector"]["matchLabels"] == pod["spec"]["template"]["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    (key,) = container["env"]
    assert key["name"] == "SHOAL_API_KEY"
    assert "secretKeyRef" in key["valueFrom"]
