"""The settings of `ref-server serve`."""

from ref_server.config.queue import QueueConfig
from ref_server.config.serve import DeviceMapName, ServeConfig, StoreUrl

__all__ = ["DeviceMapName", "QueueConfig", "ServeConfig", "StoreUrl"]
