"""Settings of replicas, and the Serve config file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from app.cli import cli
from app.cluster_settings import ClusterSettings, ReplicaSettings
from app.settings import SettingsError

SERVE_CONFIG = Path(__file__).parents[3] / "deploy" / "ray" / "serve.yaml"


def test_queues_count_the_slots_of_all_replicas() -> None:
    assert ClusterSettings(replicas=3, max_num_seqs=8).slots == 24
    assert ClusterSettings(replicas=3, max_replicas=5, max_num_seqs=8).slots == 40
    with pytest.raises(ValidationError, match=r"max_replicas \(2\) must be at least replicas \(3\)"):
        ClusterSettings(replicas=3, max_replicas=2)


def test_replicas_are_given_what_was_set_and_keep_blocks_themselves() -> None:
    settings = ClusterSettings(replicas=3, draft_depth=4, redis_url="redis://:secret@localhost:1/0", session_max_bytes=5)
    given = settings.given()
    assert given == {"replicas": 3, "draft_depth": 4, "redis_url": "redis://:secret@localhost:1/0", "session_max_bytes": 5}
    assert settings.kept_blocks is None
    kept = ReplicaSettings(**given).kept_blocks
    assert kept is not None and kept.max_bytes == 5
    assert ReplicaSettings(**given).engine_config() == settings.engine_config()


def test_the_serve_config_is_one_and_its_arguments_are_settings() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs the extra ray")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(SERVE_CONFIG.read_text()))
    (application,) = config.applications
    assert application.import_path == "app.cluster.application:build"
    assert application.args.pop("ingresses") == 1
    assert ClusterSettings(**application.args).max_replicas == 8


def test_what_serve_decides_is_refused_as_an_argument() -> None:
    application = pytest.importorskip("app.cluster.application", reason="needs the extra ray")
    with pytest.raises(SettingsError, match="host, port: give these to Ray Serve"):
        application.build({"host": "0.0.0.0", "port": 8000})


def test_the_command_takes_the_options_of_serve_and_its_own() -> None:
    result = CliRunner().invoke(cli, ["ray", "--replicas", "0"])
    assert result.exit_code == 2
    result = CliRunner().invoke(cli, ["ray", "--replicas", "3", "--max-replicas", "2"])
    assert result.exit_code == 2 and "max_replicas (2) must be at least replicas (3)" in result.output
    result = CliRunner().invoke(cli, ["ray", "--draft-depth", "0"])
    assert result.exit_code == 2 and "--draft-depth" in result.output


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    for name in [name for name in __import__("sys").modules if name.startswith("app.cluster.")]:
        monkeypatch.delitem(__import__("sys").modules, name)
    result = CliRunner().invoke(cli, ["ray"])
    assert result.exit_code == 1 and "pip install 'moaserve[ray]'" in result.output


def test_keys_and_files_of_the_ingress_do_not_go_to_replicas(tmp_path: Path) -> None:
    application = pytest.importorskip("app.cluster.application", reason="needs the extra ray")
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    settings = ClusterSettings(api_key="secret", chat_template=template, max_num_seqs=2)
    (given,) = application.engines(settings)._bound_deployment.init_args
    assert given == {"max_num_seqs": 2}
