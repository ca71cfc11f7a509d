"""What the ranks of the tests do; a module, since their processes import it."""

from __future__ import annotations

from attn_select.testing import BackendConformance
from attn_select.testing.rank_conformance import check_on_group
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA


class Sdpa(BackendConformance):
    spec = TORCH_SDPA
    device = "cpu"
    seed = 19


class Mla(BackendConformance):
    spec = TORCH_MLA
    device = "cpu"
    seed = 19


def conformance(rank: int, name: str, num_layers: int) -> list[str]:
    return check_on_group({"Sdpa": Sdpa, "Mla": Mla}[name](), None, num_layers)
