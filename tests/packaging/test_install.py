"""Each way to install, into environments that hold nothing else, without a network."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import attn_select
from attn_select.backends import distributions

pytestmark = pytest.mark.long
PLUGIN_NAMES = sorted(set(distributions.known_backends().values()))

LIST = """
import importlib.metadata, importlib.resources, json, sys
found = {}
for point in importlib.metadata.entry_points(group="attn_select"):
    module = point.load()
    backends = sorted(spec.name for spec in module.attn_select_register_backends())
    found[point.dist.name] = [backends, point.dist.version, module.__file__]
import attn_select
from attn_select.backends import distributions
rules = (importlib.resources.files("attn_select") / "selector_rules.toml").read_text()
print(json.dumps({"plugins": found, "core": attn_select.__file__, "rules": rules, "torch": "torch" in sys.modules}))
"""


def listing(environment) -> dict:
    return json.loads(environment.run("python", "-c", LIST))


def test_clone_installs_in_one_command(tree, make_environment, root):
    environment = make_environment()
    environment.pip("install", ".", "./plugins/torch", cwd=tree)
    found = listing(environment)
    assert list(found["plugins"]) == ["attn-select-torch"]
    assert found["core"].startswith(str(environment.path))
    assert found["rules"] == (root / "selector_rules.toml").read_text()
    assert environment.run("attn-select", "--version").strip().endswith(attn_select.__version__)


def run_remedy(environment, command: str, **options) -> None:
    program, *arguments = shlex.split(command)
    assert program == "pip"
    environment.pip(*arguments, **options)


def test_remedies_outside_a_clone_install_the_plugins_from_the_wheels(dist, make_environment, monkeypatch):
    """Core from its wheel and no plugin: what explain, backends and doctor print works with PIP_FIND_LINKS."""
    environment = make_environment("numpy", "scipy")  # which attn-select-measure needs
    environment.pip("install", "--find-links", dist.folder, "attn-select")
    model = ("--model", "qwen3-next-80b-a3b", "--gpu", "h100")
    explained = environment.run("attn-select", "explain", "--full", *model, code=1)
    remedies = sorted(set(re.findall(r"; try (pip install .*)", explained)))
    assert remedies == [f"pip install {name}" for name in PLUGIN_NAMES]
    listed = environment.run("attn-select", "backends")
    assert set(re.findall(r"pip install attn-select-[-a-z]+", listed)) == set(remedies)
    examined = environment.run("attn-select", "doctor", code=1)
    (remedy,) = re.findall(r"problem: no backend can run on this machine: .*: (pip install \S+)\. ", examined)
    assert remedy in remedies
    for shown in (explained, listed, examined):
        assert shown.count(distributions.NOT_ON_AN_INDEX) == 1
    missing = json.loads(environment.run("attn-select", "tune", "--json", code=2))
    assert missing["error"]["hint"] == "pip install attn-select-measure"
    monkeypatch.setenv("PIP_FIND_LINKS", str(dist.folder))
    for remedy in (*remedies, "pip install attn-select-measure"):
        run_remedy(environment, remedy)
    assert "Time a model's own layers" in environment.run("attn-select", "tune", "--help")
    found = listing(environment)
    assert sorted(found["plugins"]) == PLUGIN_NAMES
    assert {version for _, version, _ in found["plugins"].values()} == {attn_select.__version__}
    assert not found["torch"]
    explained = environment.run("attn-select", "explain", "--model", "llama-3-8b", "--gpu", "h100")
    assert "pip install" not in explained
    examined = environment.run("attn-select", "doctor", "--no-import", code=1)
    assert distributions.NOT_ON_AN_INDEX not in examined
