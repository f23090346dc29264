"""Fixtures of every test."""

pytest_plugins = ["tests.virtual_devices"]
