"""``rules prefer, avoid, deny``: what they write, show and refuse."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attn_select.machine import files
from attn_select_cli import rules_edit

WRITTEN_BY_HAND = """\
# ours
version = 1 # the format

# about a
[[rules]]
name = "a" # why
prefer = ["TRITON_ATTN"]   # fast here

[backends.FLASH_ATTN]
version = 2

# about b
[[rules]]
name = "b"
deny = ["FLASHMLA"]
[rules.when]
# old ones
library.flash-mla = "<1" # known bad

# the end
"""


@pytest.fixture
def user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's rules file, not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "attn-select" / "selector_rules.toml"


def rules(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(path.read_text())["rules"]
    return found


def test_prefer_writes_a_rule_that_decides(run: Any, user_file: Path) -> None:
    result = run("rules", "prefer", "triton-attn", "--gpu", "a100", "--phase", "decode", "--yes")
    assert result.code == 0, result.err
    assert "decode backend" in result.out
    expected = {"name": "prefer-triton-attn-a100-decode", "phase": "decode", "when": {"gpu": "a100"}}
    assert rules(user_file) == [expected | {"prefer": ["TRITON_ATTN"]}]
    layer = run("explain", "--model", "llama-3-8b", "--gpu", "a100", "--json").json["layers"][0]
    assert layer["selected"]["decode"] == "TRITON_ATTN"
    again = run("rules", "prefer", "TRITON_ATTN", "--gpu", "a100", "--phase", "decode", "--yes")
    assert again.code == 0
    assert "nothing to write" in again.out
    assert run("rules", "check").code == 0


def test_nothing_is_written_without_a_yes(run: Any, user_file: Path) -> None:
    result = run("rules", "deny", "FLASH_ATTN", "--model", "llama-3-8b")
    assert result.code == 1
    assert "FLASH_ATTN" in result.out
    assert "--yes" in result.out
    assert not user_file.parent.exists()


def test_a_terminal_is_asked(run_on_terminal: Any, user_file: Path) -> None:
    command = ("rules", "avoid", "FLASH_ATTN", "--model", "llama-3-8b")
    assert "Write it? [y/N]" in run_on_terminal(100, *command, "--gpu", "h100", typed="n\n").out
    assert not user_file.exists()
    assert run_on_terminal(100, *command, "--gpu", "h100", typed="y\n").code == 0
    assert rules(user_file)[0]["avoid"] == ["FLASH_ATTN"]


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (["--when", "sinks"], {"sinks": True}),
        (["--when", "num_heads<=16"], {"num_heads": "<=16"}),
        (["--when", "head_size=128", "--when", "head_size = 64"], {"head_size": [128, 64]}),
        (["--when", "kv_cache_dtype=fp8*"], {"kv_cache_dtype": "fp8*"}),
        (["--when", 'dtype=["float16", "bfloat16"]'], {"dtype": ["float16", "bfloat16"]}),
        (["--when", "library.flashinfer-python<0.6.3"], {"library": {"flashinfer-python": "<0.6.3"}}),
        (["--when", "library.zope.interface<6"], {"library": {"zope.interface": "<6"}}),
        (["--when", "library.torch=2.9"], {"library": {"torch": "2.9"}}),
        (["--when", "compute_capability=9.x", "--when", "mla=false"], {"compute_capability": "9.x", "mla": False}),
        (["--gpu", "sm90", "--gpu", "8.9"], {"compute_capability": ["9.0", "8.9"]}),
        (["--gpu", "NVIDIA H100 80GB HBM3", "--gpu", "cpu"], {"gpu": ["h100", "cpu"]}),
        (["--gpu", "h100", "--when", "gpu=h20"], {"gpu": ["h100", "h20"]}),
    ],
)
def test_conditions(run: Any, user_file: Path, arguments: list[str], when: dict[str, Any]) -> None:
    result = run("rules", "avoid", "FLASHINFER", *arguments, "--model", "llama-3-8b", "--yes")
    assert result.code == 0, result.err
    assert rules(user_file)[0]["when"] == when


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["FLASHINFR"], "did you mean FLASHINFER"),
        (["FLASHINFER", "--when", "num_head=8"], "did you mean num_heads"),
        (["FLASHINFER", "--when", "num_heads=many"], "num_heads = 'many'"),
        (["FLASHINFER", "--when", "<=8"], "expected FIELD=VALUE"),
        (["FLASHINFER", "--when", "head_size"], "--when 'head_size': expected a value, head_size=VALUE"),
        (["FLASHINFER", "--when", "gpu"], "--when 'gpu': expected a value, gpu=VALUE"),
        (["FLASHINFER", "--when", "größe=1"], "valid: mla,"),
        (["FLASHINFER", "--when", "a.=1"], "unknown field of --when 'a.'"),
        (["FLASHINFER", "--when", "head_size=1", "--when", "head_size.x=2"], "did you mean head_size"),
        (["FLASHINFER", "--when", "library=1"], "did you mean library.NAME?"),
        (["FLASHINFER", "--when", "library.größe=1"], "expected the name of a distribution"),
        (["FLASHINFER", "--when", "head_size=1979-05-27"], "head_size = '1979-05-27'"),
        (["FLASHINFER", "--when", "head_size=inf"], "head_size = 'inf'"),
        (["FLASHINFER", "--when", "head_size={a=1}"], "head_size = '{a=1}'"),
        (["FLASHINFER", "--when", "head_size=[1, [2]]"], "head_size = '[1, [2]]'"),
        (["FLASHINFER", "--when", f"head_size=0x{'f' * 9000}"], "head_size = '0xfff"),
        (["FLASHINFER", "--when", f"head_size={'[' * 9000}"], "head_size = '[[["),
        (["FLASHINFER", "--when", "gpu=\udcff"], "Invalid value for '--when': is not UTF-8"),
        (["FLASHINFER", "--because", "\udcff"], "Invalid value for '--because': is not UTF-8"),
        (["FLASHINFER", "--gpu", "h100", "--gpu", "sm90"], "need a rule each"),
        (["FLASHINFER", "--gpu", "h1000"], "did you mean"),
        (["FLASHINFER", "--for", "--nonsense"], "--nonsense"),
        (["FLASHINFER", "--name", "a\tb"], "printable"),
        (["FLASHINFER", "--name", ""], "name = ''"),
    ],
)
def test_wrong_input_writes_nothing(run: Any, user_file: Path, arguments: list[str], told: str) -> None:
    result = run("rules", "prefer", *arguments, "--yes")
    assert result.code == 2
    assert told in result.err
    assert not re.search(r"\.toml:\d|rules check", result.err)  # a line of a file that is not written
    assert not user_file.exists()


def test_a_broken_file_is_left_alone(run: Any, user_file: Path) -> None:
    user_file.parent.mkdir(parents=True)
    user_file.write_text("version = 1\n[[rules]\n")
    result = run("rules", "prefer", "FLASHINFER", "--yes")
    assert result.code == 2
    assert "not valid TOML" in result.err
    assert user_file.read_text() == "version = 1\n[[rules]\n"
    user_file.write_bytes(b"\xffversion = 1\n")
    assert "is not UTF-8 (byte 0xff): save it as UTF-8" in run("rules", "prefer", "FLASHINFER", "--yes").err


def test_another_file_than_the_users(run: Any, user_file: Path, tmp_path: Path) -> None:
    result = run("rules", "deny", "FLASH_ATTN", "--gpu", "h100", "--file", "mine.toml", "--yes")
    assert "written to mine.toml" in result.out
    assert "FLASH_ATTN" in result.out
    assert rules(tmp_path / "mine.toml")[0]["deny"] == ["FLASH_ATTN"]
    assert not user_file.exists()


def test_what_is_written_meanwhile_is_not_lost(run: Any, user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edited(*_: object) -> bool:
        user_file.parent.mkdir(parents=True)
        user_file.write_text(WRITTEN_BY_HAND)
        return True

    monkeypatch.setattr(rules_edit, "_confirmed", edited)
    result = run("rules", "prefer", "FLASHINFER", "--gpu", "a100")
    assert result.code == 2
    assert f"{user_file}: has changed meanwhile, and is left as it is" in result.err
    assert user_file.read_text() == WRITTEN_BY_HAND


def test_a_link_and_permissions_stay(run: Any, user_file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles.toml"
    kept.write_text(WRITTEN_BY_HAND)
    kept.chmod(0o600)
    user_file.parent.mkdir(parents=True)
    user_file.symlink_to(kept)
    assert run("rules", "deny", "FLASH_ATTN", "--model", "llama-3-8b", "--yes").code == 0
    assert user_file.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.read_text().startswith(WRITTEN_BY_HAND.rstrip())


def test_a_planted_link_is_not_followed(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, victim = tmp_path / "rules.toml", tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / f".{path.name}.guessed").symlink_to(victim)
    result = run("rules", "deny", "FLASH_ATTN", "--file", str(path), "--model", "llama-3-8b", "--yes")
    assert result.code == 2
    assert "cannot be written: File exists" in result.err
    assert victim.read_text() == "mine"


def test_a_rule_goes_to_the_end_and_all_else_stays(run: Any, user_file: Path) -> None:
    user_file.parent.mkdir(parents=True)
    user_file.write_text(WRITTEN_BY_HAND)
    words = (
        "--because",
        'x\\y "z" \u00e9 \x7f',
        "--when",
        'dtype=["float16", "bfloat16"]',
        "--when",
        "library.a-b=0.6",
    )
    assert run("rules", "prefer", "FLASHINFER", "--name", 'c "q"', *words, "--model", "llama-3-8b", "--yes").code == 0
    assert user_file.read_text().startswith(WRITTEN_BY_HAND.rstrip())
    when = {"dtype": ["float16", "bfloat16"], "library": {"a-b": "0.6"}}
    rule = {"name": 'c "q"', "when": when, "prefer": ["FLASHINFER"], "because": 'x\\y "z" \u00e9 \x7f'}
    assert rules(user_file)[2] == rule


def test_a_name_that_the_file_has_already_is_refused(run: Any, user_file: Path) -> None:
    named = ("rules", "deny", "FLASHINFER", "--name", "mine", "--model", "llama-3-8b", "--yes")
    assert run(*named).code == 0
    before = user_file.read_text()
    assert run(*named, "--gpu", "h100").code == 2
    assert user_file.read_text() == before


def test_a_packaged_rule_that_is_replaced_is_named(run: Any, user_file: Path) -> None:
    packaged = run("rules", "show", "--json").json["rules"][0]
    command = ("rules", "deny", "FLASHINFER", "--model", "llama-3-8b", "--gpu", "h100", "--name")
    told = f"rule {packaged['name']!r} ({packaged['file']}:{packaged['line']}) is replaced"
    assert told in run(*command, packaged["name"]).err
    assert "is replaced" not in run(*command, "mine").err
