"""The order of work on a device's two streams, without a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_select_triton.runtime import side_stream

DEVICE = torch.device("cuda", 1)


class Streams:
    """What stands in for torch's streams of one device: notes what is asked of them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.current, self.events = "main", 0
        streams = self

        class Event:
            def __init__(self) -> None:
                streams.events += 1
                self._name = f"event {streams.events}"

            def record(self, stream: str) -> None:
                streams.done.append((stream, "records", self._name))

            def wait(self, stream: str) -> None:
                streams.done.append((stream, "waits for", self._name))

        def current_stream(device: int) -> str:
            assert device == DEVICE.index
            return self.current

        def set_stream(stream: str) -> None:
            self.current = stream

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
        monkeypatch.setattr(side_stream, "_stream", lambda device: "side")

    def launch(self, kernel: str) -> None:
        self.done.append((self.current, "launches", kernel))


def test_each_stream_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers of a step with two events, on whatever stream is current then."""
    streams = Streams(monkeypatch)
    beside = side_stream.SideStream(DEVICE)
    for main in ("main", "main", "another"):
        streams.current = main
        streams.done.clear()
        beside.fork()
        streams.launch("prefill")
        with beside:
            streams.launch("decode")
        streams.launch("next")
        assert streams.done == [
            (main, "records", "event 1"),
            ("side", "waits for", "event 1"),
            (main, "launches", "prefill"),
            ("side", "launches", "decode"),
            ("side", "records", "event 2"),
            (main, "waits for", "event 2"),
            (main, "launches", "next"),
        ]
    assert streams.events == 2


def test_the_current_stream_is_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    beside = side_stream.SideStream(DEVICE)
    beside.fork()
    with pytest.raises(ValueError, match="no kernel"), beside:
        raise ValueError("no kernel")
    assert streams.current == "main"
