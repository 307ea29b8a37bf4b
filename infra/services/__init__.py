"""Servers, ports, processes, deployments."""
