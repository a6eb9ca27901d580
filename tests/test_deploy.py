"""The files of deploy/ and the workflows: their commands parse, their limits are the server's, their metrics exist."""

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

from divdec.serving import ServeSettings
from divdec.serving.server import DRAIN, KEEP_ALIVE
from support.served import engine_of, eventually, figure, serving

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NGINX = (DEPLOY / "nginx.conf").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGE = (ROOT / "docs" / "deployment.md").read_text()
DEFAULTS = ServeSettings()
KEY = "a-key-of-32-characters-for-tests"


def instruction(dockerfile, name):
    """The list of an ENTRYPOINT, CMD or HEALTHCHECK."""
    return json.loads(re.findall(rf"^(?:    )?{name} (\[.*\])$", dockerfile.read_text(), flags=re.MULTILINE)[-1])


def unit(name="divdec.service"):
    lines = (line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines if "=" in line)


def commands():
    found = [instruction(file, "ENTRYPOINT") + instruction(file, "CMD") for file in DOCKERFILES]
    found += [["divdec", *shlex.split(COMPOSE["services"]["divdec"]["command"])], shlex.split(unit()["ExecStart"])]
    found.append(shlex.split(unit("divdec-canary.service")["ExecStart"]))
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).splitlines():
        if match := re.match(r"\s*(?:docker run .*|command:) (serve .*)", line):  # divdec is the entry point
            found.append(["divdec", *shlex.split(match.group(1))])
        elif line.startswith("divdec "):
            found.append(shlex.split(line))
    return found


def test_commands_of_the_page_are_found():
    assert len(commands()) == len(DOCKERFILES) + 3 + 3


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_commands_parse(command):
    from divdec.cli.app import app

    assert Path(command[0]).name == "divdec"
    function, bound, _ = app.parse_args(command[1:], exit_on_error=False, print_error=False)
    if function.__name__ == "serve" and not command[0].startswith("/"):
        assert bound.arguments["settings"].host == "0.0.0.0"  # in a container the loopback address is of no use


def test_compose_states_what_replies_tell():
    assert "--logprobs off" in COMPOSE["services"]["divdec"]["command"]
    assert "--on-suppressed answer" in COMPOSE["services"]["divdec"]["command"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
class TestDockerfiles:
    def test_extras_and_copied_files_exist(self, file):
        text = file.read_text()
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"'(?:\.|divdec)\[(\S+)\]'", text + PAGE)) <= set(extras)
        copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE) for name in line.split()}
        assert all((ROOT / name).exists() for name in copied)
        # Everything else, models and secrets too, stays out of the build.
        ignored = (ROOT / ".dockerignore").read_text().split()
        assert "*" in ignored
        assert copied <= {line.removeprefix("!") for line in ignored if line.startswith("!")}

    def test_container_has_no_rights_and_no_network_for_models(self, file):
        lines = file.read_text().splitlines()
        assert "USER 10001" in lines
        assert any(line.startswith("ENV ") and "HF_HUB_OFFLINE=1" in line for line in lines)
        assert not re.search(
            r"key|token|password", file.read_text().split("FROM")[1].replace("without a key", ""), re.I
        )

    def test_health_check_tells_whether_a_server_answers(self, file, served_bundle):
        with serving([engine_of(served_bundle)], api_key=KEY) as url:
            code = re.search(r'"-c", "(.*)"\]', file.read_text()).group(1)
            here = code.replace("http://127.0.0.1:8000", url)
            assert here != code
            assert subprocess.run([sys.executable, "-c", here], capture_output=True).returncode == 0
        assert subprocess.run([sys.executable, "-c", here], capture_output=True).returncode != 0


