"""Optimizer state outside the accelerator: what lies in host memory is stepped under compute.

Knows neither FSDP2 nor Lightning. Parameters come as flat shards, gradients as flat tensors.
"""
