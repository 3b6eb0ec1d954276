"""allranks: distributed PyTorch that starts the first time, on whatever starts it."""

from allranks.errors import AllranksError
from allranks.launch import launch
from allranks.resolve import World, resolve

__all__ = ["AllranksError", "World", "launch", "resolve"]
