"""What a report shows of times: for each layer and GPU charts of what the GPU's survey predicts for the valid backends.

Decodes are drawn over how many requests there are and over how long they are, prefills over the length of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_select.decide.config_text import config_text
from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.prediction import Survey
from attn_select.times.roofline import roofline_us
from attn_select_measure.charts import Line, in_page, lines
from attn_select_measure.timed_fields import timed_fields


@dataclass(frozen=True, slots=True)
class Kind:
    """What a chart is over."""

    phase: Phase
    title: str
    x_name: str  # beside its x axis
    # what x is: how many requests there are where ``requests`` is None, else how many tokens each has
    xs: Sequence[int]
    requests: int | None  # how many there are; None: x
    length: int | None  # tokens of each; None: x

    def batch(self, x: int, config: LayerConfig) -> BatchShape:
        """Return the batch of one x."""
        length = self.length or x
        query = length if self.phase == "prefill" else config.max_decode_query_len
        return BatchShape((RequestGroup(self.requests or x, query, length),))


KINDS = (
    Kind("decode", "Decode, 4k tokens", "requests", [2**power for power in range(9)], None, 4096),
    Kind("decode", "Decode, 16 requests", "tokens per request", [2**power for power in range(9, 18)], 16, None),
    Kind("prefill", "Prefill, one prompt", "tokens of the prompt", [2**power for power in range(8, 16)], 1, None),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its SVG, and the figures behind it as a table."""

    title: str
    svg: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """The charts of one layer on one GPU."""

    title: str
    gpu: str
    text: str
    provenance: str
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer on a GPU: what readers know it by, the decision, and the survey of the GPU."""

    name: str
    device: Device
    selection: Selection[Any]
    survey: Survey

    @property
    def key(self) -> Any:
        """What layers with the same charts have in common."""
        return tuple(timed_fields(self.selection.config).items()), self.device.name


def chart_groups(layers: Sequence[Layer], looks: Mapping[str, int], done: Callable[[], None]) -> list[ChartGroup]:
    """Return the charts of each layer and GPU; layers whose times are alike share a group."""
    alike: dict[Any, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(layer.key, []).append(layer)
    found = []
    for number, group in enumerate(alike.values()):
        title = ", ".join(layer.name for layer in group[:3]) + (f" and {len(group) - 3} more" if group[3:] else "")
        first = group[0]
        device, survey, config = first.device, first.survey, first.selection.config
        drawn = [
            _chart(first, kind, looks, f"c{number}-{index}", f"{title}, {device.name}")
            for index, kind in enumerate(KINDS)
            if kind.phase in config.phases
        ]
        charts = [chart for chart in drawn if chart is not None]
        told = f"Predicted by a survey of {survey.gpu}: {survey.workloads} workloads, {survey.date[:10]}."
        found.append(ChartGroup(title, device.name, config_text(config), told, charts))
        for _ in group:
            done()
    return found


def _chart(one: Layer, kind: Kind, looks: Mapping[str, int], name: str, layer: str) -> Chart | None:
    """Return one chart; None where the survey has times of no valid backend."""
    config = one.selection.config
    batches = {x: kind.batch(x, config) for x in kind.xs}
    times = {x: one.survey.predict(config, batch) for x, batch in batches.items()}
    valid = [each.backend for each in one.selection.candidates if each.phases[kind.phase].verdict != "rejected"]
    shown = [backend for backend in valid if all(backend in known for known in times.values())]
    if not shown:
        return None
    series = [Line(each, [(x, times[x][each]) for x in kind.xs], looks[each]) for each in shown]
    floors = {x: roofline_us(config, batch, one.device) for x, batch in batches.items()}
    if least := [(x, floor) for x, floor in floors.items() if floor is not None]:
        series.append(Line("roofline", least, None))
    svg = lines(series, kind.x_name, "time of one layer's step (us)")
    told = f"{kind.title}: predicted times of {', '.join(shown)}. {layer}"
    rows = [[str(x), *[f"{times[x][each]:.4g}" for each in shown]] for x in kind.xs]
    return Chart(kind.title, in_page(svg, name, told), [kind.x_name, *[f"{each} (us)" for each in shown]], rows)
