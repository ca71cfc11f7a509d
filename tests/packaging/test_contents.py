"""What lies in the wheels and sdists, and what their metadata say."""

from __future__ import annotations

import configparser
import email
import email.message
import importlib
import os
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import attn_select
from attn_select.runtime import ops
from attn_select_cli.main import OF_MEASURE

VERSION = attn_select.__version__


def metadata(files: dict[str, bytes], project) -> email.message.Message:
    return email.message_from_bytes(files[f"{project.normalized}-{VERSION}.dist-info/METADATA"])


def test_sdist_builds_the_same_wheel(dist, project):
    built = dist.built[project]
    assert built.wheel_from_sdist == built.wheel


def test_the_readmes_links_work_in_the_sdist(dist, project):
    files = dist.built[project].sdist
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", files["README.md"].decode())
    assert not [link for link in links if os.path.normpath(link) not in files]


def test_sdist_holds_what_a_build_needs_and_what_the_readme_links_to(dist, project):
    known = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore", "CHANGELOG.md"}
    folders = tuple(f"{package}/" for package in project.packages)
    if project.folder == ".":
        folders += ("docs/", "examples/")
    assert [name for name in dist.built[project].sdist if name not in known and not name.startswith(folders)] == []


def test_packaged_rules_are_the_root_file(dist, root, project):
    rules = (root / "selector_rules.toml").read_bytes()
    if project.folder != ".":
        assert not [name for name in dist.built[project].wheel if name.endswith("selector_rules.toml")]
        return
    built = dist.built[project]
    assert built.wheel["attn_select/selector_rules.toml"] == rules
    assert built.sdist["core/attn_select/selector_rules.toml"] == rules


def test_plugin_needs_core_alone(dist, plugin):
    requirements = [Requirement(text) for text in metadata(dist.built[plugin].wheel, plugin).get_all("Requires-Dist")]
    plain = [requirement for requirement in requirements if requirement.marker is None]
    assert [requirement.name for requirement in plain] == ["attn-select"]
    assert plain[0].specifier.contains(VERSION)
    extra = [r.name for r in requirements if r.marker is not None and r.marker.evaluate({"extra": "kernels"})]
    assert "torch" in extra


def test_engine_adapter_needs_core_alone(dist, engine):
    """The engine is there already, in its user's release: an extra names those that the adapter is for."""
    requirements = [Requirement(text) for text in metadata(dist.built[engine].wheel, engine).get_all("Requires-Dist")]
    plain = [requirement for requirement in requirements if requirement.marker is None]
    assert [requirement.name for requirement in plain] == ["attn-select"]
    assert plain[0].specifier.contains(VERSION)


def test_core_needs_no_plugin_and_no_torch(dist):
    (core,) = (project for project in dist.built if project.folder == ".")
    requirements = [Requirement(text) for text in metadata(dist.built[core].wheel, core).get_all("Requires-Dist")]
    plain = sorted(requirement.name for requirement in requirements if requirement.marker is None)
    assert plain == ["click", "packaging", "platformdirs", "pluggy", "pydantic", "rich", "tomlkit"]
    every = {r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": "all"})}
    brought = {p.distribution for p in dist.built if p.folder.startswith(("plugins/", "measure"))}
    assert {r.name for r in every} == brought
    assert all(r.specifier.contains(VERSION) for r in every)


def test_entry_points(dist, project, root):
    if project.folder.startswith("engines/"):
        declared = tomllib.loads((root / project.folder / "pyproject.toml").read_text())["project"]
        assert "attn_select" not in declared.get("entry-points", {}), "an engine's adapter brings no backends"
        return
    parser = configparser.ConfigParser()
    parser.read_string(dist.built[project].wheel[f"{project.normalized}-{VERSION}.dist-info/entry_points.txt"].decode())
    found = {section: dict(parser[section]) for section in parser.sections()}
    if project.folder == ".":
        assert found == {"console_scripts": {"attn-select": "attn_select_cli.main:main"}}
    elif project.folder == "measure":
        commands = {name: f"attn_select_measure.{name}:command" for name in OF_MEASURE}
        assert found == {"attn_select.commands": commands}
    else:
        operations = found.pop("attn_select.ops", {})
        assert found == {"attn_select": {Path(project.folder).name: f"{project.packages[0]}.plugin"}}
        assert all(hasattr(ops, name) for name in operations)
        assert operations == {name: f"{project.packages[0]}.ops:{name}" for name in operations}


def test_kernels_extra_brings_what_the_backends_ask_for(root, plugin):
    """Each group of alternatives has one that the extra brings, in a version that the backend accepts."""
    extras = tomllib.loads((root / plugin.folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = {}
    for requirement in map(Requirement, extras["kernels"]):
        bounds = {bound.operator: bound.version for bound in requirement.specifier}
        assert set(bounds) <= {">=", "<", "!="}
        oldest[requirement.name] = bounds[">="]
    for spec in importlib.import_module(f"{plugin.packages[0]}.plugin").attn_select_register_backends():
        for group in spec.libraries:
            brought = [library for library in group if library.distribution in oldest]
            assert brought, f"{spec.name}: none of {[library.distribution for library in group]} is in [kernels]"
            for library in brought:
                accepted = SpecifierSet(library.version)
                assert accepted.contains(oldest[library.distribution]), f"{spec.name}: {library}"
