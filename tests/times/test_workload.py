"""``Workload``: shares, profiles, files, phases, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_select.errors import ConfigError, UnknownNameError
from attn_select.layer.config import AttentionConfig
from attn_select.times.workload import PROFILES, Workload, parse_workload


def shares(workload: Workload) -> dict[str, float]:
    return {str(shape.batch): round(shape.weight, 6) for shape in workload.shapes}


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("64q1s4k", {"64q1s4k": 1.0}, "64q1s4k"),
        ("64q1s4k*3", {"64q1s4k": 1.0}, "64q1s4k"),
        ("64q1s4k*0.8, 1q2k*0.2", {"64q1s4k": 0.8, "q2k": 0.2}, "64q1s4k*0.8,q2k*0.2"),
        ("64q1s4k*8,1q2k*2", {"64q1s4k": 0.8, "q2k": 0.2}, "64q1s4k*0.8,q2k*0.2"),
        ("8q1s1k,q2k", {"8q1s1k": 0.5, "q2k": 0.5}, "8q1s1k*0.5,q2k*0.5"),
        ("8q1s1k,q2k,4q1s1k_4q1s1024", {"8q1s1k": 0.666667, "q2k": 0.333333}, "8q1s1k*0.6667,q2k*0.3333"),
        ("q1*1e308,q2*1e308", {"q1": 0.5, "q2": 0.5}, "q1*0.5,q2*0.5"),
    ],
)
def test_shapes_have_shares_that_sum_to_one(text: str, expected: dict[str, float], name: str) -> None:
    workload = parse_workload(text)
    assert shares(workload) == expected
    assert workload.name == str(workload) == name
    assert sum(shape.weight for shape in workload.shapes) == pytest.approx(1)
    assert parse_workload(workload) is workload


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_workloads(name: str) -> None:
    workload = parse_workload(name)
    assert workload.name == name
    assert parse_workload(f" {name.upper()} ") == workload
    written = PROFILES[name].split(",")
    assert len(workload.shapes) == len(written)  # none is written twice
    assert [f"{shape.batch}" for shape in workload.shapes] == [each.partition("*")[0] for each in written]
    shares = [float(each.partition("*")[2]) for each in written if "*" in each]
    assert not shares or sum(shares) == pytest.approx(1)


def test_a_file_is_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "night.toml"
    text = '[[shapes]]\nbatch = "64q1s4k"\nweight = 4\n[[shapes]]\nbatch = "q2k"\n'
    file.write_text(text, encoding="utf-8")
    for given in (file, str(file)):
        workload = parse_workload(given)
        assert workload.name == "night"
        assert shares(workload) == {"64q1s4k": 0.8, "q2k": 0.2}
    file.write_text(f'name = "nightly batch"\n{text}', encoding="utf-8")
    assert parse_workload(file).name == "nightly batch"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("shapes = []", "shapes has 0 batch shapes"),
        ("", r"shapes = None: expected \[\[shapes\]\] tables"),
        ("shapes = 3", r"shapes = 3: expected \[\[shapes\]\] tables"),
        ('[[shape]]\nbatch = "q1"', "unknown key 'shape'; the file takes name, shapes"),
        ('[[shapes]]\nbatch = "q1"\nwieght = 2', "shape 1: unknown key 'wieght'; shape 1 takes batch, weight"),
        ("[[shapes]]\nweight = 2", "shape 1: batch = None: expected groups"),
        ('[[shapes]]\nbatch = "q1"\nweight = true', "weight = True of q1: a share is a number above 0"),
        ('[[shapes]]\nbatch = "q1"\nweight = "2"', "weight = '2' of q1: a share is a number above 0"),
        ('name = ""\n[[shapes]]\nbatch = "q1"', "name = '': expected text"),
        ("[[shapes", "not TOML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=what) as caught:
        parse_workload(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("64q1s4k*0", "weight = 0.0 of 64q1s4k: a share is a number above 0"),
        ("64q1s4k*-1", "weight = -1.0"),
        ("64q1s4k*nan", "weight = nan"),
        ("64q1s4k*inf", "weight = inf"),
        ("64q1s4k*", "weight = '' of '64q1s4k'"),
        ("64q1s4k*much", "weight = 'much'"),
        ("64q1s4k,,q1", "batch = ''"),
        ("64q1s4k,64x", "batch = '64x'"),
        (",".join(f"q{i}" for i in range(1, 1003)), "shapes has 1002 batch shapes: a workload has from 1 to 1000"),
    ],
)
def test_shares_and_shapes_that_cannot_be_are_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_workload(text)


def test_an_unknown_name_lists_the_profiles() -> None:
    with pytest.raises(UnknownNameError, match="unknown workload 'chatt'") as caught:
        parse_workload("chatt")
    assert caught.value.nearest == ["chat"]
    assert all(name in str(caught.value) for name in PROFILES)
    with pytest.raises(ConfigError, match="workload = 7: expected shapes, a profile or a file"):
        parse_workload(7)  # type: ignore[arg-type]


def test_a_shape_belongs_to_one_phase_of_a_layer() -> None:
    workload = parse_workload("64q1s4k,q2k,q512s1k_8q1s1k,8q4s1k")
    plain = AttentionConfig(num_heads=8, head_size=128)
    drafts = plain.model_copy(update={"num_speculative_tokens": 3})

    def batches(config: AttentionConfig, phase: str) -> list[str]:
        return [str(shape.batch) for shape in workload.of_phase(phase, config)]  # type: ignore[arg-type]

    assert batches(plain, "decode") == ["64q1s4k"]
    assert batches(plain, "prefill") == ["q2k", "q512s1k_8q1s1k", "8q4s1k"]
    assert batches(drafts, "decode") == ["64q1s4k", "8q4s1k"]
    assert batches(drafts, "prefill") == ["q2k", "q512s1k_8q1s1k"]
