"""Plugins: found through the entry-point group ``molt``, loaded one by one, looked up by kind and name."""

from molt_core.plugins.manager import Plugins, PluginSpec, load_plugins
from molt_core.plugins.references import absolute_name

__all__ = ["PluginSpec", "Plugins", "absolute_name", "load_plugins"]
