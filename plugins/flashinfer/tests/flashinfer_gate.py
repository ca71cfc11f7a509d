"""What the gate says of one FlashInfer backend, and selections of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_select.backends.spec import BackendPlan, BackendSpec, Reason
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig
from attn_select.testing import toolkit

RELEASE: Mapping[str, Any] = {"pins": {"flashinfer-python": "0.6.14"}}
"""The release that the facts were read in and run with."""


class Gate:
    """Asks about one backend; the layer's fields are given by name.

    Args:
        spec: the backend.
        layer: makes a layer of some fields.
        usual: fields that are not the usual ones of such layers.
    """

    def __init__(self, spec: BackendSpec, layer: Callable[..., AttentionConfig], **usual: Any) -> None:
        self._spec, self._layer, self._usual = spec, layer, usual

    def ask(self, *args: Any, **fields: Any) -> BackendPlan | list[Reason]:
        """Return a plan or the reasons; arguments as in ``_question``."""
        return self._question(toolkit.ask, *args, **fields)

    def accepts(self, *args: Any, **fields: Any) -> bool:
        return isinstance(self.ask(*args, **fields), BackendPlan)

    def plan_of(self, *args: Any, **fields: Any) -> BackendPlan:
        return self._question(toolkit.plan_of, *args, **fields)

    def reasons_of(self, *args: Any, **fields: Any) -> dict[str, Reason]:
        return self._question(toolkit.reasons_of, *args, **fields)

    def _question(
        self,
        function: Callable[..., Any],
        where: toolkit.Where,
        phase: Any = "decode",
        *,
        version: str | None = None,
        options: Any = None,
        **fields: Any,
    ) -> Any:
        config = self._layer(**{**self._usual, **fields})
        pins = {} if version is None else {"flashinfer-python": version}
        return function(self._spec, config, where, phase, pins=pins, options=options)


def with_plans(selection: Selection, change: Callable[[BackendPlan], BackendPlan] | None) -> Selection:
    """Return the selection with each plan replaced by what ``change`` makes of it."""
    if change is not None:
        for verdict in selection.candidates[0].phases.values():
            assert verdict.plan is not None
            verdict.plan = change(verdict.plan)
    return selection
