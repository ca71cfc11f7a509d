"""How ``--help`` of a command reads: examples first, then the options in groups."""

from __future__ import annotations

import functools

import click

_SERVED = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "state_dtype",
    "tensor_parallel",
    "decode_context_parallel_size",
    "num_speculative_tokens",
    "draft_tree",
    "batch_invariant",
    "per_head_quant_scales",
    "output_quantization",
    "cuda_graph",
    "assume_attention",
)
OWN = "Options"


@functools.cache
def groups() -> dict[str, tuple[str, ...]]:
    """Return each title with the parameter names of its options, in order. Options without a title are ``OWN``."""
    from attn_select.layer.config import MLA_DIMS
    from attn_select.layer.features import FEATURES

    features = [feature.field for feature in FEATURES if feature.field not in _SERVED]
    heads = ("num_heads", "num_kv_heads", "head_size", "v_head_size", "attn_type")
    states = ("recurrence", "num_v_heads", "conv_kernel_size")
    return {
        "Model, and how it is served": ("model", *_SERVED),
        "Machine": ("gpu", "pins"),
        OWN: (),
        "Rules and times": ("backend", "rules", "workload", "times", "no_times", "host_time"),
        "A layer by hand, or in place of the model's": (*heads, *features, "mla", *MLA_DIMS, "sparse_top_k", *states),
        "Output": ("full", "output", "as_json", "verbose", "help"),
    }


class Command(click.Command):
    """A command whose help shows the examples of its epilog first, and its options in groups where it has many."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description, and the first paragraph of the epilog."""
        super().format_help_text(ctx, formatter)
        self._format_paragraphs(formatter, self._epilog_parts()[0])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the rest of the epilog."""
        self._format_paragraphs(formatter, self._epilog_parts()[1])

    def _epilog_parts(self) -> tuple[str, str]:
        """Return the examples, which stand in the first paragraph behind a ``\\b``, and what is left."""
        epilog = self.epilog or ""
        first, _, rest = epilog.partition("\n\n")
        return (first, rest) if first.startswith("\b") else ("", epilog)

    def _format_paragraphs(self, formatter: click.HelpFormatter, text: str) -> None:
        if text.strip():
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text.strip("\n"))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in groups where they describe layers."""
        records = {
            "help" if "--help" in parameter.opts else str(parameter.name): record
            for parameter in self.get_params(ctx)
            if (record := parameter.get_help_record(ctx)) is not None and record[1]
        }
        titles = {OWN: tuple(records)}
        if "dtype" in records:
            listed = {name for names in groups().values() for name in names}
            titles = groups() | {OWN: tuple(name for name in records if name not in listed)}
        for title, names in titles.items():
            if shown := [records[name] for name in names if name in records]:
                with formatter.section(title):
                    formatter.write_dl(shown)
