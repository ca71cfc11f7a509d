from acme_attention import ACME_ATTN

from attn_select.testing import BackendConformance


class TestAcme(BackendConformance):
    spec = ACME_ATTN
