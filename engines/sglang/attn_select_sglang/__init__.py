"""attn-select in SGLang: installed, it chooses among SGLang's attention backends and says why (README.md)."""
