"""Where a layer runs: devices, detection, libraries and variables."""
