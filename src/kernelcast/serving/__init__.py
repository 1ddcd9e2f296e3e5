"""Engines that serve a queue of requests, event by event."""
