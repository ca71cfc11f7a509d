"""The kernels in Triton. They take plain tensors, strides and host numbers; nothing here knows a backend or a layer."""
