"""Measured selection: workloads, measurements, the model of time, and what is known about times on one device.

Nothing here imports torch or numpy, and a selection without a workload imports nothing of it.
"""
