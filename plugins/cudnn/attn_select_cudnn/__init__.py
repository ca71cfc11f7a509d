"""cuDNN's attention as a backend of attn-select."""
