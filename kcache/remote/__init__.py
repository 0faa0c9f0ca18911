"""Remotes behind the local cache: HTTP servers, Redis, object stores, and their daemon."""
