"""The command line of attn-select: one file per command, heavy imports inside the bodies."""
