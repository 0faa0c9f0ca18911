"""Tiers behind the local cache: layers, HTTP servers, Redis, object stores."""
