"""The manifests of docs/deploy fit Kubernetes' schemas, each other, and the command line."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from trt_kvcache.cli.app import app

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

FILES = sorted((Path(__file__).parent.parent / "docs" / "deploy").glob("*.yaml"))
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def of(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def containers(file: Path) -> dict[str, dict[str, Any]]:
    """Containers by the label of their pods; one each."""
    found = {}
    for one in of(file):
        if "template" in one["spec"]:
            pod = one["spec"]["template"]
            assert one["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
            (found[pod["metadata"]["labels"]["app"]],) = pod["spec"]["containers"]
            volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
            (container,) = pod["spec"]["containers"]
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_resource_fits_the_schema_of_its_kind(file: Path) -> None:
    for one in of(file):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        broken = one | {"spec": one["spec"] | {"replica": 2}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_services_probes_and_policies_lead_somewhere(file: Path) -> None:
    pods = containers(file)
    for one in of(file):
        if one["kind"] == "Service":
            ports = {port["name"] for port in pods[one["spec"]["selector"]["app"]]["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
        if one["kind"] == "NetworkPolicy":
            lists = re.findall(r"'values': \[(.*?)\]", str(one))
            named = {name for names in lists for name in re.findall(r"[\w-]+", names)}
            assert named <= set(pods)
    for container in pods.values():
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for check in container.get(probe, {}).values():
                assert not isinstance(check, dict) or check["port"] in ports
        environment = [variable["name"] for variable in container.get("env", [])]
        for at, variable in enumerate(container.get("env", [])):
            for name in re.findall(r"\$\((\w+)\)", str(variable.get("value"))):
                assert name in environment[:at]  # Kubernetes expands what comes before


def test_the_commands_have_these_flags() -> None:
    texts = [" ".join(c.get("args", [])) for file in FILES for c in containers(file).values()]
    used = {}
    for text in texts:
        for command in ("serve", "worker"):
            if found := re.search(rf"(?:^|trt-kvcache ){command} (.*)", text):
                used[command] = set(re.findall(r"--[\w-]+", found[1]))
    assert used.keys() == {"serve", "worker"}
    for command, flags in used.items():
        assert flags <= {name for parameter in COMMANDS[command].params for name in parameter.opts}, command
