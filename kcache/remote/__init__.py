"""Tiers beyond this machine: layers, HTTP, Redis, object stores."""