def test_services_are_read_only_and_without_capabilities():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        ports = [port for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")]
        assert ports == (["443:8443"] if name == "nginx" else [])  # nobody reaches divdec but through nginx
    assert "listen 8443 ssl;" in NGINX


def test_compose_refers_to_files_that_exist():
    service = COMPOSE["services"]["divdec"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    mounted = [
        volume.split(":")[0] for one in COMPOSE["services"].values() for volume in one.get("volumes", ())
        if volume.startswith("./")
    ]  # fmt: skip
    provisioned = {"grafana-datasource.yml", "grafana-dashboards.yml"}
    assert {Path(name).name for name in mounted} == provisioned | {
        "nginx.conf", "prometheus.yml", "alerts.yml", "dashboard.json",
    }  # fmt: skip
    assert all((DEPLOY / name).is_file() for name in mounted)
    for name in COMPOSE["services"]["nginx"]["secrets"]:
        assert f"/run/secrets/{name};" in NGINX
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == [f"divdec:{DEFAULTS.port}"]
    assert all(yaml.safe_load((DEPLOY / name).read_text())["apiVersion"] == 1 for name in provisioned)
    assert "configs" not in COMPOSE  # docker compose writes none with inline content into a read-only service


def test_variables_of_compose_are_documented():
    for name in re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()):
        assert f"{name}=" in PAGE


def directive(name):
    """The number of an nginx directive, in bytes or seconds."""
    number, suffix = re.search(rf"^\s*{name} (\d+)([ms]);", NGINX, flags=re.MULTILINE).groups()
    return int(number) * {"m": 2**20, "s": 1}[suffix]


def test_limits_of_nginx_are_the_servers():
    assert directive("client_max_body_size") == DEFAULTS.max_body_bytes
    assert directive("proxy_read_timeout") == DEFAULTS.max_seconds + 10  # the server's own error comes first
    assert directive("keepalive_timeout") < KEEP_ALIVE
    assert f"server divdec:{DEFAULTS.port};" in NGINX


def test_stopping_waits_for_running_requests():
    longest = DEFAULTS.shutdown_timeout + DRAIN
    assert int(unit()["TimeoutStopSec"]) > longest
    assert int(COMPOSE["services"]["divdec"]["stop_grace_period"].removesuffix("s")) > longest
    assert unit()["RestartPreventExitStatus"] == "2"


def expressions():
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    yield from (rule["expr"] for group in alerts["groups"] for rule in group["rules"])


def test_metrics_of_dashboard_and_alerts_exist(served_bundle, tmp_path):
    """On a server that has answered requests and follows a registry, with the labels that the expressions name."""
    from divdec.cli.serving import build_engine
    from divdec.data.records import read_records
    from divdec.takedowns.registry import Registry

    (tmp_path / "retain.txt").write_text("The cat sat on the mat. " * 20)
    Registry.create(tmp_path / "takedowns", read_records(str(tmp_path / "retain.txt")), served_bundle.parent / "target")
    settings = ServeSettings(registry=str(tmp_path / "takedowns"), logprobs="full")
    with serving([build_engine("tiny", str(served_bundle), settings)], logprobs="full") as url:
        body = {"model": "tiny", "prompt": "The", "max_tokens": 3, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        page = httpx.get(f"{url}/metrics").text
    samples = {}
    for name, labels in re.findall(r"^(\w+)\{(.*)\} ", page, flags=re.MULTILINE):
        samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    used = set()
    for expression in expressions():
        for name in re.findall(r"\bdivdec_\w+", expression):
            assert name in samples, expression
            used.add(name)
            labels = re.findall(r"by \(([^)]*)\) \(rate", expression) + re.findall(rf"{name}\{{(\w+)=", expression)
            assert {label for text in labels for label in text.split(", ")} <= samples[name], expression
    # The page on serving lists them all, and the dashboard shows each.
    listed = set(re.findall(r"`(divdec_\w+)`", (ROOT / "docs" / "serving.md").read_text()))
    assert {name.removesuffix("_bucket") for name in used} == listed


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_what_exists(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text()
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for command in (step["run"] for step in steps if "run" in step):
        program, *arguments = shlex.split(command)
        if program == "make":
            assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in arguments)
        elif program == ".ci/run":
            assert os.access(ROOT / program, os.X_OK)
        elif program == ".venv/bin/python":
            assert all((ROOT / path).exists() for path in arguments if path.startswith("tests/"))
        else:  # the only upload, and only with the owner's token
            assert "twine upload" in command
            assert command.startswith('if [ -n "$TWINE_PASSWORD" ]; then')
            assert "secrets." in str(steps[-1]["env"])


def test_release_needs_a_tag_of_a_version():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert "make release-check" in [step.get("run") for step in release["jobs"]["package"]["steps"]]


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def proxy(served_bundle, tmp_path):
    """nginx with the repository's configuration before a real server: its URL, the server's, and a TLS context."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost", "-keyout", "tls_key", "-out", "tls_certificate",
        ],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0, api_key=KEY) as url:
        text = NGINX.replace("/tmp/", f"{tmp_path}/").replace("/run/secrets", str(tmp_path))
        text = text.replace("listen 8443", f"listen 127.0.0.1:{port}").replace("divdec:8000", url.partition("//")[2])
        (tmp_path / "nginx.conf").write_text(text)
        # nginx, started by root, would let its workers become nobody, who may not enter the test's folder.
        rest = "daemon off; user root;" if os.getuid() == 0 else "daemon off;"
        command = ["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", rest]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            context = ssl.create_default_context(cafile=str(tmp_path / "tls_certificate"))
            eventually(lambda: process.poll() is not None or listens(port))
            yield f"https://localhost:{port}", url, context
        finally:
            process.terminate()
            log = process.communicate(timeout=30)[1]
            assert "[emerg]" not in log, log


def test_nginx_streams_and_refuses(proxy):
    url, direct, context = proxy
    long = {"model": "tiny", "prompt": "The", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=url, verify=context, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        assert client.get("/health").status_code == 200
        for path in ("/metrics", "/metrics/", "/invocations"):
            assert client.get(path).status_code == 403, path
        with client.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert figure(direct, "divdec_sequences_running") == 1  # the reply is not complete yet
        # nginx passes the disconnect on, and the server stops.
        eventually(lambda: figure(direct, "divdec_sequences_running") == 0)
        assert client.post("/v1/completions", content=b"x" * (2 * 2**20 + 1)).status_code == 413
    assert httpx.get(f"{url}/v1/models", verify=context).status_code == 401
