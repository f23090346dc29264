"""Machines in files: reading one, writing one, and the machines that come with the package.

What a machine is stands in ``inventory``; the cards that a file may name stand in ``cards``.
"""

from dmconfig.machine.model import MACHINE_VERSION, MachineFile
from dmconfig.machine.reading import machine_names, named_machine, read_machine
from dmconfig.machine.writing import machine_data, machine_text

__all__ = [
    "MACHINE_VERSION",
    "MachineFile",
    "machine_data",
    "machine_names",
    "machine_text",
    "named_machine",
    "read_machine",
]
